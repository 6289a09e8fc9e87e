"""The scheduler: pure transitions of an immutable state. No device, no clock, no text, no token is stored here.

    submit -> waiting -> (schedule admits) -> running -> (commit: stop, length) -> finished
                 ^                              |
                 +---- schedule preempts -------+            cancel: from anywhere, at any time

There is no prefill phase and no decode phase: `computed` chases `length`, and a step gives a sequence one or more
tokens. The rules:

1. Every decode (one token to compute) takes one token of the budget, before any prompt chunk. To make that
   possible no more sequences run than the budget has tokens.
2. Prompt chunks take what is left, in order of admission, then new admissions.
3. A sequence is admitted only if blocks for all its known tokens are free, and not in a step that preempted.
4. If decodes need more blocks than are free, the policy's victim goes back to the front of the queue with nothing
   computed (recomputation), until they fit. `submit` refuses what could not fit alone, so one always does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from immutables import Map

from pagedjax import blocks
from pagedjax.blocks import BlockPool
from pagedjax.policies import Policy
from pagedjax.types import (
    Admitted,
    Event,
    Finished,
    FinishReason,
    Plan,
    Preempted,
    Request,
    Running,
    Sampled,
    Seq,
    current,
    pick,
)


class SchedulerConfig(NamedTuple):
    """Integers of at least 1. `num_blocks` counts blocks that can be owned, without the trash block."""

    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


class SchedulerState(NamedTuple):
    config: SchedulerConfig
    pool: BlockPool
    waiting: tuple[Seq, ...]
    running: Running  # after `schedule`: the plan's sequences, then those that got no token
    step: int
    arrivals: int
    ids: Map[str, None]  # of the waiting and the running: looking through them made a long queue quadratic


class Rejected(ValueError):
    """A request that can never run. The message names the value, the limit and the remedy."""


def init(config: SchedulerConfig) -> SchedulerState:
    for name, value in config._asdict().items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    return SchedulerState(config, blocks.init(config.num_blocks), (), Running(), 0, 0, Map())


def submit(state: SchedulerState, request: Request) -> SchedulerState:
    """Append a request to the queue.

    Raises:
        Rejected: an empty prompt, no output wanted, an id in use, or a request that the limits rule out for ever.
    """
    c, r = state.config, request
    if r.prompt_len < 1:
        raise Rejected(f"request {r.request_id!r} has an empty prompt; give it at least one token")
    if r.max_tokens < 1:
        raise Rejected(f"request {r.request_id!r} has max_tokens {r.max_tokens}; it must be at least 1")
    if r.prompt_len >= c.max_model_len:
        raise Rejected(
            f"request {r.request_id!r} has a prompt of {r.prompt_len} tokens, but max_model_len is {c.max_model_len} "
            f"and one token must be left for output; shorten the prompt to {c.max_model_len - 1} tokens or raise "
            "max_model_len"
        )
    limit = final_length(r, c)
    need, room = _blocks_for(limit, c.block_size), c.num_blocks
    if need > room:
        raise Rejected(
            f"request {r.request_id!r} can grow to {limit} tokens, which is {need} blocks of {c.block_size}, but the "
            f"pool has {room}; raise num_blocks to {need}, or lower max_tokens or the prompt's length"
        )
    if r.request_id in state.ids:
        raise Rejected(f"request id {r.request_id!r} is in use; ids must be unique among unfinished requests")
    seq = Seq(request, state.arrivals, limit, r.prompt_len)
    ids = state.ids.set(r.request_id, None)
    return state._replace(waiting=(*state.waiting, seq), arrivals=state.arrivals + 1, ids=ids)


def final_length(request: Request, config: SchedulerConfig) -> int:
    """Tokens of the request at its longest: prompt + max_tokens, cut off at max_model_len."""
    return min(request.prompt_len + request.max_tokens, config.max_model_len)


def schedule(state: SchedulerState, policy: Policy) -> tuple[SchedulerState, Plan]:
    """Decide what the next step computes. The plan has no rows when nothing runs and nothing can."""
    c = state.config
    pool, active, waiting, preempted = _grow(state, policy)
    active, decodes = _decodes_first(active)

    counts = [1] * decodes
    budget = c.max_num_batched_tokens - decodes
    for length, computed in zip(active.lengths[decodes:], active.computed[decodes:], strict=True):
        if budget == 0:
            break
        counts.append(min(length - computed, budget))
        budget -= counts[-1]

    admitted: tuple[Seq, ...] = ()
    if waiting and budget and not preempted:
        room = min(c.max_num_seqs, c.max_num_batched_tokens) - len(active.seqs)
        pool, admitted = _admit(pool, policy, waiting, active, budget, room, c.block_size)
        for seq in admitted:
            counts.append(min(seq.length, budget))
            budget -= counts[-1]
        lengths = tuple(seq.length for seq in admitted)
        active = Running(active.seqs + admitted, active.lengths + lengths, active.computed + (0,) * len(admitted))
        entered = {seq.arrival for seq in admitted}
        waiting = tuple(seq for seq in waiting if seq.arrival not in entered) if entered else waiting

    rows = len(counts)
    plan = Plan(
        step=state.step,
        seqs=active.seqs[:rows],
        lengths=active.lengths[:rows],
        starts=active.computed[:rows],
        counts=tuple(counts),
        admitted=tuple(seq.request_id for seq in admitted),
        preempted=preempted,
        num_waiting=len(waiting),
        blocks_used=pool.num_blocks - pool.num_free,
        num_blocks=pool.num_blocks,
    )
    return SchedulerState(c, pool, waiting, active, state.step, state.arrivals, state.ids), plan


def commit(state: SchedulerState, plan: Plan, sampled: Sequence[int]) -> tuple[SchedulerState, tuple[Event, ...]]:
    """Take in what the step computed.

    Args:
        sampled: one token id for each row of the plan; those of rows that do not reach the end of their known
            tokens are ignored.

    A sequence that was cancelled after `schedule` is passed over: its blocks are already free.
    """
    if len(sampled) != len(plan.seqs):
        raise ValueError(f"{len(sampled)} sampled tokens for {len(plan.seqs)} rows; there must be one for each")
    seqs, lengths, starts, counts, tokens = plan.seqs, plan.lengths, plan.starts, plan.counts, tuple(sampled)
    step = plan.step
    if state.running.seqs[: len(seqs)] != seqs:
        alive = {seq.arrival for seq in state.running.seqs}
        keep = [i for i, seq in enumerate(seqs) if seq.arrival in alive]
        seqs, lengths, starts = pick(seqs, keep), pick(lengths, keep), pick(starts, keep)
        counts, tokens = pick(counts, keep), pick(tokens, keep)

    computed = tuple([start + count for start, count in zip(starts, counts, strict=True)])
    samples = [done == length for done, length in zip(computed, lengths, strict=True)]
    lengths = tuple([length + new for length, new in zip(lengths, samples, strict=True)])
    maybe = [
        i
        for i, (seq, length, token) in enumerate(zip(seqs, lengths, tokens, strict=True))
        if length >= seq.limit or token in seq.request.stop_token_ids
    ]
    ended: dict[int, FinishReason] = {
        i: reason for i in maybe if samples[i] and (reason := _finish_reason(seqs[i], lengths[i], tokens[i]))
    }

    rows, pool, old = len(seqs), state.pool, state.running
    active = Running(seqs + old.seqs[rows:], lengths + old.lengths[rows:], computed + old.computed[rows:])
    if ended:
        pool = blocks.release(pool, [block for i in ended for block in seqs[i].blocks])
        active = active.pick([i for i in range(len(active.seqs)) if i not in ended])

    ids = tuple([seq.request.request_id for seq in seqs])
    if not all(samples):
        new = [i for i, one in enumerate(samples) if one]
        ids, tokens = pick(ids, new), pick(tokens, new)
    events: list[Event] = [Preempted(step, i) for i in plan.preempted]
    events += [Admitted(step, i) for i in plan.admitted]
    if ids:
        events.append(Sampled(step, ids, tokens))
    for i, reason in ended.items():
        events.append(Finished(step, seqs[i].request_id, reason, lengths[i] - seqs[i].request.prompt_len))
    left = _without(state.ids, [seqs[i].request_id for i in ended]) if ended else state.ids
    return SchedulerState(state.config, pool, state.waiting, active, step + 1, state.arrivals, left), tuple(events)


def cancel(
    state: SchedulerState, request_id: str, reason: FinishReason = "abort"
) -> tuple[SchedulerState, tuple[Event, ...]]:
    """End a request wherever it is and free its blocks. An unknown or finished id changes nothing.

    `reason="stop"` is how the shell ends a request whose text reached a stop string.
    """
    if request_id not in state.ids:
        return state, ()
    state = state._replace(ids=_without(state.ids, [request_id]))
    for seq in state.waiting:
        if seq.request_id == request_id:
            left = tuple(other for other in state.waiting if other is not seq)
            return state._replace(waiting=left), (Finished(state.step, request_id, reason, seq.num_output),)
    for i, seq in enumerate(running(state)):
        if seq.request_id == request_id:
            left = state.running.pick([j for j in range(len(state.running.seqs)) if j != i])
            state = state._replace(pool=blocks.release(state.pool, seq.blocks), running=left)
            return state, (Finished(state.step, request_id, reason, seq.num_output),)
    raise AssertionError(f"{request_id!r} is among the ids, but neither waits nor runs")


def running(state: SchedulerState) -> tuple[Seq, ...]:
    """The running sequences as current records."""
    return current(*state.running)


def check(state: SchedulerState) -> None:
    """The invariants that hold between any two transitions. Raises AssertionError."""
    c, active = state.config, running(state)
    blocks.check(state.pool, [seq.blocks for seq in active])
    assert all(not seq.blocks and seq.computed == 0 for seq in state.waiting), "a waiting sequence holds cache"
    assert len(active) <= min(c.max_num_seqs, c.max_num_batched_tokens), "too many sequences run"
    for seq in active:
        assert 0 <= seq.computed < seq.length <= seq.limit <= c.max_model_len, "computed must chase length"
        assert seq.computed <= len(seq.blocks) * c.block_size, "computed tokens lie outside the blocks"
    arrivals = [seq.arrival for seq in (*state.waiting, *active)]
    assert len(arrivals) == len(set(arrivals)), "a sequence is in two places"
    assert set(state.ids) == {seq.request_id for seq in (*state.waiting, *active)}, "an id is lost or left over"


def _without(ids: Map[str, None], gone: Sequence[str]) -> Map[str, None]:
    left = ids.mutate()
    for request_id in gone:
        del left[request_id]
    return left.finish()


def _blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _finish_reason(seq: Seq, length: int, token: int) -> FinishReason | None:
    """Why a sequence ends that has grown to `length` tokens by `token`, if it does."""
    request = seq.request
    if token in request.stop_token_ids and length - request.prompt_len >= request.min_tokens:
        return "stop"
    return "length" if length >= seq.limit else None


def _grow(state: SchedulerState, policy: Policy) -> tuple[BlockPool, Running, tuple[Seq, ...], tuple[str, ...]]:
    """A block for each decode whose last one is full; victims make room -> (pool, running, waiting, preempted ids)."""
    size, pool, active, waiting = state.config.block_size, state.pool, state.running, state.waiting
    preempted: list[str] = []
    full = _full(active, size)
    while len(full) > pool.num_free:
        candidates = current(*active)
        victim = policy.preempt(candidates)
        pool = blocks.release(pool, victim.blocks)
        active = active.pick([i for i, seq in enumerate(candidates) if seq.arrival != victim.arrival])
        waiting = (victim._replace(computed=0, blocks=()), *waiting)
        preempted.append(victim.request_id)
        full = _full(active, size)
    if full:
        taken = blocks.allocate(pool, len(full))
        assert taken is not None, "the loop above made room"
        pool, ids = taken
        seqs = list(active.seqs)
        for i, block in zip(full, ids, strict=True):
            request, arrival, limit, _, _, table = seqs[i]
            seqs[i] = Seq(request, arrival, limit, active.lengths[i], active.computed[i], (*table, block))
        active = active._replace(seqs=tuple(seqs))
    return pool, active, waiting, tuple(preempted)


def _full(active: Running, size: int) -> list[int]:
    """Indices of the sequences whose next token lies past their last block."""
    edge = [i for i, computed in enumerate(active.computed) if computed % size == 0]
    return [i for i in edge if active.computed[i] == len(active.seqs[i].blocks) * size]


def _decodes_first(active: Running) -> tuple[Running, int]:
    """Reorder, stably, so that sequences with one token to compute come first -> (running, how many they are)."""
    single = [length - computed == 1 for length, computed in zip(active.lengths, active.computed, strict=True)]
    decodes = sum(single)
    if not all(single[:decodes]):
        active = active.pick(sorted(range(len(single)), key=lambda i: not single[i]))
    return active, decodes


def _admit(
    pool: BlockPool, policy: Policy, waiting: tuple[Seq, ...], active: Running, budget: int, room: int, size: int
) -> tuple[BlockPool, tuple[Seq, ...]]:
    """Admit from the head of the policy's order while tokens, places and blocks last -> (pool, admitted)."""
    admitted: list[Seq] = []
    for seq in policy.order(waiting, active):
        need = _blocks_for(seq.length, size)
        if budget <= 0 or len(admitted) >= room or need > pool.num_free or not policy.admit(seq, need, pool.num_free):
            break
        taken = blocks.allocate(pool, need)
        assert taken is not None, "need was compared with num_free"
        pool, ids = taken
        admitted.append(seq._replace(blocks=ids))
        budget -= min(seq.length, budget)
    return pool, tuple(admitted)
