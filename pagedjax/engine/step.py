"""One step of an engine: schedule -> pack -> run -> commit."""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from typing import NamedTuple

import jax
import numpy as np

from pagedjax.device.batch import Batch, Drafted, Feed, Shapes, StepShape, blank_feed, joined
from pagedjax.device.cache import KVCache
from pagedjax.device.taps import NOTHING
from pagedjax.engine import (
    adapters,
    compilations,
    drafting,
    lookahead,
    pooling,
    requests,
    results,
    taps,
    token_masks,
)
from pagedjax.engine.background import BackgroundPrograms
from pagedjax.engine.lookahead import Lookahead, SentStep
from pagedjax.engine.pack import drafted_tokens, pack, pack_drafts
from pagedjax.engine.requests import Sequences
from pagedjax.engine.runtime import COPIES, Runtime, padded_pairs
from pagedjax.engine.state import EngineState, cancel, with_events
from pagedjax.host import scheduler
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import NO_DRAFTS, FinishReason, Plan, StepResult


class ScheduledStep(NamedTuple):
    """What a step will compute. Nothing was sent to the device yet.

    scheduler: the scheduler's state after `schedule`.
    drafts: how many were asked for each decode.
    offered: how many it offered, by sequence id.
    started: seconds of time.perf_counter.
    compiled: how many programs this process had compiled by then; a policy may compile some.
    """

    scheduler: SchedulerState
    plan: Plan
    drafts: int
    offered: Mapping[str, int]
    started: float
    compiled: int


def schedule(runtime: Runtime, state: EngineState, drafts: int | None = None) -> ScheduledStep:
    """Ask for drafts, and schedule the next step.

    Args:
        drafts: of each decode; None: as many as pay by the times of past steps. Nothing else
            depends on a clock.
    """
    began = time.perf_counter(), compilations.compilations()
    learned, offered = state.drafting, NO_DRAFTS
    if learned:
        draftable, paying = drafting.wanted(learned, state.scheduler.running, runtime.shapes.tokens)
        drafts = paying if drafts is None else drafts
        offered = drafting.offer(
            learned, draftable, drafts, state.sequences, runtime.shapes.vocab_size
        )
    return ScheduledStep(
        *scheduler.schedule(state.scheduler, runtime.policy, offered), drafts or 0, offered, *began
    )


def step(
    runtime: Runtime, state: EngineState, scheduled: ScheduledStep | None = None
) -> tuple[EngineState, StepResult]:
    """Run one step. The old state must not be used again: its cache is donated.

    Args:
        scheduled: what `schedule` returned for this state; None calls it.
    """
    config, sequences, learned = runtime.config, state.sequences, state.drafting
    after_schedule, plan, _, offered, started, compiled = scheduled or schedule(runtime, state)
    cache = runtime.new_cache() if state.cache is None else state.cache

    ahead, sent, rows = (
        lookahead.take_predicted(state.ahead, plan) if config.lookahead else (Lookahead(), None, ())
    )
    if sent is None:
        cache, sent = send(runtime, state, cache, plan)
        rows = tuple(range(len(plan.seqs)))
    if config.lookahead and not state.searches:

        def send_predicted(cache: KVCache, plan: Plan, previous: SentStep, unknown: Set[int]):
            return send(runtime, state, cache, plan, previous, unknown)

        here = ahead, sent, after_schedule, plan, runtime.policy, sequences
        cache, ahead = lookahead.extend(*here, config.lookahead, cache, send_predicted)
    # the device computes predicted steps
    overlaps = any(other.sent_at > sent.sent_at for other in ahead.sent)
    was_done = not overlaps and sent.sent_at < started and sent.ready  # before this call
    tokens = np.asarray(sent.output.sampled.tokens)
    arrived = time.perf_counter()

    sampled = (
        drafting.verified(plan, sequences, tokens) if plan.drafts else tokens[list(rows)].tolist()
    )
    selection = runtime.shapes.selection
    selected = selection is not None and selection.dense_prompts
    hashes = requests.hashes_of_filled(plan, sequences, config.block_size, sampled, selected)
    searches, choices, ended = state.searches, {}, ()
    if searches:
        searches, choices, ended = results.advance_searches(plan, searches, sent.output)
    after, events = scheduler.commit(after_schedule, plan, sampled, hashes, choices)
    mine = requests.of_rows(plan, sequences)
    wanted = any([data.wants_logprobs for data in mine])
    logprobs = results.logprobs(plan, sequences, sent, rows, sampled) if wanted else ()
    pools, pooled = (
        pooling.advance(plan, state.pools, sent, rows) if state.pools else (state.pools, ())
    )
    tapped = taps.parts(plan, state.wants, sequences, sent, rows, sampled) if state.wants else ()
    log = ("schedule", (plan, started, offered)), ("commit", (sampled, hashes, choices, events))
    log = (*state.log, *((("taps", (tapped,)),) if tapped else ()), *log)
    state = state._replace(
        scheduler=after, searches=searches, pools=pools, ahead=ahead, cache=cache, log=log
    )
    state = with_events(state, events, after_schedule, runtime.spare)
    reasons: dict[str, FinishReason] = {
        search.request_id: search.sequences[0].reason for search in ended
    }
    for name, reason in (reasons | token_masks.failed(plan, mine, state.sequences, after)).items():
        state, cancelled = cancel(state, name, reason)
        events += cancelled
    finished = time.perf_counter()
    until = finished if overlaps else arrived
    result = StepResult(
        plan=plan,
        events=events,
        started=started,
        finished=finished,
        device_seconds=0.0 if was_done else sent.draft_seconds + until - max(started, sent.sent_at),
        draft_seconds=sent.draft_seconds,
        draft_rows=sent.draft_rows,
        padded_tokens=sent.padded_tokens,
        compilations=compilations.compilations() - compiled,
        logprobs=logprobs,
        beams=ended,
        pooled=pooled,
        taps=tapped,
        params_version=state.params_version,
    )
    return state._replace(drafting=learned and drafting.learned(learned, result)), result


