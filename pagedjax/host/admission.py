"""Letting the waiting in, from the head of the policy's order, while tokens, places and blocks last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pagedjax.host import blocks, prefix_sharing, reservation
from pagedjax.host.blocks import BlockPool
from pagedjax.host.branches import together, width
from pagedjax.host.policies import Policy
from pagedjax.host.preemption import Pairs
from pagedjax.host.state import SchedulerConfig
from pagedjax.host.types import Running, Seq


class Entry(NamedTuple):
    """Who has been let in so far, and what that leaves."""

    pool: BlockPool
    coming: dict[str, int]  # hashes -> the blocks that rows of this step fill; belongs to this entry alone
    budget: int  # tokens
    room: int  # places
    moved: dict[int, int]  # host block -> device block, of full blocks; belongs to this entry alone
    admitted: tuple[Seq, ...] = ()
    swap_in: Pairs = ()


def admit(entry: Entry, policy: Policy, waiting: tuple[Seq, ...], active: Running, config: SchedulerConfig) -> Entry:
    """Let in as many as fit. The first that does not ends it, so that nothing overtakes it for ever."""
    for unit in _units(policy.order(waiting, active)):
        if entry.budget <= 0 or sum(map(width, unit)) > entry.room:
            break
        trial = entry
        if len(unit) > 1:  # all or none: what the first ones note down must be undone if the last does not fit
            trial = entry._replace(coming=dict(entry.coming), moved=dict(entry.moved))
        for seq in unit:
            trial = _place(trial, policy, seq, config) if trial else None
        if trial is None:
            break
        entry = trial
    return entry


def _units(line: Iterable[Seq]) -> Iterator[list[Seq]]:
    """Sequences one by one, but the beams of a request together, where the first of them stands."""
    line, seen = tuple(line), set()
    for seq in line:
        if not together(seq):
            yield [seq]
        elif seq.group not in seen:
            seen.add(seq.group)
            yield sorted((other for other in line if other.group == seq.group), key=lambda other: other.arrival)


def _place(entry: Entry, policy: Policy, seq: Seq, config: SchedulerConfig) -> Entry | None:
    """Give a sequence its blocks; None when they do not suffice, or tokens for a prompt that must not be cut.

    Content in host blocks comes back, full blocks that branches shared once; a block that is not full comes back to
    each of them, because they write to it in this very step.
    """
    pool, moved, size = entry.pool, entry.moved, config.block_size
    whole = seq.blocks[: seq.computed // size]
    if seq.blocks:
        found = tuple([moved[b] for b in whole if b in moved])
    else:
        found = prefix_sharing.find(pool, entry.coming, seq, size)
    need = reservation.piece(config, seq) - len(found)
    free = pool.num_free - sum(block in pool.stamps for block in found)  # an idle block that is found is not free
    if need > free or not policy.admit(seq, need, free):
        return None
    if config.reservation == "none":
        taken = blocks.allocate(blocks.share(pool, found), need)
        assert taken is not None, "need was compared with what is free"
    else:
        taken = blocks.allocate_run(pool, need)
        if taken is None:
            return None  # enough is free, and not in one piece
    pool, ids = taken
    swap_in = entry.swap_in
    if seq.blocks:
        fresh, new, full = iter(ids), frozenset(ids), frozenset(whole)
        table = [moved[b] if b in moved and i < len(whole) else next(fresh) for i, b in enumerate(seq.blocks)]
        pairs = [(b, mine) for b, mine in zip(seq.blocks, table, strict=True) if mine in new]
        moved |= {b: mine for b, mine in pairs if b in full}
        swap_in += tuple(pairs)
        entered = seq._replace(blocks=(*table, *fresh))
    else:
        entered = seq._replace(computed=len(found) * size, blocks=found + ids)
    count = min(entered.length - entered.computed, entry.budget)
    if not config.chunked_prefill and entered.computed + count < entered.length:
        return None
    prefix_sharing.fills(entry.coming, entered, entered.computed, entered.computed + count, size)
    room, budget = entry.room - width(seq), entry.budget - count
    return Entry(pool, entry.coming, budget, room, moved, (*entry.admitted, entered), swap_in)
