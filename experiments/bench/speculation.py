"""Is speculative decoding faster, and are its tokens the same?

Each engine runs each workload, in turn, several rounds.

    python -m experiments.bench.speculation [--rounds 3] [--methods ngram suffix] [--tokens 7] [--json out.json]
    python -m experiments.bench.speculation --methods --head runs/draft/head --tokens 3  # a head alone

    edit    one request at a time: functions of Python's library, to be written again with one name
            changed
    prose   one request at a time: continue Python's documentation; little of the answer is in the
            prompt. The topics are those that `train_draft` holds out
    w1      64 requests at once of random tokens, the shape of configs/w1.yaml; a full batch, where
            drafts rarely pay

A ratio is the plain engine's seconds over the speculating engine's in the same round; the table has
medians. `accepted` is the share of draft tokens that were accepted, `tokens a step` counts one
sequence. The run fails if an engine's greedy tokens differ from the plain engine's.
"""

from __future__ import annotations

import inspect
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from experiments.bench.harness import bench_parser, in_turn, markdown, write_report
from experiments.core.speculation import Acceptance, acceptance_of
from experiments.training.data import texts
from pagedjax import LLM, SamplingParams
from pagedjax.host.types import Sampled
from pagedjax.weights.pretrained import load_model

FUNCTIONS: list[tuple[Callable[..., Any], str, str]] = [
    (textwrap.dedent, "text", "string"),
    (statistics.mean, "data", "values"),
    (statistics.median, "data", "values"),
    (inspect.cleandoc, "lines", "rows"),
]
ONE_AT_A_TIME: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 512,
    "max_model_len": 2048,
}
W1: dict[str, Any] = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "max_model_len": 384,
    "num_blocks": 1536,
}
REQUESTS = 64
PROMPT = 256  # tokens of prose


class Workload(NamedTuple):
    name: str
    prompts: list[list[int]]
    lengths: list[int]  # output tokens
    engine: dict[str, Any]


class Pass(NamedTuple):
    """One run of a workload by one engine."""

    seconds: float
    tokens: list[tuple[int, ...]]
    drafts: Acceptance


def edit_prompts() -> Iterator[str]:
    """Yields functions of Python's library, each with the request to rename something in it."""
    for function, old, new in FUNCTIONS:
        source = inspect.getsource(function)
        yield (
            f"```python\n{source}```\n\n"
            f"The same function, with `{old}` renamed to `{new}`:\n\n```python\n"
        )


def workloads(
    encode: Callable[[str], Sequence[int]], vocabulary: int, output: int, names: Sequence[str]
) -> list[Workload]:
    """The workloads of these names. output: tokens of an edit and of prose."""
    edits = [list(encode(edit)) for edit in edit_prompts()]
    _, held_out = texts()
    topics = [list(encode(topic)) for topic in held_out]
    long_topics = [tokens for tokens in topics if len(tokens) >= PROMPT]
    prose = [tokens[:PROMPT] for tokens in long_topics[: len(FUNCTIONS)]]
    rng = np.random.default_rng(1234)
    random_prompts = [
        rng.integers(0, vocabulary, rng.integers(16, 257)).tolist() for _ in range(REQUESTS)
    ]
    lengths = [output] * len(edits)
    all_workloads = [
        Workload("edit", edits, lengths, ONE_AT_A_TIME),
        Workload("prose", prose, lengths, ONE_AT_A_TIME),
        Workload("w1", random_prompts, rng.integers(16, 129, REQUESTS).tolist(), W1),
    ]
    return [workload for workload in all_workloads if workload.name in names]


