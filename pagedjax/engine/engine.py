"""`Engine`: one runtime and one state, behind methods. It knows requests and arrays, and no text.

engine.add("a", prompt_token_ids, SamplingParams())
while engine.has_work:
    result = engine.step()
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args
from weakref import WeakSet

from pagedjax.device.adapters import Adapter
from pagedjax.device.cache import KVCache
from pagedjax.device.draft_model import DraftModel
from pagedjax.device.memory import MemoryReport
from pagedjax.device.models import Model
from pagedjax.device.row_features import RowFeature
from pagedjax.engine import adapters, interrupts, runtime, sleep, state
from pagedjax.engine import handover as handovers
from pagedjax.engine.adapters import AdapterTable
from pagedjax.engine.background import BackgroundPrograms
from pagedjax.engine.handover import Fetch, Handover
from pagedjax.engine.lookahead import Lookahead
from pagedjax.engine.requests import EngineRequest, LoadedAdapter
from pagedjax.engine.state import EngineState, ScheduledStep
from pagedjax.engine.tap_files import TapWriter
from pagedjax.host import scheduler
from pagedjax.host.event_log import Entry, Recorder
from pagedjax.host.types import Event, FinishReason, Pending, StepResult
from pagedjax.options.config import EngineConfig, Resolved, one_of
from pagedjax.options.own_names import names_own_value
from pagedjax.options.params import BeamSearchParams, PoolingParams, SamplingParams
from pagedjax.text.structured.matcher import Grammar


class Engine:
    """One model, one cache, one scheduler. Every method replaces the state by the one that a
    transition returns.

    Attributes:
        runtime: what steps use and never change.
        sessions: the sessions that fold its results into text (session.py); each gets every result.
        turns: every method that queues, steps or changes something is one turn, so any thread may
            call it.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        eos_token_ids: Sequence[int] = (),
        row_features: Sequence[RowFeature] = (),
        draft_model: DraftModel | None = None,
        owns_params: bool = False,
        progress: bool = False,
    ) -> None:
        """
        Args:
            row_features: sampling options beside the built-in ones; requests set them by
                `extra_args`.
            draft_model: what drafts on the device, if `config.speculative` says so
                (weights/draft_model.py).
            owns_params: only this engine uses the arrays of the models, so `sleep` may delete them.
        """
        built = runtime.build(
            model,
            config,
            eos_token_ids,
            row_features=row_features,
            draft_model=draft_model,
            progress=progress,
        )
        self.runtime, cache = runtime.warmed_up(built, built.new_cache())
        self.sessions: WeakSet[Any] = WeakSet()
        self.turns = interrupts.Turns()
        self._state = state.init(self.runtime, cache)
        self._recorder: Recorder | None = None
        self._tap_writer: TapWriter | None = None
        self._ids = itertools.count()
        self._asleep: sleep.SleepState | None = None
        self._dropped = False  # by level 2 of sleep
        callers: list[Any] = []  # arrays of the models that the caller may use
        if not owns_params:
            callers += model.leaves
            callers += draft_model.leaves if draft_model else ()
        self._shared = {id(x) for x in self.runtime.leaves} & {id(x) for x in callers}
        if self.background:
            self.background.start()

    @property
    def background(self) -> BackgroundPrograms | None:
        """The programs that are compiled behind the steps; None unless `compilation` is
        "background".
        """
        programs = self.runtime.programs
        return programs if isinstance(programs, BackgroundPrograms) else None

    @property
    def config(self) -> Resolved:
        """The configuration, with nothing left open."""
        return self.runtime.config

    @property
    def model(self) -> Model:
        return self.runtime.model

    @property
    def memory(self) -> MemoryReport:
        """Where the device's memory goes, and how many blocks it holds."""
        return self.runtime.memory

    @property
    def startup(self) -> Mapping[str, Any]:
        """Seconds by stage ("compile", "warmup"), the number of programs ("compilations"), and how
        many of them came from the cache on disk ("cached")."""
        return self.runtime.startup

    @property
    def scheduler_state(self) -> scheduler.SchedulerState:
        """Queues, block tables and counts. It is immutable."""
        return self._state.scheduler

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to return."""
        return self._state.has_work

    # requests -------------------------------------------------------------------------------------

    def new_ids(self, count: int) -> tuple[str, ...]:
        """Ids that this engine has not given before. Use them, or ids of another form, for all
        requests.
        """
        return tuple(str(next(self._ids)) for _ in range(count))

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        forks: Sequence[str] = (),
        priority: int = 0,
        user: str = "",
        tags: Sequence[str] = (),
        grammar: Grammar | None = None,
        adapter: str | None = None,
        predicted: int | None = None,
        service_class: str = "",
        deadline: float | None = None,
        given: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Queue a request. `priority` and `user` matter to the policies of those names, see
        host/policies/.

        The hidden states of a prompt with PoolingParams come in a `StepResult` under `request_id`.

        Args:
            forks: ids of further branches. All share the prompt's blocks; branch i draws with the
                request's seed + i, as a separate request with that seed would. A beam search needs
                beam_width - 1 of them; its result comes in a `StepResult` under `request_id`.
            tags: opaque names; requests with other tags share no cached blocks.
            grammar: what `params.structured_outputs` was compiled to (pagedjax/structured).
            adapter: the name of a loaded one. The request keeps it, whatever is loaded or unloaded
                later.
            predicted: output tokens that someone predicts, for a policy that reads `seq.predicted`.
            service_class: the name of its class of service, for a policy that knows its targets.
            deadline: seconds after its arrival by which it should have ended, for a policy that
                reads it. Nothing else ends a request that is late.
            given: output tokens by the id of a sequence, in place of sampled ones. Beside
                `params.trace_decode_token_ids`, branches may have other ones, the request keeps its
                limit and its stop tokens, and tokens behind the given ones are sampled.

        Raises:
            ValueError: the request can never run (see `scheduler.submit` and `requests.prepare`).
                The engine is unchanged.
        """
        self._submit(
            EngineRequest(
                (request_id, *forks),
                prompt_token_ids,
                params,
                priority=priority,
                user=user,
                tags=tuple(tags),
                grammar=grammar,
                adapter=adapter,
                predicted=predicted,
                service_class=service_class,
                deadline=deadline,
                given=given or {},
            )
        )

    @interrupts.in_turn
    def _submit(self, request: EngineRequest) -> None:
        """Queue a request that `add` or a session made."""
        self._check_awake()
        queue = state.submit if request.begun is None else handovers.go_on
        self._set(queue(self.runtime, self._state, request))
        table = self.runtime.adapters
        if request.adapter is not None and table:
            self.runtime = replace(
                self.runtime, adapters=adapters.after_use(table, request.adapter)
            )

    @interrupts.in_turn
    def cancel(self, request_id: str, reason: FinishReason = "abort") -> tuple[Event, ...]:
        """End a request at any time; its blocks are free at once. An unknown id does nothing.

        A branch of parallel sampling ends alone; the id of any beam ends its whole search.
        """
        after, events = state.cancel(self._state, request_id, reason)
        self._set(after)
        return events

    # another engine goes on with a request (handover.py) ------------------------------------------

    @property
    def facts(self) -> Mapping[str, Any]:
        """What must be equal in two engines that hand requests over."""
        return handovers.facts(self.runtime, self._state)

    @property
    def identity(self) -> str:
        """A short text that is equal in engines that give the same next token."""
        return handovers.identity(self.runtime, self._state)

    @interrupts.in_turn
    def handover(self, request_id: str) -> Handover:
        """What another engine needs to go on with an unfinished sequence, and nothing changes here
        (`handover`).

        Raises:
            ValueError: see `handover.handover`; or the engine has `late_stops`.
        """
        self._check_knows_all_tokens()
        return handovers.handover(self.runtime, self._state, request_id)

    def has_room(self, handover: Handover) -> bool:
        """Whether a sequence of another engine would run here in the next step."""
        return handovers.has_room(self.runtime, self._state, handover)

    @interrupts.in_turn
    def pages(self, blocks: Sequence[int]) -> KVCache:
        """Copies of the pages of n blocks, on the device, in the order of their ids; block 0 is the
        trash block.

        Returns:
            A `KVCache` of n blocks: `k` and `v` have an array [n, K, S, D] for each layer, `tokens`
            is [n, S]. A TPU's kernels have several tokens in a row (device/cache.py).

        Raises:
            ValueError: an id is no block, or there is no cache now: the engine sleeps, or its last
            step failed.
        """
        return handovers.take(self._cache(), blocks)

    @interrupts.in_turn
    def padded_pages(self, blocks: Sequence[int]) -> KVCache:
        """`pages` with padding rows behind them, up to a power of two: what `adopt` fetches, with
        few programs.

        Raises:
            ValueError: as in `pages`.
        """
        return handovers.take_padded(self._cache(), blocks)

    def _cache(self) -> KVCache:
        if self._state.cache is None:
            self._check_awake()
            raise ValueError(
                "the last step failed, and its cache is gone; run a step, which allocates a new one"
            )
        return self._state.cache

    @interrupts.deferred()
    @interrupts.in_turn
    def adopt(
        self, request_id: str, handover: Handover, fetch: Fetch, *, grammar: Grammar | None = None
    ) -> bool:
        """Go on with a sequence of another engine -> whether its content is here; else it is
        computed again.

        Raises:
            ValueError: see `handover.adopt`; or the engine has `late_stops`. The engine is
                unchanged.
        """
        self._check_awake()
        self._check_knows_all_tokens()
        after, adopted = handovers.adopt(
            self.runtime, self._state, request_id, handover, fetch, grammar=grammar
        )
        self._set(after)
        return bool(adopted.blocks)

    @interrupts.in_turn
    def release(self, request_id: str) -> None:
        """Forget a sequence that another engine has adopted. Its full blocks stay in the prefix
        cache.
        """
        self._set(handovers.release(self._state, request_id))

    @interrupts.in_turn
    def reset_prefix_cache(self) -> None:
        """Forget what cached blocks hold. Unfinished requests continue."""
        self._set(state.forget(self._state))

    # adapters (docs/design/adapters.md) -----------------------------------------------------------

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        """The adapters that requests may use, by name."""
        return self.runtime.adapters.names if self.runtime.adapters else {}

    @interrupts.in_turn
    def load_adapter(
        self, adapter: Adapter, *, keep: bool = True, needed: Iterable[str] = ()
    ) -> None:
        """Load an adapter, or replace the one of its name. Unfinished requests keep theirs. Nothing
        is compiled.

        Args:
            keep: it stays until it is unloaded. Else it gives way when another one needs its slot.
            needed: names of adapters that may not give way to it.

        Raises:
            ValueError: the engine has no adapters, this one does not fit, or no slot is free. The
            engine is unchanged.
        """
        table = self._adapter_table(adapter.name)
        in_use = adapters.adapter_slots_in_use(self._state.sequences)
        new_table = adapters.with_adapter(
            table, adapter, in_use, keep=keep, needed=frozenset(needed)
        )
        self.runtime = replace(self.runtime, adapters=new_table)

    @interrupts.in_turn
    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Unfinished requests continue with it.

        Raises:
            ValueError: there is no such adapter.
        """
        self.runtime = replace(
            self.runtime, adapters=adapters.without_adapter(self._adapter_table(name), name)
        )

    def _adapter_table(self, name: str) -> AdapterTable:
        if self.runtime.adapters is None:
            raise adapters.no_adapters(name)
        return self.runtime.adapters

    # parameters -----------------------------------------------------------------------------------

    @property
    def params_version(self) -> int:
        """How often `update_params` has replaced the parameters. Each `StepResult` has that of its
        own.
        """
        return self._state.params_version

    @interrupts.deferred()
    @interrupts.in_turn
    def update_params(self, tree: Any, pending: Pending | None = None) -> None:
        """Replace the parameters by copies of others, of the same shapes and dtypes, and forget the
        prefix cache.

        Args:
            pending: what becomes of unfinished requests, between two steps. All keep their tokens
                so far. "restart": keys and values are computed again with the new parameters.
                "keep": those in the cache stay, and later tokens are computed from them. None:
                there must be no such request.

        Raises:
            ValueError: requests are unfinished and `pending` is None, it has another value, or a
                parameter differs (all are named). The engine is unchanged.
        """
        one_of("pending", pending, (None, *get_args(Pending)))
        if pending is None:
            self._check_idle(
                "before you update parameters, or say what becomes of them: pending='restart' "
                "computes again what they have in the cache, 'keep' goes on with it"
            )
        self._settle("before you update parameters")
        self.runtime = self.runtime.with_params(tree)
        self._dropped = False
        # ids of arrays that are gone may come again
        self._shared &= {id(x) for x in self.runtime.leaves}
        self._set(state.update(self._state, pending or "restart"))

    @interrupts.deferred()
    @interrupts.in_turn
    def sleep(self, level: int = 1) -> None:
        """Free the memory of the devices: the cache, and the parameters, which move to the host (1)
        or are dropped (2).

        Arrays that the engine does not own are let go of and not deleted: others may use them. The
        prefix cache is emptied; programs stay.

        Raises:
            ValueError: requests are unfinished, it sleeps already, or there is no such level.
        """
        sleep.check_level(level)
        self._check_idle("before the engine sleeps")
        self._check_awake()
        self.runtime, self._asleep = sleep.put_to_sleep(self.runtime, level, self._shared)
        self._dropped = level == 2
        self._shared = set()
        self._set(state.roll_back(self._state))

    @interrupts.deferred()
    @interrupts.in_turn
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`. After level 2 the model's parameters come from `update_params`, before or
        after this.

        Args:
            tags: "weights" or "kv_cache" wakes up that part alone; None is both. An engine that is
                awake stays so.

        Raises:
            ValueError: an unknown tag.
        """
        parts = sleep.check_tags(tags)
        asleep = self._asleep
        if asleep is None:
            return
        if "weights" in parts:
            self.runtime = sleep.wake_up(self.runtime, asleep)
            asleep = sleep.SleepState((), (), asleep.cache)
        if "kv_cache" in parts and asleep.cache:
            self._set(self._state._replace(cache=self.runtime.new_cache()))
            asleep = asleep._replace(cache=False)
        self._asleep = asleep if asleep.cache or asleep.model or asleep.draft else None

    @property
    def is_sleeping(self) -> bool:
        return self._asleep is not None

    def _check_idle(self, before: str) -> None:
        """Raises ValueError if a sequence is unfinished, or the result of a step was not taken.

        Args:
            before: what the caller wants to do, as the end of a sentence.
        """
        self._check_result_taken(before)
        if self.has_work:
            raise ValueError(
                f"{self._state.unfinished} sequences are unfinished; finish or cancel them {before}"
            )

    def _check_knows_all_tokens(self) -> None:
        """Raises ValueError if a step is planned before the tokens of the one before are known."""
        if self.runtime.config.late_stops:
            raise ValueError(
                "late_stops is True, and a sequence goes to another engine when all of its tokens "
                "are known; set late_stops=False in both engines"
            )

    def _check_result_taken(self, before: str) -> None:
        if self._state.result:
            raise ValueError(
                "an interrupt came between the last step and its caller, who did not get the "
                f"result; call step() once, which returns it, {before}"
            )

    def _check_awake(self) -> None:
        """Raises ValueError if no step can run: the engine sleeps, or has no parameters."""
        if self._asleep is not None:
            raise ValueError("the engine sleeps; call wake_up() first")
        if self._dropped:
            raise ValueError(
                "sleep(level=2) dropped the model's parameters; call update_params(tree) first"
            )

    # steps ----------------------------------------------------------------------------------------

    @interrupts.in_turn
    def step(self, now: float | None = None) -> StepResult | None:
        """Run one step. Returns None if no request is unfinished.

        If it raises or is interrupted, the step is rolled back: its requests return to the queue
        and are computed again. If the interrupt comes after the step, the next call returns the
        step's result.

        Args:
            now: seconds since the scheduler began, for a timed policy; None: by the clock.
        """
        if not self.has_work:
            return None
        old_state = self._state
        if old_state.result is None:
            try:
                scheduled = None if old_state.in_flight else self._schedule(now)
                after, result = state.step(self.runtime, old_state, scheduled, now)
                self._set(after._replace(result=result))
            except BaseException:
                if self._state is old_state:  # its cache was donated
                    self._set(state.roll_back(old_state))
                raise
        result = self._state.result
        self._state = self._state._replace(result=None)
        return result

    def _settle(self, before: str) -> None:
        """Commit the plan in flight, if there is one, so that all tokens are known. The next call of
        `step` returns its result.

        Args:
            before: what the caller wants to do, as the end of a sentence.
        """
        old_state = self._state
        if old_state.in_flight is None:
            return
        self._check_result_taken(before)
        try:
            after, result = state.settle(self.runtime, old_state)
            self._set(after._replace(result=result))
        except BaseException:
            if self._state is old_state:
                self._set(state.roll_back(old_state))
            raise

    def _schedule(self, now: float | None = None) -> ScheduledStep:
        """What the next step will compute. Processes that share an engine agree on it here
        (engine/processes/engines.py).
        """
        return state.schedule(self.runtime, self._state, now=now)

    @interrupts.deferred()
    def _set(self, after: EngineState) -> None:
        """Replace the state, and write its transitions to the recording: both, or neither."""
        if self._recorder:
            for entry in after.log:
                if isinstance(entry, Entry):
                    self._recorder.write(entry)
            if self._tap_writer:
                self._tap_writer.note(after.log)
        self._state = after._replace(log=())

    @interrupts.in_turn
    def reset(self) -> None:
        """Forget every request and all cache content, and end a recording. Programs and what their
        steps cost stay.

        Raises:
            ValueError: the engine sleeps.
        """
        self._check_awake()
        self.record(None)
        state.roll_back(self._state)  # frees the old cache before the new one is allocated
        learned = self._state.drafting
        new_state = state.init(self.runtime)._replace(params_version=self._state.params_version)
        if learned and new_state.drafting:
            drafting = new_state.drafting._replace(
                seconds=learned.seconds, draft_seconds=learned.draft_seconds, warm=learned.warm
            )
            new_state = new_state._replace(drafting=drafting)
        self._state = new_state

    @interrupts.in_turn
    def record(
        self, path: str | os.PathLike[str] | None, *, times: bool = False, prompts: bool = False
    ) -> None:
        """Write every scheduler input and outcome to a JSONL file from now on (host/event_log.py);
        None ends it.

        A replay starts from nothing, so a recording does too: the prefix cache is forgotten, and
        default seeds begin again.

        What taps give is written into a folder beside it, which `pagedjax.read_taps(path)` reads.

        Args:
            times: write the time of each transition, for `pagedjax view` and `trace`. Then two
                equal runs do not give equal bytes.
            prompts: write the prompts' token ids, so that `pagedjax view` can show their text.

        Raises:
            ValueError: requests are unfinished, because a replay starts from an empty scheduler, or
                no file can be written there.
        """
        if path is not None:
            self._check_idle("before a recording starts")
        if self._recorder:
            self._recorder.close()
            self._recorder = self._tap_writer = None
        if path is not None:
            clock = time.perf_counter if times else None
            named_policy: Any = self.runtime.config.policy
            self._recorder = Recorder(
                path,
                self.scheduler_state.config,
                self.runtime.policy.name,
                own_policy=named_policy if names_own_value(named_policy) else None,
                clock=clock,
                prompts=prompts,
            )
            self._tap_writer = TapWriter(path)
            self._restart_scheduler()

    def _restart_scheduler(self) -> None:
        """A replay counts arrivals from zero, and predicted steps know sequences by arrival."""
        empty = scheduler.init(self.scheduler_state.config)
        self._state = self._state._replace(
            scheduler=empty, ahead=Lookahead(), began=time.perf_counter()
        )
