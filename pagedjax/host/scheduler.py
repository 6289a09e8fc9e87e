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
   its group, until the free blocks suffice. If only one group runs, it loses one branch at a time.
   One sequence alone always fits, because `submit` rejects a request that could not.
6. The beams of a request advance together: a beam with no token left to compute waits for the
   others. Then `commit` is given, for each beam, the beam that it continues and its new token.
   Beams are admitted and preempted together.
7. A victim returns to the front of the queue: with its content in host blocks if they suffice
   (swapping), else with nothing computed (recomputation). It is admitted again like any other
   sequence.
8. Drafts of decodes take what is left of the budget and of the free blocks (speculative decoding).
9. A request with max_tokens 0 samples nothing and ends when its prompt is computed (pooled hidden
   states).
10. Where queries do not see all blocks, a block that no later query sees is given back, and rule 3
    counts the blocks that a sequence has at most at one time. A chunk is then cut where no block is
    free for its next token.
11. A policy with memory observes what happened before each step. Before rules 1 to 5 it may reject
    waiting requests and evict running ones, as 7 says. After rule 3 it may lower the tokens of
    rows. A sequence that it evicted is not admitted in the same step; other sequences may be.
12. After a plan, the content that has been unused for longest is given up until `empty_blocks`
    blocks are empty.

The rules are here and in these files: admission.py (what `submit` refuses, and 3), preemption.py
(the victims of 5, and 7), prefix_sharing.py (finding blocks), branches.py (4, 6), drafts.py (8),
views.py (10), handover.py (`release` and `adopt`, between two schedulers), state.py (the state and
its invariants), policy_memory.py (11). step_kinds.py and reservation.py are baselines that replace
rules 1 to 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from operator import add, attrgetter, ge, sub
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from immutables import Map

from pagedjax.host import (
    blocks,
    branches,
    checkpoints,
    late,
    policy_memory,
    prefix_sharing,
    step_kinds,
    views,
)
from pagedjax.host.admission import (
    Admission,
    Rejected,
    admit,
    check_request,
    chunk_size,
    final_length,
    with_ids,
)
from pagedjax.host.blocks import BlockPool
from pagedjax.host.drafts import Sample, accepted_columns, cut_at_the_end, flat, give_back, grant
from pagedjax.host.handover import adopt, has_room, release
from pagedjax.host.policies import Policy, shipped, with_memory
from pagedjax.host.preemption import NO_PREEMPTIONS, Pairs, Preemptions, evict, preempt
from pagedjax.host.state import SchedulerConfig, SchedulerState, check, running, with_news
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
    Submitted,
    Verified,
    current_seqs,
    pick,
)
from pagedjax.options.config import Reservation, one_of

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
    "schedule_late",
    "schedule_next",
    "submit",
    "update",
]

LIMIT = attrgetter("limit")
GROUP = attrgetter("group")
NO_CHOICES: Mapping[str, Choice] = MappingProxyType({})
SIZES = (
    "block_size",
    "num_blocks",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "host_blocks",
    "empty_blocks",
)
SIZES_OF_0 = "host_blocks", "empty_blocks"  # which may be 0


def init(config: SchedulerConfig) -> SchedulerState:
    """The state without requests.

    Raises:
        ValueError: a value of the configuration is not allowed.
    """
    for name in SIZES:
        value = getattr(config, name)
        minimum = 0 if name in SIZES_OF_0 else 1
        if value < minimum:
            raise ValueError(f"{name} is {value}; it must be at least {minimum}")
    for name in ("chunked_prefill", "mixed_steps", "late_stops"):
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be True or False")
    check_empty_blocks(config.empty_blocks, config.num_blocks)
    one_of("reservation", config.reservation, get_args(Reservation))
    views.check_config(config)
    checkpoints.check_config(config)
    return SchedulerState(
        config,
        pool=blocks.init(config.num_blocks),
        waiting=(),
        running=Running(),
        step=0,
        arrivals=0,
        host_pool=blocks.init(config.host_blocks) if config.host_blocks else None,
        forked=frozenset(),
        ids=Map(),
    )


def check_empty_blocks(empty_blocks: int, num_blocks: int) -> None:
    """Raises ValueError if no block could have cached content."""
    if empty_blocks >= num_blocks:
        raise ValueError(
            f"empty_blocks is {empty_blocks}, and there are {num_blocks} blocks, so nothing could "
            f"stay in the cache; choose at most {num_blocks - 1}, or more num_blocks"
        )


def submit(state: SchedulerState, request: Request) -> SchedulerState:
    """Appends a request to the queue.

    Raises:
        Rejected: the request can never run (admission.py). The message names the value, the
        limit and the remedy.
    """
    check_request(state, request)
    group = None if request.advances_alone else state.arrivals
    limit = final_length(request, state.config)
    seq = Seq(
        request, state.arrivals, limit, request.prompt_len, hashes=request.hashes, group=group
    )
    if state.news is not None:
        state = with_news(state, (Submitted(state.step, seq),))
    return with_ids(state, request)._replace(waiting=(*state.waiting, seq))