def send(
    runtime: Runtime,
    state: EngineState,
    cache: KVCache,
    plan: Plan,
    previous: SentStep | None = None,
    unknown: Set[int] = frozenset(),
) -> tuple[KVCache, SentStep]:
    """Have the device compute a plan, after the steps that were sent to it before.

    Args:
        previous: of a predicted plan, the step before it, which samples the unknown tokens.
        unknown: arrivals of the sequences whose newest token is not known on the host.
    """
    cache, rows, seconds, probs = moved(runtime, state, cache, plan), 0, 0.0, None
    if plan.drafts and runtime.draft_model:
        cache, seconds, probs = drafted(runtime, state.sequences, cache, plan)
        rows = runtime.shapes.bucket(sum(k > 0 for k in plan.drafts))
    batch = packed(runtime, state.sequences, plan, previous, unknown, probs)
    sent_at = time.perf_counter()
    wanted = taps.of_plan(plan, state.wants) if state.wants else NOTHING
    shape = StepShape(len(batch.tokens), len(batch.last), batch.cu_q_lens is None)
    program = (runtime.programs if wanted is NOTHING else runtime.tapped[wanted])[shape]
    cache, output = program(runtime.leaves, cache, joined(batch))
    return cache, SentStep(plan, output, sent_at, shape.tokens, seconds, rows, wanted)


def drafted(
    runtime: Runtime, sequences: Sequences, cache: KVCache, plan: Plan
) -> tuple[KVCache, float, jax.Array | None]:
    """Have the device draft, and write the drafts behind the known tokens.

    Returns:
        (cache, seconds of the program, what the draft in the place of each sample was drawn from)
    """
    shape, batch = pack_drafts(plan, sequences, runtime.shapes, runtime.blanks, runtime.chain)
    began = time.perf_counter()
    cache, output = runtime.programs[shape](runtime.leaves, cache, batch)
    drafts, seconds = np.asarray(output.tokens), time.perf_counter() - began
    rows = (i for i, k in enumerate(plan.drafts) if k)
    for column, i in enumerate(rows):
        length, k = plan.lengths[i], plan.drafts[i]
        sequences[plan.seqs[i].request_id].tokens[length : length + k] = drafts[:k, column]
    return cache, seconds, output.probs


def packed(
    runtime: Runtime,
    sequences: Sequences,
    plan: Plan,
    previous: SentStep | None,
    unknown: Set[int],
    probs: jax.Array | None = None,
) -> Batch:
    """The arrays of a plan; arguments as in `send` and `drafted`."""
    batch = pack(plan, sequences, present(runtime), runtime.blanks, runtime.chain)
    if runtime.adapters:
        batch = batch._replace(
            adapters=adapters.of_tokens(runtime.adapters, plan, sequences, len(batch.tokens))
        )
    if runtime.undrafted:
        blank = runtime.undrafted[len(batch.last)]
        if plan.drafts:
            blank = Drafted(drafted_tokens(plan, batch), probs)
        batch = batch._replace(drafted=blank)
    if not runtime.config.lookahead:
        return batch
    t = len(batch.tokens)
    if previous is None:
        return batch._replace(feed=blank_feed(runtime.shapes, t))
    return batch._replace(
        feed=Feed(lookahead.fed_rows(plan, previous.plan, unknown, t), previous.output.fed)
    )


def present(runtime: Runtime) -> Shapes:
    """The shapes of the runtime, with those buckets alone that a step may have now. It is read once
    a step, because programs that are compiled behind the steps come in at any time."""
    programs = runtime.programs
    if not isinstance(programs, BackgroundPrograms):
        return runtime.shapes
    programs.stepped_at = time.monotonic()
    return programs.present


def moved(runtime: Runtime, state: EngineState, cache: KVCache, plan: Plan) -> KVCache:
    """Move whole blocks before the step writes any: to the host, back from the host, then copies on
    the device.
    """
    if runtime.swap and state.host_cache is not None:
        if plan.swap_out:
            runtime.swap.out(cache, state.host_cache, plan.swap_out)
        if plan.swap_in:
            cache = runtime.swap.back(cache, state.host_cache, plan.swap_in)
    # to free blocks, so none of them reads what another one writes
    for i in range(0, len(plan.copies), COPIES):
        cache = runtime.copy(cache, *padded_pairs(plan.copies[i : i + COPIES], COPIES))
    return cache
