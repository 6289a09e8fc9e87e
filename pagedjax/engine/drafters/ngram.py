"""Prompt lookup (Saxena 2023, in transformers): the last n tokens of a sequence are looked up
earlier in it, and the tokens that followed them there are the draft.

The numbers n are tried from the largest to the smallest. The first occurrence that a token follows
is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedjax.engine.drafters.drafter import Drafter


def drafter(longest: int, shortest: int) -> Drafter:
    """Returns the drafter for runs of `longest` down to `shortest` tokens."""

    def propose(memory: Any, sequence_id: str, tokens: np.ndarray, k: int) -> np.ndarray:
        text = tokens.tobytes()
        for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
            end = first_index(text, tokens[-n:]) + n
            if end < len(tokens):
                return tokens[end : end + k]
        return tokens[:0]

    return Drafter("ngram", propose)


def first_index(text: bytes, run: np.ndarray) -> int:
    """Returns the index of the token where a run of tokens occurs first.

    Args:
        text: the bytes of int32 tokens. The run must occur in them.
        run: int32.
    """
    run_bytes = run.tobytes()
    byte = text.index(run_bytes)
    while byte % run.itemsize != 0:  # this match begins inside a token
        byte = text.index(run_bytes, byte + 1)
    return byte // run.itemsize
