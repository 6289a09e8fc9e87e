"""`Drafter`: what guesses the next tokens of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Tokens = Sequence[int] | np.ndarray


class Drafter(NamedTuple):
    """A guess that is wrong costs time and changes no token. So a drafter need not be right, and need not be pure.

        LAST = Drafter("last", lambda memory, sequence_id, tokens, k: [int(tokens[-1])] * k)

    Attributes:
        name: unique among drafters.
        propose: (memory, sequence_id, tokens, k) -> draft tokens, at most k; none if it has no guess. `tokens` are the
            known ones, [n] int32, which it must not change. None: a program on the device drafts (draft_model.py),
            always as many as it may.
        start: () -> the memory of a new engine. A drafter may change its memory.
        finished: (memory, sequence_id, output tokens) -> None, when a sequence has ended, or left for another
            engine.
    """

    name: str
    propose: Callable[[Any, str, np.ndarray, int], Tokens] | None
    start: Callable[[], Any] = lambda: None
    finished: Callable[[Any, str, np.ndarray], None] = lambda memory, sequence_id, output: None
