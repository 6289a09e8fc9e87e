"""Prompt and output lengths of the papers' data sets, as workloads of a config.

The PagedAttention paper (Kwon et al. 2023, Fig. 11) prints only the means. Exponential lengths with
those means are not the data sets; a study states where this matters.
"""

from __future__ import annotations

from typing import NamedTuple

MEANS_ALONE = (
    "the paper prints only the means of its lengths; ours are exponential with those means"
)


class Lengths(NamedTuple):
    prompt: float  # mean tokens
    output: float


DATA = {"ShareGPT": Lengths(161.31, 337.99), "Alpaca": Lengths(19.31, 58.45)}


def count_of(name: str, requests: int) -> int:
    """The requests of a workload with the lengths of a data set. Alpaca's are much shorter, so its
    workloads have four times as many.
    """
    return requests if name == "ShareGPT" else 4 * requests


def overrides(name: str) -> tuple[str, ...]:
    """--set of experiments.run for exponential lengths with the means of a data set."""
    prompt, output = DATA[name]
    return (
        f"workload.prompt={{dist: exponential, mean: {prompt}, max: 1024}}",
        f"workload.output={{dist: exponential, mean: {output}, max: 1023}}",
    )
