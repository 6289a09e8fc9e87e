"""The scheduler: pure transitions of an immutable state. No device, no clock, no text, no token is stored here.

The transitions are here; what they are made of is in preemption.py (rules 5 and 7), admission.py (3), sharing.py (which
blocks can be found) and branches.py (4 and 6), and what they carry in state.py. turns.py and reservation.py hold how
earlier engines made a step (1 and 2) and kept a cache (3), to compare with.

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
6. Beams of a request advance together: one that has computed all its tokens waits for the others, then `commit` is told
   from which of them each goes on, and with which token. They enter and leave together.
7. A victim goes back to the front of the queue: with its content in host blocks if they have room for it (swapping),
   else with nothing computed (recomputation). It is admitted again like everybody else.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import get_args

from immutables import Map

from pagedjax.config import Reservation, one_of
from pagedjax.host import blocks, branches, prefix_sharing, reservation
from pagedjax.host.admission import Entry, admit
from pagedjax.host.branches import width
from pagedjax.host.policies import Policy
from pagedjax.host.preemption import make_room
from pagedjax.host.state import SchedulerConfig, SchedulerState, check, max_running, running
from pagedjax.host.step_kinds import split, turns
from pagedjax.host.types import (
    Admitted,
    Choice,
    Event,
    Finished,
    FinishReason,
    Item,
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

__all__ = [
    "Rejected",
    "SchedulerConfig",
    "SchedulerState",
    "cancel",
    "check",
    "commit",
    "final_length",
    "forget",
    "init",
    "restart",
    "running",
    "schedule",
    "submit",
]

NO_HASHES: Mapping[str, tuple[str, ...]] = MappingProxyType({})
NO_CHOICES: Mapping[str, Choice] = MappingProxyType({})


class Rejected(ValueError):
    """A request that can never run. The message names the value, the limit and the remedy."""


def init(config: SchedulerConfig) -> SchedulerState:
    for name, value in zip(config._fields[:6], config[:6], strict=True):
        least = 0 if name == "host_blocks" else 1
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    for name, value in (("chunked_prefill", config.chunked_prefill), ("mixed_steps", config.mixed_steps)):
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be True or False")
    one_of("reservation", config.reservation, get_args(Reservation))
    host = blocks.init(config.host_blocks) if config.host_blocks else None
    return SchedulerState(config, blocks.init(config.num_blocks), (), Running(), 0, 0, host, frozenset(), Map())


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
    names = (r.request_id, *r.forks)
    beams = len(names) if r.beams else 1  # those of one request have to fit at once, with nothing shared at worst
    group = state.arrivals if r.forks or r.beams else None
    seq = Seq(request, state.arrivals, limit, r.prompt_len, hashes=r.hashes, group=group)
    _check_baselines(c, seq, beams)
    need, room = beams * blocks.needed(limit, c.block_size), c.num_blocks
    if need > room:
        what = f"can grow to {limit} tokens" + (f" in each of {beams} beams" if beams > 1 else "")
        less = f"max_tokens{', beam_width' if beams > 1 else ''}"
        raise Rejected(
            f"request {r.request_id!r} {what}, which is {need} blocks of {c.block_size}, but the pool has {room}; "
            f"raise num_blocks to {need}, or lower {less} or the prompt's length"
        )
    for i, name in enumerate(names):
        if name in state.ids or name in names[:i]:
            raise Rejected(f"request id {name!r} is in use; ids must be unique among unfinished requests")
    most = max_running(c)
    if len(names) > most:
        raise Rejected(
            f"request {r.request_id!r} has {len(names)} branches, but at most {most} sequences run at a time; lower n "
            "or beam_width, or raise max_num_seqs (and max_num_batched_tokens, which gives each of them a token)"
        )
    if len(r.hashes) > r.prompt_len // c.block_size:
        raise Rejected(f"request {r.request_id!r} has {len(r.hashes)} hashes; its prompt has fewer full blocks")
    ids = state.ids.update({name: None for name in names})
    stops = state.stops | r.stop_token_ids if state.ids else r.stop_token_ids
    return state._replace(waiting=(*state.waiting, seq), arrivals=state.arrivals + len(names), ids=ids, stops=stops)


def _check_baselines(c: SchedulerConfig, seq: Seq, beams: int) -> None:
    """What whole prompts and contiguous reservations rule out. Raises Rejected."""
    name = seq.request_id
    if not c.chunked_prefill and beams * seq.limit > c.max_num_batched_tokens:
        each = f" in each of {beams} beams" if beams > 1 else ""
        raise Rejected(
            f"request {name!r} can grow to {seq.limit} tokens{each}, which have to fit into one step without "
            f"chunked_prefill, but max_num_batched_tokens is {c.max_num_batched_tokens}; raise it, or lower max_tokens"
        )
    if c.reservation == "none":
        return
    if seq.request.forks or seq.request.beams or seq.hashes:
        raise Rejected(
            f"request {name!r} has branches or a shareable prefix, and a contiguous reservation ({c.reservation!r}) "
            "shares nothing; use reservation='none', or n=1 and enable_prefix_caching=False"
        )
    need, room = reservation.piece(c, seq), reservation.largest(c)
    if need > room:
        raise Rejected(
            f"request {name!r} reserves {need} blocks in a row (reservation {c.reservation!r}), but the largest piece "
            f"of the pool has {room}; raise num_blocks to {need}, or lower max_model_len or max_tokens"
        )


def final_length(request: Request, config: SchedulerConfig) -> int:
    """Tokens of the request at its longest: prompt + max_tokens, cut off at max_model_len."""
    return min(request.prompt_len + request.max_tokens, config.max_model_len)


def schedule(state: SchedulerState, policy: Policy) -> tuple[SchedulerState, Plan]:
    """Decide what the next step computes. The plan has no rows when nothing runs and nothing can."""
    c = state.config
    state, made = make_room(state, policy)
    host, waiting = state.host, state.waiting
    everyone, ones, held = _in_order(state.running)
    for kind in turns(c, state.step):
        active, decodes, waits = split(everyone, ones, kind)
        counts, entry = _shared_out(state, policy, active, decodes, kind != "decodes" and not made.preempted)
        if counts:
            break
    held = waits.joined(held)
    admitted, pool = entry.admitted, entry.pool
    new = Running(admitted, tuple([seq.length for seq in admitted]), tuple([seq.computed for seq in admitted]))
    resumed: tuple[str, ...] = ()
    if admitted:
        away = {seq.arrival: seq for seq in waiting if seq.blocks}
        back = [away[seq.arrival] for seq in admitted if seq.arrival in away]
        if back and host is not None:
            resumed = tuple([seq.request_id for seq in back])
            host = blocks.release(host, [block for seq in back for block in reversed(seq.blocks)])
        entered = {seq.arrival for seq in admitted}
        waiting = tuple([seq for seq in waiting if seq.arrival not in entered])
        active = active.joined(new)

    rows = len(counts)
    plan = Plan(
        step=state.step,
        seqs=active.seqs[:rows],
        lengths=active.lengths[:rows],
        starts=active.computed[:rows],
        counts=tuple(counts),
        admitted=tuple([seq.request_id for seq in admitted]),
        known=new.lengths,
        cached=new.computed,
        copies=made.copies,
        preempted=made.preempted,
        swapped=made.swapped,
        resumed=resumed,
        swap_out=made.swap_out,
        swap_in=entry.swap_in,
        num_waiting=len(waiting),
        blocks_used=pool.num_blocks - pool.num_free,
        num_blocks=pool.num_blocks,
    )
    active = active.joined(held) if held.seqs else active
    return state._replace(pool=pool, waiting=waiting, running=active, host=host), plan


def _shared_out(
    state: SchedulerState, policy: Policy, active: Running, decodes: int, admits: bool
) -> tuple[list[int], Entry]:
    """The tokens that each of the active gets, decodes first, and then each of those that enter."""
    c = state.config
    counts, budget = [1] * decodes, c.max_num_batched_tokens - decodes
    for length, computed in zip(active.lengths[decodes:], active.computed[decodes:], strict=True):
        if budget == 0:
            break
        counts.append(min(length - computed, budget))
        budget -= counts[-1]

    room = max_running(c) - len(state.running.seqs)
    if state.waiting and room > 0:
        room -= sum(map(width, state.running.seqs)) - len(state.running.seqs)
    entry = Entry(state.pool, {}, budget, room, {})
    if state.waiting and budget and room > 0 and admits:
        coming = prefix_sharing.filling(active, decodes, counts, c.block_size)
        entry = admit(entry._replace(coming=coming), policy, state.waiting, state.running, c)
    for seq in entry.admitted:
        if budget:  # beams enter together, though there may be tokens for the first of them only
            counts.append(min(seq.length - seq.computed, budget))
            budget -= counts[-1]
    return counts, entry


def commit(
    state: SchedulerState,
    plan: Plan,
    sampled: Sequence[int],
    hashes: Mapping[str, tuple[str, ...]] = NO_HASHES,
    choices: Mapping[str, Choice] = NO_CHOICES,
) -> tuple[SchedulerState, tuple[Event, ...]]:
    """Take in what the step computed.

    Args:
        sampled: one token id for each row of the plan; those of rows that do not reach the end of their known
            tokens are ignored, and those of beams.
        hashes: by request id, of the blocks that this step filled and whose hashes the sequence does not have yet:
            those of generated tokens, which only the shell knows. Left out, these blocks are not shared.
        choices: by the id of the first beam, how the beams of a request go on that have all caught up.

    A sequence that was cancelled after `schedule` is passed over: its blocks are already free.
    """
    if len(sampled) != len(plan.seqs):
        raise ValueError(f"{len(sampled)} sampled tokens for {len(plan.seqs)} rows; there must be one for each")
    seqs, lengths, starts, counts, tokens = plan.seqs, plan.lengths, plan.starts, plan.counts, tuple(sampled)
    step, size = plan.step, state.config.block_size
    if state.running.seqs[: len(seqs)] != seqs:
        alive = {seq.arrival: seq for seq in state.running.seqs}
        keep = [i for i, seq in enumerate(seqs) if seq.arrival in alive]
        seqs = tuple([alive[seqs[i].arrival] for i in keep])  # one of their branches may have been cancelled, too
        lengths, starts, counts, tokens = (pick(column, keep) for column in (lengths, starts, counts, tokens))

    computed = tuple([start + count for start, count in zip(starts, counts, strict=True)])
    caught_up = computed == lengths  # as in most steps: all rows sample
    samples = [True] * len(seqs) if caught_up else [a == b for a, b in zip(computed, lengths, strict=True)]
    grouped = [i for i, seq in enumerate(seqs) if seq.group is not None]
    grouped = [i for i in grouped if seqs[i].request.forks or seqs[i].request.beams]
    for i in grouped:
        samples[i] = samples[i] and not seqs[i].request.beams  # a beam gets its token from `choices`
    lengths = tuple([length + new for length, new in zip(lengths, samples, strict=True)])
    maybe = [i for i, (seq, length) in enumerate(zip(seqs, lengths, strict=True)) if length >= seq.limit]
    if not state.stops.isdisjoint(tokens):  # else nobody looks at 256 requests one by one
        maybe = sorted({*maybe, *(i for i, token in enumerate(tokens) if token in seqs[i].request.stop_token_ids)})
    ended: dict[int, FinishReason] = {
        i: reason for i in maybe if samples[i] and (reason := _finish_reason(seqs[i], lengths[i], tokens[i]))
    }

    pool, seqs = prefix_sharing.publish(state.pool, seqs, counts, computed, hashes, size)
    rows, old = len(seqs), state.running
    pool, seqs, forks = branches.fork(pool, seqs, grouped, samples, size)
    active = Running(
        seqs + old.seqs[rows:] + forks,
        lengths + old.lengths[rows:] + tuple([seq.length for seq in forks]),
        computed + old.computed[rows:] + tuple([seq.computed for seq in forks]),
    )
    if ended:
        pool = blocks.release(pool, [block for i in ended for block in reversed(seqs[i].blocks)])
        active = active.pick([i for i in range(len(active.seqs)) if i not in ended])
    pool, active, beamed = branches.advance(pool, active, choices, step)
    apart = branches.arrivals(active, forks, choices)

    ids = tuple([seq.request.request_id for seq in seqs])
    if not all(samples):
        new = [i for i, one in enumerate(samples) if one]
        ids, tokens = pick(ids, new), pick(tokens, new)
    events: list[Event] = [Preempted(step, i, i in plan.swapped) for i in plan.preempted]
    events += [Resumed(step, i) for i in plan.resumed]
    entered = zip(plan.admitted, plan.known, plan.cached, strict=True)
    events += [Admitted(step, *one) for one in entered if one[0] not in plan.resumed]
    events += branches.forked(step, forks)
    if ids:
        events.append(Sampled(step, ids, tokens))
    events += beamed
    for i, reason in ended.items():
        events.append(Finished(step, seqs[i].request_id, reason, lengths[i] - seqs[i].request.prompt_len))
    left = _without(state.ids, [seqs[i].request_id for i in ended]) if ended else state.ids
    return state._replace(pool=pool, running=active, step=step + 1, forked=apart, ids=left), tuple(events)


def cancel(
    state: SchedulerState, request_id: str, reason: FinishReason = "abort"
) -> tuple[SchedulerState, tuple[Event, ...]]:
    """End a request wherever it is and free its blocks. An unknown or finished id changes nothing.

    Branches are cancelled one by one; but as long as they have not forked, the first one's id ends all of them. Beams
    end together, whichever is named. `reason="stop"` is how the shell ends a request whose text reached a stop string,
    and a finished beam search.
    """
    if request_id not in state.ids:
        return state, ()
    active, queue = state.running, state.waiting
    named = next(seq for seq in itertools.chain(active.seqs, queue) if request_id in _names(seq))
    if request_id != named.request_id and not named.request.beams:
        return _without_fork(state, named, request_id), (Finished(state.step, request_id, reason, 0),)
    at = _places(active.seqs, named)
    waits = _places(queue, named) if named.request.beams or not at else []
    away, stopped = pick(queue, waits), current(*active.pick(at))
    pool = blocks.release(state.pool, [block for seq in stopped for block in reversed(seq.blocks)])
    host = state.host and blocks.release(state.host, [block for seq in away for block in reversed(seq.blocks)])
    ends = [(name, seq.num_output) for seq in (*away, *stopped) for name in _names(seq)]
    state = state._replace(
        pool=pool,
        host=host,
        waiting=_but(queue, waits),
        running=Running(_but(active.seqs, at), _but(active.lengths, at), _but(active.computed, at)),
        ids=_without(state.ids, [name for name, _ in ends]),
    )
    return state, tuple([Finished(state.step, name, reason, outputs) for name, outputs in ends])


def _names(seq: Seq) -> tuple[str, ...]:
    """Its own, and those of branches that have not begun."""
    return (seq.request.request_id, *seq.request.forks)


def _places(line: tuple[Seq, ...], named: Seq) -> list[int]:
    """Where it is in a line, and a beam its siblings. A queue is mostly ended in order: it is found from the front."""
    if named.request.beams:
        return [i for i, seq in enumerate(line) if seq.group == named.group]
    return [line.index(named)] if named in line else []


def _but(line: tuple[Item, ...], at: Sequence[int]) -> tuple[Item, ...]:
    """All but those at some places, in ascending order."""
    for i in reversed(at):
        line = line[:i] + line[i + 1 :]
    return line


def forget(state: SchedulerState) -> SchedulerState:
    """Forget what cached blocks hold: nothing computed so far is found again. Running sequences keep their blocks."""
    return state._replace(pool=blocks.forget(state.pool))


def restart(state: SchedulerState) -> SchedulerState:
    """Whoever runs goes back to the front of the queue with nothing computed, and what blocks hold is forgotten.

    For a shell whose step failed: its device may have written, or not, any block that a plan after this state could
    name. Tokens that are known stay known, and what lies in host blocks stays there.
    """
    active = sorted(running(state), key=lambda seq: seq.arrival)
    pool = blocks.release(state.pool, [block for seq in active for block in reversed(seq.blocks)])
    back = tuple([seq._replace(computed=0, blocks=()) for seq in active])
    queue, left = (*back, *state.waiting), Running()
    return state._replace(pool=blocks.forget(pool), waiting=queue, running=left, forked=frozenset())


def _in_order(active: Running) -> tuple[Running, int, Running]:
    """Reorder, stably, so that sequences with one token to compute come first.

    Returns:
        (those that have tokens to compute, how many of them have one, beams that wait for their siblings)
    """
    left = [length - computed for length, computed in zip(active.lengths, active.computed, strict=True)]
    decodes, held = left.count(1), Running()
    if 0 in left:
        held = active.pick([i for i, number in enumerate(left) if not number])
        active = active.pick([i for i, number in enumerate(left) if number])
        left = [number for number in left if number]
    if left[:decodes].count(1) != decodes:
        active = active.pick(sorted(range(len(left)), key=lambda i: left[i] != 1))
    return active, decodes, held


def _finish_reason(seq: Seq, length: int, token: int) -> FinishReason | None:
    """Why a sequence ends that has grown to `length` tokens by `token`, if it does."""
    request = seq.request
    if token in request.stop_token_ids and length - request.prompt_len >= request.min_tokens:
        return "stop"
    return "length" if length >= seq.limit else None


def _without(ids: Map[str, None], gone: Sequence[str]) -> Map[str, None]:
    left = ids.mutate()
    for request_id in gone:
        del left[request_id]
    return left.finish()


def _without_fork(state: SchedulerState, seq: Seq, fork: str) -> SchedulerState:
    """A branch that has not begun never will."""
    request = seq.request._replace(forks=tuple(name for name in seq.request.forks if name != fork))
    same = seq.arrival
    swap = lambda seqs: tuple(s._replace(request=request) if s.arrival == same else s for s in seqs)  # noqa: E731
    running = state.running._replace(seqs=swap(state.running.seqs))
    return state._replace(waiting=swap(state.waiting), running=running, ids=_without(state.ids, [fork]))
