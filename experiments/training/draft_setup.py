"""The options of a draft head's training run that decide its result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftSetup:
    """The options that determine the result, bit for bit on one machine.

    model: that the head is for, as in `load_model`.
    steps: updates; the learning rate falls over them, so another number is another run.
    vocabulary: tokens that the head drafts.
    windows, held_out: prompts of the training and of the held-out text.
    prompt, output: tokens of a prompt, and of the model's answer to it.
    batch: windows in a step.
    passes: drafts of a sequence that training looks ahead, the later ones on the head's own
        features.
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
