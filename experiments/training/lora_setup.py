"""The options of a training run of adapters that decide its result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoraSetup:
    """The options that determine the result, bit for bit on one machine.

    steps: updates of each adapter; the learning rate falls over them, so another number is another
        run.
    rank, alpha: of the factors; B A is multiplied by alpha / rank.
    modules: kinds of matrices that have factors, as PEFT's target_modules, with commas between
        them; "all": every kind.
    context: tokens of a window of text.
    batch: windows of text in a step. lists: lists to sort in a step.
    held_out: examples of each task that no step trains on.
    rate: the highest learning rate.
    """

    steps: int = 400
    seed: int = 0
    rank: int = 16
    alpha: float = 16.0
    modules: str = "all"
    context: int = 96
    batch: int = 16
    lists: int = 32
    held_out: int = 64
    rate: float = 5e-3
