"""What do structured outputs cost? The same requests with and without a form, in turn, several
rounds.

    python -m experiments.bench.structured [--rounds 5] [--requests 32] [--tokens 64] [--json out.json]

Every answer has exactly `--tokens` tokens: the form is a list that may not end before, and a
request without a form ignores the end of text. So both passes compute the same number of rows in
the same steps. What differs is the masks: computed on the host, sent, and applied. A ratio is
output tokens a second with the form over those without it, of the same round. The table also has
the host's time in masks as a share of the constrained pass. A text of bounded length costs more:
the parser counts its characters.

The grammars are compiled before, because a server has them from the second request on; `compile` is
the time of that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from experiments.bench.harness import (
    bench_parser,
    cell,
    in_turn,
    markdown,
    ratios,
    write_report,
)
from pagedjax import LLM, SamplingParams, StructuredOutputsParams
from pagedjax.engine import token_masks


def item(**text: Any) -> dict[str, Any]:
    """The schema of a list's item. text: further keywords of its texts."""
    fields = {
        "name": {"type": "string", **text},
        "kind": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 10_000},
        "tags": {"type": "array", "items": {"type": "string", **text}, "maxItems": 4},
        "more": {"anyOf": [{"type": "null"}, {"type": "number"}, {"type": "boolean"}]},
    }
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


ITEMS = {"texts of any length": item(), "texts of 24 characters": item(maxLength=24)}
PROMPT = "A list of {} things in a shop, as JSON:\n"


class Pass(NamedTuple):
    tokens_per_second: float
    mask_share: float


def run(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> Pass:
    """Run one pass. Returns its rate, and the share of its time that masks take."""
    mask_seconds = 0.0
    masks = token_masks.masks

    def time_masks(*args: Any) -> Any:
        nonlocal mask_seconds
        start = time.perf_counter()
        rows = masks(*args)
        mask_seconds += time.perf_counter() - start
        return rows

    token_masks.masks = time_masks
    try:
        llm.reset_prefix_cache()
        pass_start = time.perf_counter()
        outputs = llm.generate(list(prompts), params, use_tqdm=False)
        seconds = time.perf_counter() - pass_start
    finally:
        token_masks.masks = masks
    tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    expected = len(prompts) * params.max_tokens
    if tokens != expected:
        raise RuntimeError(
            f"{tokens} tokens came and {expected} were expected; a form has ended early"
        )
    return Pass(tokens / seconds, mask_seconds / seconds)


def measure(llm: LLM, name: str, requests: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Run the requests with a form of ITEMS and without, `rounds` times. Returns the figures."""
    # an item has at least ten tokens, so such a list does not end before
    form = StructuredOutputsParams(
        json={"type": "array", "items": ITEMS[name], "minItems": 1 + tokens // 10}
    )
    start = time.perf_counter()
    llm.session.grammars.compiled(form)
    compile_seconds = time.perf_counter() - start
    prompts = [PROMPT.format(2 + i) for i in range(requests)]
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": tokens, "seed": 1}
    params = {
        "free": SamplingParams(**options, ignore_eos=True),
        "bound": SamplingParams(**options, structured_outputs=form),  # to the form
    }
    runs = {kind: partial(run, llm, prompts, params[kind]) for kind in params}
    for run_once in runs.values():  # a warm-up of caches, and of the first step of each size
        run_once()
    passes = in_turn(runs, rounds)
    rates = {kind: [result.tokens_per_second for result in passes[kind]] for kind in runs}
    mask_share = statistics.median(result.mask_share for result in passes["bound"])
    return {
        "form": name,
        "requests": requests,
        "tokens": tokens,
        **{kind: [round(rate, 1) for rate in rates[kind]] for kind in runs},
        **ratios(rates["bound"], rates["free"]),
        "mask_share": round(mask_share, 4),
        "compile_seconds": round(compile_seconds, 4),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args(argv)
    sizes = {
        "max_num_seqs": args.requests,
        "max_num_batched_tokens": 512,
        "max_model_len": 64 + args.tokens,
    }
    llm = LLM(args.model, progress=False, compilation="eager", **sizes)
    figures = [measure(llm, name, args.requests, args.tokens, args.rounds) for name in ITEMS]
    rows = []
    for figure in figures:
        rate_without = statistics.median(figure["free"])
        rate_with = statistics.median(figure["bound"])
        mask_share = f"{100 * figure['mask_share']:.1f} %"
        milliseconds = f"{1e3 * figure['compile_seconds']:.0f}"
        rates = f"{rate_without:.0f} / {rate_with:.0f}"
        rows.append((figure["form"], rates, cell(figure), mask_share, milliseconds))
    columns = (
        "form",
        "output tokens/s without / with",
        "ratio",
        "time in masks",
        "compile, ms",
    )
    print(markdown(columns, rows))
    write_report(args.json, {"model": args.model, "forms": figures})


if __name__ == "__main__":
    main()
