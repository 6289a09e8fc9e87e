"""Log entries: small lists [what, number of the request, ...], in the order of events.

    submitted n [seconds]      a new request; the seconds if they were recorded
    admitted n known cached    it runs now: its known tokens, and how many of them were in the cache
    resumed n                  it runs again, with its content from host memory
    preempted n swapped        it runs no longer; swapped: its content moved to host memory
    forked n [numbers]         branches begin on the blocks of its prompt
    beamed n parent token      a beam continues from a parent, itself or a sibling
    ended n reason outputs     outputs: null if no event says how many
    forgot null                the prefix cache was reset
    shared n [blocks]          blocks that were found in the cache, or that others own as well
    allocated n [blocks]       blocks that were empty or evicted
    evicted n [blocks]         allocated blocks whose old content was lost
    copied n from to           copy on write: the old block is shared or published
    cached n [blocks]          blocks that it filled and that can be found now
    freed n [blocks]           blocks without an owner now: empty
    kept n [blocks]            blocks without an owner now: their content stays

Chunks and tokens are rows of a frame, not entries. The page combines the two (story.js).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from pagedjax.host.blocks import BlockPool
from pagedjax.host.types import Beamed, Event, Forked, Plan

LogEntry = list[Any]
Tables = dict[int, tuple[int, ...]]  # number -> block table


def planned(plan: Plan, numbers: Mapping[str, int]) -> list[LogEntry]:
    """Entries of a plan: sequences that were preempted, resumed and admitted."""
    entered = zip(plan.admitted, plan.known, plan.cached, strict=True)
    swapped = set(plan.swapped)
    resumed = set(plan.resumed)
    return [
        *(["preempted", numbers[name], name in swapped] for name in plan.preempted),
        *(["resumed", numbers[name]] for name in plan.resumed),
        *(
            ["admitted", numbers[name], known_tokens, cached]
            for name, known_tokens, cached in entered
            if name not in resumed
        ),
    ]


def committed(
    events: Sequence[Event],
    numbers: Mapping[str, int],
    requests: Mapping[int, Sequence[Any]],
    filled: Sequence[tuple[str, list[int]]],
) -> list[LogEntry]:
    """Entries of a commit, except ends, which also occur without a commit.

    Args:
        requests: the records in `came`, by number.
        filled: (request id, its blocks that can be found now).
    """
    log: list[LogEntry] = [
        ["cached", numbers[name], ids] for name, ids in filled if name in numbers
    ]
    for event in events:
        if isinstance(event, Forked):
            branches = [numbers[name] for name in event.request_ids]
            first_branch = requests[branches[0]][6]  # of a record in `came` (picture.py)
            log.append(["forked", first_branch, branches])
        elif isinstance(event, Beamed):
            beams = zip(event.request_ids, event.parents, event.token_ids, strict=True)
            log += [
                ["beamed", numbers[beam], numbers[parent], token] for beam, parent, token in beams
            ]
    return log


def moves(
    old: Tables,
    new: Tables,
    before: BlockPool,
    after: BlockPool,
    *,
    allocates: bool,
    copies: Iterable[tuple[int, int]] = (),
) -> list[LogEntry]:
    """Compares the block tables of two states -> entries for the blocks that they gained and lost.

    Args:
        allocates: whether a table's new block may have been free. It may in a `schedule`; in a
            commit it is shared.
        copies: (from, to) of blocks that were copied.
    """
    gains, losses = _changes(old, new)
    source = {to: origin for origin, to in copies}
    takers = Counter(block for n, ids in gains for block in ids)
    gained: list[LogEntry] = []
    allocated: set[int] = set(source)  # blocks that were free before
    for n, ids in gains:
        unowned = []
        shared = []
        for block in ids:
            if block in source:
                continue
            if (
                not allocates
                or after.owners[block] > takers[block]
                or block in after.hashes
                or block in allocated
            ):
                shared.append(block)
            else:
                unowned.append(block)
        allocated.update(unowned)
        gained += _entry("shared", n, shared)
        overwritten = [block for block in ids if block in allocated and block in before.hashes]
        gained += _entry("evicted", n, [block for block in overwritten if block not in shared])
        gained += _entry("allocated", n, unowned)
        gained += [["copied", n, source[block], block] for block in ids if block in source]
    return _releases(losses, before, after, allocated) + gained


def _releases(
    losses: Iterable[tuple[int, list[int]]],
    before: BlockPool,
    after: BlockPool,
    allocated: Set[int],
) -> list[LogEntry]:
    """Entries for lost blocks that have no owner now, or only a new owner (`allocated`)."""
    log: list[LogEntry] = []
    released: set[int] = set()
    for n, ids in losses:
        blocks = [
            block
            for block in ids
            if block not in released and (block not in after.owners or block in allocated)
        ]
        released.update(blocks)
        findable = [block for block in blocks if block in before.hashes or block in after.hashes]
        log += _entry("freed", n, [block for block in blocks if block not in findable])
        log += _entry("kept", n, findable)
    return log


def _changes(
    old: Tables, new: Tables
) -> tuple[list[tuple[int, list[int]]], list[tuple[int, list[int]]]]:
    """Returns (gains, losses): (number, blocks) of each request that gained or lost blocks."""
    gains = []
    losses = []
    for n, table in new.items():
        old_table = old.get(n, ())
        if old_table is table or old_table == table:
            continue
        if table[: len(old_table)] == old_table:
            gains.append((n, list(table[len(old_table) :])))
            continue
        old_blocks = set(old_table)
        new_blocks = set(table)
        gains.append((n, [block for block in table if block not in old_blocks]))
        losses.append((n, [block for block in old_table if block not in new_blocks]))
    losses += [(n, list(table)) for n, table in old.items() if n not in new]
    return _without_holes(gains), _without_holes(losses)


def _without_holes(changes: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
    """The changes without holes, and without requests that have no other changes."""
    blocks = [(n, [block for block in ids if block]) for n, ids in changes]
    return [(n, ids) for n, ids in blocks if ids]


def _entry(kind: str, n: int, blocks: list[int]) -> list[LogEntry]:
    return [[kind, n, blocks]] if blocks else []
