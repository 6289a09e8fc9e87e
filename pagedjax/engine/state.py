"""`EngineState`: everything that an engine's steps change, as one value, and its transitions.

    init(runtime) -> state
    submit(runtime, state, request) -> state       or ValueError, and the state before stays valid
    step(runtime, state) -> (state, result)        schedule -> pack -> run -> commit
    cancel(state, sequence_id) -> (state, events)
    forget(state) -> state                         the prefix cache
    update(state, pending) -> state                after which the runtime has other parameters
    roll_back(state) -> state                      after a step that failed

A state is used once: the next step donates its cache and writes tokens into its arrays. So an
engine holds one state and replaces it, and a new state is assigned whole or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from immutables import Map

from pagedjax.device.batch import OneTransfer, Shapes, StepShape
from pagedjax.device.cache import KVCache
from pagedjax.device.host_swap import HostCache, host_cache
from pagedjax.device.side_outputs import NOTHING, SideOutputs
from pagedjax.engine import (
    adapters,
    compilations,
    drafting,
    lookahead,
    readers,
    requests,
    token_masks,
)
from pagedjax.engine.background import BackgroundPrograms
from pagedjax.engine.drafting import Drafting
from pagedjax.engine.lookahead import Foresight, Lookahead, Run, SentStep
from pagedjax.engine.outcome import NewRequest, Outcome
from pagedjax.engine.pack import Sources, pack, pack_drafts
from pagedjax.engine.readers import Readers
from pagedjax.engine.repack import Packed, pack_next, packed
from pagedjax.engine.requests import EngineRequest, Sequences
from pagedjax.engine.runtime import COPIES, Runtime, padded_pairs
from pagedjax.engine.taps import StepTaps, TapsBegin
from pagedjax.host import decode_spans, late, scheduler
from pagedjax.host.drafts import Sample
from pagedjax.host.event_log import (
    Cancel,
    Commit,
    Entry,
    Forget,
    Restart,
    Schedule,
    Submit,
    Update,
)
from pagedjax.host.policies import Policy
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import (
    NO_DRAFTS,
    Event,
    Finished,
    FinishReason,
    Pending,
    Plan,
    Running,
    StepResult,
    pick,
)
from pagedjax.options.params import SamplingParams

# what a recorder writes, or a `TapWriter`
LogEntry = Entry | TapsBegin | StepTaps


class InFlight(NamedTuple):
    """A real plan that the device computes.

    rows: of each row of the plan, its row in the sent step. A predicted step may have further rows.
    """

    plan: Plan
    sent: SentStep
    rows: Sequence[int]


class EngineState(NamedTuple):
    """scheduler: the scheduler's state: queues, block tables, counts.
    sequences: tokens and sampling of every unfinished sequence.
    ahead: predicted steps on the device.
    in_flight: with `late_stops`, the plan on the device that is not committed yet.
    cache: keys and values on the device; None until the next step allocates it.
    drafting: what is known of drafts; None without speculation.
    host_cache: the swap space, in host memory; None without swapping.
    result: the result of a step whose caller did not receive it, because Ctrl-C came in between;
        the next call returns it.
    log: transitions that no recorder has written yet.
    readers: what readers of outcomes know of unfinished sequences (readers.py): beam searches,
        pooled prompts, taps, matchers.
    params_version: how often the parameters were updated.
    began: seconds of time.perf_counter when the scheduler began: the zero of a timed policy.
    packed: the last step of decodes alone that was sent, from which the next one is packed.
    """

    scheduler: SchedulerState
    sequences: Sequences
    ahead: Lookahead
    cache: KVCache | None
    host_cache: HostCache | None
    drafting: Drafting | None
    result: StepResult | None = None
    log: tuple[LogEntry, ...] = ()
    readers: Readers = Map()
    params_version: int = 0
    began: float = 0.0
    in_flight: InFlight | None = None
    packed: Packed | None = None

    @property
    def has_work(self) -> bool:
        scheduled = self.scheduler
        return bool(
            scheduled.waiting or scheduled.running.seqs or scheduled.in_flight or self.result
        )

    @property
    def unfinished(self) -> int:
        """Sequences that wait or run."""
        return len(self.scheduler.waiting) + len(self.scheduler.running.seqs)


def init(runtime: Runtime, cache: KVCache | None = None) -> EngineState:
    """The state without requests, with an empty cache."""
    config = runtime.scheduler_config
    pages = runtime.new_cache() if cache is None else cache
    options = runtime.config.speculative
    return EngineState(
        scheduler=scheduler.init(config),
        sequences=Map(),
        ahead=Lookahead(),
        cache=pages,
        host_cache=host_cache(pages, config.host_blocks) if config.host_blocks else None,
        drafting=drafting.start(runtime.drafter, options) if runtime.drafter and options else None,
        began=time.perf_counter(),
    )


def submit(runtime: Runtime, state: EngineState, request: EngineRequest) -> EngineState:
    """Queue a request.

    Raises:
        ValueError: the request can never run (see `scheduler.submit` and `requests.prepare`), a
        reader refuses it, or its adapter is not loaded.
    """
    old_state = state.scheduler
    params = request.params
    adapter = None
    if request.adapter is not None:
        adapter = adapters.of_name(runtime.adapters, request.adapter)
    prepared = requests.prepare(old_state, request, runtime.request_rules, adapter=adapter)
    new_state = scheduler.submit(old_state, prepared.request)
    log: tuple[LogEntry, ...] = (Submit(prepared.request, request.prompt_token_ids),)
    entries = readers.start(state.readers, NewRequest(runtime, request, prepared))
    if isinstance(params, SamplingParams) and params.taps:
        log += (TapsBegin(request.names, len(request.prompt_token_ids)),)
    return state._replace(
        scheduler=new_state,
        sequences=state.sequences.update(prepared.sequences),
        readers=entries,
        log=(*state.log, *log),
    )


def cancel(
    state: EngineState, sequence_id: str, reason: FinishReason = "abort"
) -> tuple[EngineState, tuple[Event, ...]]:
    """End a sequence at any time (`scheduler.cancel`). An unknown id changes nothing."""
    old_state = state.scheduler
    if sequence_id not in old_state.ids:
        return state, ()
    new_state, events = scheduler.cancel(old_state, sequence_id, reason)
    state = state._replace(
        scheduler=new_state,
        log=(*state.log, Cancel(sequence_id, reason, events)),
    )
    return with_events(state, events, old_state.running), events


def with_events(
    state: EngineState, events: Sequence[Event], before: Running, spare: int = 0
) -> EngineState:
    """Append the new tokens of events, and drop the sequences that ended.

    Args:
        before: the running sequences before the transition that gave the events.
        spare: see `requests.appended`.
    """
    ended = {event.request_id: event for event in events if isinstance(event, Finished)}
    if not ended:
        sequences = requests.apply_events(state.sequences, events, before, spare)
        return state._replace(sequences=sequences)
    tokens = [event for event in events if not isinstance(event, Finished)]
    sequences = requests.apply_events(state.sequences, tokens, before, spare)
    if state.drafting:  # the drafter learns from the last tokens of ended sequences, too
        drafting.show_ended_outputs(state.drafting, ended, sequences)
    sequences = requests.apply_events(sequences, tuple(ended.values()), before)
    return state._replace(sequences=sequences, readers=readers.without(state.readers, ended))


def forget(state: EngineState) -> EngineState:
    """Forget what cached blocks hold. Unfinished requests continue."""
    return state._replace(scheduler=scheduler.forget(state.scheduler), log=(*state.log, Forget()))


def update(state: EngineState, pending: Pending) -> EngineState:
    """The next step has other parameters: nothing so far is found again, and predicted steps are
    dropped.

    Args:
        pending: see `scheduler.update`. With "keep", what a sequence computes from now on depends
            on old content too, so its blocks have no hashes any more.
    """
    old_state = state.scheduler
    sequences = state.sequences
    entries = state.readers
    version = state.params_version + 1
    if pending == "restart":
        entries = readers.restarted(entries)
    else:
        mixed = [*old_state.running.seqs, *(seq for seq in old_state.waiting if seq.blocks)]
        names = [name for seq in mixed for name in seq.request.names]
        sequences = sequences.update(
            {name: requests.without_hashes(sequences[name]) for name in names}
        )
    return state._replace(
        scheduler=scheduler.update(old_state, pending),
        sequences=sequences,
        readers=entries,
        ahead=Lookahead(),
        params_version=version,
        log=(*state.log, Update(version, pending)),
    )


def roll_back(state: EngineState) -> EngineState:
    """After a failed step: running requests return to the queue, and the cache is reset.

    The state is the one before the step. The device may have written any block since then, so no
    content is trusted, and the next step allocates a new cache. Known tokens stay known.
    """
    for array in jax.tree.leaves(state.cache):
        if not array.is_deleted():
            # its memory is needed for the new cache, and a traceback may still refer to it
            array.delete()
    return state._replace(
        scheduler=scheduler.restart(state.scheduler),
        readers=readers.restarted(state.readers),
        ahead=Lookahead(),
        in_flight=None,
        cache=None,
        log=(*state.log, Restart()),
    )


# a step -------------------------------------------------------------------------------------------


class ScheduledStep(NamedTuple):
    """What a step will compute. Nothing was sent to the device yet.

    scheduler: the scheduler's state after `schedule`.
    drafts: how many drafts were wanted for each decode.
    offered: how many drafts there are, by sequence id.
    started: seconds of time.perf_counter.
    compiled: how many programs this process had compiled by then; a policy may compile some.
    is_predicted: whether the plan is known to be that of the next predicted step.
    """

    scheduler: SchedulerState
    plan: Plan
    drafts: int
    offered: Mapping[str, int]
    started: float
    compiled: int
    is_predicted: bool = False


def schedule(
    runtime: Runtime, state: EngineState, drafts: int | None = None, now: float | None = None
) -> ScheduledStep:
    """Ask for drafts, and schedule the next step.

    Args:
        drafts: how many for each decode; None: as many as pay by the times of past steps.
        now: seconds since the scheduler began, for a timed policy; None: by the clock. Nothing else
            depends on a clock.
    """
    started = time.perf_counter()
    compiled = compilations.compilations()
    offered = NO_DRAFTS
    past_drafting = state.drafting
    if past_drafting:
        draftable, best_drafts = drafting.candidates(
            past_drafting, state.scheduler.running, runtime.shapes.tokens
        )
        drafts = best_drafts if drafts is None else drafts
        offered = drafting.offer(
            past_drafting,
            draftable,
            drafts,
            state.sequences,
            runtime.shapes.vocab_size,
            token_masks.matchers_in(state.readers),
        )
    now = _time_for(runtime.policy, state, started, now)
    predicted = None if offered else predicted_plan(state)
    after, plan = predicted or scheduler.schedule(state.scheduler, runtime.policy, offered, now)
    return ScheduledStep(
        after, plan, drafts or 0, offered, started, compiled, is_predicted=predicted is not None
    )


def predicted_plan(state: EngineState) -> tuple[SchedulerState, Plan] | None:
    """What `schedule` gives if the next step is the predicted one, of decodes alone; None if it may
    be another one.
    """
    if not state.ahead.sent:
        return None
    predicted = state.ahead.sent[0]
    if predicted.steps_left is None:
        return None
    return decode_spans.schedule_predicted(state.scheduler, predicted.plan, predicted.allocated)


def _time_for(
    policy: Policy, state: EngineState, started: float, now: float | None
) -> float | None:
    """The time for a policy, in seconds since the scheduler began.

    Args:
        started: seconds of time.perf_counter.
        now: the time that was given; None: a timed policy gets that of the clock.
    """
    if policy.timed and now is None:
        return max(0.0, round(started - state.began, 6))
    return now


def step(
    runtime: Runtime,
    state: EngineState,
    scheduled: ScheduledStep | None = None,
    now: float | None = None,
) -> tuple[EngineState, StepResult]:
    """Run one step. The old state must not be used again: its cache is donated.

    With `late_stops`, a plan may be in flight already; then the next one is sent before the tokens
    of the older one are read.

    Args:
        scheduled: what `schedule` returned for this state; None calls it. With a plan in flight,
            it is not read.
        now: for the plan behind the one in flight, as in `schedule`.
    """
    beginning = Beginning.now()
    if state.in_flight is None:
        scheduled = scheduled or schedule(runtime, state, now=now)
        beginning = Beginning(scheduled.started, scheduled.compiled)
        entry = Schedule(scheduled.plan, scheduled.offered, scheduled.started)
        state = with_schedule(state, scheduled.scheduler, entry)
        state = compute(runtime, state, scheduled.plan, is_predicted=scheduled.is_predicted)
    assert state.in_flight is not None, "a plan was just sent"
    current = state.in_flight
    if runtime.config.late_stops:
        state = compute_next(runtime, state, now)
    return finish(runtime, state, current, beginning)


class Beginning(NamedTuple):
    """When a step begins.

    started: seconds of time.perf_counter.
    compiled: how many programs this process had compiled by then; a policy may compile some.
    """

    started: float
    compiled: int

    @staticmethod
    def now() -> Beginning:
        return Beginning(time.perf_counter(), compilations.compilations())


def finish(
    runtime: Runtime, state: EngineState, current: InFlight, beginning: Beginning
) -> tuple[EngineState, StepResult]:
    """Read the tokens of the oldest plan in flight, and commit it."""
    plan = current.plan
    sent = current.sent
    started = beginning.started
    overlaps = _overlaps(state, sent)
    # a predicted step may have ended before this call began
    was_done = not overlaps and sent.sent_at < started and sent.ready
    tokens = sent.tokens
    arrived = time.perf_counter()

    if plan.drafts:
        sampled = drafting.verified(plan, state.sequences, tokens)
    else:
        sampled = lookahead.of_rows(tokens, current.rows).tolist()
    state, events, outputs = commit(runtime, state, current, sampled)

    finished = time.perf_counter()
    busy_until = finished if overlaps else arrived
    busy_seconds = sent.draft_seconds + busy_until - max(started, sent.sent_at)
    result = StepResult(
        plan=plan,
        events=events,
        started=started,
        finished=finished,
        device_seconds=0.0 if was_done else busy_seconds,
        draft_seconds=sent.draft_seconds,
        draft_rows=sent.draft_rows,
        padded_tokens=sent.padded_tokens,
        compilations=compilations.compilations() - beginning.compiled,
        outputs=outputs,
        params_version=state.params_version,
    )
    if state.drafting:
        state = state._replace(drafting=drafting.learned(state.drafting, result))
    return state, result


def settle(runtime: Runtime, state: EngineState) -> tuple[EngineState, StepResult]:
    """Commit the plan in flight, with no other plan behind it."""
    assert state.in_flight is not None, "there is a plan to commit"
    return finish(runtime, state, state.in_flight, Beginning.now())


def _overlaps(state: EngineState, sent: SentStep) -> bool:
    """Whether the device goes on with other steps when this one is done."""
    steps = [*state.ahead.sent]
    if state.in_flight is not None:
        steps.append(state.in_flight.sent)
    return any(step.sent_at > sent.sent_at for step in steps)


def commit(
    runtime: Runtime, state: EngineState, current: InFlight, sampled: Sequence[Sample]
) -> tuple[EngineState, tuple[Event, ...], Mapping[str, Any]]:
    """Let the readers read what a step computed, and add it to the state -> (state, events, outputs
    of the readers).
    """
    outcome = outcome_of(state, current, sampled)
    plan = outcome.plan
    selection = runtime.shapes.selection
    hashes = requests.hashes_of_filled(
        plan,
        state.sequences,
        runtime.config.block_size,
        outcome.sampled,
        dense_prompts=selection is not None and selection.dense_prompts,
    )
    read = readers.read(state.readers, outcome)
    before = state.scheduler.running
    if len(state.scheduler.in_flight) > 1:  # the running sequences have this plan's lengths already
        before = Running(plan.seqs, plan.lengths, plan.starts)
    committed = None
    following = state.ahead.sent[0] if state.ahead.sent else None
    if following is not None and following.steps_left is not None and not read.choices:
        committed = decode_spans.commit_predicted(
            state.scheduler, current.plan, sampled, hashes, following.plan
        )
    if committed is None:
        committed = scheduler.commit(state.scheduler, current.plan, sampled, hashes, read.choices)
    after, events = committed

    tap_parts = read.outputs.get("taps")
    log: list[LogEntry] = [StepTaps(tap_parts)] if tap_parts else []
    log.append(Commit(current.plan, sampled, hashes, read.choices, events))
    in_flight = None if state.in_flight is current else state.in_flight
    state = state._replace(
        scheduler=after, readers=read.readers, in_flight=in_flight, log=(*state.log, *log)
    )
    state = with_events(state, events, before, runtime.spare)
    for request_id, reason in read.ends.items():
        state, cancelled = cancel(state, request_id, reason)
        events += cancelled
    return state, events, read.outputs


def outcome_of(state: EngineState, current: InFlight, sampled: Sequence[Sample]) -> Outcome:
    """What a step computed of the sequences that are unfinished. Others were cancelled while the
    device computed the step.
    """
    plan = current.plan
    rows = current.rows
    if state.scheduler.in_flight:
        records = late.records_of(state.scheduler, plan)
        alive = [i for i, seq in enumerate(records) if seq is not None]
        plan = plan._replace(
            seqs=tuple([seq for seq in records if seq is not None]),
            lengths=pick(plan.lengths, alive),
            starts=pick(plan.starts, alive),
            counts=pick(plan.counts, alive),
        )
        rows = [rows[i] for i in alive]
        sampled = [sampled[i] for i in alive]
    data = requests.sequences_of_rows(plan, state.sequences) if state.readers else ()
    return Outcome(plan, current.sent, rows, sampled, data)


def with_schedule(state: EngineState, after: SchedulerState, entry: Schedule) -> EngineState:
    """The state after a plan was made.

    Args:
        after: the scheduler's state after `schedule`.
    """
    return state._replace(scheduler=after, log=(*state.log, entry))


def compute_next(runtime: Runtime, state: EngineState, now: float | None = None) -> EngineState:
    """The state after the plan behind that in flight was made and sent, before the tokens of the
    plan in flight are known; the same state if the next plan depends on them.

    Args:
        now: as in `schedule`.
    """
    current = state.in_flight
    assert current is not None, "the caller has sent it"
    if readers.decide(state.readers, current.plan):
        return state
    started = time.perf_counter()
    now = _time_for(runtime.policy, state, started, now)
    planned = scheduler.schedule_late(state.scheduler, runtime.policy, now)
    if planned is None:
        return state
    after, plan = planned
    return compute(runtime, with_schedule(state, after, Schedule(plan, started=started)), plan)


def compute(
    runtime: Runtime, state: EngineState, plan: Plan, *, is_predicted: bool = False
) -> EngineState:
    """Take the predicted step that has computed the plan, or send the plan to the device; then send
    predicted steps behind it. The plan is in flight now.

    Args:
        state: after the plan was made. If another plan is in flight, its tokens are unknown.
        is_predicted: see `ScheduledStep`.
    """
    foresight = Foresight(
        policy=runtime.policy,
        sequences=state.sequences,
        depth=runtime.config.lookahead,
        span=runtime.shapes.span,
        decided=partial(readers.decide, state.readers),
        spans=partial(has_span, runtime, state),
    )
    cache = runtime.new_cache() if state.cache is None else state.cache
    ahead, sent, rows = lookahead.take_predicted(state.ahead, plan, is_predicted=is_predicted)
    if sent is None:
        run = lookahead.first_run(plan, state.scheduler, foresight)
        before = state.in_flight
        if before is None:
            cache, steps = send(runtime, state, cache, run)
        elif before.sent.is_last_of_program:
            unknown_arrivals = set(lookahead.sampling(before.plan))
            cache, steps = send(runtime, state, cache, run, before.sent, unknown_arrivals)
        else:  # the predictions behind it in its span are wrong, and the span gives its last tokens
            write_tokens(state, before)
            cache, steps = send(runtime, state, cache, run)
        sent = steps[0]
        rows = range(len(plan.seqs))
        ahead = Lookahead(steps[1:], run[-1] if steps[1:] else None)
    if foresight.depth:
        cache, ahead = lookahead.extend(
            ahead, sent, state.scheduler, plan, foresight, cache, partial(send, runtime, state)
        )
    newest = ahead.sent[-1] if ahead.sent else sent
    return state._replace(
        cache=cache, ahead=ahead, in_flight=InFlight(plan, sent, rows), packed=newest.packed
    )


def write_tokens(state: EngineState, current: InFlight) -> None:
    """Write the tokens of the plan in flight behind the known ones. Waits for the device."""
    tokens = current.sent.tokens
    rows = zip(current.plan.seqs, current.plan.lengths, current.rows, strict=True)
    for seq, length, row in rows:
        data = state.sequences.get(seq.request.request_id)
        if data is not None:
            data.tokens[length] = tokens[row]


def has_span(runtime: Runtime, state: EngineState, plan: Plan) -> bool:
    """Whether the engine has a program for a span that begins with a plan of decodes, and no reader
    needs more of its rows than tokens, or must read them before the next step.
    """
    shapes = present_shapes(runtime)
    ids = [seq.request_id for seq in plan.seqs]
    if not shapes.span_buckets or len(ids) > shapes.span_buckets[-1]:
        return False
    if shapes.decode_bucket(len(ids)) not in shapes.span_buckets:
        return False
    return not any(name in entries for entries in state.readers.values() for name in ids)


def send(
    runtime: Runtime,
    state: EngineState,
    cache: KVCache,
    run: Run,
    previous: SentStep | None = None,
    unknown_arrivals: Set[int] = frozenset(),
) -> tuple[KVCache, tuple[SentStep, ...]]:
    """Have the device compute a run of plans, after the steps that were sent to it before.

    Args:
        previous: the step before a predicted plan, which samples the unknown tokens.
        unknown_arrivals: arrivals of the sequences whose newest token is not known on the host.
    """
    plans = [prediction.plan for prediction in run]
    plan = plans[0]
    cache = move_blocks(runtime, state, cache, plan)
    drafted = Drafts()
    if plan.drafts and runtime.draft_model:
        cache, drafted = run_drafter(runtime, state.sequences, cache, plan)
    past = state.packed if previous is None else previous.packed
    shape, transfer, memory = packed_plans(
        runtime, state, plans, previous, unknown_arrivals, drafted.probs, past
    )
    sent_at = time.perf_counter()
    side_outputs = readers.side_outputs_of(state.readers, (seq.request_id for seq in plan.seqs))
    cache, output = program_of(runtime, shape, side_outputs)(runtime.leaves, cache, transfer)
    steps = [
        SentStep(
            plan=prediction.plan,
            output=output,
            sent_at=sent_at,
            padded_tokens=shape.tokens,
            draft_seconds=drafted.seconds,
            draft_rows=drafted.rows,
            side_outputs=side_outputs,
            place=place,
            allocated=prediction.allocated,
            steps_left=prediction.steps_left,
            packed=memory,
        )
        for prediction, place in zip(run, lookahead.places_in_span(plans), strict=True)
    ]
    return cache, tuple(steps)


def program_of(runtime: Runtime, shape: StepShape, side_outputs: SideOutputs) -> Any:
    """The program of a step's shape."""
    if side_outputs is not NOTHING:
        return runtime.side_programs[side_outputs][shape]
    if shape.prompt_logprobs:
        return runtime.prompt_programs[shape]
    return runtime.programs[shape]


