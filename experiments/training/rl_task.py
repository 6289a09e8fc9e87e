"""The task of an RL run: sums of short numbers, each with an answer that can be checked."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np


class Sum(NamedTuple):
    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}+{self.b}="


def sums(seed: int, step: int, count: int, largest: int) -> list[Sum]:
    """The sums of a step, which depend on seed and step only, so a run can resume at any step."""
    pairs = np.random.default_rng((seed, step)).integers(largest + 1, size=(count, 2))
    return [Sum(*pair) for pair in pairs.tolist()]


def number_in(text: str) -> int | None:
    """The number that an answer begins with; None: it begins with something else."""
    match = re.match(r" ?([0-9]{1,6})(?![0-9])", text)
    return int(match[1]) if match else None


def reward(problem: Sum, text: str) -> float:
    """1 for the right sum; less for a number that is farther from it; 0 if there is no number."""
    number = number_in(text)
    return 0.0 if number is None else 1 / (1 + abs(number - problem.a - problem.b))
