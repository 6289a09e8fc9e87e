"""The tasks of a training run of adapters: text in capitals, and lists to sort.

Each task has answers that can be checked. An example is a prompt and what should follow it. The
loss is that of the tokens after the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from experiments.training.data import texts
from experiments.training.lora_setup import LoraSetup
from pagedjax.text.tokenizer import Tokenizer

DIGITS = 4  # in a list to sort, all different


class Examples(NamedTuple):
    """N examples of L tokens at most. Arrays of numpy."""

    tokens: Any  # [N, L] int32, padded
    lengths: Any  # [N] int32: tokens of prompt and answer
    prompts: Any  # [N] int32: tokens of the prompt alone

    @property
    def has_loss(self) -> Any:
        """Whether the loss of each token counts, bool [N, L]: it is after the prompt."""
        places = np.arange(self.tokens.shape[1])
        return (places >= self.prompts[:, None]) & (places < self.lengths[:, None])

    def prompt(self, i: int) -> list[int]:
        return self.tokens[i, : self.prompts[i]].tolist()

    def answer(self, i: int) -> list[int]:
        return self.tokens[i, self.prompts[i] : self.lengths[i]].tolist()


class Task(NamedTuple):
    """What an adapter learns.

    batch: step -> the examples of that step, which depend on seed and step alone, so a run can
        resume at any step.
    right: (what should follow, what a model said) -> whether that is right. Both are text.
    """

    batch: Callable[[int], Examples]
    held_out: Examples
    right: Callable[[str, str], bool]


def tasks(tokenizer: Tokenizer, setup: LoraSetup) -> dict[str, Task]:
    """The tasks by the names of their adapters.

    Raises:
        ValueError: the context has no room for a list, there is too little text or there are too
            few lists.
    """
    return {"upper": capitals(tokenizer, setup), "sort": sorting(tokenizer, setup)}


# --- capitals -------------------------------------------------------------------------------------


def capitals(tokenizer: Tokenizer, setup: LoraSetup) -> Task:
    """Python's documentation in capitals. The prompt of a held-out window is a third of it."""
    text, held_out_text = texts()
    held_out = encode_capitals(tokenizer, held_out_text)
    num_windows = len(held_out) // setup.context
    if num_windows < setup.held_out:
        raise ValueError(
            f"--held-out is {setup.held_out}; the held-out text has {num_windows} windows: lower "
            "it or --context"
        )

    @cache
    def train() -> np.ndarray:
        """The training text. A run that is refused before its first step does not encode it."""
        return encode_capitals(tokenizer, text)

    def examples_at(tokens: np.ndarray, places: np.ndarray, prompt: int) -> Examples:
        rows = len(places)
        size = setup.context
        windows = tokens[places[:, None] + np.arange(size)]
        return Examples(windows, np.full(rows, size, np.int32), np.full(rows, prompt, np.int32))

    def batch(step: int) -> Examples:
        rng = np.random.default_rng((setup.seed, step, 2))
        places = rng.integers(len(train()) - setup.context, size=setup.batch)
        return examples_at(train(), places, prompt=1)

    places = np.arange(setup.held_out) * (len(held_out) // setup.held_out)
    held_out_examples = examples_at(held_out, places, prompt=setup.context // 3)
    return Task(batch, held_out_examples, lambda _, answer: answer.isupper())


def encode_capitals(tokenizer: Tokenizer, topics: Sequence[str]) -> np.ndarray:
    """The tokens of topics in capitals, int32 [n]."""
    return np.array(tokenizer.encode("\n\n".join(topics).upper()), np.int32)


# --- sorting --------------------------------------------------------------------------------------


def question(digits: Sequence[int]) -> tuple[str, str]:
    """A line of Python's prompt, and Python's answer."""
    return f">>> sorted({list(digits)})\n", f"{sorted(digits)}\n"


def sorting(tokenizer: Tokenizer, setup: LoraSetup) -> Task:
    """Lists of different digits to sort. The held-out lists are in no step."""
    # All lists have equally many characters, and each character is at most one token.
    width = len("".join(question(range(DIGITS))))
    if width > setup.context:
        raise ValueError(
            f"--context is {setup.context}; a list to sort has up to {width} tokens: raise it"
        )
    lists = np.random.default_rng(0).permutation(list(permutations(range(10), DIGITS)))
    if setup.held_out + setup.lists > len(lists):
        raise ValueError(
            f"--held-out is {setup.held_out} and --lists {setup.lists}; there are {len(lists)} "
            "lists: lower one of them"
        )
    held_out = lists[: setup.held_out]
    train = lists[setup.held_out :]

    def examples(chosen: np.ndarray) -> Examples:
        pairs = [
            [tokenizer.encode(part, False) for part in question(digits)]
            for digits in chosen.tolist()
        ]
        lengths = np.array([len(prompt) + len(answer) for prompt, answer in pairs], np.int32)
        tokens = np.zeros((len(pairs), width), np.int32)
        for i, (prompt, answer) in enumerate(pairs):
            tokens[i, : lengths[i]] = *prompt, *answer
        prompts = np.array([len(prompt) for prompt, _ in pairs], np.int32)
        return Examples(tokens, lengths, prompts)

    def batch(step: int) -> Examples:
        rng = np.random.default_rng((setup.seed, step, 3))
        return examples(rng.choice(train, setup.lists, replace=False))

    return Task(batch, examples(held_out), lambda target, answer: answer == target)
