"""What benchmarks share: the command line, runs in turn, ratios, tables, and the file of `--json`.

in_turn({"a": run_a, "b": run_b}, 5)     -> {"a": [result of each round ...], "b": ...}
run_rounds({"a": run_a, "b": run_b}, 5)  -> the same for runs that return seconds, after a warm-up
ratios(seconds["a"], seconds["b"])       -> {"ratio": the median, "ratios": the ratio of each round}

Runs take turns, so that a slow minute of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from experiments.core.environment import environment
from experiments.core.json_files import write_json
from pagedjax.options.params import SamplingParams

if TYPE_CHECKING:
    from pagedjax import LLM

Result = TypeVar("Result")


# --- the command line -----------------------------------------------------------------------------


def bench_parser(description: str | None, *, model: bool = True) -> argparse.ArgumentParser:
    """A parser with `--json` and, if `model`, `--model`."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if model:
        # this import loads JAX, which a benchmark of the host does not need
        from pagedjax.weights.pretrained import DEFAULT_MODEL

        parser.add_argument("--model", default=DEFAULT_MODEL, help="as in LLM(model=...)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def arguments_of(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, **rehearsal_defaults: Any
) -> argparse.Namespace:
    """The arguments of a command. rehearsal_defaults: defaults of options with `--rehearse`."""
    args = parser.parse_args(argv)
    if args.rehearse:
        parser.set_defaults(**rehearsal_defaults)
        args = parser.parse_args(argv)
    return args


def at_least_1(words: str) -> int:
    """The type of an option that counts something."""
    if not words.isdigit() or int(words) < 1:
        raise argparse.ArgumentTypeError(f"{words!r} is given; it must be an integer of at least 1")
    return int(words)


def check_least(parser: argparse.ArgumentParser, args: argparse.Namespace, **minima: int) -> None:
    """End the command with a sentence if an option, or one of its values, is below its minimum."""
    for name, minimum in minima.items():
        values = getattr(args, name)
        value = min(values, default=minimum) if isinstance(values, Sequence) else values
        if value < minimum:
            option = name.replace("_", "-")
            parser.error(f"--{option} is {value}; it must be at least {minimum}")


def write_report(
    file: Path | None, figures: Mapping[str, Any], place: str = "environment", **options: bool
) -> None:
    """Write the environment and the figures to the file of `--json`, if there is one.

    Args:
        place: the name of the field that has the environment.
        options: the options of `environment`.
    """
    if file is not None:
        write_json(file, {place: environment(**options), **figures})


# --- runs in turn ---------------------------------------------------------------------------------


def in_turn(runs: Mapping[str, Callable[[], Result]], count: int) -> dict[str, list[Result]]:
    """Make each run in `count` rounds. Returns the results by run.

    Each round has another order of the runs.
    """
    names = list(runs)
    results: dict[str, list[Result]] = {name: [] for name in names}
    for _ in range(count):
        for name in names:
            results[name].append(runs[name]())
        names.append(names.pop(0))
    return results


def run_rounds(runs: Mapping[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """Make runs that return seconds in `count` rounds, after a round as a warm-up."""
    results = in_turn(runs, count + 1)
    return {name: [round(x, 3) for x in times[1:]] for name, times in results.items()}


def timed(run: Callable[[], Any]) -> float:
    """Make a run. Returns its seconds."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def second_run(run: Callable[[], Any]) -> float:
    """Make a run twice. Returns the seconds of the second time.

    When a run ends, XLA frees its widened weights, hundreds of MB. So the next run, whatever it is,
    takes up to four times as long.
    """
    run()
    return timed(run)


def computes_prompts(llm: LLM) -> bool:
    """Whether a request waits, or a running one still has more than one token to compute."""
    state = llm.engine.scheduler_state
    rows = zip(state.running.lengths, state.running.computed, strict=True)
    return bool(state.waiting) or any(length - computed > 1 for length, computed in rows)


# --- requests -------------------------------------------------------------------------------------


class Workload(NamedTuple):
    """Requests of random lengths: from the first to the second number of tokens, both included."""

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]


def requests_of(
    workload: Workload, vocab: int, seed: int
) -> tuple[list[Any], list[SamplingParams]]:
    """Prompts of random tokens, and greedy parameters with an exact length."""
    rng = np.random.default_rng(seed)

    def length(bounds: tuple[int, int]) -> int:
        return int(rng.integers(bounds[0], bounds[1] + 1))

    prompts = [
        {"prompt_token_ids": rng.integers(3, vocab, length(workload.prompt)).tolist()}
        for _ in range(workload.requests)
    ]
    outputs = [length(workload.output) for _ in prompts]
    return prompts, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in outputs]


def seconds(llm: LLM, prompts: list[Any], params: list[SamplingParams], **options: Any) -> float:
    """Time one call of `generate` that begins with an empty prefix cache. Returns its seconds."""
    llm.reset_prefix_cache()
    return timed(partial(llm.generate, prompts, params, use_tqdm=False, **options))


# --- figures --------------------------------------------------------------------------------------


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, Any]:
    """The ratio of two runs in each round, and the median.

    If the numerators are seconds of a base and the denominators are seconds of another run, it is
    the share of the base's speed that is left.
    """
    quotients = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return {
        "ratio": round(statistics.median(quotients), 3),
        "ratios": [round(quotient, 3) for quotient in quotients],
    }


def compared(
    runs: Mapping[str, Callable[[], float]], count: int, base: str
) -> dict[str, dict[str, Any]]:
    """Make runs that return seconds in `count` rounds. Returns for each the median of its seconds,
    those of the rounds, and the `ratios` of the run called `base` to it.
    """
    seconds = in_turn(runs, count)
    return {
        name: {"seconds": statistics.median(times), "rounds": times} | ratios(seconds[base], times)
        for name, times in seconds.items()
    }


def cell(shares: Mapping[str, Any]) -> str:
    """The result of `ratios` as a cell of a table."""
    return f"{shares['ratio']:.3f} ({min(shares['ratios']):.3f} to {max(shares['ratios']):.3f})"


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Lines of columns that are aligned to the right, for a terminal."""
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)).rstrip() for line in lines)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table. texts: how many of the first columns have texts; others are aligned to the right."""
    marks = ["---"] * texts + ["---:"] * (len(columns) - texts)
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(marks)}|", *lines[1:]])
