"""Engines of one model that compute the same requests in turn, several rounds, so that noise meets
all of them.

rounds({"a": run_a, "b": run_b}, 5) -> {"a": [seconds ...], "b": [seconds ...]}
share(seconds, "a", "b") -> seconds of a over those of b in the same round, with their median
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.core.environment import environment
from pagedjax import LLM, SamplingParams
from pagedjax.weights.pretrained import DEFAULT_MODEL


class Workload(NamedTuple):
    """Ranges are inclusive, in tokens."""

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
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, **options)
    return time.perf_counter() - start


def rounds(runs: Mapping[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """Time each run in `count` rounds, after a round as a warm-up. Returns seconds by run.

    The order of the runs is another one in each round.
    """
    names = list(runs)
    seconds_by_run = {name: [] for name in runs}
    for turn in range(count + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds_by_run[name].append(runs[name]())
    return {name: [round(x, 3) for x in times[1:]] for name, times in seconds_by_run.items()}


def share(seconds_by_run: Mapping[str, Sequence[float]], base: str, name: str) -> dict[str, Any]:
    """The share of the base's speed that is left: its seconds over those of another run, round by
    round."""
    ratios = [
        base_seconds / run_seconds
        for base_seconds, run_seconds in zip(
            seconds_by_run[base], seconds_by_run[name], strict=True
        )
    ]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def at_least_1(words: str) -> int:
    """The type of an option that counts something."""
    if not words.isdigit() or int(words) < 1:
        raise argparse.ArgumentTypeError(f"{words!r} is given; it must be an integer of at least 1")
    return int(words)


def parser(description: str | None, workloads: Mapping[str, Workload]) -> argparse.ArgumentParser:
    """The options that all such benchmarks have."""
    command_parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command_parser.add_argument("--rounds", type=at_least_1, default=5)
    command_parser.add_argument("--model", default=DEFAULT_MODEL)
    command_parser.add_argument("--dtype", default="float32")
    command_parser.add_argument(
        "--workloads", nargs="+", choices=list(workloads), default=list(workloads)
    )
    command_parser.add_argument("--json", type=Path)
    return command_parser


def keep(args: argparse.Namespace, results: Sequence[Mapping[str, Any]]) -> None:
    """Write the results to the file of `--json`, if there is one."""
    if args.json:
        about = {"environment": environment(), "model": args.model, "dtype": args.dtype}
        args.json.write_text(json.dumps({**about, "workloads": results}, indent=1) + "\n")


def cell(shares: Mapping[str, Any]) -> str:
    """The result of `share` in a table."""
    return f"{shares['ratio']:.3f} ({min(shares['ratios']):.3f} to {max(shares['ratios']):.3f})"