def schedule(
    state: SchedulerState,
    policy: Policy | str,
    offered: Mapping[str, int] = NO_DRAFTS,
    now: float | None = None,
) -> tuple[SchedulerState, Plan]:
    """Decides what the next step computes. The plan has no rows when nothing runs and nothing can.

    Args:
        policy: a `Policy`, or the name of a shipped policy, such as "fcfs".
        offered: by sequence id, how many draft tokens there are for it. Decodes get some of them
            (drafts.py).
        now: seconds since the scheduler began, for a policy that is timed. Others do not see it.

    Raises:
        ValueError: there is no such policy, a function of the policy returns what it must not, or
            a timed policy gets no time.
        OwnError: a function of a user's own policy raised; names the file and the line.
    """
    if isinstance(policy, str):
        policy = shipped(policy)
    beginning = NO_BEGINNING
    if policy.init is not None:
        state, policy, beginning = begin_step(state, policy, now)
    state, copies, preemptions = make_room(state, policy, beginning.evictions)
    chosen = _choose_rows(state, policy, preemptions, beginning.evictions)
    active = chosen.active
    num_decodes = chosen.num_decodes
    counts = chosen.counts
    idle = chosen.idle
    admitted = Running.of(chosen.admission.admitted)
    resumed: tuple[str, ...] = ()
    if admitted.seqs:
        active = active.concat(admitted)
        state, resumed = _leave_queue(state, admitted.seqs)
    config = state.config
    if policy.compose is not None:
        active, num_decodes, counts, idle, config = policy_memory.composed(
            policy, state.memory, active, num_decodes, counts, idle, config
        )
    pool = chosen.admission.pool
    drafts: tuple[int, ...] = ()
    if offered:
        pool, active, counts, drafts = grant(pool, active, num_decodes, counts, offered, config)
    num_rows = len(counts)
    plan = Plan(
        step=state.step,
        seqs=active.seqs[:num_rows],
        lengths=active.lengths[:num_rows],
        starts=active.computed[:num_rows],
        counts=tuple(counts),
        admitted=tuple([seq.request_id for seq in admitted.seqs]),
        known=admitted.lengths,
        cached=admitted.computed,
        copies=copies,
        preempted=preemptions.preempted,
        swapped=preemptions.swapped,
        resumed=resumed,
        swap_out=preemptions.swap_out,
        swap_in=chosen.admission.swap_in,
        num_waiting=len(state.waiting),
        blocks_used=pool.num_blocks - pool.num_free,
        num_blocks=pool.num_blocks,
        drafts=drafts,
        rejected=beginning.rejected,
        now=beginning.now,
    )
    if idle.seqs:
        active = active.concat(idle)
    if state.news is not None:
        state = state._replace(news=tuple(events_of_plan(plan)))
    if config.late_stops:
        state = state._replace(in_flight=(*state.in_flight, plan))
    pool = blocks.keep_empty(pool, config.empty_blocks)
    return state._replace(pool=pool, running=active), plan


def schedule_late(
    state: SchedulerState, policy: Policy | str, now: float | None = None
) -> tuple[SchedulerState, Plan] | None:
    """Decides what the step after the plan in flight computes, before the tokens of that plan are
    known (late.py). The caller commits the older plan next.

    Returns:
        (state, plan); None if the tokens must be known first, or nothing is left to compute: then
        the caller commits the plan in flight, and calls `schedule`.

    Raises:
        ValueError, OwnError: see `schedule`.
    """
    ready = late.advanced(state)
    if ready is None:
        return None
    after, plan = schedule(ready, policy, now=now)
    return (after, plan) if late.is_certain(plan) else None


def schedule_next(
    state: SchedulerState,
    policy: Policy | str,
    offered: Mapping[str, int] = NO_DRAFTS,
    now: float | None = None,
) -> tuple[SchedulerState, Plan] | None:
    """`schedule_late` if a plan is in flight, else `schedule`."""
    if state.in_flight:
        return schedule_late(state, policy, now)
    return schedule(state, policy, offered, now)


class Beginning(NamedTuple):
    """What a policy with memory decides before a step (rule 11).

    rejected: ids of requests that end.
    now: the time that the policy was given.
    """

    rejected: tuple[str, ...] = ()
    evictions: Preemptions = NO_PREEMPTIONS
    now: float | None = None


NO_BEGINNING = Beginning()


