"""Two recorded runs of the same requests on one page: `pair(first, second)`.

A request has the same number in both, so it has one colour and one place. Requests are matched by
their ids; an id that was used again is another request each time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from pagedjax.viewer.picture import Frame, Picture, apply
from pagedjax.viewer.read_recording import Run

REMEDY = "show two runs that got the same prompts, of one model"


class Pair(NamedTuple):
    """Two runs whose requests have common numbers.

    parting: the indices of the frames in which the runs first decide differently; None in the place
        of a run that had ended before; None if all decisions are equal.
    only: numbers of the requests that are in the first run alone, and in the second alone.
    """

    first: Run
    second: Run
    parting: tuple[int | None, int | None] | None
    only: tuple[tuple[int, ...], tuple[int, ...]]


def pair(first: Run, second: Run) -> Pair:
    """Gives the requests of the second run the numbers that they have in the first.

    A decision is which request computes which tokens in a step, with how many drafts, and which one
    is preempted. Steps are compared in turn: the first with the first, and so on.

    Raises:
        ValueError: no request is in both runs, or one has another prompt.
    """
    first_records = _records(first)
    numbers = {key: n for n, key in enumerate(first_records)}
    second_records = _records(second)
    common = [key for key in second_records if key in numbers]
    if not common:
        raise ValueError(
            f"{first.name} and {second.name} have no request id in common "
            f"({_id_examples(first_records)}; {_id_examples(second_records)}); {REMEDY}"
        )
    _check_prompts(first, second, numbers, first_records, second_records)
    new_numbers = iter(range(len(first_records), len(first_records) + len(second_records)))
    renamed = [numbers[key] if key in numbers else next(new_numbers) for key in second_records]
    second = second._replace(
        frames=tuple([renumbered(frame, renamed) for frame in second.frames]),
        prompts={renamed[n]: prompt for n, prompt in second.prompts.items()},
    )
    missing = tuple([n for key, n in numbers.items() if key not in second_records])
    added = tuple([n for n in renamed if n >= len(first_records)])
    return Pair(first, second, _parting(first, second), (missing, added))


def different_names(first: str, second: str) -> tuple[str, str]:
    """The names of two recordings: those of their files, or where these are equal, their paths
    from the last folder that has both.
    """
    paths = [Path(os.path.abspath(path)) for path in (first, second)]
    if paths[0].name != paths[1].name or paths[0] == paths[1]:
        return paths[0].name, paths[1].name
    parts = list(zip(paths[0].parts, paths[1].parts, strict=False))
    num_common = next(i for i, (a, b) in enumerate(parts) if a != b)
    names = [Path(*path.parts[num_common:]).as_posix() for path in paths]
    return names[0], names[1]


def _records(run: Run) -> dict[tuple[str, int], Sequence[Any]]:
    """The records in `came` by (id, how often it was used before), in the order of their numbers."""
    records: dict[tuple[str, int], Sequence[Any]] = {}
    uses: dict[str, int] = {}
    for frame in run.frames:
        for record in frame.get("came", ()):
            name = record[1]
            records[name, uses.get(name, 0)] = record
            uses[name] = uses.get(name, 0) + 1
    return records


def _id_examples(records: dict[tuple[str, int], Sequence[Any]]) -> str:
    names = [repr(name) for name, _ in records][:2]
    return f"{', '.join(names)}, ..." if len(records) > 2 else ", ".join(names) or "none"


def _check_prompts(
    first: Run,
    second: Run,
    numbers: dict[tuple[str, int], int],
    first_records: dict[tuple[str, int], Sequence[Any]],
    second_records: dict[tuple[str, int], Sequence[Any]],
) -> None:
    """Raises ValueError for a request that has another prompt in the second run."""
    for number_in_second, (key, record) in enumerate(second_records.items()):
        if key not in first_records:
            continue
        name = key[0]
        length = first_records[key][2]
        if length != record[2]:
            raise ValueError(
                f"request {name!r} has a prompt of {length} tokens in {first.name} "
                f"and of {record[2]} in {second.name}; {REMEDY}"
            )
        prompt = first.prompts.get(numbers[key])
        prompt_of_second = second.prompts.get(number_in_second)
        if prompt is not None and prompt_of_second is not None and prompt != prompt_of_second:
            pairs = enumerate(zip(prompt, prompt_of_second, strict=True))
            i = next(i for i, (token, other_token) in pairs if token != other_token)
            raise ValueError(
                f"the prompt of request {name!r} has token {prompt[i]} at {i} in {first.name} "
                f"and {prompt_of_second[i]} in {second.name}; {REMEDY}"
            )


def renumbered(frame: Frame, numbers: Sequence[int]) -> Frame:
    """A frame whose request n has the number `numbers[n]`."""

    def with_new_numbers(entries: Sequence[Any]) -> list[list[Any]]:
        return [[numbers[entry[0]], *entry[1:]] for entry in entries]

    parts: dict[str, Any] = {}
    if "came" in frame:
        parts["came"] = [_arrival(record, numbers) for record in frame["came"]]
    if "waiting" in frame:
        front, back, queue = frame["waiting"]
        parts["waiting"] = [front, back, [numbers[n] for n in queue]]
    if "rows" in frame:
        front, back, rows = frame["rows"]
        parts["rows"] = [front, back, with_new_numbers(rows)]
    for name in ("still", "tables", "away"):
        if name in frame:
            parts[name] = with_new_numbers(frame[name])
    if "why" in frame:
        parts["why"] = [
            [sentence, _mapped(rival, numbers), _mapped(requests, numbers), limit]
            for sentence, rival, requests, limit in frame["why"]
        ]
    for name in ("before", "after"):
        if name in frame:
            parts[name] = [_entry(entry, numbers) for entry in frame[name]]
    return frame | parts


def _arrival(record: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    """The record of a request that came, with other numbers."""
    number, name, prompt, limit, priority, user, branch, *tags = record
    return [
        numbers[number],
        name,
        prompt,
        limit,
        priority,
        user,
        _mapped(branch, numbers),
        *tags,
    ]


def _entry(entry: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    """A log entry with other numbers (story.py)."""
    kind, number, *details = entry
    if kind in ("forked", "beamed"):  # their third item is requests as well
        details[0] = _mapped(details[0], numbers)
    return [kind, _mapped(number, numbers), *details]


def _mapped(requests: Any, numbers: Sequence[int]) -> Any:
    """The new number of a request, or the new numbers of a list of them; None of None."""
    if requests is None:
        return None
    if isinstance(requests, int):
        return numbers[requests]
    return [numbers[n] for n in requests]


def _parting(first: Run, second: Run) -> tuple[int | None, int | None] | None:
    """`Pair.parting`."""
    for step, step_of_second in zip_longest(
        _decisions(first), _decisions(second), fillvalue=(None, None)
    ):
        if step[1] != step_of_second[1]:
            return step[0], step_of_second[0]
    return None


def _decisions(run: Run) -> list[tuple[int, Any]]:
    """(index of its frame, what it decides) of each step."""
    decisions = []
    picture = Picture()
    for index, frame in enumerate(run.frames):
        picture = apply(picture, frame)
        if picture.at_rest:
            continue
        rows = sorted((n, start, count, *drafts) for n, start, count, _, *drafts in picture.rows)
        log = frame.get("before", ())
        preempted = sorted(number for kind, number, *_ in log if kind == "preempted")
        decisions.append((index, (rows, preempted)))
    return decisions
