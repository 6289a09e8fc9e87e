"""What does batch invariance cost? Two engines of one model, with and without it, in turn, several rounds.

    python -m experiments.bench.batch_invariance [--rounds 5] [--json out.json]

"W1" is the workload of configs/w1.yaml: 64 requests, prompts of 16 to 256 tokens, outputs of 16 to 128. "long prompts"
has 8 requests with prompts of 1,000 to 1,500 tokens and 16 output tokens: almost all of its time is in chunks, whose
attention is what the mode changes. A ratio is seconds without it over seconds with it, in the same round: the share of
the speed that is left.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.core.environment import environment
from pagedjax import LLM, SamplingParams, load_model
from pagedjax.weights.pretrained import DEFAULT_MODEL


class Workload(NamedTuple):
    """Ranges are inclusive, in tokens."""

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]


WORKLOADS = {"W1": Workload(64, (16, 256), (16, 128)), "long prompts": Workload(8, (1000, 1500), (16, 16))}
ENGINE: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 1536, "num_blocks": 1536}


def requests_of(workload: Workload, vocab: int, seed: int) -> tuple[list[Any], list[SamplingParams]]:
    rng = np.random.default_rng(seed)

    def one(bounds: tuple[int, int]) -> int:
        return int(rng.integers(bounds[0], bounds[1] + 1))

    prompts = [{"prompt_token_ids": rng.integers(3, vocab, one(workload.prompt)).tolist()} for _ in range(workload[0])]
    outputs = [one(workload.output) for _ in prompts]
    return prompts, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in outputs]


def seconds(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> float:
    llm.reset_prefix_cache()
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def measured(engines: Sequence[LLM], name: str, rounds: int) -> dict[str, Any]:
    """engines: without and with batch invariance."""
    vocab = engines[0].engine.model.config.vocab_size
    found: list[list[float]] = []
    for turn in range(rounds + 1):  # the first one is a warm-up
        jobs = requests_of(WORKLOADS[name], vocab, seed=1234)
        order = (0, 1) if turn % 2 else (1, 0)
        times = {i: seconds(engines[i], *jobs) for i in order}
        found.append([times[0], times[1]])
    ratios = [without / with_it for without, with_it in found[1:]]
    return {
        "workload": name,
        "seconds_without": [round(a, 3) for a, _ in found[1:]],
        "seconds_with": [round(b, 3) for _, b in found[1:]],
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    model = load_model(args.model, dtype=args.dtype)
    engines = [LLM(model, progress=False, **ENGINE, batch_invariant=on) for on in (False, True)]
    found = [measured(engines, name, args.rounds) for name in args.workloads]
    print("| workload | seconds without / with | ratio |\n|---|---:|---:|")
    for one in found:
        without, with_it = (statistics.median(one[f"seconds_{name}"]) for name in ("without", "with"))
        ratio = f"{one['ratio']:.3f} ({min(one['ratios']):.3f} to {max(one['ratios']):.3f})"
        print(f"| {one['workload']} | {without:.2f} / {with_it:.2f} | {ratio} |")
    if args.json:
        about = {"environment": environment(), "model": args.model, "dtype": args.dtype}
        args.json.write_text(json.dumps({**about, "workloads": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
