"""`Drafter`: what guesses the next tokens of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pagedjax.options.own_errors import placed

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


def called(drafter: Drafter, function: str, *arguments: Any) -> Any:
    """Returns the result of one of a drafter's functions.

    Raises:
        OwnError: a function of the user raised. The message names its file and line.
    """
    with placed(f"{function} of the drafter {drafter.name!r}"):
        return getattr(drafter, function)(*arguments)


def proposed(drafter: Drafter, memory: Any, sequence_id: str, tokens: np.ndarray, k: int) -> Tokens:
    """Returns what a drafter proposes.

    Raises:
        ValueError: the proposal is no list of tokens.
    """
    drafts = called(drafter, "propose", memory, sequence_id, tokens, k)
    if not isinstance(drafts, (Sequence, np.ndarray)) or np.ndim(drafts) != 1:
        raise ValueError(
            f"propose of the drafter {drafter.name!r} returned {drafts!r:.200} for "
            f"{sequence_id!r}; return at most {k} tokens in a list or an array"
        )
    return drafts
