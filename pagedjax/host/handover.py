"""Handing a sequence over: one scheduler releases it, and another one adopts it with what it has
computed.

A released sequence leaves as it would end: its published blocks stay in the prefix cache. The block
ids that it takes along are names in the cache that it leaves. The adopting scheduler says which of
them it wants copied, and where to: blocks whose content it has already are shared. If it has no
room, nothing is copied, and the sequence waits like one that was preempted, to be computed again.
"""

from __future__ import annotations

from pagedjax.host import blocks, prefix_sharing, request_limits, views
from pagedjax.host.policies import Policy
from pagedjax.host.request_limits import Rejected, final_length
from pagedjax.host.state import SchedulerState, running
from pagedjax.host.types import HOLE, Adopted, Released, Running, Seq


def release(state: SchedulerState, request_id: str) -> tuple[SchedulerState, Released]:
    """Let a sequence go, wherever it is. Its blocks are free, and their content stays until a step
    writes them.

    Content in host blocks is not taken along.

    Raises:
        ValueError: no such sequence, or one that cannot leave alone: a beam, or branches whose
        prompt is not computed.
    """
    active = running(state)
    seq = next((seq for seq in (*active, *state.waiting) if seq.request_id == request_id), None)
    if seq is None:
        raise ValueError(
            f"sequence {request_id!r} is not unfinished here; release one that waits or runs"
        )
    if seq.request.beams or not seq.request.max_tokens:
        kind = "a beam of a search" if seq.request.beams else "a prompt that samples nothing"
        raise ValueError(
            f"sequence {request_id!r} is {kind}, which ends where it began; release sampled sequences"
        )
    if seq.request.forks:
        what = f"has {seq.num_rows} branches, whose prompt is not computed"
        raise ValueError(
            f"sequence {request_id!r} {what}; release them one by one after their fork"
        )
    ids = state.ids.delete(request_id)
    if seq not in active:
        host_pool = state.host_pool and blocks.release(state.host_pool, seq.blocks[::-1])
        waiting = tuple([other for other in state.waiting if other is not seq])
        state = state._replace(waiting=waiting, host_pool=host_pool, ids=ids)
        return state, Released(seq.request, seq.length, 0, (), seq.hashes)
    left = state.running.pick([i for i, other in enumerate(active) if other is not seq])
    state = state._replace(running=left, pool=blocks.release(state.pool, seq.blocks[::-1]), ids=ids)
    return state, _taken_along(seq, state.config.block_size, state.config.groups)


def _taken_along(seq: Seq, size: int, groups: int) -> Released:
    """What a running sequence takes along: the blocks of its computed tokens alone."""
    table = seq.blocks[: blocks.needed(seq.computed, size) * groups]
    return Released(seq.request, seq.length, seq.computed, table, seq.hashes)