def run(llm: LLM, work: Workload) -> Pass:
    """Run all requests at once; an engine with one place runs them one after the other."""
    engine = llm.engine
    tokens: dict[str, list[int]] = {}
    events = []
    engine.reset()
    for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
        engine.add(
            str(i), prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        )
    started = time.perf_counter()
    while engine.has_work:
        result = engine.step()
        assert result is not None, "there is work"
        events += result.events
    seconds = time.perf_counter() - started
    for event in events:
        if isinstance(event, Sampled):
            for name, token in zip(event.request_ids, event.token_ids, strict=True):
                tokens.setdefault(name, []).append(token)
    outputs = [tuple(tokens[str(i)]) for i in range(len(work.prompts))]
    return Pass(seconds, outputs, acceptance_of(events))


def measure(work: Workload, engines: dict[str, LLM], rounds: int) -> list[dict[str, Any]]:
    """Run a workload in all engines, `rounds` times. Returns rows of the table, the plain engine's
    first.

    Raises:
        RuntimeError: an engine gave other tokens than the plain engine.
    """
    expected = run(engines["plain"], work).tokens  # this is a warm-up too
    for name, llm in engines.items():
        if run(llm, work).tokens != expected:
            raise RuntimeError(f"{work.name}: {name} gave other tokens than the plain engine")
    passes = in_turn({name: partial(run, llm, work) for name, llm in engines.items()}, rounds)
    rows = []
    for name, engine_passes in passes.items():
        ratios = [
            plain.seconds / engine_pass.seconds
            for plain, engine_pass in zip(passes["plain"], engine_passes, strict=True)
        ]
        acceptance = engine_passes[-1].drafts
        total = sum(work.lengths)
        rows.append(
            {
                "workload": work.name,
                "engine": name,
                "tokens_per_s": total / statistics.median(p.seconds for p in engine_passes),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "accepted": acceptance.accepted / acceptance.drafts if acceptance.drafts else None,
                "tokens_a_step": 1 + acceptance.accepted / acceptance.rows
                if acceptance.rows
                else None,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        ratio = f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
        share = "" if row["accepted"] is None else f"{100 * row['accepted']:.0f} %"
        tokens = "" if row["tokens_a_step"] is None else f"{row['tokens_a_step']:.2f}"
        rate = f"{row['tokens_per_s']:.1f}"
        lines.append((row["workload"], row["engine"], rate, ratio, share, tokens))
    columns = (
        "workload",
        "engine",
        "output tokens/s",
        "times as fast",
        "accepted",
        "tokens a step with drafts",
    )
    return markdown(columns, lines, texts=2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="the default is the device's"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--output", type=int, default=128, help="output tokens of an edit and of prose"
    )
    parser.add_argument(
        "--tokens", type=int, default=7, help="draft tokens of a sequence in a step, at most"
    )
    parser.add_argument("--methods", nargs="*", default=["ngram", "suffix"], help="drafters")
    parser.add_argument("--head", help="folder of a trained head: the method eagle is measured too")
    parser.add_argument("--draft", help="a smaller model: the method draft is measured too")
    parser.add_argument(
        "--workloads", nargs="+", choices=("edit", "prose", "w1"), default=("edit", "prose", "w1")
    )
    args = parser.parse_args(argv)
    if min(args.rounds, args.output) < 1:
        parser.error("--rounds and --output must be at least 1")
    try:
        model = load_model(args.model, dtype=args.dtype)
        rows: list[dict[str, Any]] = []
        vocabulary = model.model.config.vocab_size
        for work in workloads(model.tokenizer.encode, vocabulary, args.output, args.workloads):
            engines = {"plain": LLM(model, compilation="eager", **work.engine)}
            models = {"eagle": args.head, "draft": args.draft}
            methods = [*args.methods, *(method for method, path in models.items() if path)]
            for method in methods:
                options = {"method": method, "num_tokens": args.tokens, "model": models.get(method)}
                engines[method] = LLM(model, speculative=options, **work.engine)
            rows += measure(work, engines, args.rounds)
            print(table(rows[-len(engines) :]), flush=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    settings = {"rounds": args.rounds, "tokens": args.tokens, "model": args.model}
    write_report(args.json, settings | {"rows": rows})


if __name__ == "__main__":
    main()