class Drafts(NamedTuple):
    """What a drafter's program gave beside tokens.

    rows: with drafts, rounded up to a bucket.
    seconds: of the program.
    probs: what the draft in the place of each sample was drawn from.
    """

    rows: int = 0
    seconds: float = 0.0
    probs: jax.Array | None = None


def run_drafter(
    runtime: Runtime, sequences: Sequences, cache: KVCache, plan: Plan
) -> tuple[KVCache, Drafts]:
    """Have the device draft, and write the drafts behind the known tokens."""
    shape, batch = pack_drafts(plan, sequences, runtime.shapes, runtime.blanks, runtime.chain)
    start = time.perf_counter()
    cache, output = runtime.programs[shape](runtime.leaves, cache, batch)
    drafts = np.asarray(output.tokens)
    seconds = time.perf_counter() - start
    drafted = (i for i, k in enumerate(plan.drafts) if k)
    for column, i in enumerate(drafted):
        length = plan.lengths[i]
        k = plan.drafts[i]
        sequences[plan.seqs[i].request_id].tokens[length : length + k] = drafts[:k, column]
    rows = runtime.shapes.bucket(sum(k > 0 for k in plan.drafts))
    return cache, Drafts(rows, seconds, output.probs)


def packed_plans(
    runtime: Runtime,
    state: EngineState,
    plans: Sequence[Plan],
    previous: SentStep | None,
    unknown_arrivals: Set[int],
    draft_probs: jax.Array | None,
    past: Packed | None,
) -> tuple[StepShape, OneTransfer, Packed | None]:
    """The arrays of a plan, or of the plans of a span -> (its program's shape, the arrays for it,
    the last step of decodes alone). The arguments are those of `send`, what `run_drafter` returned,
    and the last step of decodes alone before this one.
    """
    plan = plans[0]
    steps = None
    if len(plans) > 1:
        plan, steps = lookahead.merged_plans(plans)
    sources = Sources(
        undrafted=runtime.undrafted,
        adapters=runtime.adapters,
        looks_ahead=runtime.sends_ahead,
        previous=previous,
        unknown_arrivals=unknown_arrivals,
        draft_probs=draft_probs,
        masks=readers.masks_of(state.readers, plan, state.sequences),
        span=steps,
    )
    shapes = present_shapes(runtime)
    blanks = runtime.blanks
    if past is not None:
        step = pack_next(past, plan, state.sequences, shapes, blanks, sources, plans[-1])
        if step is not None:
            return step.shape, step.transfer, step
    batch = pack(plan, state.sequences, shapes, blanks, runtime.chain, sources)
    shape = StepShape(
        len(batch.tokens),
        len(batch.last),
        decodes_alone=batch.cu_q_lens is None,
        span=len(plans),
        prompt_logprobs=batch.targets is not None,
        plain=batch.sampling.is_plain,
        logprobs=batch.sampling.num_top is not None,
    )
    transfer, step = packed(plan, batch, shape, blanks[shape.samples], sources, plans[-1])
    return shape, transfer, step or past


def present_shapes(runtime: Runtime) -> Shapes:
    """The shapes of the runtime, with only those buckets that a step may have now. They are read
    once a step, because a program that is compiled beside the steps may come in at any time.
    """
    programs = runtime.programs
    if not isinstance(programs, BackgroundPrograms):
        return runtime.shapes
    programs.stepped_at = time.monotonic()
    return programs.present


def move_blocks(runtime: Runtime, state: EngineState, cache: KVCache, plan: Plan) -> KVCache:
    """Move whole blocks before the step writes any: to the host, back from the host, then copies on
    the device.
    """
    if runtime.swap and state.host_cache is not None:
        if plan.swap_out:
            runtime.swap.out(cache, state.host_cache, plan.swap_out)
        if plan.swap_in:
            cache = runtime.swap.back(cache, state.host_cache, plan.swap_in)
    # copies go to free blocks, so none of them reads what another one writes
    for start in range(0, len(plan.copies), COPIES):
        pairs = padded_pairs(plan.copies[start : start + COPIES], COPIES)
        cache = runtime.copy(cache, *pairs)
    return cache
