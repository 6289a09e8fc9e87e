"""Preemption: sequences that stop, so that the blocks of a step suffice for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pagedjax.host import blocks, prefix_sharing
from pagedjax.host.blocks import BlockPool
from pagedjax.host.policies import Policy, called, decision
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import HOLE, SchedulerConfig, Seq, current_seqs

Pairs = tuple[tuple[int, int], ...]  # of block ids


class Preemptions(NamedTuple):
    """Who was preempted in a step: ids of sequences."""

    preempted: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()  # those of them whose content moves to the swap space
    swap_out: Pairs = ()  # (device block, host block)


NO_PREEMPTIONS = Preemptions()


def preempt(
    state: SchedulerState, policy: Policy, earlier: Preemptions
) -> tuple[SchedulerState, Preemptions]:
    """Stops the policy's victim, with its group -> (state, preemptions of the step).

    Args:
        earlier: the preemptions of the step so far.
    """
    candidates = current_seqs(*state.running)
    victims = _victims(candidates, _victim(policy, candidates))
    return _preempted(state, policy, candidates, victims, earlier)


def evict(
    state: SchedulerState, policy: Policy, request_ids: Iterable[str]
) -> tuple[SchedulerState, Preemptions]:
    """Stops running sequences, each with its whole group -> (state, preemptions)."""
    preemptions = NO_PREEMPTIONS
    for request_id in request_ids:
        candidates = current_seqs(*state.running)
        seq = next((seq for seq in candidates if seq.request_id == request_id), None)
        if seq is None:
            continue  # it went with its group
        victims = [seq]
        if seq.group is not None:
            group = [sibling for sibling in candidates if sibling.group == seq.group]
            victims = sorted(group, key=lambda sibling: sibling.arrival)
        state, preemptions = _preempted(state, policy, candidates, victims, preemptions)
    return state, preemptions


def _preempted(
    state: SchedulerState,
    policy: Policy,
    candidates: Sequence[Seq],
    victims: Sequence[Seq],
    earlier: Preemptions,
) -> tuple[SchedulerState, Preemptions]:
    """The state without the running victims -> (state, preemptions of the step)."""
    state, moves = _stop(state, policy, candidates, victims)
    names = tuple([victim.request_id for victim in victims])
    swapped = names if moves else ()
    return state, Preemptions(
        earlier.preempted + names, earlier.swapped + swapped, earlier.swap_out + moves
    )


def _victim(policy: Policy, candidates: Sequence[Seq]) -> Seq:
    """The running sequence that the policy chooses.

    Raises:
        ValueError: the policy chooses something else.
    """
    victim = called(policy, "preempt", candidates)
    if not any(victim is seq for seq in candidates):
        raise ValueError(
            f"preempt of the policy {policy.name!r} returned {victim!r:.200}; return one of the "
            "running sequences that it gets"
        )
    return victim


def _victims(candidates: Sequence[Seq], victim: Seq) -> list[Seq]:
    """The victim and its group, in order of arrival. If only its group runs, the victim alone, so
    that one branch advances.

    Beams are never split, because they advance together. `submit` ensures that the beams of one
    request fit when they run alone. But a policy that composes steps may leave a beam with blocks
    of tokens that it does not compute; then all beams begin again.
    """
    if victim.group is None:
        return [victim]
    group = [seq for seq in candidates if seq.group == victim.group]
    if len(group) == len(candidates) and not victim.is_beam:
        return [victim]
    return sorted(group, key=lambda seq: seq.arrival)


def _stop(
    state: SchedulerState, policy: Policy, candidates: Sequence[Seq], victims: Sequence[Seq]
) -> tuple[SchedulerState, Pairs]:
    """Stops the victims -> (state, (device block, host block) of the blocks to move; () if the
    victims are computed again).
    """
    # a beam that waits for its siblings computes its last token again, because the engine drops
    # what it offered to the search
    victims = [
        victim._replace(computed=min(victim.computed, victim.length - 1)) for victim in victims
    ]
    swap = None
    have_content = all(victim.computed for victim in victims)
    if state.host_pool is not None and have_content and decision(policy, "swap", victims):
        swap = _swap_out(state.host_pool, victims, state.config)
    pool = state.pool
    if swap is None:  # it begins again behind what is found of it
        texts = [(victim, victim.computed) for victim in victims]
        pool = prefix_sharing.publish_ends(pool, texts, state.config)
    for victim in victims:
        pool = blocks.release(pool, victim.blocks[::-1])
    arrivals = {victim.arrival for victim in victims}
    survivors = [i for i, seq in enumerate(candidates) if seq.arrival not in arrivals]
    state = state._replace(pool=pool, running=state.running.pick(survivors))
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
    # the allocation counts one owner of each block; add the other tables that list it
    uses = Counter(block for table in host_tables for block in table if block)
    host_pool = blocks.share(host_pool, (uses - Counter(host_blocks)).elements())
    swapped = [
        victim._replace(blocks=table) for victim, table in zip(victims, host_tables, strict=True)
    ]
    return host_pool, swapped, tuple(host_block_of.items())
