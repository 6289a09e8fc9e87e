"""Admission: waiting sequences enter in the policy's order while tokens, rows and blocks suffice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pagedjax.host import blocks, prefix_sharing, reservation, views
from pagedjax.host.blocks import BlockPool
from pagedjax.host.policies import Policy
from pagedjax.host.preemption import Pairs
from pagedjax.host.types import HOLE, Running, SchedulerConfig, Seq


class Admission(NamedTuple):
    """The sequences admitted so far, and what is left for others."""

    pool: BlockPool
    # hashes -> the blocks that rows of this step fill; owned by this value alone
    filling_now: dict[str, int]
    budget: int  # tokens
    free_rows: int
    # host block -> device block, of full blocks; owned by this value alone
    swapped_in: dict[int, int]
    admitted: tuple[Seq, ...] = ()
    swap_in: Pairs = ()
    promised: int = 0  # blocks that sequences need beside those that they have (views.py)


def admit(
    admission: Admission,
    policy: Policy,
    waiting: tuple[Seq, ...],
    active: Running,
    config: SchedulerConfig,
) -> Admission:
    """Admit as many sequences as fit. The first that does not fit ends it, so that none is
    overtaken for ever.
    """
    pool = admission.pool
    line = policy.order(
        waiting, active, lambda seq: prefix_sharing.cached_tokens(pool, seq, config)
    )
    for group in _groups(line):
        if admission.budget <= 0 or sum([seq.num_rows for seq in group]) > admission.free_rows:
            break
        trial = admission
        # all or none: the changes of the first ones are dropped if the last does not fit
        if len(group) > 1:
            trial = admission._replace(
                filling_now=dict(admission.filling_now), swapped_in=dict(admission.swapped_in)
            )
        if config.views:
            each = [views.wanted(config, seq) for seq in group]
            trial = trial._replace(promised=trial.promised + sum(each))
        for seq in group:
            trial = _admit_one(trial, policy, seq, config) if trial else None
        if trial is None:
            break
        admission = trial
    return admission


def _groups(line: Iterable[Seq]) -> Iterator[list[Seq]]:
    """Sequences one by one, but the beams of a request together, at the place of the first of them."""
    line, seen = tuple(line), set()
    for seq in line:
        if not seq.is_beam:
            yield [seq]
        elif seq.group not in seen:
            seen.add(seq.group)
            yield sorted(
                (other for other in line if other.group == seq.group),
                key=lambda other: other.arrival,
            )


def _admit_one(
    admission: Admission, policy: Policy, seq: Seq, config: SchedulerConfig
) -> Admission | None:
    """Give a sequence its blocks. None if blocks do not suffice, or tokens for a prompt that must
    not be cut.

    Content in host blocks is moved back: full blocks that branches share once; a block that is not
    full once for each branch, because each of them writes to it in this step.
    """
    pool, swapped_in, size, promised = (
        admission.pool,
        admission.swapped_in,
        config.block_size,
        admission.promised,
    )
    whole = seq.blocks[: seq.computed // size * config.groups]
    if seq.blocks:
        found = tuple([swapped_in[b] for b in whole if b in swapped_in])
    else:
        found = prefix_sharing.find(pool, admission.filling_now, seq, config)
    paged = config.reservation == "none"
    need = (blocks.needed(seq.length, size) if paged else reservation.piece(config, seq)) - len(
        found
    )
    # an idle block that is found is not free
    free = pool.num_free - sum(block in pool.stamps for block in found)
    if config.views:
        mine = views.wanted(config, seq)
        need, free = mine - views.held(found), free - (promised - mine)
    if need > free or not policy.admit(seq, need, free):
        return None
    # blocks for what this step computes; the others follow, when some of these are given back
    if config.views:
        need, mine = views.entering(config, seq, found, free, admission.budget)
        promised += mine - views.wanted(config, seq)
    if paged:
        taken = blocks.allocate(blocks.share(pool, found), need)
        assert taken is not None, "need was compared with the free blocks"
    else:
        taken = blocks.allocate_run(pool, need)
        if taken is None:
            return None  # enough blocks are free, but not in one piece
    pool, ids = taken
    swap_in = admission.swap_in
    if seq.blocks:
        fresh, new, full = iter(ids), frozenset(ids), frozenset(whole)
        shared = {b: swapped_in[b] for b in whole if b in swapped_in} | {HOLE: HOLE}
        table = [shared[b] if b in shared else next(fresh) for b in seq.blocks]
        pairs = [(b, mine) for b, mine in zip(seq.blocks, table, strict=True) if mine in new]
        swapped_in |= {b: mine for b, mine in pairs if b in full}
        swap_in += tuple(pairs)
        entered = seq._replace(blocks=(*table, *fresh))
    else:
        entered = seq._replace(computed=len(found) // config.groups * size, blocks=found + ids)
    count = min(entered.length - entered.computed, admission.budget)
    if config.views:
        count = min(count, len(entered.blocks) // config.groups * size - entered.computed)
    if not config.chunked_prefill and entered.computed + count < entered.length:
        return None
    prefix_sharing.fills(
        admission.filling_now, entered, entered.computed, entered.computed + count, config
    )
    free_rows, budget = admission.free_rows - seq.num_rows, admission.budget - count
    admitted = (*admission.admitted, entered)
    return Admission(
        pool, admission.filling_now, budget, free_rows, swapped_in, admitted, swap_in, promised
    )
