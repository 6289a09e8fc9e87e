"""Halves of surrogate pairs: Python and JSON allow them in a text (`"\\ud800"`).

They are no characters, and UTF-8 cannot express them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

SURROGATE = re.compile("[\ud800-\udfff]")


def places_of_halves(value: Any) -> Iterator[str]:
    """The places of texts with half of a pair in a value of JSON, such as `messages.0.content`.

    Keys of objects are texts too.
    """
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:  # no recursion: a value may be deep
        place, inner = pending.pop()
        if isinstance(inner, str) and SURROGATE.search(inner):
            yield place
        elif isinstance(inner, list):
            pending += [(_below(place, i), child) for i, child in enumerate(inner)]
        elif isinstance(inner, dict):
            if any(SURROGATE.search(key) for key in inner):
                yield place
            pending += [(_below(place, key), child) for key, child in inner.items()]


def check_whole(place: str, value: Any) -> None:
    """Raise ValueError, with the place, if a value has half of a pair."""
    path = next(places_of_halves(value), None)
    if path is None:
        return
    location = f"{place} at {path}" if path else place
    raise ValueError(
        f"{location} has half of a surrogate pair; remove it, or write the whole character"
    )


def _below(place: str, name: str | int) -> str:
    safe = SURROGATE.sub("\ufffd", str(name))
    return f"{place}.{safe}" if place else safe
