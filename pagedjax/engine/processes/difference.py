"""In which transition another process differs from process 0."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 200  # characters of a line in an error


def difference(process: int, leader_lines: Sequence[str], lines: Sequence[str]) -> str:
    """The first difference of another process from process 0, as the end of a sentence.

    Args:
        leader_lines, lines: of the transitions in process 0, and in `process`.
    """
    for leader_line, line in zip(leader_lines, lines, strict=False):
        if leader_line != line:
            return (
                f"process 0 has {_excerpt(leader_line, line)}, and process {process} "
                f"{_excerpt(line, leader_line)}"
            )
    if len(leader_lines) == len(lines):
        return "drafts or predicted plans, or what was before this step"
    if len(leader_lines) > len(lines):
        return f"process {process} has no {leader_lines[len(lines)][:SHOWN]}"
    return f"process 0 has no {lines[len(leader_lines)][:SHOWN]}"


def _excerpt(line: str, counterpart: str) -> str:
    """The start of a line, which names the transition, and the place where it begins to differ."""
    first = next(
        (i for i, (a, b) in enumerate(zip(line, counterpart, strict=False)) if a != b),
        min(len(line), len(counterpart)),
    )
    start = first - SHOWN // 4
    excerpt = line[:SHOWN]
    if start > SHOWN // 4:
        excerpt = f"{line[: SHOWN // 4]}...{line[start : start + SHOWN]}"
    reaches_the_end = line.endswith(excerpt[-9:])  # as far as its last characters tell
    return excerpt if reaches_the_end else f"{excerpt}..."
