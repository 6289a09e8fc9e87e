"""Several steps at once: steps in which all running sequences decode, and nothing else happens.

Between the arrival of a request and the end of another one, the steps of a scheduler are often
alike: each running sequence gets one token, and from time to time a block. `steps_ahead` returns
how many such steps come next. `after_decodes` returns the state after some of them, which is the
same as after as many calls of `schedule` and `commit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress, groupby
from operator import attrgetter, is_not, sub
from types import MappingProxyType
from typing import Any, NamedTuple

from pagedjax.host import blocks, prefix_sharing, scheduler
from pagedjax.host.blocks import BlockPool
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import (
    EMPTY_PLAN,
    NO_HASHES,
    Event,
    Plan,
    Running,
    Sampled,
    Seq,
)

BLOCKS = attrgetter("blocks")
NO_ENDS: Mapping[str, int] = MappingProxyType({})


def steps_ahead(state: SchedulerState, ends: Mapping[str, int] = NO_ENDS) -> int:
    """The number of next steps that certainly compute one token of each running sequence, and
    nothing else.

    In none of these steps does a sequence enter, fork, end or lose its blocks. 0: the next step may
    do something else. It is also 0 where this function would have to know more: if a request waits
    and there is room for another row, if there are stop tokens, sequences that do not advance
    alone, branches that may have to copy a block, queries that do not see all blocks, or a policy
    with memory.

    Args:
        ends: by sequence id, its length when a stop token ends it. If some are given, no other
            sequence has stop tokens.
    """
    config = state.config
    seqs, lengths, computed = state.running
    if not seqs or (state.stops and not ends) or state.forked or not config.sees_all:
        return 0
    if state.news is not None:
        return 0  # a policy with memory decides anew in each step
    if state.waiting and sum([seq.num_rows for seq in seqs]) < config.max_running:
        return 0
    steps = config.max_model_len
    for seq, length, num_computed in zip(seqs, lengths, computed, strict=True):
        request = seq.request
        decodes = length - num_computed == 1 and length > request.prompt_len
        if not (decodes and request.advances_alone):
            return 0
        end = min(seq.limit, ends.get(request.request_id, seq.limit)) if ends else seq.limit
        steps = min(steps, end - length - 1)
    if _blocks_for(state, steps) <= state.pool.num_free:
        return max(steps, 0)
    low = 0  # the pool has blocks for so many steps
    high = steps  # but not for so many
    while high - low > 1:
        middle = (low + high) // 2
        if _blocks_for(state, middle) <= state.pool.num_free:
            low = middle
        else:
            high = middle
    return low


def may_span(state: SchedulerState, plan: Plan, steps: int) -> bool:
    """Whether a plan and the plans after it are probably decodes of its rows, for so many steps. A
    caller that predicts the plans finds out; it need not try where the answer is no.

    Args:
        state: after `schedule` returned the plan.
    """
    seqs = plan.seqs
    if not seqs or plan.drafts or state.forked or len(seqs) < len(state.running.seqs):
        return False
    if any([length - start != 1 for length, start in zip(plan.lengths, plan.starts, strict=True)]):
        return False
    if not all([seq.request.advances_alone for seq in seqs]):
        return False
    steps_left = [seq.limit - length for seq, length in zip(seqs, plan.lengths, strict=True)]
    if max(steps_left) < steps or (state.waiting and min(steps_left) < steps):
        return False  # nothing is left to compute, or a waiting request enters
    return _blocks_for(state, steps) <= _num_empty(state.pool)


class DecodeStep(NamedTuple):
    """A plan of decodes that follows another one.

    state: the scheduler's state with the plan.
    allocated: the blocks that the plan takes.
    steps_left: how many such plans follow this one before a sequence may reach its limit.
    """

    state: SchedulerState
    plan: Plan
    allocated: tuple[int, ...]
    steps_left: int


def next_decodes(
    state: SchedulerState, plan: Plan, steps_left: int | None = None
) -> DecodeStep | None:
    """The plan after a plan of decodes, if no sequence stops: what `commit` and `schedule` give, in
    a part of their time. None where the next plan may be of another kind, or would take a block with
    cached content.

    Args:
        state: after `schedule` returned the plan.
        steps_left: that of the plan if it is a `DecodeStep`, whose rows need not be looked at again.
    """
    if not _only_decodes(state):
        return None
    if steps_left is None:
        steps_left = _steps_left(state.running, plan)
    if steps_left < 1:
        return None
    seqs, lengths, _ = state.running
    new_computed = lengths  # each row has computed all its tokens but the new one
    size = state.config.block_size
    at_boundary = prefix_sharing.rows_at_boundary(new_computed, size)
    if any([len(seqs[i].hashes) * size >= new_computed[i] for i in at_boundary]):
        return None  # `commit` publishes a block of a prompt
    new_lengths = tuple([length + 1 for length in lengths])
    advanced = state._replace(running=Running(seqs, new_lengths, new_computed), step=plan.step + 1)
    rows, _ = scheduler.rows_without_room(advanced)
    if len(rows) > _num_empty(state.pool):
        return None
    after = advanced
    if rows:
        after, _ = scheduler.give_blocks(advanced, rows, ())
        pool = blocks.keep_empty(after.pool, state.config.empty_blocks)
        after = after._replace(pool=pool)
    next_plan = _decode_plan(after, plan)
    allocated = tuple([after.running.seqs[i].blocks[-1] for i in rows])
    return DecodeStep(after, next_plan, allocated, steps_left - 1)


def schedule_predicted(
    state: SchedulerState, plan: Plan, allocated: Sequence[int]
) -> tuple[SchedulerState, Plan] | None:
    """What `schedule` gives, if it is the predicted plan of decodes, with the predicted columns and
    block tables themselves; None if it may be another plan. So the two plans are compared fast, and
    most of `schedule` is left out.

    Args:
        state: before `schedule`, with the policy and the configuration of the prediction.
        plan, allocated: those of a `DecodeStep`.
    """
    if not _only_decodes(state) or state.step != plan.step or state.config.late_stops:
        return None
    active = state.running
    if active.lengths != plan.lengths or active.computed != plan.starts:
        return None
    if len(allocated) > _num_empty(state.pool):
        return None
    allocation = blocks.allocate(state.pool, len(allocated))
    if allocation is None or allocation[1] != allocated:
        return None
    records = _with_tables(active, plan.seqs, len(allocated))
    if records is None:
        return None
    active = Running(records, plan.lengths, plan.starts)
    pool = blocks.keep_empty(allocation[0], state.config.empty_blocks)
    state = state._replace(pool=pool, running=active)
    return state, _decode_plan(state, plan)


def _with_tables(
    active: Running, predicted: tuple[Seq, ...], num_allocated: int
) -> tuple[Seq, ...] | None:
    """The running sequences with the block tables of predicted ones; None if other sequences were
    predicted, or other tables than theirs and one more block in `num_allocated` of them.
    """
    seqs = active.seqs
    # a row with the predicted table itself is of the same sequence: no table has two owners here
    other_tables = map(is_not, map(BLOCKS, seqs), map(BLOCKS, predicted))
    records = list(seqs)
    num_grown = 0
    for i in compress(range(len(seqs)), other_tables):
        request, arrival, limit, length, count, table, hashes, group, junction = seqs[i]
        expected = predicted[i]
        if request is not expected.request or arrival != expected.arrival:
            return None
        new_table = expected.blocks
        if len(new_table) == len(table) + 1:
            num_grown += 1
            length = active.lengths[i]
            count = active.computed[i]
        if table != new_table[: len(table)] or len(new_table) > len(table) + 1:
            return None
        records[i] = Seq(request, arrival, limit, length, count, new_table, hashes, group, junction)
    return tuple(records) if num_grown == num_allocated else None


def commit_predicted(
    state: SchedulerState,
    plan: Plan,
    sampled: Sequence[Any],
    hashes: Mapping[str, tuple[str, ...]],
    following: Plan,
) -> tuple[SchedulerState, tuple[Event, ...]] | None:
    """What `commit` gives, if a plan was predicted to follow this one and no sequence stops. The
    columns after the step are those of the predicted plan, and no row needs to be looked at.

    Args:
        state, plan, sampled, hashes: those of `commit`. Each sample is one token.
        following: a plan of `next_decodes`.
    """
    seqs = state.running.seqs
    if following.starts is not plan.lengths or state.step != plan.step or state.in_flight:
        return None  # it does not follow this plan
    if plan.seqs != seqs or len(sampled) != len(seqs) or not state.stops.isdisjoint(sampled):
        return None
    ids = tuple([seq.request.request_id for seq in seqs])
    pool, seqs = prefix_sharing.publish(
        state.pool, seqs, plan.counts, plan.lengths, hashes, state.config
    )
    active = Running(seqs, following.lengths, following.starts)
    state = state._replace(pool=pool, running=active, step=plan.step + 1)
    events = scheduler.events_of_plan(plan)
    return state, (*events, Sampled(plan.step, ids, tuple(sampled)))


def _only_decodes(state: SchedulerState) -> bool:
    """Whether the next steps are decodes alone while the running sequences decode and have blocks:
    nothing enters, forks or is copied, and no policy decides anything.
    """
    config = state.config
    if state.forked or state.news is not None or state.in_flight:
        return False
    if config.views or not config.mixed_steps or config.reservation != "none":
        return False
    return not state.waiting or len(state.running.seqs) >= config.max_running


def _steps_left(active: Running, plan: Plan) -> int:
    """How many plans of decodes may follow a plan before a sequence reaches its limit; 0 if the plan
    is no plan of decodes of all running sequences, which wait for no other one.
    """
    seqs, lengths, computed = active
    if plan.seqs != seqs or plan.drafts or plan.counts.count(1) < len(seqs):
        return 0
    if not seqs or list(map(sub, lengths, computed)).count(1) < len(seqs):
        return 0
    if list(map(scheduler.GROUP, seqs)).count(None) < len(seqs):
        return 0
    return min(map(sub, map(scheduler.LIMIT, seqs), lengths)) - 1


def _decode_plan(state: SchedulerState, plan: Plan) -> Plan:
    """The plan of a state in which all running sequences decode and have blocks. Its counts and its
    time are those of another such plan.
    """
    seqs, lengths, computed = state.running
    pool = state.pool
    return EMPTY_PLAN._replace(
        step=state.step,
        seqs=seqs,
        lengths=lengths,
        starts=computed,
        counts=plan.counts,
        num_waiting=len(state.waiting),
        blocks_used=pool.num_blocks - pool.num_free,
        num_blocks=pool.num_blocks,
        now=plan.now,
    )


def _num_empty(pool: BlockPool) -> int:
    """Blocks that can be taken without evicting content."""
    return pool.num_free - len(pool.idle)


def _blocks_for(state: SchedulerState, steps: int) -> int:
    """The number of blocks that the running sequences need for some steps."""
    size = state.config.block_size
    groups = state.config.groups
    rows = zip(state.running.seqs, state.running.computed, strict=True)
    return sum(
        [
            max(0, blocks.needed(computed + steps, size) * groups - len(seq.blocks))
            for seq, computed in rows
        ]
    )


def after_decodes(
    state: SchedulerState, steps: int, hashes: Mapping[str, tuple[str, ...]] = NO_HASHES
) -> tuple[SchedulerState, tuple[int, ...]]:
    """The state after some steps -> (state, number of blocks that each of the steps allocated).

    Args:
        steps: at most `steps_ahead(state)`.
        hashes: by sequence id, of the blocks that these steps fill and whose hashes the sequence
            does not have yet, in the order of the blocks. Without them, these blocks are not
            shared.

    Raises:
        ValueError: the free blocks do not suffice, so that there are more steps than
        `steps_ahead(state)`.
    """
    seqs, lengths, computed = state.running
    changes = _block_changes(state, steps, hashes)
    allocated = [0] * steps
    last_allocation: dict[int, int] = {}  # of a row, the step
    chains: dict[int, tuple[str, ...]] = {}  # all hashes of the rows that fill a block
    for step, fills, i in changes:
        if fills:
            chains[i] = seqs[i].hashes + hashes.get(seqs[i].request.request_id, ())
        else:
            allocated[step] += 1
            last_allocation[i] = step
    pool, tables = _apply_changes(state, steps, changes, chains)
    records = list(seqs)
    for i, table in tables.items():
        seq = seqs[i]
        # a record has the length of the step that gave it its last block, as `schedule` makes it
        if i in last_allocation:
            step = last_allocation[i]
            seq = seq._replace(length=lengths[i] + step, computed=computed[i] + step)
        records[i] = seq._replace(blocks=tuple(table), hashes=chains.get(i, seq.hashes))
    active = Running(
        tuple(records),
        tuple([tokens + steps for tokens in lengths]),
        tuple([tokens + steps for tokens in computed]),
    )
    return state._replace(pool=pool, running=active, step=state.step + steps), tuple(allocated)


def _block_changes(
    state: SchedulerState, steps: int, hashes: Mapping[str, tuple[str, ...]]
) -> list[tuple[int, bool, int]]:
    """(step, whether a block is filled, row) of the blocks that the steps allocate or fill, in the
    order of the steps. An allocation comes before the blocks that its step fills.
    """
    size = state.config.block_size
    changes: list[tuple[int, bool, int]] = []
    for i, (seq, computed) in enumerate(
        zip(state.running.seqs, state.running.computed, strict=True)
    ):
        first_allocation = len(seq.blocks) * size - computed
        changes += [(step, False, i) for step in range(first_allocation, steps, size)]
        if seq.hashes or seq.request.request_id in hashes:
            first_fill = -(computed + 1) % size
            changes += [(step, True, i) for step in range(first_fill, steps, size)]
    return sorted(changes)


def _apply_changes(
    state: SchedulerState,
    steps: int,
    changes: Sequence[tuple[int, bool, int]],
    chains: Mapping[int, tuple[str, ...]],
) -> tuple[BlockPool, dict[int, list[int]]]:
    """Allocates and publishes the blocks of `_block_changes` -> (pool, the block tables of the rows
    with a change).

    All allocations come before all publications if no step evicts a block, because then their order
    does not matter. Else the steps are taken one by one.

    Args:
        chains: by row, the hashes of its blocks.
    """
    num_kept = state.config.empty_blocks
    pool = state.pool
    if steps > 0:  # blocks may have become idle since the last plan
        pool = blocks.keep_empty(pool, num_kept)
    active = state.running
    tables = {i: list(active.seqs[i].blocks) for _, _, i in changes}
    need = sum([not fills for _, fills, _ in changes])
    if need > pool.num_free:
        raise ValueError(
            f"the steps need {need} blocks and {pool.num_free} are free; see `steps_ahead`"
        )
    evicts = need > pool.num_free - len(pool.idle) - num_kept
    for _, group in groupby(changes, key=lambda change: change[0] if evicts else 0):
        step_changes = list(group)
        rows = [i for _, fills, i in step_changes if not fills]
        allocation = blocks.allocate(pool, len(rows))
        assert allocation is not None, "checked for all steps together"
        pool = blocks.keep_empty(allocation[0], num_kept)
        for i, block in zip(rows, allocation[1], strict=True):
            tables[i].append(block)
        filled = [
            (tables[i][index], chains[i][index])
            for i, index in _filled_blocks(state, step_changes)
            if index < len(chains[i])
        ]
        pool = blocks.publish(pool, filled) if filled else pool
    return pool, tables


def _filled_blocks(
    state: SchedulerState, changes: Sequence[tuple[int, bool, int]]
) -> list[tuple[int, int]]:
    """(row, index of the block in its table) of each change that fills a block."""
    computed = state.running.computed
    size = state.config.block_size
    return [(i, (computed[i] + step) // size) for step, fills, i in changes if fills]
