"""A block for the next token of each running sequence; if none is free, sequences are preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pagedjax.host import blocks, branches
from pagedjax.host.policies import Policy
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import HOLE, Running, Seq, current

Pairs = tuple[tuple[int, int], ...]  # of block ids


class Preemptions(NamedTuple):
    """Block ids in pairs of (from, to), and ids of sequences."""

    copies: Pairs
    preempted: tuple[str, ...]
    swapped: tuple[str, ...]  # those of them whose content moves to the swap space
    swap_out: Pairs


def make_room(state: SchedulerState, policy: Policy) -> tuple[SchedulerState, Preemptions]:
    """Give a block to each decode whose last block is full or must be copied; preempt until the
    blocks suffice.
    """
    size, preempted, swapped, moved = state.config.block_size, [], [], []
    groups = state.config.groups
    full, shared = _full(state.running, size, groups), _shared(state)
    while len(full) * groups + len(shared) > state.pool.num_free:
        candidates = current(*state.running)
        victims = _victims(candidates, policy.preempt(candidates))
        state, pairs = _preempt(state, policy, candidates, victims)
        moved += pairs
        preempted += [victim.request_id for victim in victims]
        swapped += [victim.request_id for victim in victims] if pairs else []
        full, shared = _full(state.running, size, groups), _shared(state)
    facts = tuple(preempted), tuple(swapped), tuple(moved)
    if not (full or shared):
        return state, Preemptions((), *facts)
    taken = blocks.allocate(state.pool, len(full) * groups + len(shared))
    assert taken is not None, "the loop above made room"
    (pool, ids), active = taken, state.running
    seqs, copies = list(active.seqs), []
    for k, i in enumerate(full):
        seqs[i] = _with_blocks(active, i, seqs[i].blocks + ids[k * groups : (k + 1) * groups])
    for (i, at), block in zip(shared, ids[len(full) * groups :], strict=True):
        table = seqs[i].blocks
        copies.append((table[at], block))
        seqs[i] = _with_blocks(active, i, (*table[:at], block, *table[at + 1 :]))
    pool = blocks.release(pool, [source for source, _ in copies]) if copies else pool
    return state._replace(pool=pool, running=active._replace(seqs=tuple(seqs))), Preemptions(
        tuple(copies), *facts
    )


def _shared(state: SchedulerState) -> list[tuple[int, int]]:
    """The blocks that have to be copied, and by which sequences (`branches.shared`)."""
    return (
        branches.shared(state.pool, state.running, state.forked, state.config)
        if state.forked
        else []
    )


def _full(active: Running, size: int, groups: int) -> list[int]:
    """Indices of the sequences whose next token is past their last block."""
    edge = [i for i, computed in enumerate(active.computed) if computed % size == 0]
    edge = [i for i in edge if active.computed[i] * groups == len(active.seqs[i].blocks) * size]
    return [i for i in edge if active.computed[i] < active.lengths[i]]  # a waiting beam writes none


def _with_blocks(active: Running, i: int, table: tuple[int, ...]) -> Seq:
    request, arrival, limit, _, _, _, hashes, group = active.seqs[i]
    return Seq(request, arrival, limit, active.lengths[i], active.computed[i], table, hashes, group)


def _victims(candidates: Sequence[Seq], victim: Seq) -> list[Seq]:
    """The victim and its group, in order of arrival; the victim alone if only its group runs, so
    that one advances.

    Beams are never split: `submit` ensures that the beams of one request fit when they run alone.
    """
    group = (
        [seq for seq in candidates if seq.group == victim.group]
        if victim.group is not None
        else [victim]
    )
    return sorted(group, key=lambda seq: seq.arrival) if len(group) < len(candidates) else [victim]


def _preempt(
    state: SchedulerState, policy: Policy, candidates: Sequence[Seq], victims: Sequence[Seq]
) -> tuple[SchedulerState, Pairs]:
    """Stop the victims -> (state, blocks to move to the host; none if the victims are computed
    again).
    """
    pool = state.pool
    for victim in victims:
        pool = blocks.release(pool, victim.blocks[::-1])
    gone = {victim.arrival for victim in victims}
    active = state.running.pick([i for i, seq in enumerate(candidates) if seq.arrival not in gone])
    state = state._replace(pool=pool, running=active)

    # a beam that waits for its siblings computes its last token again, because its offer is dropped
    victims = [
        victim._replace(computed=min(victim.computed, victim.length - 1)) for victim in victims
    ]
    size, groups = state.config.block_size, state.config.groups
    tables = [victim.blocks[: blocks.needed(victim.computed, size) * groups] for victim in victims]
    moved_blocks = tuple(dict.fromkeys(block for table in tables for block in table if block))
    swaps = state.host_pool is not None and all(tables) and policy.swap(victims)
    taken = (
        blocks.allocate(state.host_pool, len(moved_blocks))
        if state.host_pool is not None and swaps
        else None
    )
    if taken is None:
        back = [victim._replace(computed=0, blocks=()) for victim in victims]
        return state._replace(waiting=(*back, *state.waiting)), ()
    host_pool, ids = taken
    place = dict(zip(moved_blocks, ids, strict=True))
    moved = [tuple([place.get(block, HOLE) for block in table]) for table in tables]
    again = Counter(block for table in moved for block in table if block) - Counter(ids)
    out = [victim._replace(blocks=table) for victim, table in zip(victims, moved, strict=True)]
    host_pool = blocks.share(host_pool, again.elements())
    return state._replace(host_pool=host_pool, waiting=(*out, *state.waiting)), tuple(place.items())