def begin_step(
    state: SchedulerState, policy: Policy, now: float | None
) -> tuple[SchedulerState, Policy, Beginning]:
    """Lets a policy with memory observe, reject and evict -> (state, the policy for the rest of the
    step, whose functions need no memory, what it decided).

    Raises:
        ValueError: see `schedule`; or the policy composes steps, and prompts are computed whole.
    """
    if policy.compose is not None and not state.config.chunked_prefill:
        raise ValueError(
            f"the policy {policy.name!r} composes steps, and chunked_prefill is off, so that a "
            "prompt is computed in one step; set chunked_prefill=True"
        )
    state = policy_memory.observed(state, policy, now)
    rejected: list[str] = []
    for request_id in policy_memory.rejected(state, policy):
        state, events = cancel(state, request_id, "rejected")
        rejected += [event.request_id for event in events if isinstance(event, Finished)]
    evicted = policy_memory.evicted(state, policy)
    bound = with_memory(policy, state.memory)
    state, evictions = evict(state, bound, evicted)
    return state, bound, Beginning(tuple(rejected), evictions, now if policy.timed else None)


def make_room(
    state: SchedulerState, policy: Policy, evictions: Preemptions
) -> tuple[SchedulerState, Pairs, Preemptions]:
    """Gives a block to each decode whose last block is full or must be copied. Sequences are
    preempted until the blocks suffice (rule 5).

    Args:
        evictions: the preemptions of this step before.

    Returns:
        (state, (from, to) of the blocks to copy, preemptions)
    """
    preemptions = evictions
    full, shared = rows_without_room(state)
    while len(full) * state.config.groups + len(shared) > state.pool.num_free:
        state, preemptions = preempt(state, policy, preemptions)
        full, shared = rows_without_room(state)
    copies: Pairs = ()
    if full or shared:
        state, copies = give_blocks(state, full, shared)
    return state, copies, preemptions


def rows_without_room(state: SchedulerState) -> tuple[list[int], list[tuple[int, int]]]:
    """The running sequences that need blocks for their next token.

    Returns:
        (indices of the sequences whose next token is past their last block, (index of a sequence,
        entry of its block table) of the blocks that have to be copied, see `branches.shared`)
    """
    active = state.running
    size = state.config.block_size
    groups = state.config.groups
    at_boundary = prefix_sharing.rows_at_boundary(active.computed, size)
    past_last_block = [
        i for i in at_boundary if active.computed[i] * groups == len(active.seqs[i].blocks) * size
    ]
    # a waiting beam writes no token
    full = [i for i in past_last_block if active.computed[i] < active.lengths[i]]
    if not state.forked:
        return full, []
    return full, branches.shared(state.pool, active, state.forked, state.config)


