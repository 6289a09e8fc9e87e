"""`Drafter`: what guesses the next tokens of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Tokens = Sequence[int] | np.ndarray


class Drafter(NamedTuple):
    """What guesses the next tokens of a sequence. It need not be right, and it need not be pure: a
    wrong guess costs time and changes no token.

        LAST = Drafter("last", lambda memory, sequence_id, tokens, k: [int(tokens[-1])] * k)

    Attributes:
        name: unique among drafters.
        propose: (memory, sequence_id, tokens, k) -> at most k draft tokens; none if it has no
            guess. `tokens` are the tokens so far, [n] int32, which it must not change. None: a
            program on the device drafts (draft_model.py), and it always gives as many as it may.
        start: () -> the memory of a new engine. A drafter may change its memory.
        finished: (memory, sequence_id, output tokens) -> None; called when a sequence has ended, or
            has left for another engine.
    """

    name: str
    propose: Callable[[Any, str, np.ndarray, int], Tokens] | None
    start: Callable[[], Any] = lambda: None
    finished: Callable[[Any, str, np.ndarray], None] = lambda memory, sequence_id, output: None