def adopt(
    state: SchedulerState, policy: Policy, released: Released
) -> tuple[SchedulerState, Adopted]:
    """Take a sequence over. It runs at once if there is room (`has_room`); else it joins the queue,
    with nothing computed.

    Full blocks are published under their hashes, so their copies must be there before the next
    step.

    Raises:
        Rejected: the request can never run here (`request_limits.check`), or it is as long as it
        may be.
        ValueError: the record contradicts itself.
    """
    c, request = state.config, released.request
    request_limits.check(state, request)
    limit = final_length(request, c)
    _check(state, released, limit)
    seq = Seq(request, state.arrivals, limit, released.length, hashes=released.hashes)
    ids = state.ids.set(request.request_id, None)
    stops = state.stops | request.stop_token_ids if state.ids else request.stop_token_ids
    state = state._replace(arrivals=state.arrivals + 1, ids=ids, stops=stops)
    shared = _shared(state, released)
    if not released.computed or not has_room(state, policy, released):
        return state._replace(waiting=(*state.waiting, seq)), Adopted(0, (), ())
    pool = blocks.share(state.pool, [block for block in shared if block])
    # with views, a step adds the blocks that it needs
    tokens = released.computed if c.views else released.length
    new = sum(
        block != HOLE and mine == HOLE for block, mine in zip(released.blocks, shared, strict=True)
    )
    more = blocks.needed(tokens, c.block_size) * c.groups - len(released.blocks)
    taken = blocks.allocate(pool, new + more)
    assert taken is not None, "has_room counted the free blocks"
    pool, fresh = taken[0], iter(taken[1])
    table = [
        mine or (next(fresh) if block else HOLE)
        for block, mine in zip(released.blocks, shared, strict=True)
    ]
    copied = [i for i, block in enumerate(released.blocks) if block and not shared[i]]
    full = _keys(state, released)
    pool = blocks.publish(pool, [(table[i], full[i]) for i in copied if i < len(full)])
    seq = seq._replace(computed=released.computed, blocks=(*table, *fresh))
    active = state.running.joined(Running((seq,), (seq.length,), (seq.computed,)))
    copies = tuple([(released.blocks[i], table[i]) for i in copied])
    return state._replace(pool=pool, running=active), Adopted(seq.computed, seq.blocks, copies)


def has_room(state: SchedulerState, policy: Policy, released: Released) -> bool:
    """Whether a sequence would run at once: nothing waits, and a row and blocks for all its known
    tokens are free.
    """
    c, active = state.config, state.running
    if (
        state.waiting
        or c.reservation != "none"
        or sum(seq.num_rows for seq in active.seqs) >= c.max_running
    ):
        return False
    seq = Seq(released.request, state.arrivals, final_length(released.request, c), released.length)
    shared = [block for block in _shared(state, released) if block]
    free = state.pool.num_free - sum(block in state.pool.stamps for block in shared)
    whole = views.wanted(c, seq) if c.views else blocks.needed(released.length, c.block_size)
    need = max(whole, views.held(released.blocks)) - len(shared)
    free -= views.promised(c, active) if c.views else 0
    return need <= free and policy.admit(seq, need, free)


def _keys(state: SchedulerState, released: Released) -> list[str]:
    """The hashes of the entries of a table, as far as they are known."""
    full = released.hashes[: released.computed // state.config.block_size]
    return [
        prefix_sharing.named(key, group) for key in full for group in range(state.config.groups)
    ]


def _shared(state: SchedulerState, released: Released) -> list[int]:
    """For each entry of the released table, the block here that has its content; HOLE if there is
    none.
    """
    contents = state.pool.contents
    known = [contents.get(key, HOLE) for key in _keys(state, released)]
    known += [HOLE] * (len(released.blocks) - len(known))
    return [mine if block else HOLE for block, mine in zip(released.blocks, known, strict=True)]


def _check(state: SchedulerState, released: Released, limit: int) -> None:
    name, c, request = released.request.request_id, state.config, released.request
    if released.length >= limit:
        what = f"sequence {name!r} has {released.length} tokens, and may have {limit} here"
        raise Rejected(f"{what}; raise max_model_len ({c.max_model_len}), or end it")
    if request.forks or request.beams or not request.max_tokens:
        raise ValueError(
            f"sequence {name!r} has branches or beams, or samples nothing; adopt what `release` returned"
        )
    entries = blocks.needed(released.computed, c.block_size) * c.groups
    sane = 0 <= released.computed < released.length and request.prompt_len <= released.length
    if (
        not sane
        or len(released.blocks) != entries
        or len(released.hashes) > released.length // c.block_size
    ):
        numbers = f"{released.length} tokens, {released.computed} of them computed, {len(released.blocks)} blocks"
        what = f"sequence {name!r} has {numbers} and {len(released.hashes)} hashes, with blocks of {c.block_size}"
        raise ValueError(
            f"{what}; adopt what `release` of a scheduler with the same blocks returned"
        )
