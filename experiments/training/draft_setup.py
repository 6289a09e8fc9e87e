"""The options of a draft head's training run that decide its result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftSetup:
    """The options that determine the result, bit for bit on one machine.

    model: the model that the head is for, as in `load_model`.
    steps: updates; the learning rate falls over them, so another number is another run.
    vocabulary: how many tokens the head drafts.
    windows, held_out: how many prompts of the training text and of the held-out text.
    prompt, output: tokens of a prompt, and of the model's answer to it.
    batch: windows in a step.
    passes: how many drafts ahead training looks; the later drafts continue the head's own features.
    rate: the highest learning rate.
    """

    model: str = "smollm2-135m"
    steps: int = 600
    seed: int = 0
    vocabulary: int = 4096
    windows: int = 512
    held_out: int = 32
    prompt: int = 64
    output: int = 128
    batch: int = 4
    passes: int = 3
    rate: float = 1e-3
