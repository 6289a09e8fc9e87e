"""Half of a surrogate pair is a text in Python and in JSON (`"\\ud800"`), and no character: UTF-8
cannot express it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

SURROGATE = re.compile("[\ud800-\udfff]")


def halves(value: Any) -> Iterator[str]:
    """The places of texts with half of a pair in a value of JSON, as `messages.0.content`; keys are
    texts too.
    """
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:  # no recursion: a value may be deep
        place, inner = waiting.pop()
        if isinstance(inner, str) and SURROGATE.search(inner):
            yield place
        elif isinstance(inner, list):
            waiting += [(_below(place, i), each) for i, each in enumerate(inner)]
        elif isinstance(inner, dict):
            if any(SURROGATE.search(key) for key in inner):
                yield place
            waiting += [(_below(place, key), each) for key, each in inner.items()]


def check_whole(place: str, value: Any) -> None:
    """Raises ValueError for half of a pair in a value; names where."""
    for below in halves(value):
        where = f"{place} at {below}" if below else place
        raise ValueError(
            f"{where} has half of a surrogate pair; remove it, or write the whole character"
        )


def _below(place: str, name: str | int) -> str:
    safe = SURROGATE.sub("\ufffd", str(name))
    return f"{place}.{safe}" if place else safe
