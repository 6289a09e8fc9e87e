"""The imperative shell: schedule -> pack -> step -> commit, and the tokens of the requests under way.

It knows requests and arrays, and nothing of text. Everything it yields is a `StepResult`; it counts nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from pagedjax.config import EngineConfig, Resolved
from pagedjax.device import attention, cache, memory
from pagedjax.device.batch import Batch, Feed, blank_feed, blank_sampling
from pagedjax.device.host_swap import SwapSpace
from pagedjax.device.models import Model
from pagedjax.device.sampling import device_tile
from pagedjax.device.step import copy_blocks, make_step, make_steps
from pagedjax.engine import compilations, lookahead, programs, results
from pagedjax.engine.interrupts import undisturbed
from pagedjax.engine.lookahead import Lookahead, SentStep
from pagedjax.engine.pack import pack
from pagedjax.engine.programs import Key
from pagedjax.engine.requests import SequenceData, apply_events, prepare
from pagedjax.engine.resolve import block_shape, host_blocks, resolve, shapes
from pagedjax.host import beams, policies, scheduler
from pagedjax.host.event_log import Recorder
from pagedjax.host.state import limits
from pagedjax.host.types import EMPTY_PLAN, Event, Finished, FinishReason, Plan, StepResult
from pagedjax.params import BeamSearchParams, SamplingParams
from pagedjax.weights.trained import replaced

# What moves blocks moves a fixed number, and the trash block in place of those that are not there. A branch copies one
# block now and then; a sequence swaps as many as it has.
COPIES = 8  # blocks
MOVED = 16 * memory.MIB  # to and from the host


class Engine:
    """One model, one cache, one scheduler state.

        engine.add("a", prompt_token_ids, SamplingParams())
        while engine.has_work:
            result = engine.step()

    Attributes:
        config: the `Resolved` configuration.
        memory: the `MemoryReport`: where the device's memory goes and how many blocks it holds.
        startup: seconds by stage ("compile", "warmup"), the number of programs ("compilations"), and how many of them
            came from the cache on disk ("cached").
    """

    def __init__(
        self, model: Model, config: EngineConfig, *, eos_token_ids: Sequence[int] = (), progress: bool = False
    ) -> None:
        self.model = model
        found = memory.read(jax.devices()[0])  # before the cache takes its share
        self.config = resolve(config, model, found)
        self.eos_token_ids = tuple(eos_token_ids)
        c, m = self.config, model.config
        self._policy = policies.find(c.policy)
        self._shapes = shapes(c, model)
        self._block = block_shape(c.block_size, model, c.kv_cache_dtype, c.attention_impl)
        step = make_step(model, attention.attend(c.attention_impl, m.attn_scale), c.seed, device_tile())
        self._leaves = model.leaves
        self._recorder: Recorder | None = None
        self._notes_prompts = False
        self._cache: cache.KVCache | None = None
        self._ahead = Lookahead()
        self._guesses = c.lookahead > 0 or c.steps_per_dispatch > 1
        self._keys = frozenset(programs.keys(c))
        self._nothing = np.zeros(self._shapes.max_seqs, np.int32)  # tokens of a step that has not begun
        blanks = {self._shapes.rows(t): blank_sampling(self._shapes, t) for t in self._shapes.tokens}
        blanks = {rows: jax.device_put(blank) for rows, blank in blanks.items()}
        self._blanks = {t: blanks[self._shapes.rows(t)] for t in self._shapes.tokens}
        inputs = memory.held(blanks) + memory.held(self._blank(self._shapes.tokens[-1]))  # a step may bring its own
        found = found._replace(free=max(found.free - inputs, 0))
        self._steps, self.memory, self.startup = self._warm_up(step, config, found, progress)
        if progress:
            tqdm.write(f"attention {c.attention_impl!r}\n{self.memory}", file=sys.stderr)

    # requests ---------------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        forks: Sequence[str] = (),
        priority: int = 0,
        user: str = "",
    ) -> None:
        """Queue a request. `priority` and `user` matter to the policies of those names, see policies.py.

        Args:
            forks: ids of further branches. All share the prompt's blocks; branch i draws with the request's seed + i,
                as a request of its own with that seed would. A beam search needs beam_width - 1 of them; its result
                comes in a `StepResult` under `request_id`.

        Raises:
            ValueError: the request can never run (see `scheduler.submit` and `intake`). The engine is as it was before.
        """
        taken = prepare(
            self._state,
            (request_id, *forks),
            prompt_token_ids,
            params,
            eos_token_ids=self.eos_token_ids,
            vocab_size=self.model.config.vocab_size,
            caching=self.config.enable_prefix_caching,
            priority=priority,
            user=user,
        )
        state = scheduler.submit(self._state, taken.request)
        self._sources |= taken.sources
        if taken.search:
            self._searches[self._state.arrivals] = taken.search
        self._state = state
        if self._recorder:
            self._recorder.submit(taken.request, prompt_token_ids if self._notes_prompts else None)

    def reset_prefix_cache(self) -> None:
        """Forget what cached blocks hold. Requests under way go on."""
        self._state = scheduler.forget(self._state)
        if self._recorder:
            self._recorder.forget()

    def update_params(self, tree: Any) -> None:
        """Replace the parameters by copies of others, of the same shapes and dtypes, and forget what was cached.

        Raises:
            ValueError: requests are under way, or a parameter differs (all are named). The engine is as it was before.
        """
        if self.has_work:
            count = len(self._state.waiting) + len(self._state.running.seqs)
            raise ValueError(
                f"requests are under way ({count}), and one model has to serve each to its end; "
                "finish or cancel them before parameters are updated"
            )
        self.model = self.model._replace(params=replaced(self.model.params, tree))
        self._leaves = self.model.leaves
        self._ahead = Lookahead()  # what was sent ahead was computed with the old ones
        self.reset_prefix_cache()

    def cancel(self, request_id: str, reason: FinishReason = "abort") -> tuple[Event, ...]:
        """End a request at any time; its blocks are free at once. An unknown id does nothing.

        A branch of parallel sampling ends alone; the id of any beam ends its whole search.
        """
        self._state, events = scheduler.cancel(self._state, request_id, reason)
        self._ahead = self._ahead._replace(last=None)  # guesses go on from the state that is now
        self._take_in(events)
        if self._recorder:
            self._recorder.cancel(request_id, reason, events)
        return events

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do, or to tell."""
        return bool(self._state.waiting or self._state.running.seqs or self._kept)

    @property
    def state(self) -> scheduler.SchedulerState:
        """The scheduler's state: immutable, so looking cannot disturb."""
        return self._state

    # steps ------------------------------------------------------------------------------------------------------

    def step(self) -> StepResult | None:
        """Run one step; None when there is nothing to do.

        If it raises, or is interrupted, nothing is lost: what ran goes back to the queue and is computed again. If it
        was made before Ctrl-C came through, its result is that of the next call.
        """
        if self._kept is not None:
            result, self._kept = self._kept, None
            return result
        if not self.has_work:
            return None
        try:
            return self._step()
        except BaseException:
            if self._kept is None:
                self._start_over()
            raise

    def _step(self) -> StepResult:
        started, compiled = time.perf_counter(), compilations.compilations()
        state, plan = scheduler.schedule(self._state, self._policy)
        self._ahead, flight, rows = lookahead.take(self._ahead, plan)
        known, several = (self._policy, self._sources), self._together(plan)
        if flight is None:
            self._ahead, flight = lookahead.launch(state, plan, *known, several, self._send)
            rows = range(len(plan.seqs))
        if self.config.lookahead and not self._searches:
            depth = self.config.lookahead
            self._ahead = lookahead.extend(self._ahead, flight, state, plan, *known, depth, several, self._send)
        busy = any(other.sent > flight.sent for other in self._ahead.flights)  # with what follows
        idle = not busy and flight.sent < started and flight.ready
        tokens = np.asarray(flight.output.sampled.tokens)
        arrived = time.perf_counter()

        sampled = tokens[list(rows)].tolist()
        hashes = results.filled(plan, self._sources, self.config.block_size)
        searches, choices, ended = results.choose(plan, self._searches, flight.output)
        state, events = scheduler.commit(state, plan, sampled, hashes, choices)
        logprobs = results.logprobs(plan, self._sources, flight, rows)
        with undisturbed():
            self._state, self._searches = state, searches
            self._take_in(events)
            if self._recorder:
                self._recorder.schedule(plan, started)
                self._recorder.commit(sampled, hashes, choices, events)
            for result in ended:
                events += self.cancel(result.request_id, result.sequences[0].reason)
            finished = time.perf_counter()
            self._kept = StepResult(
                plan=plan,
                events=events,
                started=started,
                finished=finished,
                device_seconds=0.0 if idle else (finished if busy else arrived) - max(started, flight.sent),
                padded_tokens=self._shapes.bucket(flight.plan.num_tokens),
                compilations=compilations.compilations() - compiled,
                logprobs=logprobs,
                beams=ended,
            )
        result, self._kept = self._kept, None
        return result

    @undisturbed()
    def _start_over(self) -> None:
        """After a step that failed, nobody knows what the device has written: the cache begins anew."""
        self._state = scheduler.restart(self._state)
        self._searches = {group: search._replace(offers=()) for group, search in self._searches.items()}
        if self._recorder:
            self._recorder.restart()
        self._new_cache()

    def _together(self, plan: Plan) -> int:
        """How many steps a dispatch may have that begins with this plan, or with one like it."""
        several = Key(self._shapes.bucket(plan.num_tokens), self.config.steps_per_dispatch)
        return several.steps if several in self._keys and not self._searches else 1  # nobody can guess how beams go on

    def _send(self, plans: Sequence[Plan], before: SentStep | None = None) -> tuple[SentStep, ...]:
        """Have plans of one bucket computed, one after the other, after whatever is on the device -> their flights.

        Args:
            plans: all but the first are guesses, and that is one if there is a flight `before` it. From the first of
                another bucket on they are left out. A guess takes new tokens from the plan before it.
        """
        buckets = [self._shapes.bucket(plan.num_tokens) for plan in plans]
        several = Key(buckets[0], self.config.steps_per_dispatch)
        same = next((i for i, t in enumerate(buckets) if t != buckets[0]), len(plans))
        plans = plans[: same if several in self._keys else 1]
        batches, after = [], before and (before.plan, before.output.fed)
        for plan in plans:
            batches.append(self._packed(plan, after))
            after = plan, self._nothing
        if self._cache is None:  # there was no memory for it after a step that failed
            self._new_cache()
        assert self._cache is not None
        leaves, sent = self._leaves, time.perf_counter()
        pages = self._moved(plans[0], self._cache)
        if len(plans) == 1:
            self._cache, output = self._steps[Key(buckets[0])](leaves, pages, batches[0])
            outputs = (output,)
        else:
            batches += batches[-1:] * (several.steps - len(plans))
            self._cache, outputs = self._steps[several](leaves, pages, tuple(batches), np.int32(len(plans)))
        return tuple(SentStep(plan, output, sent) for plan, output in zip(plans, outputs, strict=False))

    def _packed(self, plan: Plan, after: tuple[Plan, Any] | None = None) -> Batch:
        """The batch of a plan; of a guess if it comes `after` a plan that samples what is, or will be, in an array."""
        sources = self._sources if after is None else lookahead.advanced(plan, self._sources)
        batch = pack(plan, sources, self._shapes, self._blanks)
        if not self._guesses:
            return batch
        feed = blank_feed(self._shapes, len(batch.tokens))
        if after is not None:
            feed = Feed(lookahead.fed_rows(plan, after[0], self._sources, len(batch.tokens)), after[1])
        return batch._replace(feed=feed)

    def _blank(self, t: int) -> Batch:
        """A step of bucket t that computes nothing: what shapes are taken from."""
        batch = pack(EMPTY_PLAN, {}, self._shapes._replace(tokens=(t,)), self._blanks)
        return batch._replace(feed=blank_feed(self._shapes, t)) if self._guesses else batch

    def _moved(self, plan: Plan, pages: cache.KVCache) -> cache.KVCache:
        """Move whole blocks before any is written: out to the host, back from there, then copies on the device."""
        if plan.swap_out:
            self._swap.out(pages, plan.swap_out)
        if plan.swap_in:
            pages = self._swap.back(pages, plan.swap_in)
        for i in range(0, len(plan.copies), COPIES):  # they are to blocks that were free, so none reads another's
            pages = self._copy(pages, *_padded(plan.copies[i : i + COPIES], COPIES))
        return pages

    def _take_in(self, events: Sequence[Event]) -> None:
        """Append new tokens to their requests and forget the requests and searches that ended."""
        apply_events(self._sources, events)
        ended = {event.request_id for event in events if isinstance(event, Finished)}
        self._searches = {g: search for g, search in self._searches.items() if search.names[0] not in ended}

    # state ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every request and all cache content, and end a recording; compiled steps stay."""
        if self._recorder:
            self._recorder.close()
            self._recorder = None
        c = self.config
        self._state = scheduler.init(limits(c, host_blocks(c, self.model)))
        self._sources: dict[str, SequenceData] = {}
        self._searches: dict[int, beams.Search] = {}  # by the group of their beams
        self._kept: StepResult | None = None  # of a step that was made, and that nobody has been told of
        self._new_cache()

    def _new_cache(self) -> None:
        self._ahead = Lookahead()  # whose steps were sent with the old one
        self._cache = None  # which goes before the new one comes
        self._cache = cache.init(blocks=self.config.num_blocks, **self._block)

    def record(self, path: str | os.PathLike[str] | None, *, times: bool = False, prompts: bool = False) -> None:
        """Write every scheduler input and outcome to a JSONL file from now on (host/event_log.py); None stops.

        Args:
            times: note when, for `pagedjax view` and `trace`; the same run no longer gives the same bytes then.
            prompts: note the prompts' token ids, so that `pagedjax view` can show their text.

        Raises:
            ValueError: requests are under way; a replay starts from an empty scheduler.
        """
        if path is not None and self.has_work:
            raise ValueError("recording must start while no request is under way; a replay starts from nothing")
        if self._recorder:
            self._recorder.close()
            self._recorder = None
        if path is not None:
            self._state = scheduler.init(self._state.config)  # where a replay starts
            self._ahead = Lookahead()  # guesses know sequences by their arrival, which starts again
            clock = time.perf_counter if times else None
            self._notes_prompts = prompts
            self._recorder = Recorder(path, self._state.config, self._policy.name, clock=clock)

    def _warm_up(
        self, step: Any, config: EngineConfig, found: memory.DeviceMemory, progress: bool
    ) -> tuple[Mapping[Key, Callable], memory.MemoryReport, dict[str, Any]]:
        """Compile the steps, settle the number of blocks, and run the smallest step once so that the first request
        meets warm code. Compiling needs the shapes of a cache and not its memory, which is taken only when it fits."""
        before, started = compilations.counts(), time.perf_counter()
        smallest, largest = self._shapes.tokens[0], self._shapes.tokens[-1]

        def pages(c: Resolved) -> cache.KVCache:
            return jax.eval_shape(lambda: cache.init(blocks=c.num_blocks, **self._block))

        def build(key: Key, c: Resolved) -> Any:
            known, blank = (self._leaves, pages(c)), self._blank(key.tokens)
            if key.steps == 1:
                return step.lower(*known, blank).compile()
            return make_steps(step).lower(*known, (blank,) * key.steps, np.int32(0)).compile()

        def settle(program: Any) -> Resolved:
            return resolve(config, self.model, found, memory.activations_peak(program))

        lazy = self.config.compilation == "lazy"
        if lazy:
            steps = programs.Lazy(build, self.config)
        else:
            steps, self.config = programs.at_once(build, self.config, settle, progress=progress)
        shapes = pages(self.config)
        pairs = _padded((), COPIES)
        self._copy = copy_blocks if lazy else copy_blocks.lower(shapes, *pairs).compile()
        if self.config.preemption == "swap":
            several = max(1, min(MOVED // cache.block_bytes(**self._block), self._shapes.table_width))
            self._swap = SwapSpace(shapes, host_blocks(self.config, self.model), several)
        self.reset()
        compiled = time.perf_counter()
        if not lazy:
            self._cache, output = steps[Key(smallest)](self._leaves, self._cache, self._blank(smallest))
            jax.block_until_ready(output)
        report = memory.report(
            found,
            weights=memory.held(self._leaves),
            activations=None if lazy else memory.activations_peak(steps[Key(largest)]),
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            block_bytes=cache.block_bytes(**self._block),
            max_model_len=self.config.max_model_len,
            swap_space_gib=self.config.swap_space_gib if self.config.preemption == "swap" else 0,
        )
        made = compilations.counts() - before
        startup = {"compile": compiled - started, "warmup": time.perf_counter() - compiled, **made._asdict()}
        return steps, report, startup


def _padded(copies: Sequence[tuple[int, int]], size: int) -> np.ndarray:
    """[2, size] from and to; what is left over copies the trash block onto itself."""
    pairs = np.zeros((2, size), np.int32)
    if copies:
        pairs[:, : len(copies)] = np.array(copies, np.int32).T
    return pairs