def give_blocks(
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
    seq = active.seqs[i]
    # `_replace` would take twice as long, and a decode needs a record whenever a block is full
    return Seq(
        seq.request,
        seq.arrival,
        seq.limit,
        active.lengths[i],
        active.computed[i],
        table,
        seq.hashes,
        seq.group,
        seq.junction,
    )


class ChosenRows(NamedTuple):
    """What a step computes, before drafts.

    active: running sequences of the step, decodes first.
    counts: tokens to compute of these, and then of the admitted sequences.
    idle: running sequences that compute nothing.
    """

    active: Running
    num_decodes: int
    counts: list[int]
    admission: Admission
    idle: Running


def _choose_rows(
    state: SchedulerState, policy: Policy, preemptions: Preemptions, evictions: Preemptions
) -> ChosenRows:
    """Chooses the running sequences that the step computes, and admits others.

    Args:
        preemptions: those of the step. If more sequences stopped than the policy evicted, none is
            admitted (rule 3).
        evictions: those of the policy (rule 11). These sequences are not offered.
    """
    evicted = evictions.preempted
    admits = len(preemptions.preempted) == len(evicted)
    for attempt in attempts(state):
        waiting = state.waiting if admits and attempt.admits else ()
        if evicted:
            waiting = tuple([seq for seq in waiting if seq.request_id not in evicted])
        active, counts, admission = _token_counts(state, policy, attempt, waiting)
        if counts:
            break
    return ChosenRows(active, attempt.num_decodes, counts, admission, attempt.idle)


class Attempt(NamedTuple):
    """Sequences of which a step may compute tokens. If the step would compute nothing of them, the
    next attempt is tried (step_kinds.py).
    """

    active: Running  # decodes first
    num_decodes: int
    idle: Running  # running sequences that compute nothing
    admits: bool


def attempts(state: SchedulerState) -> tuple[Attempt, ...]:
    """The attempts of a step in their order; one, unless steps do not mix decodes and prompts."""
    active, num_decodes, waiting_beams = _decodes_first(state.running)
    if state.config.mixed_steps:
        return (Attempt(active, num_decodes, waiting_beams, admits=True),)
    trials = []
    for kind in step_kinds.kinds(state.config, state.step):
        chosen, decodes, skipped = step_kinds.split(active, num_decodes, kind)
        idle = skipped.concat(waiting_beams) if skipped.seqs else waiting_beams
        trials.append(Attempt(chosen, decodes, idle, admits=kind != "decodes"))
    return tuple(trials)


def _leave_queue(
    state: SchedulerState, admitted: Sequence[Seq]
) -> tuple[SchedulerState, tuple[str, ...]]:
    """Takes admitted sequences out of the queue, and frees their host blocks -> (state, ids of the
    sequences whose content comes back from the host).
    """
    arrivals = {seq.arrival for seq in admitted}
    waiting = tuple([seq for seq in state.waiting if seq.arrival not in arrivals])
    records = {seq.arrival: seq for seq in state.waiting if seq.blocks}
    resumed = [records[seq.arrival] for seq in admitted if seq.arrival in records]
    state = state._replace(waiting=waiting, host_pool=_without_host_blocks(state, resumed))
    return state, tuple([seq.request_id for seq in resumed])


def _release_blocks(pool: BlockPool, seqs: Sequence[Seq]) -> BlockPool:
    """Frees the blocks of some sequences, the last block of each first."""
    return blocks.release(pool, [block for seq in seqs for block in reversed(seq.blocks)])


def _without_host_blocks(state: SchedulerState, seqs: Sequence[Seq]) -> BlockPool | None:
    """The swap space without the blocks of some waiting sequences; None if there is none."""
    if state.host_pool is None:
        return None
    return _release_blocks(state.host_pool, seqs)


def _token_counts(
    state: SchedulerState, policy: Policy, attempt: Attempt, waiting: tuple[Seq, ...]
) -> tuple[Running, list[int], Admission]:
    """How many tokens the step computes of each running sequence, decodes first, and then of each
    admitted sequence -> (running sequences with their blocks, tokens, admission).

    Args:
        waiting: the sequences that may be admitted.
    """
    config = state.config
    active, counts, admission = running_counts(state, attempt)
    if waiting and admission.budget and admission.free_rows > 0:
        composes = policy.compose is not None
        admission = begin_admission(
            config, attempt.num_decodes, active, counts, admission, composes=composes
        )
        budget = admission.budget
        admission = admit(admission, policy, waiting, state.running, config)
        for seq in admission.admitted:
            if budget:  # beams enter together, even if tokens suffice only for the first of them
                counts.append(chunk_size(seq, budget, config))
                budget -= counts[-1]
    return active, counts, admission


def running_counts(state: SchedulerState, attempt: Attempt) -> tuple[Running, list[int], Admission]:
    """The tokens of each running sequence until the budget is used -> (running sequences with their
    blocks, tokens, what is left for an admission).
    """
    config = state.config
    pool = state.pool
    active = attempt.active
    num_decodes = attempt.num_decodes
    counts = [1] * num_decodes
    budget = config.max_num_batched_tokens - num_decodes
    if config.views:
        pool, active, chunks = views.grow(config, pool, active, num_decodes, budget)
        counts += chunks
        budget -= sum(chunks)
    else:
        for length, computed in zip(
            active.lengths[num_decodes:], active.computed[num_decodes:], strict=True
        ):
            if budget == 0:
                break
            counts.append(min(length - computed, budget))
            budget -= counts[-1]
    free_rows = config.max_running - len(state.running.seqs)
    if state.waiting and free_rows > 0:  # then branches that have not forked count, too
        free_rows = config.max_running - sum([seq.num_rows for seq in state.running.seqs])
    admission = Admission(pool, filling_now={}, budget=budget, free_rows=free_rows, swapped_in={})
    return active, counts, admission


def begin_admission(
    config: SchedulerConfig,
    num_decodes: int,
    active: Running,
    counts: Sequence[int],
    admission: Admission,
    *,
    composes: bool,
) -> Admission:
    """An admission that knows the blocks which the running sequences fill in this step, and those
    that they still need.

    Args:
        composes: whether the policy may give a row fewer tokens than `counts`.
    """
    filling_now = {}
    shares_filling = config.shares_filling and not composes
    if shares_filling:
        filling_now = prefix_sharing.filling(active, num_decodes, counts, config)
    promised = views.promised_blocks(config, active) if config.views else 0
    return admission._replace(
        filling_now=filling_now, promised=promised, shares_filling=shares_filling
    )


def commit(
    state: SchedulerState,
    plan: Plan,
    sampled: Sequence[Sample],
    hashes: Mapping[str, tuple[str, ...]] = NO_HASHES,
    choices: Mapping[str, Choice] = NO_CHOICES,
) -> tuple[SchedulerState, tuple[Event, ...]]:
    """Add the outcome of a step to the state.

    Args:
        sampled: one token id for each row of the plan. It is ignored for a row that does not reach
            the end of its known tokens, and for a beam. For a row with drafts, the accepted drafts
            and one more token, which are cut where the sequence ends.
        hashes: by request id, the hashes of the blocks that this step filled and whose hashes the
            sequence does not have yet: blocks of generated tokens, which only the engine knows.
            Without the hashes, these blocks are not shared.
        choices: by the id of the first beam, how the beams of a request continue that have no token
            left to compute.

    A sequence that was cancelled after `schedule` gets no token: its blocks are already free.
    Events of the plan name it all the same (Admitted, Preempted, Resumed).

    Raises:
        ValueError: the plan is not the one that `schedule` returned with this state, or was
            committed already; or the number of samples is not the number of rows.
    """
    step = state.in_flight[0].step if state.in_flight else state.step
    if plan.step != step:
        raise ValueError(
            f"the plan is of step {plan.step} and the state is at step {step}; commit a plan "
            "once, to the state that schedule returned with it"
        )
    if len(state.in_flight) > 1:
        return _commit_late(state, plan, sampled, hashes)
    rows = drop_cancelled(accept_drafts(plan, sampled), state.running)
    grouped = _grouped_rows(rows)
    rows = add_tokens(rows, grouped)
    rows, ended = end_rows(rows, state.stops)

    pool, rows, forks = settle_blocks(state, rows, ended, grouped, hashes)
    active = advance_rows(state.running, rows, forks)
    if ended:
        pool = _without_ended(pool, rows, ended, state.config)
        active = active.pick([i for i in range(len(active.seqs)) if i not in ended])
    beamed: list[Event] = []
    if choices:
        pool, active, beamed = branches.advance(pool, active, choices, plan.step, state.config)
    if state.config.views:
        pool, active = views.drop(state.config, pool, active)
    forked = branches.arrivals(active, forks, choices) if forks or choices else frozenset()
    unfinished_ids = state.ids
    if ended:
        unfinished_ids = _without(state.ids, [rows.seqs[i].request_id for i in ended])
    next_state = state._replace(
        pool=pool,
        running=active,
        step=plan.step + 1,
        forked=forked,
        ids=unfinished_ids,
        in_flight=(),
    )
    events = events_of_plan(plan)
    num_planned = len(events)
    if forks:
        events += branches.fork_events(plan.step, forks)
    events += _sampled(plan.step, rows)
    events += beamed
    events += _verified(plan.step, rows, ended)
    events += _finished(plan.step, rows, ended)
    if next_state.news is not None:
        next_state = with_news(next_state, events[num_planned:])
    return next_state, tuple(events)


def _commit_late(
    state: SchedulerState,
    plan: Plan,
    sampled: Sequence[Sample],
    hashes: Mapping[str, tuple[str, ...]],
) -> tuple[SchedulerState, tuple[Event, ...]]:
    """`commit` of the older one of two plans in flight. The running sequences have the lengths that
    they got in it already; what is left are its tokens, the content of blocks, and the ends.
    """
    columns = accept_drafts(plan, sampled)
    records = late.records_of(state, plan)
    keep = [i for i, seq in enumerate(records) if seq is not None]
    rows = columns._replace(
        seqs=tuple([seq for seq in records if seq is not None]),
        lengths=pick(columns.lengths, keep),
        computed=pick(columns.computed, keep),
        counts=pick(columns.counts, keep),
        tokens=pick(columns.tokens, keep),
        samples=pick(columns.samples, keep),
    )
    rows = add_tokens(rows, ())
    rows, ended = end_rows(rows, state.stops)
    pool, rows, _ = settle_blocks(state, rows, ended, (), hashes)
    if ended:
        pool = _without_ended(pool, rows, ended, state.config)
    active = late.settled(state.running, rows.seqs, {rows.seqs[i].arrival for i in ended})
    if state.config.views:
        pool, active = views.drop(state.config, pool, active)
    next_state = state._replace(
        pool=pool,
        running=active,
        forked=frozenset(),
        ids=_without(state.ids, [rows.seqs[i].request_id for i in ended]),
        in_flight=state.in_flight[1:],
        leaving=(),
    )
    ends = [*_sampled(plan.step, rows), *_finished(plan.step, rows, ended)]
    return with_news(next_state, ends), (*events_of_plan(plan), *ends)


def _without_ended(
    pool: BlockPool, rows: Rows, ended: Iterable[int], config: SchedulerConfig
) -> BlockPool:
    """The pool after rows ended: their blocks are free, and later prompts can find the last ones."""
    texts = [(rows.seqs[i], rows.computed[i]) for i in ended]
    pool = prefix_sharing.publish_ends(pool, texts, config)
    return _release_blocks(pool, [rows.seqs[i] for i in ended])


def _grouped_rows(rows: Rows) -> list[int]:
    """The rows of sequences that will fork: their groups have not done so yet."""
    groups = list(map(GROUP, rows.seqs))
    if groups.count(None) == len(groups):
        return []
    return branches.unforked(rows.seqs, [i for i, group in enumerate(groups) if group is not None])


class Rows(NamedTuple):
    """The computed rows of a step, in columns, while `commit` goes through its stages.

    lengths: known tokens of each row; after `add_tokens` with the new token.
    computed: tokens of each row whose keys and values are in the cache.
    counts: tokens that the step computed of each row, without rejected drafts.
    tokens: the last token that each row sampled.
    samples: all that each row sampled.
    drafts: of each row, how many it had; () if no row had one.
    sampling: whether the tokens of each row become known.
    """

    seqs: tuple[Seq, ...]
    lengths: tuple[int, ...]
    computed: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: tuple[int, ...]
    samples: tuple[Sample, ...]
    drafts: tuple[int, ...]
    sampling: Sequence[bool] = ()


def accept_drafts(plan: Plan, sampled: Sequence[Sample]) -> Rows:
    """The rows of a plan, where accepted drafts are known tokens already (rule 8).

    Raises:
        ValueError: the number of samples is not the number of rows.
    """
    if len(sampled) != len(plan.seqs):
        raise ValueError(
            f"{len(sampled)} sampled tokens for {len(plan.seqs)} rows; there must be one for each"
        )
    if plan.drafts:
        samples = cut_at_the_end(plan, sampled)
        lengths, counts, tokens = accepted_columns(plan, samples)
    else:
        samples = tuple(sampled)
        lengths = plan.lengths
        counts = plan.counts
        tokens: Any = samples  # each is one token
    computed = tuple(map(add, plan.starts, counts))
    return Rows(plan.seqs, lengths, computed, counts, tokens, samples, plan.drafts)


def drop_cancelled(rows: Rows, active: Running) -> Rows:
    """The rows of the sequences that still run, with their present records.

    A sequence may have been cancelled since `schedule`, and so may a branch before its fork.
    """
    if active.seqs[: len(rows.seqs)] == rows.seqs:
        return rows
    alive = {seq.arrival: seq for seq in active.seqs}
    keep = [i for i, seq in enumerate(rows.seqs) if seq.arrival in alive]
    return Rows(
        seqs=tuple([alive[rows.seqs[i].arrival] for i in keep]),
        lengths=pick(rows.lengths, keep),
        computed=pick(rows.computed, keep),
        counts=pick(rows.counts, keep),
        tokens=pick(rows.tokens, keep),
        samples=pick(rows.samples, keep),
        drafts=pick(rows.drafts, keep) if rows.drafts else (),
    )


def add_tokens(rows: Rows, grouped: Sequence[int]) -> Rows:
    """Each row that has computed all its known tokens gets one more.

    Args:
        grouped: rows of a request with branches. A beam gets its token from the `choices` of
            `commit` instead.
    """
    if rows.computed == rows.lengths:  # as in most steps: all rows sample
        sampling = [True] * len(rows.seqs)
    else:
        pairs = zip(rows.computed, rows.lengths, strict=True)
        sampling = [computed == length for computed, length in pairs]
    for i in grouped:
        if rows.seqs[i].request.beams:
            sampling[i] = False
    lengths = tuple(map(add, rows.lengths, sampling))
    # `_replace` would cost a fiftieth of the commit
    return Rows(
        rows.seqs,
        lengths,
        rows.computed,
        rows.counts,
        rows.tokens,
        rows.samples,
        rows.drafts,
        sampling,
    )


def end_rows(rows: Rows, stops: frozenset[int]) -> tuple[Rows, dict[int, FinishReason]]:
    """The rows that end, and why, by the index of the row.

    Rows of requests with max_tokens 0 end as well, and their token does not become known (rule 9).

    Args:
        stops: stop tokens of all requests. In most steps none of them is sampled, and no request is
            checked on its own.
    """
    at_limit = map(ge, rows.lengths, map(LIMIT, rows.seqs))
    candidates = list(itertools.compress(range(len(rows.seqs)), at_limit))
    if not stops.isdisjoint(rows.tokens):
        seqs_and_tokens = enumerate(zip(rows.seqs, rows.tokens, strict=True))
        stopped = [i for i, (seq, token) in seqs_and_tokens if token in seq.request.stop_token_ids]
        candidates = sorted({*candidates, *stopped})
    ended: dict[int, FinishReason] = {}
    for i in candidates:
        if rows.sampling[i]:
            reason = rows.seqs[i].finish_reason(rows.lengths[i], rows.tokens[i])
            if reason:
                ended[i] = reason
    without_output = {i for i in ended if not rows.seqs[i].request.max_tokens}
    if without_output:
        ended |= dict.fromkeys(without_output, "length")
        lengths = list(rows.lengths)
        sampling = list(rows.sampling)
        for i in without_output:
            lengths[i] -= 1
            sampling[i] = False
        rows = rows._replace(lengths=tuple(lengths), sampling=sampling)
    return rows, ended


def settle_blocks(
    state: SchedulerState,
    rows: Rows,
    ended: Mapping[int, FinishReason],
    grouped: Sequence[int],
    hashes: Mapping[str, tuple[str, ...]],
) -> tuple[BlockPool, Rows, tuple[Seq, ...]]:
    """Publishes the blocks that the rows filled, gives back the blocks of rejected drafts, and
    shares the blocks of computed prompts with new branches -> (pool, rows with their blocks, new
    branches).

    Args:
        grouped: what `branches.unforked` returned.
        hashes: the argument of `commit`.
    """
    config = state.config
    pool, seqs = prefix_sharing.publish(
        state.pool, rows.seqs, rows.counts, rows.computed, hashes, config
    )
    unfinished = [i for i in _with_drafts(rows) if i not in ended]
    if unfinished and config.reservation == "none":
        pool, seqs = give_back(pool, seqs, unfinished, rows.computed, config)
    forks: tuple[Seq, ...] = ()
    if grouped:
        pool, seqs, forks = branches.fork(pool, seqs, grouped, rows.sampling, config)
    if seqs is not rows.seqs:
        rows = rows._replace(seqs=seqs)
    return pool, rows, forks


def _with_drafts(rows: Rows) -> list[int]:
    """The indices of the rows that had drafts."""
    return [i for i, k in enumerate(rows.drafts) if k]


def advance_rows(active: Running, rows: Rows, forks: tuple[Seq, ...]) -> Running:
    """The running sequences after a step: first its rows, with their new columns, then sequences
    that it did not compute, then new branches.
    """
    count = len(rows.seqs)
    return Running(
        rows.seqs + active.seqs[count:] + forks,
        rows.lengths + active.lengths[count:] + tuple([seq.length for seq in forks]),
        rows.computed + active.computed[count:] + tuple([seq.computed for seq in forks]),
    )


def events_of_plan(plan: Plan) -> list[Event]:
    """Who was rejected, who stopped running and who began, as `schedule` decided."""
    events: list[Event] = [
        Finished(plan.step, request_id, "rejected", 0) for request_id in plan.rejected
    ]
    events += [
        Preempted(plan.step, request_id, request_id in plan.swapped)
        for request_id in plan.preempted
    ]
    events += [Resumed(plan.step, request_id) for request_id in plan.resumed]
    for request_id, num_tokens, num_cached in zip(
        plan.admitted, plan.known, plan.cached, strict=True
    ):
        if request_id not in plan.resumed:
            events.append(Admitted(plan.step, request_id, num_tokens, num_cached))
    return events


def _sampled(step: int, rows: Rows) -> list[Event]:
    """The event of the new tokens; none if no row samples."""
    ids = tuple([seq.request.request_id for seq in rows.seqs])
    samples: tuple[Any, ...] = rows.samples
    if not all(rows.sampling):
        ids = tuple(itertools.compress(ids, rows.sampling))
        samples = tuple(itertools.compress(samples, rows.sampling))
    if any(rows.drafts):
        ids, samples = flat(ids, samples)
    return [Sampled(step, ids, samples)] if ids else []


def _verified(step: int, rows: Rows, ended: Mapping[int, FinishReason]) -> list[Event]:
    """The event of the rows with drafts; none if no row had one."""
    drafted = _with_drafts(rows)
    if not drafted:
        return []
    num_blocks = [0 if i in ended else len(rows.seqs[i].blocks) for i in drafted]
    return [
        Verified(
            step,
            request_ids=tuple([rows.seqs[i].request_id for i in drafted]),
            drafts=pick(rows.drafts, drafted),
            accepted=tuple([rows.counts[i] - 1 for i in drafted]),
            num_blocks=tuple(num_blocks),
        )
    ]


def _finished(step: int, rows: Rows, ended: Mapping[int, FinishReason]) -> list[Event]:
    events: list[Event] = []
    for i, reason in ended.items():
        request = rows.seqs[i].request
        num_output = rows.lengths[i] - request.prompt_len
        events.append(Finished(step, request.request_id, reason, num_output))
    return events


def cancel(
    state: SchedulerState, request_id: str, reason: FinishReason = "abort"
) -> tuple[SchedulerState, tuple[Event, ...]]:
    """Ends a request that waits or runs, and frees its blocks. An unknown or finished id changes
    nothing.

    Branches are cancelled one by one. Before the fork, the id of the first branch ends all of them.
    Beams end together, by the id of any of them. The engine uses `reason="stop"` for a stop string
    in the text and for a finished beam search.
    """
    if request_id not in state.ids:
        return state, ()
    active = state.running
    queue = state.waiting
    unfinished = itertools.chain(active.seqs, queue, state.leaving)
    seq = next(seq for seq in unfinished if request_id in seq.request.names)
    if request_id != seq.request_id and not seq.request.beams:
        finished = Finished(state.step, request_id, reason, 0)
        state = with_news(state, (finished,))
        return _without_fork(state, seq, request_id), (finished,)
    rows = _indices(active.seqs, seq)
    places = _indices(queue, seq) if seq.request.beams or not rows else []
    leaving = tuple([left for left in state.leaving if left is not seq])
    stopped = current_seqs(*active.pick(rows))
    if len(leaving) < len(state.leaving):
        stopped = (*stopped, seq)
    dequeued = pick(queue, places)
    events = [
        Finished(state.step, name, reason, ended.num_output - late.unknown_tokens(state, ended))
        for ended in (*dequeued, *stopped)
        for name in ended.request.names
    ]
    texts = [(seq, seq.computed) for seq in stopped]
    pool = prefix_sharing.publish_ends(state.pool, texts, state.config)
    state = state._replace(
        pool=_release_blocks(pool, stopped),
        host_pool=_without_host_blocks(state, dequeued),
        waiting=_except(queue, places),
        running=Running(
            _except(active.seqs, rows),
            _except(active.lengths, rows),
            _except(active.computed, rows),
        ),
        ids=_without(state.ids, [event.request_id for event in events]),
        leaving=leaving,
    )
    return with_news(state, events), tuple(events)


def _indices(seqs: tuple[Seq, ...], seq: Seq) -> list[int]:
    """The index of `seq` in `seqs`, if it is there; for a beam, also the indices of its siblings.

    Requests mostly end in order, near the front.
    """
    if seq.request.beams:
        return [i for i, sibling in enumerate(seqs) if sibling.group == seq.group]
    return [seqs.index(seq)] if seq in seqs else []


def _except(column: tuple[Item, ...], indices: Sequence[int]) -> tuple[Item, ...]:
    """All items except those at `indices`, which ascend."""
    for i in reversed(indices):
        column = column[:i] + column[i + 1 :]
    return column


def forget(state: SchedulerState) -> SchedulerState:
    """Forgets what cached blocks hold: no block that was published so far is found again. Running
    sequences keep their blocks.
    """
    return state._replace(pool=blocks.forget(state.pool))


def restart(state: SchedulerState) -> SchedulerState:
    """Returns running sequences to the front of the queue with nothing computed, and forgets cached
    content.

    The engine uses it after a failed step: the device may have written any block that a plan after
    this state could use. Known tokens stay known, and content in host blocks stays there.
    """
    late.check_known(state)
    active = sorted(running(state), key=lambda seq: seq.arrival)
    state = with_news(state, [Preempted(state.step, seq.request_id, False) for seq in active])
    return state._replace(
        pool=blocks.forget(_release_blocks(state.pool, active)),
        waiting=(*map(_emptied, active), *state.waiting),
        running=Running(),
        forked=frozenset(),
        in_flight=(),
    )


def _emptied(seq: Seq) -> Seq:
    """A sequence with nothing computed."""
    return seq._replace(computed=0, blocks=())


def update(state: SchedulerState, pending: Pending) -> SchedulerState:
    """Forgets what cached blocks hold, because the weights are others from now on.

    Args:
        pending: "restart": everything that unfinished sequences have computed is computed again,
            also what is in host blocks. "keep": they keep it. What they compute from it mixes
            versions of the weights, so it is never published.
    """
    late.check_known(state)
    if pending == "restart":
        state = restart(state)
        host_pool = _without_host_blocks(state, state.waiting)
        waiting = tuple([_emptied(seq) if seq.blocks else seq for seq in state.waiting])
        return state._replace(host_pool=host_pool, waiting=waiting)
    waiting = tuple([seq._replace(hashes=()) if seq.blocks else seq for seq in state.waiting])
    seqs = tuple([seq._replace(hashes=()) for seq in state.running.seqs])
    return forget(state)._replace(waiting=waiting, running=state.running._replace(seqs=seqs))


def _decodes_first(active: Running) -> tuple[Running, int, Running]:
    """Reorders the sequences, stably, so that those with one token to compute come first.

    Returns:
        (sequences with tokens to compute, the number of decodes among them, beams that wait for
        their siblings)
    """
    to_compute = list(map(sub, active.lengths, active.computed))
    num_decodes = to_compute.count(1)
    waiting_beams = Running()
    if 0 in to_compute:
        waiting_beams = active.pick([i for i, count in enumerate(to_compute) if not count])
        active = active.pick([i for i, count in enumerate(to_compute) if count])
        to_compute = [count for count in to_compute if count]
    if num_decodes < len(to_compute) and to_compute[:num_decodes].count(1) != num_decodes:
        active = active.pick(sorted(range(len(to_compute)), key=lambda i: to_compute[i] != 1))
    return active, num_decodes, waiting_beams


def _without(ids: Map[str, None], removed: Sequence[str]) -> Map[str, None]:
    """The ids of unfinished sequences without some of them."""
    unfinished = ids.mutate()
    for request_id in removed:
        del unfinished[request_id]
    return unfinished.finish()


def _without_fork(state: SchedulerState, leader: Seq, fork: str) -> SchedulerState:
    """The state without a branch that has not forked yet from its leader."""
    forks = tuple(name for name in leader.request.forks if name != fork)
    request = leader.request._replace(forks=forks)

    def with_request(seqs: tuple[Seq, ...]) -> tuple[Seq, ...]:
        return tuple(
            [
                seq._replace(request=request) if seq.arrival == leader.arrival else seq
                for seq in seqs
            ]
        )

    return state._replace(
        waiting=with_request(state.waiting),
        running=state.running._replace(seqs=with_request(state.running.seqs)),
        ids=_without(state.ids, [fork]),
    )
