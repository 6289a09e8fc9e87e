"""Prompt lookup: the tokens that followed the last n tokens where those occurred first (Saxena 2023, in transformers).

For n from the longest to the shortest, the first earlier occurrence that something follows wins.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedjax.engine.drafters.drafter import Drafter


def drafter(longest: int, shortest: int) -> Drafter:
    """The drafter for runs of `longest` down to `shortest` tokens."""

    def propose(memory: Any, sequence_id: str, tokens: np.ndarray, k: int) -> np.ndarray:
        text = tokens.tobytes()
        for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
            at = first(text, tokens[-n:])
            if at + n < len(tokens):
                return tokens[at + n : at + n + k]
        return tokens[:0]

    return Drafter("ngram", propose)


def first(text: bytes, run: np.ndarray) -> int:
    """Index of the first occurrence of a run of int32 tokens among the tokens whose bytes are `text`; it has one."""
    wanted, at = run.tobytes(), -1
    while True:
        at = text.index(wanted, at + 1)
        if at % run.itemsize == 0:  # else the match begins inside a token
            return at // run.itemsize
