"""The scheduler: pure transitions of an immutable state. It uses no device and no clock, and stores
no text or token.

    submit -> waiting -> (schedule admits) -> running -> (commit: stop, length) -> finished
                 ^                              |
                 +---- schedule preempts -------+            cancel: from anywhere, at any time

There is no prefill phase and no decode phase: `computed` grows until it equals `length`, and a step
gives a sequence one or more tokens. The rules:

1. Every decode (one token to compute) takes one token of the budget, before any prompt chunk. So no
   more sequences run than the budget has tokens.
2. Prompt chunks take the rest of the budget in order of admission, then new admissions do.
3. A sequence is admitted only if blocks for all its known tokens are free, and not in a step that
   preempted. Full blocks are shared if their content is in the cache or is computed by an earlier
   row of the same step.
4. The branches of a request (parallel sampling) fork when its prompt is computed: they share the
   blocks of all its tokens but the last, and compute that token again. A block that others own or
   can find is copied before a write.
5. If decodes need more blocks than are free, the policy's victim is preempted, with the branches of
   its group, until they suffice. If only one group runs, it loses one branch at a time. One
   sequence alone always fits, because `submit` rejects what could not.
6. The beams of a request advance together: a beam with no token left to compute waits for the
   others. Then `commit` is given the beam that each continues, and its token. Beams are admitted
   and preempted together.
7. A victim returns to the front of the queue: with its content in host blocks if they suffice
   (swapping), else with nothing computed (recomputation). It is admitted again like any other
   sequence.
8. Drafts of decodes take what is left of the budget and of the free blocks (speculative decoding).
9. A request with max_tokens 0 samples nothing and ends when its prompt is computed (pooled hidden
   states).
10. Where queries do not see all blocks, those out of sight are given back, and rule 3 counts the
    blocks that a sequence has at most at one time. A chunk is then cut where no block is free for
    its next token.

The rules are in these files: preemption.py (5, 7), admission.py (3), prefix_sharing.py (finding
blocks), branches.py (4, 6), drafts.py (8), views.py (10), request_limits.py (`submit`), handover.py
(`release` and `adopt`, between two schedulers), state.py (the state and its invariants).
step_kinds.py and reservation.py are baselines that replace rules 1 to 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from operator import add, sub
from types import MappingProxyType
from typing import Any, get_args

from immutables import Map

from pagedjax.config import Reservation, one_of
from pagedjax.host import blocks, branches, prefix_sharing, request_limits, step_kinds, views
from pagedjax.host.admission import Admission, admit
from pagedjax.host.drafts import Sample, accepted, cut_at_the_end, flat, give_back, grant
from pagedjax.host.handover import adopt, has_room, release
from pagedjax.host.policies import Policy
from pagedjax.host.preemption import make_room
from pagedjax.host.request_limits import Rejected, final_length
from pagedjax.host.state import SchedulerConfig, SchedulerState, check, running
from pagedjax.host.types import (
    NO_DRAFTS,
    NO_HASHES,
    Admitted,
    Choice,
    Event,
    Finished,
    FinishReason,
    Item,
    Pending,
    Plan,
    Preempted,
    Request,
    Resumed,
    Running,
    Sampled,
    Seq,
    Verified,
    current,
    pick,
)

__all__ = [
    "Rejected",
    "SchedulerConfig",
    "SchedulerState",
    "adopt",
    "cancel",
    "check",
    "commit",
    "final_length",
    "forget",
    "has_room",
    "init",
    "release",
    "restart",
    "running",
    "schedule",
    "submit",
    "update",
]

NO_CHOICES: Mapping[str, Choice] = MappingProxyType({})


def init(config: SchedulerConfig) -> SchedulerState:
    for name, value in zip(config._fields[:6], config[:6], strict=True):
        least = 0 if name == "host_blocks" else 1
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    for name, value in (
        ("chunked_prefill", config.chunked_prefill),
        ("mixed_steps", config.mixed_steps),
    ):
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be True or False")
    one_of("reservation", config.reservation, get_args(Reservation))
    views.check_config(config)
    host_pool = blocks.init(config.host_blocks) if config.host_blocks else None
    return SchedulerState(
        config, blocks.init(config.num_blocks), (), Running(), 0, 0, host_pool, frozenset(), Map()
    )


def submit(state: SchedulerState, request: Request) -> SchedulerState:
    """Append a request to the queue.

    Raises:
        Rejected: the request can never run (request_limits.py). The message names the value, the
        limit and the remedy.
    """
    request_limits.check(state, request)
    names = (request.request_id, *request.forks)
    group = state.arrivals if request.forks or request.beams else None
    limit = final_length(request, state.config)
    seq = Seq(
        request, state.arrivals, limit, request.prompt_len, hashes=request.hashes, group=group
    )
    ids = state.ids.update({name: None for name in names})
    stops = state.stops | request.stop_token_ids if state.ids else request.stop_token_ids
    return state._replace(
        waiting=(*state.waiting, seq), arrivals=state.arrivals + len(names), ids=ids, stops=stops
    )


def schedule(
    state: SchedulerState, policy: Policy, offered: Mapping[str, int] = NO_DRAFTS
) -> tuple[SchedulerState, Plan]:
    """Decide what the next step computes. The plan has no rows when nothing runs and nothing can.

    Args:
        offered: by sequence id, how many draft tokens there are for it. Decodes get some of them
            (drafts.py).
    """
    c = state.config
    state, preempted = make_room(state, policy)
    host_pool, waiting = state.host_pool, state.waiting
    active, num_decodes, waiting_beams = _decodes_first(state.running)
    if c.mixed_steps:
        active, counts, admission = _token_counts(
            state, policy, active, num_decodes, not preempted.preempted
        )
    else:
        mixed, ones, skipped = active, num_decodes, waiting_beams
        for kind in step_kinds.kinds(c, state.step):
            active, num_decodes, skipped = step_kinds.split(mixed, ones, kind)
            admits = kind != "decodes" and not preempted.preempted
            active, counts, admission = _token_counts(state, policy, active, num_decodes, admits)
            if counts:
                break
        waiting_beams = skipped.joined(waiting_beams)
    admitted, pool = admission.admitted, admission.pool
    new = Running(
        admitted, tuple([seq.length for seq in admitted]), tuple([seq.computed for seq in admitted])
    )
    resumed: tuple[str, ...] = ()
    if admitted:
        away = {seq.arrival: seq for seq in waiting if seq.blocks}
        back = [away[seq.arrival] for seq in admitted if seq.arrival in away]
        if back and host_pool is not None:
            resumed = tuple([seq.request_id for seq in back])
            host_pool = blocks.release(
                host_pool, [block for seq in back for block in reversed(seq.blocks)]
            )
        entered = {seq.arrival for seq in admitted}
        waiting = tuple([seq for seq in waiting if seq.arrival not in entered])
        active = active.joined(new)

    drafts: tuple[int, ...] = ()
    if offered:
        left = c.max_num_batched_tokens - sum(counts)
        pool, active, counts, drafts = grant(pool, active, num_decodes, counts, offered, left, c)
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
        copies=preempted.copies,
        preempted=preempted.preempted,
        swapped=preempted.swapped,
        resumed=resumed,
        swap_out=preempted.swap_out,
        swap_in=admission.swap_in,
        num_waiting=len(waiting),
        blocks_used=pool.num_blocks - pool.num_free,
        num_blocks=pool.num_blocks,
        drafts=drafts,
    )
    active = active.joined(waiting_beams) if waiting_beams.seqs else active
    return state._replace(pool=pool, waiting=waiting, running=active, host_pool=host_pool), plan


def _token_counts(
    state: SchedulerState, policy: Policy, active: Running, num_decodes: int, admits: bool
) -> tuple[Running, list[int], Admission]:
    """The tokens that each running sequence gets, decodes first, then each sequence that is
    admitted.
    """
    c, pool = state.config, state.pool
    counts, budget = [1] * num_decodes, c.max_num_batched_tokens - num_decodes
    if c.views:
        pool, active, chunks = views.grow(c, pool, active, num_decodes, budget)
        counts, budget = counts + chunks, budget - sum(chunks)
    else:
        for length, computed in zip(
            active.lengths[num_decodes:], active.computed[num_decodes:], strict=True
        ):
            if budget == 0:
                break
            counts.append(min(length - computed, budget))
            budget -= counts[-1]

    free_rows = c.max_running - len(state.running.seqs)
    if state.waiting and free_rows > 0:
        free_rows = c.max_running - sum([seq.num_rows for seq in state.running.seqs])
    admission = Admission(pool, {}, budget, free_rows, {})
    if state.waiting and budget and free_rows > 0 and admits:
        filling_now = prefix_sharing.filling(active, num_decodes, counts, c)
        promised = views.promised(c, active) if c.views else 0
        admission = admission._replace(filling_now=filling_now, promised=promised)
        admission = admit(admission, policy, state.waiting, state.running, c)
    for seq in admission.admitted:
        if budget:  # beams are admitted together, even if tokens suffice only for the first of them
            covered = len(seq.blocks) // c.groups * c.block_size
            counts.append(min(seq.length - seq.computed, budget, covered - seq.computed))
            budget -= counts[-1]
    return active, counts, admission


def commit(
    state: SchedulerState,
    plan: Plan,
    sampled: Sequence[Sample],
    hashes: Mapping[str, tuple[str, ...]] = NO_HASHES,
    choices: Mapping[str, Choice] = NO_CHOICES,
) -> tuple[SchedulerState, tuple[Event, ...]]:
    """Add the outcome of a step to the state.

    Args:
        sampled: one token id for each row of the plan; those of rows that do not reach the end of
            their known tokens are ignored, and those of beams. For a row with drafts, the accepted
            drafts and one more token, which are cut where the sequence ends.
        hashes: by request id, of the blocks that this step filled and whose hashes the sequence
            does not have yet: those of generated tokens, which only the engine knows. Without them,
            these blocks are not shared.
        choices: by the id of the first beam, how the beams of a request continue that have no token
            left to compute.

    A sequence that was cancelled after `schedule` gets no token: its blocks are already free.
    Events of the plan name it all the same (Admitted, Preempted, Resumed).
    """
    if len(sampled) != len(plan.seqs):
        raise ValueError(
            f"{len(sampled)} sampled tokens for {len(plan.seqs)} rows; there must be one for each"
        )
    all_tokens: tuple[Any, ...] = cut_at_the_end(plan, sampled) if plan.drafts else tuple(sampled)
    seqs, starts, drafts = plan.seqs, plan.starts, plan.drafts
    lengths, counts, tokens = (
        accepted(plan, all_tokens) if drafts else (plan.lengths, plan.counts, all_tokens)
    )
    step, c = plan.step, state.config
    if state.running.seqs[: len(seqs)] != seqs:
        alive = {seq.arrival: seq for seq in state.running.seqs}
        keep = [i for i, seq in enumerate(seqs) if seq.arrival in alive]
        # a branch of them may have been cancelled, too
        seqs = tuple([alive[seqs[i].arrival] for i in keep])
        lengths, starts, counts, tokens = (
            pick(column, keep) for column in (lengths, starts, counts, tokens)
        )
        drafts, all_tokens = pick(drafts, keep) if drafts else (), pick(all_tokens, keep)

    computed = tuple(map(add, starts, counts))
    caught_up = computed == lengths  # as in most steps: all rows sample
    samples = (
        [True] * len(seqs)
        if caught_up
        else [a == b for a, b in zip(computed, lengths, strict=True)]
    )
    grouped = [i for i, seq in enumerate(seqs) if seq.group is not None]
    grouped = [i for i in grouped if seqs[i].request.forks or seqs[i].request.beams]
    for i in grouped:
        # a beam gets its token from `choices`
        samples[i] = samples[i] and not seqs[i].request.beams
    lengths = tuple(map(add, lengths, samples))
    maybe = [
        i for i, (seq, length) in enumerate(zip(seqs, lengths, strict=True)) if length >= seq.limit
    ]
    if not state.stops.isdisjoint(tokens):  # most steps: no request is checked on its own
        maybe = sorted(
            {
                *maybe,
                *(i for i, token in enumerate(tokens) if token in seqs[i].request.stop_token_ids),
            }
        )
    ended: dict[int, FinishReason] = {
        i: reason
        for i in maybe
        if samples[i] and (reason := seqs[i].finish_reason(lengths[i], tokens[i]))
    }
    if silent := {i for i in ended if not seqs[i].request.max_tokens}:
        samples = [one and i not in silent for i, one in enumerate(samples)]
        lengths = tuple([length - (i in silent) for i, length in enumerate(lengths)])
        ended |= dict.fromkeys(silent, "length")

    pool, seqs = prefix_sharing.publish(state.pool, seqs, counts, computed, hashes, c)
    drafted = [i for i, k in enumerate(drafts) if k]
    if drafted and c.reservation == "none":
        pool, seqs = give_back(pool, seqs, [i for i in drafted if i not in ended], computed, c)
    rows, old = len(seqs), state.running
    forks: tuple[Seq, ...] = ()
    if grouped:
        pool, seqs, forks = branches.fork(pool, seqs, grouped, samples, c)
    active = Running(
        seqs + old.seqs[rows:] + forks,
        lengths + old.lengths[rows:] + tuple([seq.length for seq in forks]),
        computed + old.computed[rows:] + tuple([seq.computed for seq in forks]),
    )
    if ended:
        pool = blocks.release(pool, [block for i in ended for block in reversed(seqs[i].blocks)])
        active = active.pick([i for i in range(len(active.seqs)) if i not in ended])
    beamed: list[Event] = []
    if choices:
        pool, active, beamed = branches.advance(pool, active, choices, step)
    if c.views:
        pool, active = views.drop(c, pool, active)
    forked = branches.arrivals(active, forks, choices) if forks or choices else frozenset()

    ids = tuple([seq.request.request_id for seq in seqs])
    if not all(samples):
        new = [i for i, one in enumerate(samples) if one]
        ids, all_tokens = pick(ids, new), pick(all_tokens, new)
    if drafted:
        ids, all_tokens = flat(ids, all_tokens)
    events: list[Event] = [Preempted(step, i, i in plan.swapped) for i in plan.preempted]
    events += [Resumed(step, i) for i in plan.resumed]
    entered = zip(plan.admitted, plan.known, plan.cached, strict=True)
    events += [Admitted(step, *one) for one in entered if one[0] not in plan.resumed]
    events += branches.forked(step, forks) if forks else []
    if ids:
        events.append(Sampled(step, ids, all_tokens))
    events += beamed
    if drafted:
        names, right = (
            tuple([seqs[i].request_id for i in drafted]),
            tuple([counts[i] - 1 for i in drafted]),
        )
        left = tuple([0 if i in ended else len(seqs[i].blocks) for i in drafted])
        events.append(Verified(step, names, pick(drafts, drafted), right, left))
    for i, reason in ended.items():
        events.append(
            Finished(step, seqs[i].request_id, reason, lengths[i] - seqs[i].request.prompt_len)
        )
    unfinished = _without(state.ids, [seqs[i].request_id for i in ended]) if ended else state.ids
    return state._replace(
        pool=pool, running=active, step=step + 1, forked=forked, ids=unfinished
    ), tuple(events)


def cancel(
    state: SchedulerState, request_id: str, reason: FinishReason = "abort"
) -> tuple[SchedulerState, tuple[Event, ...]]:
    """End a request wherever it is and free its blocks. An unknown or finished id changes nothing.

    Branches are cancelled one by one, but before the fork the first one's id ends all of them.
    Beams end together, by the id of any of them. The engine uses `reason="stop"` for a stop string
    in the text and for a finished beam search.
    """
    if request_id not in state.ids:
        return state, ()
    active, queue = state.running, state.waiting
    named = next(seq for seq in itertools.chain(active.seqs, queue) if request_id in _names(seq))
    if request_id != named.request_id and not named.request.beams:
        return _without_fork(state, named, request_id), (
            Finished(state.step, request_id, reason, 0),
        )
    at = _indices(active.seqs, named)
    waits = _indices(queue, named) if named.request.beams or not at else []
    away, stopped = pick(queue, waits), current(*active.pick(at))
    pool = blocks.release(state.pool, [block for seq in stopped for block in reversed(seq.blocks)])
    host_pool = state.host_pool
    host_pool = host_pool and blocks.release(
        host_pool, [block for seq in away for block in reversed(seq.blocks)]
    )
    ends = [(name, seq.num_output) for seq in (*away, *stopped) for name in _names(seq)]
    state = state._replace(
        pool=pool,
        host_pool=host_pool,
        waiting=_except(queue, waits),
        running=Running(
            _except(active.seqs, at), _except(active.lengths, at), _except(active.computed, at)
        ),
        ids=_without(state.ids, [name for name, _ in ends]),
    )
    return state, tuple([Finished(state.step, name, reason, outputs) for name, outputs in ends])


def _names(seq: Seq) -> tuple[str, ...]:
    """Its own id, and those of branches that have not forked yet."""
    return (seq.request.request_id, *seq.request.forks)


def _indices(line: tuple[Seq, ...], named: Seq) -> list[int]:
    """Its indices in a line; of a beam, those of its siblings too. Requests mostly end in order,
    near the front.
    """
    if named.request.beams:
        return [i for i, seq in enumerate(line) if seq.group == named.group]
    return [line.index(named)] if named in line else []


def _except(line: tuple[Item, ...], at: Sequence[int]) -> tuple[Item, ...]:
    """All items except those at some indices, which ascend."""
    for i in reversed(at):
        line = line[:i] + line[i + 1 :]
    return line


def forget(state: SchedulerState) -> SchedulerState:
    """Forget what cached blocks hold: no block so far is found again. Running sequences keep their
    blocks.
    """
    return state._replace(pool=blocks.forget(state.pool))


def restart(state: SchedulerState) -> SchedulerState:
    """Running sequences return to the front of the queue with nothing computed, and cached content
    is forgotten.

    The engine uses it after a failed step: the device may have written any block that a plan after
    this state could use. Known tokens stay known, and content in host blocks stays there.
    """
    active = sorted(running(state), key=lambda seq: seq.arrival)
    pool = blocks.release(state.pool, [block for seq in active for block in reversed(seq.blocks)])
    back = tuple([seq._replace(computed=0, blocks=()) for seq in active])
    queue, left = (*back, *state.waiting), Running()
    return state._replace(pool=blocks.forget(pool), waiting=queue, running=left, forked=frozenset())


def update(state: SchedulerState, pending: Pending) -> SchedulerState:
    """The weights are others from now on, so no block so far is found again.

    Args:
        pending: "restart": everything that unfinished sequences have computed is computed again,
            also what is in host blocks. "keep": they keep it. What they compute from it is of no
            single version, so it is never published.
    """
    if pending == "restart":
        state = restart(state)
        away = [block for seq in state.waiting for block in reversed(seq.blocks)]
        host_pool = state.host_pool and blocks.release(state.host_pool, away)
        waiting = tuple(
            [seq._replace(computed=0, blocks=()) if seq.blocks else seq for seq in state.waiting]
        )
        return state._replace(host_pool=host_pool, waiting=waiting)
    waiting = tuple([seq._replace(hashes=()) if seq.blocks else seq for seq in state.waiting])
    active = state.running._replace(
        seqs=tuple([seq._replace(hashes=()) for seq in state.running.seqs])
    )
    return forget(state)._replace(waiting=waiting, running=active)


def _decodes_first(active: Running) -> tuple[Running, int, Running]:
    """Reorder, stably, so that sequences with one token to compute come first.

    Returns:
        (sequences with tokens to compute, the number of decodes among them, beams that wait for
        their siblings)
    """
    left = list(map(sub, active.lengths, active.computed))
    num_decodes, waiting_beams = left.count(1), Running()
    if 0 in left:
        waiting_beams = active.pick([i for i, number in enumerate(left) if not number])
        active = active.pick([i for i, number in enumerate(left) if number])
        left = [number for number in left if number]
    if num_decodes < len(left) and left[:num_decodes].count(1) != num_decodes:
        active = active.pick(sorted(range(len(left)), key=lambda i: left[i] != 1))
    return active, num_decodes, waiting_beams


def _without(ids: Map[str, None], gone: Sequence[str]) -> Map[str, None]:
    left = ids.mutate()
    for request_id in gone:
        del left[request_id]
    return left.finish()


def _without_fork(state: SchedulerState, seq: Seq, fork: str) -> SchedulerState:
    """Cancel a branch before its fork."""
    request = seq.request._replace(forks=tuple(name for name in seq.request.forks if name != fork))
    same = seq.arrival
    swap = lambda seqs: tuple(s._replace(request=request) if s.arrival == same else s for s in seqs)  # noqa: E731
    running = state.running._replace(seqs=swap(state.running.seqs))
    return state._replace(
        waiting=swap(state.waiting), running=running, ids=_without(state.ids, [fork])
    )
