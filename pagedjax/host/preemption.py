"""A block for the next token of each running sequence; if none is free, sequences are preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pagedjax.host import blocks, branches
from pagedjax.host.blocks import BlockPool
from pagedjax.host.policies import Policy, called, decision
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import HOLE, Running, SchedulerConfig, Seq, current

Pairs = tuple[tuple[int, int], ...]  # of block ids


class Preemptions(NamedTuple):
    """What `make_room` did: block ids in pairs of (from, to), and ids of sequences."""

    copies: Pairs
    preempted: tuple[str, ...]
    swapped: tuple[str, ...]  # those of them whose content moves to the swap space
    swap_out: Pairs


def make_room(state: SchedulerState, policy: Policy) -> tuple[SchedulerState, Preemptions]:
    """Gives a block to each decode whose last block is full or must be copied. It preempts
    sequences until the blocks suffice.
    """
    groups = state.config.groups
    preempted: list[str] = []
    swapped: list[str] = []
    swap_out: list[tuple[int, int]] = []
    copies: Pairs = ()
    full, shared = rows_without_room(state)
    while len(full) * groups + len(shared) > state.pool.num_free:
        candidates = current(*state.running)
        victims = _victims(candidates, _victim(policy, candidates))
        state, moves = _preempt(state, policy, candidates, victims)
        names = [victim.request_id for victim in victims]
        preempted += names
        if moves:
            swapped += names
            swap_out += moves
        full, shared = rows_without_room(state)
    if full or shared:
        state, copies = _give_blocks(state, full, shared)
    return state, Preemptions(copies, tuple(preempted), tuple(swapped), tuple(swap_out))


def _victim(policy: Policy, candidates: Sequence[Seq]) -> Seq:
    """The running sequence that the policy chooses.

    Raises:
        ValueError: it chooses something else.
    """
    victim = called(policy, "preempt", candidates)
    if not any(victim is seq for seq in candidates):
        raise ValueError(
            f"preempt of the policy {policy.name!r} returned {victim!r:.200}; return one of the "
            "running sequences that it gets"
        )
    return victim


def rows_without_room(state: SchedulerState) -> tuple[list[int], list[tuple[int, int]]]:
    """The running sequences that need blocks for their next token.

    Returns:
        (indices of the sequences whose next token is past their last block, (index of a sequence,
        entry of its block table) of the blocks that have to be copied, see `branches.shared`)
    """
    active = state.running
    size = state.config.block_size
    groups = state.config.groups
    rows = [i for i, computed in enumerate(active.computed) if computed % size == 0]
    rows = [i for i in rows if active.computed[i] * groups == len(active.seqs[i].blocks) * size]
    # a waiting beam writes no token
    full = [i for i in rows if active.computed[i] < active.lengths[i]]
    if not state.forked:
        return full, []
    return full, branches.shared(state.pool, active, state.forked, state.config)


def _give_blocks(
    state: SchedulerState, full: Sequence[int], shared: Sequence[tuple[int, int]]
) -> tuple[SchedulerState, Pairs]:
    """Gives new blocks to the rows that `rows_without_room` returned -> (state, (from, to) of the
    blocks to copy).
    """
    groups = state.config.groups
    num_appended = len(full) * groups
    allocation = blocks.allocate(state.pool, num_appended + len(shared))
    assert allocation is not None, "make_room compared with the free blocks"
    pool, new_blocks = allocation
    active = state.running
    seqs = list(active.seqs)
    copies: list[tuple[int, int]] = []
    for k, i in enumerate(full):
        appended = new_blocks[k * groups : (k + 1) * groups]
        seqs[i] = _with_table(active, i, seqs[i].blocks + appended)
    for (i, entry), block in zip(shared, new_blocks[num_appended:], strict=True):
        table = seqs[i].blocks
        copies.append((table[entry], block))
        seqs[i] = _with_table(active, i, (*table[:entry], block, *table[entry + 1 :]))
    if copies:
        pool = blocks.release(pool, [source for source, _ in copies])
    state = state._replace(pool=pool, running=active._replace(seqs=tuple(seqs)))
    return state, tuple(copies)


def _with_table(active: Running, i: int, table: tuple[int, ...]) -> Seq:
    """The current record of a running sequence with another block table."""
    request, arrival, limit, _, _, _, hashes, group = active.seqs[i]
    return Seq(request, arrival, limit, active.lengths[i], active.computed[i], table, hashes, group)


def _victims(candidates: Sequence[Seq], victim: Seq) -> list[Seq]:
    """The victim and its group, in order of arrival. If only its group runs, the victim alone, so
    that one branch advances.

    Beams are never split: `submit` ensures that the beams of one request fit when they run alone.
    """
    if victim.group is None:
        return [victim]
    group = [seq for seq in candidates if seq.group == victim.group]
    if len(group) == len(candidates):
        return [victim]
    return sorted(group, key=lambda seq: seq.arrival)


def _preempt(
    state: SchedulerState, policy: Policy, candidates: Sequence[Seq], victims: Sequence[Seq]
) -> tuple[SchedulerState, Pairs]:
    """Stops the victims -> (state, (device block, host block) of the blocks to move; () if the
    victims are computed again).
    """
    pool = state.pool
    for victim in victims:
        pool = blocks.release(pool, victim.blocks[::-1])
    arrivals = {victim.arrival for victim in victims}
    survivors = [i for i, seq in enumerate(candidates) if seq.arrival not in arrivals]
    state = state._replace(pool=pool, running=state.running.pick(survivors))

    # a beam that waits for its siblings computes its last token again, because its offer is dropped
    victims = [
        victim._replace(computed=min(victim.computed, victim.length - 1)) for victim in victims
    ]
    computed = all(victim.computed for victim in victims)
    if state.host_pool is not None and computed and decision(policy, "swap", victims):
        swap = _swap_out(state.host_pool, victims, state.config)
        if swap is not None:
            host_pool, swapped, moves = swap
            return state._replace(host_pool=host_pool, waiting=(*swapped, *state.waiting)), moves
    emptied = [victim._replace(computed=0, blocks=()) for victim in victims]
    return state._replace(waiting=(*emptied, *state.waiting)), ()


def _swap_out(
    host_pool: BlockPool, victims: Sequence[Seq], config: SchedulerConfig
) -> tuple[BlockPool, list[Seq], Pairs] | None:
    """Gives the victims host blocks for their computed tokens -> (host pool, victims with their
    host blocks, (device block, host block) of the blocks to move). None if the host blocks do not
    suffice.

    A block that several victims share is moved once.
    """
    tables = [
        victim.blocks[: blocks.needed(victim.computed, config.block_size) * config.groups]
        for victim in victims
    ]
    device_blocks = tuple(dict.fromkeys(block for table in tables for block in table if block))
    allocation = blocks.allocate(host_pool, len(device_blocks))
    if allocation is None:
        return None
    host_pool, host_blocks = allocation
    host_block_of = dict(zip(device_blocks, host_blocks, strict=True))
    host_tables = [tuple([host_block_of.get(block, HOLE) for block in table]) for table in tables]
    uses = Counter(block for table in host_tables for block in table if block)
    host_pool = blocks.share(host_pool, (uses - Counter(host_blocks)).elements())
    swapped = [
        victim._replace(blocks=table) for victim, table in zip(victims, host_tables, strict=True)
    ]
    return host_pool, swapped, tuple(host_block_of.items())
