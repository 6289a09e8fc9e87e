"""In which transition another process differs from process 0."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 200  # characters of a line in an error


def difference(process: int, mine: Sequence[str], theirs: Sequence[str]) -> str:
    """In which transition another process differs from process 0, by the lines of both."""
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            return f"process 0 has {_around(a, b)}, and process {process} {_around(b, a)}"
    if len(mine) == len(theirs):
        return "drafts or predicted plans, or what was before this step"
    more, fewer = (mine, theirs) if len(mine) > len(theirs) else (theirs, mine)
    where = f"process {process}" if fewer is theirs else "process 0"
    return f"{where} has no {more[len(fewer)][:SHOWN]}"


def _around(line: str, other: str) -> str:
    """The start of a line, which names the transition, and where it begins to differ from another
    one.
    """
    first = next(
        (i for i, (a, b) in enumerate(zip(line, other, strict=False)) if a != b),
        min(len(line), len(other)),
    )
    start = first - SHOWN // 4
    shown = (
        f"{line[: SHOWN // 4]}...{line[start : start + SHOWN]}"
        if start > SHOWN // 4
        else line[:SHOWN]
    )
    return shown if line.endswith(shown[-9:]) else f"{shown}..."
