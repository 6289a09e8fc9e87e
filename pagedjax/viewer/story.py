"""What happened, as entries of a log: small lists [what, number of the request, ...], in the order of events.

    submitted n [seconds]          forked n [numbers]             begins branches, on the blocks of its prompt
    admitted n known cached        beamed n parent token          goes on from a beam, itself or a sibling
    resumed n                      ended n reason outputs         outputs: null where nobody said
    preempted n swapped            forgot null                    the prefix cache
    shared n [blocks]              found in the cache, or held by others too
    evicted n [blocks]             their content was lost for it  allocated n [blocks]           those and empty ones
    copied n from to               it was about to write where others look
    cached n [blocks]              filled, and can be found from now on
    freed n [blocks]               nobody has them now: empty     kept n [blocks]   the same, but their content stays

Chunks and tokens are not among them: they are the rows of a frame. The page puts the two together (story.js).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagedjax.host.blocks import BlockPool
from pagedjax.host.types import Beamed, Event, Forked, Plan

Entry = list[Any]
Tables = dict[int, tuple[int, ...]]  # number -> block table


def planned(plan: Plan, numbers: Mapping[str, int]) -> list[Entry]:
    """Who gave way, who came back and who entered."""
    entered = zip(plan.admitted, plan.known, plan.cached, strict=True)
    swapped, resumed = set(plan.swapped), set(plan.resumed)
    return [
        *(["preempted", numbers[name], name in swapped] for name in plan.preempted),
        *(["resumed", numbers[name]] for name in plan.resumed),
        *(["admitted", numbers[name], known, cached] for name, known, cached in entered if name not in resumed),
    ]


def brought(
    events: Sequence[Event],
    numbers: Mapping[str, int],
    requests: Mapping[int, Sequence[Any]],
    filled: Sequence[tuple[str, list[int]]],
) -> list[Entry]:
    """What a commit brought, but for ends, which have to be noticed without it, too.

    Args:
        requests: what `came` said of each, by number.
        filled: ids of requests and their blocks that can be found from now on.
    """
    log: list[Entry] = [["cached", numbers[name], ids] for name, ids in filled if name in numbers]
    for event in events:
        if isinstance(event, Forked):
            branches = [numbers[name] for name in event.request_ids]
            log.append(["forked", requests[branches[0]][6], branches])
        elif isinstance(event, Beamed):
            beams = zip(event.request_ids, event.parents, event.token_ids, strict=True)
            log += [["beamed", numbers[me], numbers[parent], token] for me, parent, token in beams]
    return log


def moves(
    old: Tables,
    new: Tables,
    before: BlockPool,
    after: BlockPool,
    *,
    allocates: bool,
    copies: Iterable[tuple[int, int]] = (),
) -> list[Entry]:
    """Compare the block tables of two states -> which blocks came and went, and how.

    Args:
        allocates: whether a new block may have been a free one: so in `schedule`, but a commit only shares.
        copies: (from, to) of blocks that were copied.
    """
    gains, losses = _changes(old, new)
    source = {to: origin for origin, to in copies}
    takers = Counter(block for _, ids in gains for block in ids)
    came: list[Entry] = []
    taken: set[int] = set(source)  # were free
    for n, ids in gains:
        fresh, found = [], []
        for block in ids:
            held = after.owners[block] > takers[block] or block in after.hashes or block in taken
            if block not in source:
                (found if held or not allocates else fresh).append(block)
        taken.update(fresh)
        lost = [block for block in ids if block in taken and block in before.hashes]
        came += _entry("shared", n, found)
        came += _entry("evicted", n, [block for block in lost if block not in found])
        came += _entry("allocated", n, fresh)
        came += [["copied", n, source[block], block] for block in ids if block in source]
    went: list[Entry] = []
    told: set[int] = set()
    for n, ids in losses:
        gone = [block for block in ids if block not in told and (block not in after.owners or block in taken)]
        told.update(gone)
        kept = [block for block in gone if block in before.hashes or block in after.hashes]
        went += _entry("freed", n, [block for block in gone if block not in kept])
        went += _entry("kept", n, kept)
    return went + came


def _changes(old: Tables, new: Tables) -> tuple[list[tuple[int, list[int]]], list[tuple[int, list[int]]]]:
    """Blocks that each request has more, and less."""
    gains, losses = [], []
    for n, table in new.items():
        had = old.get(n, ())
        if had is table or had == table:
            continue
        if table[: len(had)] == had:
            gains.append((n, list(table[len(had) :])))
            continue
        mine, now = set(had), set(table)
        gains.append((n, [block for block in table if block not in mine]))
        losses.append((n, [block for block in had if block not in now]))
    losses += [(n, list(table)) for n, table in old.items() if n not in new]
    return [g for g in gains if g[1]], [lost for lost in losses if lost[1]]


def _entry(what: str, n: int, blocks: list[int]) -> list[Entry]:
    return [[what, n, blocks]] if blocks else []
