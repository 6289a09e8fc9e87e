"""The options of an RL run that decide its result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RLSetup:
    """The options that determine the result, bit for bit.

    sums: prompts of a step. group: answers to each prompt, which are compared with each other.
    largest: the largest number that is added. answer: the most tokens of an answer.
    clip: how far from 1 the ratio of the two policies counts (PPO).
    exact: whether the engine is batch-invariant and the trainer has the engine's bits.
    """

    steps: int = 200
    seed: int = 0
    sums: int = 32
    group: int = 16
    largest: int = 4
    answer: int = 2
    rate: float = 1e-3
    clip: float = 0.2
    exact: bool = True
