"""Which share of cache blocks does beam search save, on real text with a real model?

    python -m experiments.bench.beams
    python -m experiments.bench.beams --requests 8 --widths 4 --block-size 8

    saved = 1 - sum over steps of distinct blocks / sum over steps of block table entries, of the running sequences

This is the quantity of Fig. 15 of the PagedAttention paper (Kwon et al., SOSP 2023). The paper's
values for Alpaca are printed beside it. Sharing depends on where beams diverge, which random
numbers cannot imitate, so a real model runs. Prompts are windows of configs/prompts/english.txt.
Prompt and output lengths are exponential with Alpaca's means (the paper's Fig. 11), rounded and at
least 1. The end of text is ignored, prefix caching is off, all requests arrive at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.bench.harness import check_least
from experiments.bench.sharing import ALPACA, BlockCounts, Dataset
from experiments.core.distributions import Exponential, draw_lengths
from experiments.core.workloads import branch_ids
from pagedjax import LLM, BeamSearchParams, load_model
from pagedjax.weights.pretrained import LoadedModel

TEXT = Path(__file__).parents[2] / "configs" / "prompts" / "english.txt"
PLACES = 48  # sequences that run at the same time
# most tokens of a request; with Alpaca's means, one exponential length in 500 is longer
LONGEST = 448


def draw(
    tokens: Sequence[int], data: Dataset, count: int, seed: int
) -> list[tuple[list[int], int]]:
    """`count` prompts, each a window of `tokens`, and their numbers of output tokens."""
    streams = [np.random.default_rng([seed, stream]) for stream in range(3)]
    prompts, _ = draw_lengths(Exponential("exponential", data.prompt), count, streams[0])
    outputs, _ = draw_lengths(Exponential("exponential", data.output), count, streams[1])
    prompts = [min(prompt, LONGEST // 2) for prompt in prompts]
    starts = [int(streams[2].integers(len(tokens) - prompt + 1)) for prompt in prompts]
    return [
        (list(tokens[start : start + prompt]), min(output, LONGEST // 2))
        for start, prompt, output in zip(starts, prompts, outputs, strict=True)
    ]


def searcher(model: LoadedModel, block_size: int) -> LLM:
    """An engine that runs PLACES beams, with blocks for all of their tokens."""
    return LLM(
        model,
        progress=False,
        compilation="eager",
        block_size=block_size,
        max_num_seqs=PLACES,
        max_num_batched_tokens=256,
        token_buckets=(16, PLACES, 256),
        max_model_len=LONGEST,
        num_blocks=PLACES * -(-LONGEST // block_size),
        enable_prefix_caching=False,
    )


def measure(llm: LLM, requests: Sequence[tuple[list[int], int]], width: int) -> BlockCounts:
    """Run a beam search of `width` for all requests, as many at a time as PLACES allows."""
    llm.engine.reset()
    for i, (prompt, output) in enumerate(requests):
        request_id, *forks = branch_ids(f"r{i}", width)
        params = BeamSearchParams(width, output, ignore_eos=True)
        llm.engine.add(request_id, prompt, params, forks=forks)
    table_entries = 0
    used_blocks = 0
    steps = 0
    preemptions = 0
    while llm.engine.has_work:
        result = llm.engine.step()
        assert result is not None
        # beams advance together, so each has a row
        table_entries += sum(len(seq.blocks) for seq in result.plan.seqs)
        used_blocks += result.plan.blocks_used
        steps += 1
        preemptions += len(result.plan.preempted)
    return BlockCounts(table_entries, used_blocks, steps, preemptions)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Share of cache blocks that beam search saves, beside Fig. 15.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block (16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    args = parser.parse_args(arguments)
    check_least(parser, args, requests=1, block_size=1, widths=1)
    if max(args.widths) > PLACES:
        parser.error(
            f"--widths has {max(args.widths)}; at most {PLACES} beams run at the same time"
        )
    try:
        model = load_model(args.model)
        llm = searcher(model, args.block_size)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    requests = draw(
        model.tokenizer.encode(TEXT.read_text("utf-8")), ALPACA, args.requests, args.seed
    )
    rows = []
    for width in args.widths:
        saved = measure(llm, requests, width)
        share = 100 * saved.share
        paper = ALPACA.beams.get(width)
        rows.append({"width": width, "saved": share, "paper": paper, **saved._asdict()})
        if not args.json:
            paper_text = "-" if paper is None else f"{paper:.2f} %"
            print(
                f"beam width {width}: {share:.2f} % saved, paper {paper_text}; {saved.steps} steps",
                flush=True,
            )
    if args.json:
        sizes = {"block_size": args.block_size, "requests": args.requests}
        print(json.dumps({"model": args.model, **sizes, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
