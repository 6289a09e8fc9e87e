"""The scheduler: pure transitions of an immutable state. No device, no clock, no text, no token is stored here.

    submit -> waiting -> (schedule admits) -> running -> (commit: stop, length) -> finished
                 ^                              |
                 +---- schedule preempts -------+            cancel: from anywhere, at any time

There is no prefill phase and no decode phase: `computed` chases `length`, and a step gives a sequence one or more
tokens. The rules:

1. Every decode (one token to compute) takes one token of the budget, before any prompt chunk. To make that
   possible no more sequences run than the budget has tokens.
2. Prompt chunks take what is left, in order of admission, then new admissions.
3. A sequence is admitted only if blocks for all its known tokens are free, and not in a step that preempted. Full
   blocks whose content is in the cache, or is being computed by earlier rows of this very step, are shared.
4. Branches of a request (parallel sampling) fork when its prompt is computed: they share all its blocks and compute
   its last token again. A block that others have too, or that may be found by others, is copied before it is written.
5. If decodes need more blocks than are free, the policy's victim stops, and the branches of its group with it, until
   they fit. A group that runs alone loses one branch at a time. `submit` refuses what could not fit alone, so one
   always does.
6. A victim goes back to the front of the queue: with its content in host blocks if they have room for it (swapping),
   else with nothing computed (recomputation). It is admitted again like everybody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
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
    Forked,
    Plan,
    Preempted,
    Request,
    Resumed,
    Running,
    Sampled,
    Seq,
    current,
    pick,
)

Pairs = tuple[tuple[int, int], ...]  # of block ids
NOTHING: Mapping[str, tuple[str, ...]] = MappingProxyType({})


class SchedulerConfig(NamedTuple):
    """Integers of at least 1; `host_blocks` may be 0. `num_blocks` counts blocks that can be owned, without the trash
    block."""

    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    host_blocks: int = 0  # of the swap space; 0: preemption is by recomputation


class SchedulerState(NamedTuple):
    config: SchedulerConfig
    pool: BlockPool
    waiting: tuple[Seq, ...]
    running: Running  # after `schedule`: the plan's sequences, then those that got no token
    step: int
    arrivals: int
    host: BlockPool | None  # the swap space: who is waiting and has blocks has them there
    ids: Map[str, None]  # of the waiting and the running: looking through them made a long queue quadratic


class Rejected(ValueError):
    """A request that can never run. The message names the value, the limit and the remedy."""


def init(config: SchedulerConfig) -> SchedulerState:
    for name, value in config._asdict().items():
        least = 0 if name == "host_blocks" else 1
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    host = blocks.init(config.host_blocks) if config.host_blocks else None
    return SchedulerState(config, blocks.init(config.num_blocks), (), Running(), 0, 0, host, Map())


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
    names = (r.request_id, *r.forks)
    for i, name in enumerate(names):
        if name in state.ids or name in names[:i]:
            raise Rejected(f"request id {name!r} is in use; ids must be unique among unfinished requests")
    most = min(c.max_num_seqs, c.max_num_batched_tokens)
    if len(names) > most:
        raise Rejected(
            f"request {r.request_id!r} has {len(names)} branches, but at most {most} sequences run at a time; lower n, "
            "or raise max_num_seqs (and max_num_batched_tokens, which gives each of them a token)"
        )
    if len(r.hashes) > r.prompt_len // c.block_size:
        raise Rejected(f"request {r.request_id!r} has {len(r.hashes)} hashes; its prompt has fewer full blocks")
    group = state.arrivals if r.forks else None
    seq = Seq(request, state.arrivals, limit, r.prompt_len, hashes=r.hashes, group=group)
    ids = state.ids.update({name: None for name in names})
    return state._replace(waiting=(*state.waiting, seq), arrivals=state.arrivals + len(names), ids=ids)


def final_length(request: Request, config: SchedulerConfig) -> int:
    """Tokens of the request at its longest: prompt + max_tokens, cut off at max_model_len."""
    return min(request.prompt_len + request.max_tokens, config.max_model_len)


def schedule(state: SchedulerState, policy: Policy) -> tuple[SchedulerState, Plan]:
    """Decide what the next step computes. The plan has no rows when nothing runs and nothing can."""
    c = state.config
    state, copies, preempted, swapped, swap_out = _grow(state, policy)
    pool, active, waiting, host = state.pool, state.running, state.waiting, state.host
    active, decodes = _decodes_first(active)

    counts = [1] * decodes
    budget = c.max_num_batched_tokens - decodes
    for length, computed in zip(active.lengths[decodes:], active.computed[decodes:], strict=True):
        if budget == 0:
            break
        counts.append(min(length - computed, budget))
        budget -= counts[-1]

    admitted: tuple[Seq, ...] = ()
    cached: tuple[int, ...] = ()
    resumed: tuple[str, ...] = ()
    swap_in: Pairs = ()
    room = min(c.max_num_seqs, c.max_num_batched_tokens) - (sum(map(_width, active.seqs)) if waiting else 0)
    if waiting and budget and room and not preempted:
        filling = _filling(active, decodes, counts, c.block_size)
        pool, admitted, swap_in = _admit(pool, policy, waiting, active, filling, budget, room, c.block_size)
        away = {seq.arrival: seq for seq in waiting if seq.blocks} if host is not None else {}
        back = [away[seq.arrival] for seq in admitted if seq.arrival in away]
        resumed = tuple([seq.request_id for seq in back])
        if back and host is not None:
            host = blocks.release(host, [block for seq in back for block in reversed(seq.blocks)])
        for seq in admitted:
            counts.append(min(seq.length - seq.computed, budget))
            budget -= counts[-1]
        lengths, cached = tuple(seq.length for seq in admitted), tuple(seq.computed for seq in admitted)
        active = Running(active.seqs + admitted, active.lengths + lengths, active.computed + cached)
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
        cached=cached,
        copies=copies,
        preempted=preempted,
        swapped=swapped,
        resumed=resumed,
        swap_out=swap_out,
        swap_in=swap_in,
        num_waiting=len(waiting),
        blocks_used=pool.num_blocks - pool.num_free,
        num_blocks=pool.num_blocks,
    )
    return state._replace(pool=pool, waiting=waiting, running=active, host=host), plan


def commit(
    state: SchedulerState, plan: Plan, sampled: Sequence[int], hashes: Mapping[str, tuple[str, ...]] = NOTHING
) -> tuple[SchedulerState, tuple[Event, ...]]:
    """Take in what the step computed.

    Args:
        sampled: one token id for each row of the plan; those of rows that do not reach the end of their known
            tokens are ignored.
        hashes: by request id, of the blocks that this step filled and whose hashes the sequence does not have yet:
            those of generated tokens, which only the shell knows. Left out, these blocks are not shared.

    A sequence that was cancelled after `schedule` is passed over: its blocks are already free.
    """
    if len(sampled) != len(plan.seqs):
        raise ValueError(f"{len(sampled)} sampled tokens for {len(plan.seqs)} rows; there must be one for each")
    seqs, lengths, starts, counts, tokens = plan.seqs, plan.lengths, plan.starts, plan.counts, tuple(sampled)
    step = plan.step
    if state.running.seqs[: len(seqs)] != seqs:
        alive = {seq.arrival: seq for seq in state.running.seqs}
        keep = [i for i, seq in enumerate(seqs) if seq.arrival in alive]
        seqs = tuple([alive[seqs[i].arrival] for i in keep])  # one of their branches may have been cancelled, too
        lengths, starts, counts, tokens = (pick(column, keep) for column in (lengths, starts, counts, tokens))

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

    pool, seqs = _publish(state.pool, seqs, counts, computed, hashes, state.config.block_size)
    rows, old = len(seqs), state.running
    pool, seqs, forks = _fork(pool, seqs, samples, state.config.block_size)
    active = Running(
        seqs + old.seqs[rows:] + forks,
        lengths + old.lengths[rows:] + tuple([seq.length for seq in forks]),
        computed + old.computed[rows:] + tuple([seq.computed for seq in forks]),
    )
    if ended:
        pool = blocks.release(pool, [block for i in ended for block in reversed(seqs[i].blocks)])
        active = active.pick([i for i in range(len(active.seqs)) if i not in ended])

    ids = tuple([seq.request.request_id for seq in seqs])
    if not all(samples):
        new = [i for i, one in enumerate(samples) if one]
        ids, tokens = pick(ids, new), pick(tokens, new)
    events: list[Event] = [Preempted(step, i, i in plan.swapped) for i in plan.preempted]
    events += [Resumed(step, i) for i in plan.resumed]
    events += [Admitted(step, *entered) for entered in _entered(plan) if entered[0] not in plan.resumed]
    events += _forked(step, forks)
    if ids:
        events.append(Sampled(step, ids, tokens))
    for i, reason in ended.items():
        events.append(Finished(step, seqs[i].request_id, reason, lengths[i] - seqs[i].request.prompt_len))
    left = _without(state.ids, [seqs[i].request_id for i in ended]) if ended else state.ids
    return state._replace(pool=pool, running=active, step=step + 1, ids=left), tuple(events)


def cancel(
    state: SchedulerState, request_id: str, reason: FinishReason = "abort"
) -> tuple[SchedulerState, tuple[Event, ...]]:
    """End a request wherever it is and free its blocks. An unknown or finished id changes nothing.

    Branches are cancelled one by one; but as long as they have not forked, the first one's id ends all of them.
    `reason="stop"` is how the shell ends a request whose text reached a stop string.
    """
    if request_id not in state.ids:
        return state, ()
    for seq in (*state.waiting, *state.running.seqs):
        if request_id in seq.request.forks:
            return _without_fork(state, seq, request_id), (Finished(state.step, request_id, reason, 0),)
    for seq in state.waiting:
        if seq.request_id == request_id:
            left = tuple(other for other in state.waiting if other is not seq)
            host = blocks.release(state.host, seq.blocks[::-1]) if state.host is not None else None
            return _ended(state._replace(waiting=left, host=host), seq, reason)
    for i, seq in enumerate(running(state)):
        if seq.request_id == request_id:
            left = state.running.pick([j for j in range(len(state.running.seqs)) if j != i])
            return _ended(state._replace(pool=blocks.release(state.pool, seq.blocks[::-1]), running=left), seq, reason)
    raise AssertionError(f"{request_id!r} is among the ids, but neither waits nor runs")


def forget(state: SchedulerState) -> SchedulerState:
    """Forget what cached blocks hold: nothing computed so far is found again. Running sequences keep their blocks."""
    return state._replace(pool=blocks.forget(state.pool))


def running(state: SchedulerState) -> tuple[Seq, ...]:
    """The running sequences as current records."""
    return current(*state.running)


def check(state: SchedulerState) -> None:
    """The invariants that hold between any two transitions. Raises AssertionError."""
    c, active = state.config, running(state)
    blocks.check(state.pool, [seq.blocks for seq in active])
    away = [seq for seq in state.waiting if seq.blocks]
    assert state.host is not None or not away, "a waiting sequence holds cache"
    assert all(len(seq.blocks) == _blocks_for(seq.computed, c.block_size) for seq in state.waiting), "content is lost"
    places = min(c.max_num_seqs, c.max_num_batched_tokens)
    assert sum(map(_width, active)) <= places, "too many sequences run, or will"
    for seq in active:
        assert 0 <= seq.computed < seq.length <= seq.limit <= c.max_model_len, "computed must chase length"
        assert seq.computed <= len(seq.blocks) * c.block_size, "computed tokens lie outside the blocks"
        assert len(seq.hashes) <= seq.length // c.block_size, "a hash of a block that is not full"
    if state.host is not None:
        blocks.check(state.host, [seq.blocks for seq in away])
    arrivals = [seq.arrival for seq in (*state.waiting, *active)]
    assert len(arrivals) == len(set(arrivals)), "a sequence is in two places"
    named = Counter(name for seq in (*state.waiting, *active) for name in (seq.request_id, *seq.request.forks))
    assert Counter(list(state.ids)) == named, "an id is lost, left over or used twice"


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


def _width(seq: Seq) -> int:
    """Places that a sequence takes, or will when its branches fork."""
    return 1 + len(seq.request.forks)


def _ended(state: SchedulerState, seq: Seq, reason: FinishReason) -> tuple[SchedulerState, tuple[Event, ...]]:
    names = (seq.request_id, *seq.request.forks)
    events = tuple(Finished(state.step, name, reason, seq.num_output) for name in names)
    return state._replace(ids=_without(state.ids, names)), events


def _without_fork(state: SchedulerState, seq: Seq, fork: str) -> SchedulerState:
    """A branch that has not begun never will."""
    request = seq.request._replace(forks=tuple(name for name in seq.request.forks if name != fork))
    swap = lambda seqs: tuple(other._replace(request=request) if other is seq else other for other in seqs)  # noqa: E731
    running = state.running._replace(seqs=swap(state.running.seqs))
    return state._replace(waiting=swap(state.waiting), running=running, ids=_without(state.ids, [fork]))


def _fork(
    pool: BlockPool, seqs: tuple[Seq, ...], samples: Sequence[bool], size: int
) -> tuple[BlockPool, tuple[Seq, ...], tuple[Seq, ...]]:
    """Begin the branches of the rows whose prompt is computed -> (pool, rows, new sequences).

    A branch has all of the prompt but its last token, which it computes again, to sample with its own seed.
    """
    ready = [i for i, seq in enumerate(seqs) if seq.group is not None and seq.request.forks and samples[i]]
    if not ready:
        return pool, seqs, ()
    changed, forks = list(seqs), []
    for i in ready:
        seq = seqs[i]
        request = seq.request._replace(forks=())
        changed[i] = seq._replace(request=request)
        table = seq.blocks[: _blocks_for(request.prompt_len - 1, size)]
        for k, name in enumerate(seq.request.forks, 1):
            fork = changed[i]._replace(request=request._replace(request_id=name), arrival=seq.arrival + k)
            forks.append(fork._replace(length=request.prompt_len, computed=request.prompt_len - 1, blocks=table))
            pool = blocks.share(pool, table)
    return pool, tuple(changed), tuple(forks)


def _forked(step: int, forks: Sequence[Seq]) -> list[Event]:
    by_group: dict[int | None, list[Seq]] = {}
    for seq in forks:
        by_group.setdefault(seq.group, []).append(seq)
    return [Forked(step, tuple([seq.request_id for seq in group])) for group in by_group.values()]


def _grow(
    state: SchedulerState, policy: Policy
) -> tuple[SchedulerState, Pairs, tuple[str, ...], tuple[str, ...], Pairs]:
    """A block for each decode whose last one is full, and for each that may not write to its own; victims make room.

    Returns:
        (state, blocks to copy, preempted ids, those of them that were swapped, blocks to move out)
    """
    size, preempted, swapped, moved = state.config.block_size, [], [], []
    full, shared = _full(state.running, size), _shared(state.pool, state.running, size)
    while len(full) + len(shared) > state.pool.num_free:
        candidates = current(*state.running)
        victims = _victims(candidates, policy.preempt(candidates))
        state, pairs = _stop(state, candidates, victims)
        moved += pairs
        preempted += [victim.request_id for victim in victims]
        swapped += [victim.request_id for victim in victims] if pairs else []
        full, shared = _full(state.running, size), _shared(state.pool, state.running, size)
    facts = tuple(preempted), tuple(swapped), tuple(moved)
    if not (full or shared):
        return state, (), *facts
    taken = blocks.allocate(state.pool, len(full) + len(shared))
    assert taken is not None, "the loop above made room"
    (pool, ids), active = taken, state.running
    seqs, copies = list(active.seqs), []
    for i, block in zip(full, ids, strict=False):
        seqs[i] = _given(active, i, (*seqs[i].blocks, block))
    for i, block in zip(shared, ids[len(full) :], strict=True):
        table, at = seqs[i].blocks, active.computed[i] // size
        copies.append((table[at], block))
        seqs[i] = _given(active, i, (*table[:at], block, *table[at + 1 :]))
    pool = blocks.release(pool, [source for source, _ in copies]) if copies else pool
    return state._replace(pool=pool, running=active._replace(seqs=tuple(seqs))), tuple(copies), *facts


def _stop(state: SchedulerState, candidates: Sequence[Seq], victims: Sequence[Seq]) -> tuple[SchedulerState, Pairs]:
    """Take victims from the running -> (state, blocks to move out: none if they have to be computed again)."""
    pool = state.pool
    for victim in victims:
        pool = blocks.release(pool, victim.blocks[::-1])
    gone = {victim.arrival for victim in victims}
    active = state.running.pick([i for i, seq in enumerate(candidates) if seq.arrival not in gone])
    state = state._replace(pool=pool, running=active)

    tables = [victim.blocks[: _blocks_for(victim.computed, state.config.block_size)] for victim in victims]
    held = tuple(dict.fromkeys(block for table in tables for block in table))
    taken = blocks.allocate(state.host, len(held)) if state.host is not None and all(tables) else None
    if taken is None:
        back = [victim._replace(computed=0, blocks=()) for victim in victims]
        return state._replace(waiting=(*back, *state.waiting)), ()
    host, ids = taken
    place = dict(zip(held, ids, strict=True))
    moved = [tuple([place[block] for block in table]) for table in tables]
    again = Counter(block for table in moved for block in table) - Counter(ids)
    out = [victim._replace(blocks=table) for victim, table in zip(victims, moved, strict=True)]
    host = blocks.share(host, again.elements())
    return state._replace(host=host, waiting=(*out, *state.waiting)), tuple(place.items())


def _given(active: Running, i: int, table: tuple[int, ...]) -> Seq:
    request, arrival, limit, _, _, _, hashes, group = active.seqs[i]
    return Seq(request, arrival, limit, active.lengths[i], active.computed[i], table, hashes, group)


def _victims(candidates: Sequence[Seq], victim: Seq) -> list[Seq]:
    """The victim and its group, in order of arrival; the victim alone if nobody else runs, so that one advances."""
    group = [seq for seq in candidates if seq.group == victim.group] if victim.group is not None else [victim]
    return sorted(group, key=lambda seq: seq.arrival) if len(group) < len(candidates) else [victim]


def _shared(pool: BlockPool, active: Running, size: int) -> list[int]:
    """Indices of the branches that would write to a block that others have, or may find. The last to leave keeps it."""
    copying: list[int] = []
    left: dict[int, int] = {}
    for i, seq in enumerate(active.seqs):
        if seq.group is None or active.computed[i] >= len(seq.blocks) * size:
            continue
        block = seq.blocks[active.computed[i] // size]
        owners = left.setdefault(block, pool.owners[block])
        if owners > 1 or block in pool.hashes:
            copying.append(i)
            left[block] = owners - 1
    return copying


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


def _filling(active: Running, decodes: int, counts: Sequence[int], size: int) -> dict[str, int]:
    """Hashes of the blocks that the prompt chunks of this step fill -> the blocks.

    A row may read what another row of the same step writes: in each layer all keys and values are written before any
    is read. So of many requests with one prefix that arrive together, one computes it and nobody waits.
    """
    filling: dict[str, int] = {}
    for i in range(decodes, len(counts)):
        seq, start = active.seqs[i], active.computed[i]
        _fills(filling, seq, start, start + counts[i], size)
    return filling


def _fills(filling: dict[str, int], seq: Seq, start: int, stop: int, size: int) -> None:
    for j in range(start // size, min(stop // size, len(seq.hashes))):
        filling.setdefault(seq.hashes[j], seq.blocks[j])


def _found(pool: BlockPool, filling: Mapping[str, int], seq: Seq, size: int) -> tuple[int, ...]:
    """Blocks of the longest beginning of a sequence that somebody has computed; one token is left to compute."""
    keys = seq.hashes[: (seq.length - 1) // size]
    found = blocks.find(pool, keys)
    for key in keys[len(found) :]:
        block = filling.get(key, pool.contents.get(key))
        if block is None:
            break
        found = (*found, block)
    return found


def _admit(
    pool: BlockPool,
    policy: Policy,
    waiting: tuple[Seq, ...],
    active: Running,
    filling: dict[str, int],
    budget: int,
    room: int,
    size: int,
) -> tuple[BlockPool, tuple[Seq, ...], Pairs]:
    """Admit from the head of the policy's order while tokens, places and blocks last.

    Content in host blocks comes back, full blocks that branches shared once; a block that is not full comes back to
    each of them, because they write to it in this very step.

    Returns:
        (pool, admitted, blocks to move in)
    """
    admitted: list[Seq] = []
    moved: dict[int, int] = {}  # host block -> device block
    swap_in: list[tuple[int, int]] = []
    for seq in policy.order(waiting, active):
        if budget <= 0 or _width(seq) > room:
            break
        whole = seq.blocks[: seq.computed // size]
        found = tuple([moved[b] for b in whole if b in moved]) if seq.blocks else _found(pool, filling, seq, size)
        need = _blocks_for(seq.length, size) - len(found)
        free = pool.num_free - sum(block in pool.stamps for block in found)  # an idle block that is found is not free
        if need > free or not policy.admit(seq, need, free):
            break
        taken = blocks.allocate(blocks.share(pool, found), need)
        assert taken is not None, "need was compared with what is free"
        pool, ids = taken
        if seq.blocks:
            fresh = iter(ids)
            table = [moved[b] if b in moved and i < len(whole) else next(fresh) for i, b in enumerate(seq.blocks)]
            pairs = [(b, mine) for b, mine in zip(seq.blocks, table, strict=True) if mine in ids]
            moved |= {b: mine for b, mine in pairs if b in whole}
            swap_in += pairs
            admitted.append(seq._replace(blocks=(*table, *fresh)))
        else:
            admitted.append(seq._replace(computed=len(found) * size, blocks=found + ids))
        count = min(seq.length - admitted[-1].computed, budget)
        _fills(filling, admitted[-1], admitted[-1].computed, admitted[-1].computed + count, size)
        budget -= count
        room -= _width(seq)
    return pool, tuple(admitted), tuple(swap_in)


def _publish(
    pool: BlockPool,
    seqs: tuple[Seq, ...],
    counts: Sequence[int],
    ends: Sequence[int],
    hashes: Mapping[str, tuple[str, ...]],
    size: int,
) -> tuple[BlockPool, tuple[Seq, ...]]:
    """Let the blocks that rows of a step filled be found, now that they hold what they are said to hold."""
    full = [i for i, (end, count) in enumerate(zip(ends, counts, strict=True)) if end % size < count]
    if not full:
        return pool, seqs
    filled: list[tuple[int, str]] = []
    changed = list(seqs)
    for i in full:
        seq = seqs[i]
        known = seq.hashes
        new = hashes.get(seq.request.request_id)
        if new:
            known += new
            changed[i] = seq._replace(hashes=known)
        first, last = (ends[i] - counts[i]) // size, min(ends[i] // size, len(known))
        filled += zip(seq.blocks[first:last], known[first:last], strict=True)
    return (blocks.publish(pool, filled) if filled else pool), tuple(changed)


def _entered(plan: Plan) -> list[tuple[str, int, int]]:
    """Of each sequence that the plan admitted: id, known tokens, tokens found in the cache. They are its last rows."""
    first = len(plan.seqs) - len(plan.admitted)
    return list(zip(plan.admitted, plan.lengths[first:], plan.cached, strict=True))
