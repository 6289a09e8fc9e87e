"""`EngineState`: everything that an engine's steps change, as one value, and its transitions other
than a step.

    init(runtime) -> state
    submit(runtime, state, request) -> state       or ValueError, and the state before stays valid
    cancel(state, sequence_id) -> (state, events)
    forget(state) -> state                         the prefix cache
    update(state, pending) -> state                after which the runtime has other parameters
    roll_back(state) -> state                      after a step that failed

A state is used once: the next step donates its cache and writes tokens into its arrays. So an
engine holds one state and replaces it, and a new state is assigned whole or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
from immutables import Map

from pagedjax.device.cache import KVCache
from pagedjax.device.host_swap import HostCache, host_cache
from pagedjax.engine import adapters, drafting, readers
from pagedjax.engine.drafting import Drafting
from pagedjax.engine.lookahead import Lookahead
from pagedjax.engine.outcome import NewRequest
from pagedjax.engine.readers import Readers
from pagedjax.engine.requests import EngineRequest, Sequences, apply_events, prepare, without_hashes
from pagedjax.engine.runtime import Runtime
from pagedjax.engine.taps import StepTaps, TapsBegin
from pagedjax.host import scheduler
from pagedjax.host.event_log import Cancel, Entry, Forget, Restart, Submit, Update
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import Event, Finished, FinishReason, Pending, StepResult
from pagedjax.options.params import SamplingParams

# what a recorder writes, or a `TapWriter`
LogEntry = Entry | TapsBegin | StepTaps


class EngineState(NamedTuple):
    """scheduler: the scheduler's state: queues, block tables, counts.
    sequences: tokens and sampling of every unfinished sequence.
    ahead: predicted steps on the device.
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

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running.seqs or self.result)

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
        ValueError: the request can never run (see `scheduler.submit` and `prepare`), a reader
        refuses it, or its adapter is not loaded.
    """
    old_state = state.scheduler
    params = request.params
    adapter = None
    if request.adapter is not None:
        adapter = adapters.of_name(runtime.adapters, request.adapter)
    prepared = prepare(old_state, request, runtime.request_rules, adapter=adapter)
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
        ahead=state.ahead._replace(last=None),  # the next prediction starts from the new state
        log=(*state.log, Cancel(sequence_id, reason, events)),
    )
    return with_events(state, events, old_state), events


def with_events(
    state: EngineState, events: Sequence[Event], before: SchedulerState, spare: int = 0
) -> EngineState:
    """Append the new tokens of events, and drop the sequences that ended.

    Args:
        before: the scheduler's state before the transition that gave the events.
        spare: see `requests.appended`.
    """
    ended = {event.request_id: event for event in events if isinstance(event, Finished)}
    if not ended:
        sequences = apply_events(state.sequences, events, before.running, spare)
        return state._replace(sequences=sequences)
    tokens = [event for event in events if not isinstance(event, Finished)]
    sequences = apply_events(state.sequences, tokens, before.running, spare)
    if state.drafting:  # the drafter learns from the last tokens of ended sequences, too
        drafting.show_ended_outputs(state.drafting, ended, sequences)
    sequences = apply_events(sequences, tuple(ended.values()), before.running)
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
        sequences = sequences.update({name: without_hashes(sequences[name]) for name in names})
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
        cache=None,
        log=(*state.log, Restart()),
    )
