"""Handing a sequence over: one scheduler releases it, and another one adopts it with what it has
computed.

A released sequence leaves as it would end: its published blocks stay in the prefix cache. The block
ids that it takes along are names in the cache that it leaves. The adopting scheduler says which of
these blocks it wants copied, and where to. It shares a block whose content it has already. If it
has no room, nothing is copied, and the sequence waits to be computed again, as after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedjax.host import blocks, checkpoints, late, prefix_sharing, views
from pagedjax.host.admission import Rejected, check_request, final_length, with_ids
from pagedjax.host.blocks import BlockPool
from pagedjax.host.policies import Policy, decision, shipped, with_memory
from pagedjax.host.policy_memory import memory_of
from pagedjax.host.preemption import Pairs
from pagedjax.host.state import SchedulerState, running, with_news
from pagedjax.host.types import (
    HOLE,
    Admitted,
    Adopted,
    Finished,
    Released,
    Running,
    Seq,
    Submitted,
)


def release(state: SchedulerState, request_id: str) -> tuple[SchedulerState, Released]:
    """Lets a sequence go that waits or runs. Its blocks are free, and their content stays until a
    step writes them.

    Content in host blocks is not taken along.

    Raises:
        ValueError: no such sequence, or one that cannot leave alone: a beam, or branches whose
        prompt is not computed.
    """
    late.check_known(state)
    active = running(state)
    seq = next((seq for seq in (*active, *state.waiting) if seq.request_id == request_id), None)
    if seq is None:
        raise ValueError(
            f"sequence {request_id!r} is not unfinished here; release one that waits or runs"
        )
    if seq.request.beams or not seq.request.max_tokens:
        kind = "a beam of a search" if seq.request.beams else "a prompt that samples nothing"
        raise ValueError(
            f"sequence {request_id!r} is {kind}, which ends where it began; "
            "release sampled sequences"
        )
    if seq.request.forks:
        raise ValueError(
            f"sequence {request_id!r} has {seq.num_rows} branches, whose prompt is not computed; "
            "release them one by one after their fork"
        )
    ids = state.ids.delete(request_id)
    state = with_news(state, (Finished(state.step, request_id, "abort", seq.num_output),))
    if seq not in active:
        host_pool = state.host_pool and blocks.release(state.host_pool, seq.blocks[::-1])
        waiting = tuple([queued for queued in state.waiting if queued is not seq])
        state = state._replace(waiting=waiting, host_pool=host_pool, ids=ids)
        return state, Released(seq.request, seq.length, computed=0, blocks=(), hashes=seq.hashes)
    pool = prefix_sharing.publish_ends(state.pool, [(seq, seq.computed)], state.config)
    pool = blocks.release(pool, seq.blocks[::-1])
    other_rows = [i for i, record in enumerate(active) if record is not seq]
    state = state._replace(running=state.running.pick(other_rows), pool=pool, ids=ids)
    # the blocks of its computed tokens alone
    entries = blocks.needed(seq.computed, state.config.block_size) * state.config.groups
    table = seq.blocks[:entries]
    return state, Released(seq.request, seq.length, seq.computed, table, seq.hashes)


def adopt(
    state: SchedulerState, policy: Policy | str, released: Released
) -> tuple[SchedulerState, Adopted]:
    """Takes a sequence over. It runs at once if there is room (`has_room`); else it joins the
    queue, with nothing computed.

    Full blocks are published under their keys, so their copies must be there before the next step.

    Raises:
        Rejected: the request can never run here (`check_request`), or it is as long as it
        may be.
        ValueError: the record contradicts itself.
    """
    late.check_known(state)
    request = released.request
    check_request(state, request)
    limit = final_length(request, state.config)
    _check(state, released, limit)
    seq = Seq(request, state.arrivals, limit, released.length, hashes=released.hashes)
    state = with_news(with_ids(state, request), (Submitted(state.step, seq),))
    if not released.computed or not has_room(state, policy, released):
        state = state._replace(waiting=(*state.waiting, seq))
        return state, Adopted(computed=0, blocks=(), copies=())
    pool, table, copies = _place_blocks(state, seq, released)
    seq = seq._replace(computed=released.computed, blocks=table)
    active = state.running.concat(Running.of((seq,)))
    admitted = Admitted(state.step, seq.request_id, seq.length, seq.computed)
    state = with_news(state, (admitted,))
    state = state._replace(pool=pool, running=active)
    return state, Adopted(seq.computed, table, copies)


def _place_blocks(
    state: SchedulerState, seq: Seq, released: Released
) -> tuple[BlockPool, tuple[int, ...], Pairs]:
    """Gives an adopted sequence its blocks, after `has_room` has counted the free ones.

    Returns:
        (pool, block table, copies); a copy is (block in the cache that it left, block here).
    """
    config = state.config
    table = _shared_blocks(state, released)
    pool = blocks.share(state.pool, table)
    to_copy = [i for i, block in enumerate(released.blocks) if block and not table[i]]
    # with views, a step adds the blocks that it needs
    tokens = released.computed if config.views else released.length
    num_entries = blocks.needed(tokens, config.block_size) * config.groups
    num_added = num_entries - len(released.blocks)
    allocation = blocks.allocate(pool, len(to_copy) + num_added)
    assert allocation is not None, "has_room counted the free blocks"
    pool, new_blocks = allocation
    for i, block in zip(to_copy, new_blocks, strict=False):
        table[i] = block
    keys = _keys(state, released)
    are_kept = checkpoints.kept_entries(config, seq, 0, len(keys) // config.groups)
    filled = [(table[i], keys[i]) for i in to_copy if i < len(keys) and are_kept[i]]
    pool = blocks.publish(pool, filled)
    copies = tuple([(released.blocks[i], table[i]) for i in to_copy])
    return pool, (*table, *new_blocks[len(to_copy) :]), copies


def has_room(state: SchedulerState, policy: Policy | str, released: Released) -> bool:
    """Whether a sequence would run at once: nothing waits, and a row and blocks for all its known
    tokens are free.
    """
    config = state.config
    active = state.running
    if state.waiting or config.reservation != "none":
        return False
    if sum(seq.num_rows for seq in active.seqs) >= config.max_running:
        return False
    limit = final_length(released.request, config)
    seq = Seq(released.request, state.arrivals, limit, released.length)
    shared = [block for block in _shared_blocks(state, released) if block]
    num_free = state.pool.num_free - sum(block in state.pool.stamps for block in shared)
    if config.views:
        need = views.entry_need(config, seq)
        num_free -= views.promised_blocks(config, active)
    else:
        need = blocks.needed(released.length, config.block_size)
    need = max(need, views.held(released.blocks)) - len(shared)
    if need > num_free:
        return False
    policy = shipped(policy)
    if policy.init is not None:
        policy = with_memory(policy, memory_of(state, policy))
    return decision(policy, "admit", seq, need, num_free)


def _keys(state: SchedulerState, released: Released) -> Sequence[str]:
    """The keys of the entries of the released table, as far as they are known."""
    config = state.config
    full = released.hashes[: released.computed // config.block_size]
    return prefix_sharing.block_keys(full, config.groups)


def _shared_blocks(state: SchedulerState, released: Released) -> list[int]:
    """For each entry of the released table, the block here that has its content; HOLE if there is
    none.
    """
    contents = state.pool.contents
    cached = [contents.get(key, HOLE) for key in _keys(state, released)]
    cached += [HOLE] * (len(released.blocks) - len(cached))
    return [
        block if released_block else HOLE
        for released_block, block in zip(released.blocks, cached, strict=True)
    ]


def _check(state: SchedulerState, released: Released, limit: int) -> None:
    """Raises Rejected for a sequence as long as it may be, and ValueError for a record that
    contradicts itself.
    """
    config = state.config
    request = released.request
    name = request.request_id
    length = released.length
    computed = released.computed
    if length >= limit:
        raise Rejected(
            f"sequence {name!r} has {length} tokens, and may have {limit} here; "
            f"raise max_model_len ({config.max_model_len}), or end it"
        )
    if not (request.advances_alone and request.max_tokens):
        raise ValueError(
            f"sequence {name!r} has branches or beams, or samples nothing; "
            "adopt what `release` returned"
        )
    num_blocks = len(released.blocks)
    num_hashes = len(released.hashes)
    if (
        not 0 <= computed < length
        or length < request.prompt_len
        or num_blocks != blocks.needed(computed, config.block_size) * config.groups
        or num_hashes > length // config.block_size
    ):
        raise ValueError(
            f"sequence {name!r} has {length} tokens, {computed} of them computed, "
            f"{num_blocks} blocks and {num_hashes} hashes, with blocks of {config.block_size}; "
            "adopt what `release` of a scheduler with the same blocks returned"
        )
