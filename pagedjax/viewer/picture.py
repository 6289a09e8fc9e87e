"""A picture is the page at one moment; a frame turns it into the next picture. fold.js does the
same in the browser.

A frame is a JSON-able dict of changes, so that a run of thousands of steps stays small. An absent
key means no change. Requests have numbers 0, 1, 2 ... in the order of arrival, because ids are long
and may be used again.

    step       number of the scheduler's step
    rest       true: no step runs; else the frame shows the cache while its step runs
    at         [start, end] of the step in seconds since the recording began
    came       [number, id, prompt_len, most tokens, priority, user, number of the first branch or null] of new
               requests, and a list of their tags if they have any
    waiting    a splice of the queue's numbers
    rows       a splice of [number, first token, tokens, known tokens], the packed batch in its order; a row with drafts
               has their number behind that, and they are the last of its tokens. The base of the splice is the batch
               in which each row of the last step that still runs gets one more token
    still      [number, computed, known tokens] of running requests without a row in this step
    tables     [number, blocks kept, new blocks] of a changed block table; [number, null, []]: it no longer runs
    published  [added, removed] blocks whose content can be found, or [all of them]
    why        [sentence, number of the request that is before it or null, numbers, limit] of requests that get no token
               in this step: why they wait, or run without one. Numbers are null in one entry, of all others
    memory     text of the policy's memory in this step, if the policy has one
    away       [number, host blocks] of requests that are swapped out
    counts     [tokens computed, blocks with an owner, idle blocks, slots of owned blocks that hold no token]
    sampled    the token that each row gets, or null; of a row with drafts a list: the accepted ones and one more
    accepted   drafts of each row that were accepted; null: it had none, or was cancelled while the step ran
    verified   [drafts, accepted] of all steps so far, this one included
    before     log entries until the step ran, in order: see story.py
    after      log entries at its end

A splice is [items kept at the front, items kept at the back, new items between].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from immutables import Map

Frame = dict[str, Any]
# Rows: (number, first token, tokens, known tokens), and drafts if the row has any
Batch = tuple[tuple[int, ...], ...]


class Picture(NamedTuple):
    step: int = 0
    at_rest: bool = True
    waiting: tuple[int, ...] = ()
    rows: Batch = ()
    still: tuple[tuple[int, int, int], ...] = ()
    tables: Map[int, tuple[int, ...]] = Map()
    published: Map[int, None] = Map()
    why: tuple[tuple[Any, ...], ...] = ()
    memory: str = ""
    away: tuple[tuple[int, int], ...] = ()
    counts: tuple[int, ...] = (0, 0, 0, 0)
    # number -> its record in `came`, of requests that were unfinished while the step ran
    requests: Map[int, tuple[Any, ...]] = Map()
    ended: tuple[int, ...] = ()  # numbers of the requests that ended with the step
    # the numbers of drafts and of accepted drafts in all steps so far
    verified: tuple[int, ...] = (0, 0)


def splice(old: Sequence[Any], new: Sequence[Any]) -> list[Any] | None:
    """Returns the change from one sequence to another; None if they are equal."""
    if len(old) == len(new) and all(map(_same, old, new)):
        return None
    shorter = min(len(old), len(new))
    front = next((i for i in range(shorter) if not _same(old[i], new[i])), shorter)
    back = next(
        (i for i in range(shorter - front) if not _same(old[-1 - i], new[-1 - i])), shorter - front
    )
    return [front, back, [_plain(item) for item in new[front : len(new) - back]]]


def spliced(old: Sequence[Any], change: Sequence[Any] | None) -> tuple[Any, ...]:
    """Returns the new sequence after a change from `splice`."""
    if change is None:
        return tuple(old)
    front, back, middle = change
    return (*old[:front], *map(_tupled, middle), *old[len(old) - back :])


def expected(rows: Batch, tables: Map[int, tuple[int, ...]]) -> Batch:
    """Returns the rows of the next step if each row that still has blocks gets one more token."""
    return tuple(
        [(n, first + count, 1, first + count + 1) for n, first, count, *_ in rows if n in tables]
    )


def apply(picture: Picture, frame: Frame) -> Picture:
    """Returns the picture after a frame."""
    tables = picture.tables.mutate()
    for n, blocks_kept, new in frame.get("tables", ()):
        if blocks_kept is None:
            del tables[n]
        else:
            tables[n] = (*tables.get(n, ())[:blocks_kept], *new)
    tables = tables.finish()
    requests = picture.requests.mutate()
    for record in frame.get("came", ()):
        requests[record[0]] = tuple(record)
    for n in (*picture.ended, *_ended(frame.get("before", ()))):
        requests.pop(n, None)
    return Picture(
        step=frame["step"],
        at_rest=frame.get("rest", False),
        waiting=spliced(picture.waiting, frame.get("waiting")),
        rows=spliced(expected(picture.rows, tables), frame.get("rows")),
        still=tuple(map(tuple, frame.get("still", ()))),
        tables=tables,
        published=_published(picture.published, frame.get("published")),
        why=tuple(map(tuple, frame.get("why", ()))),
        memory=frame.get("memory", ""),
        away=tuple(map(tuple, frame.get("away", ()))),
        counts=tuple(frame["counts"]),
        requests=requests.finish(),
        ended=_ended(frame.get("after", ())),
        verified=tuple(frame.get("verified", picture.verified)),
    )


def _ended(log: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """The requests that end in some log entries."""
    return tuple([entry[1] for entry in log if entry[0] == "ended"])


def _published(old: Map[int, None], change: Sequence[Sequence[int]] | None) -> Map[int, None]:
    if change is None:
        return old
    if len(change) == 1:
        return Map(dict.fromkeys(change[0]))
    new = old.mutate()
    new.update(dict.fromkeys(change[0]))
    for block in change[1]:
        new.pop(block, None)
    return new.finish()


def whole(picture: Picture) -> Frame:
    """Returns the frame that makes this picture from an empty one: a page can begin with it."""
    frame: Frame = {
        "step": picture.step,
        "came": [list(record) for _, record in sorted(picture.requests.items())],
        "waiting": [0, 0, list(picture.waiting)],
        "rows": [0, 0, [list(row) for row in picture.rows]],
        "still": [list(entry) for entry in picture.still],
        "tables": [[n, 0, list(table)] for n, table in sorted(picture.tables.items())],
        "published": [sorted(picture.published)],
        "why": [list(entry) for entry in picture.why],
        "away": [list(entry) for entry in picture.away],
        "counts": list(picture.counts),
        "after": [["ended", n, "", None] for n in picture.ended],
    }
    if picture.memory:
        frame["memory"] = picture.memory
    if any(picture.verified):
        frame["verified"] = list(picture.verified)
    return frame | ({"rest": True} if picture.at_rest else {})


def _same(a: Any, b: Any) -> bool:
    return a is b or a == b


def _plain(item: Any) -> Any:
    return list(item) if isinstance(item, tuple) else item


def _tupled(item: Any) -> Any:
    return tuple(item) if isinstance(item, list) else item
