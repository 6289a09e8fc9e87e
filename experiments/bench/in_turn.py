"""Engines of one model that compute the same requests in turn, several rounds, so that noise meets all of them.

rounds({"a": run_a, "b": run_b}, 5) -> {"a": [seconds ...], "b": [seconds ...]}
share(seconds, "a", "b") -> seconds of a over those of b in the same round, with their median
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pagedjax import LLM, SamplingParams


class Workload(NamedTuple):
    """Ranges are inclusive, in tokens."""

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]


def requests_of(workload: Workload, vocab: int, seed: int) -> tuple[list[Any], list[SamplingParams]]:
    """Prompts of random tokens, and greedy parameters with an exact length."""
    rng = np.random.default_rng(seed)

    def one(bounds: tuple[int, int]) -> int:
        return int(rng.integers(bounds[0], bounds[1] + 1))

    prompts = [{"prompt_token_ids": rng.integers(3, vocab, one(workload.prompt)).tolist()} for _ in range(workload[0])]
    outputs = [one(workload.output) for _ in prompts]
    return prompts, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in outputs]


def seconds(llm: LLM, prompts: list[Any], params: list[SamplingParams], **options: Any) -> float:
    """Of one call of `generate` that begins with an empty prefix cache."""
    llm.reset_prefix_cache()
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, **options)
    return time.perf_counter() - began


def rounds(runs: Mapping[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """The seconds of each run in `count` rounds, after a round as a warm-up. The order is another one in each round."""
    names, found = list(runs), {name: [] for name in runs}
    for turn in range(count + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(runs[name]())
    return {name: [round(x, 3) for x in times[1:]] for name, times in found.items()}


def share(found: Mapping[str, Sequence[float]], base: str, name: str) -> dict[str, Any]:
    """The share of the base's speed that is left: its seconds over those of another run, round by round."""
    ratios = [a / b for a, b in zip(found[base], found[name], strict=True)]
    return {"ratio": round(statistics.median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios]}


def cell(one: Mapping[str, Any]) -> str:
    """The result of `share` in a table."""
    return f"{one['ratio']:.3f} ({min(one['ratios']):.3f} to {max(one['ratios']):.3f})"
