"""An engine without a device: the same scheduler, policies and requests, with a clock that a cost
model advances.

    simulate: {chip: h200, model: llama-3-8b}      # a roofline, see cost.py
    simulate: {chip: tpu-v5e, mesh: {tensor: 8}, model: llama-3-8b}   # a roofline of eight devices,
                                                                      # which exchange sums
    simulate: {fit: runs/w1/0123456789ab/0}        # the measured steps of a run
    simulate: {cost: mine.py:seconds}              # a function of your own, of the step's counts
    simulate: {step_s: 1.0}                        # every step takes the same time
    simulate: {profile: distserve/opt-13b/tp2, padded: false}   # published coefficients, see
                                                                # profiles.py

This section is the only difference in a config: driver, events, records, summary and report are the
same. Tokens have no meaning. A request ends at its max_tokens, or before, at the length that the
workload draws: its last token there is an end token outside of the vocabulary. So
`sampling.ignore_eos` must be true. Time is virtual: nothing sleeps, and the load of the machine
does not change a run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from immutables import Map

from experiments.simulation import cost, profiles
from experiments.simulation.cache_plan import CachePlan, cache_plan
from experiments.simulation.cost import (
    Roofline,
    Shape,
    Simulate,
    StepTime,
    Work,
    work_of,
)
from experiments.simulation.layer_kinds import Seen
from experiments.simulation.spans import DecodeSpan, StepTimes, sampled, step_times
from experiments.simulation.unfelt import refuse_unfelt
from pagedjax.device import formats
from pagedjax.device.batch import token_buckets
from pagedjax.engine import drafting
from pagedjax.engine.drafters import Drafter
from pagedjax.engine.requests import (
    EngineRequest,
    RequestRules,
    SequenceData,
    Sequences,
    apply_events,
    extended,
    hashes_of_filled,
    prepare,
)
from pagedjax.host import admission, blocks, decode_spans, kv_policies, policies, scheduler
from pagedjax.host.drafts import Sample, cut_at_the_end
from pagedjax.host.event_log import Cancel, Commit, Entry, Recorder, Schedule, Submit
from pagedjax.host.reservation import table_width
from pagedjax.host.state import limits
from pagedjax.host.types import (
    EMPTY_PLAN,
    NO_HASHES,
    Event,
    Finished,
    FinishReason,
    Plan,
    Released,
    Request,
    Seq,
    StepResult,
)
from pagedjax.options.config import AS_STORED, EngineConfig, check_model_len
from pagedjax.options.own_names import names_own_value
from pagedjax.options.params import SamplingParams
from pagedjax.weights.families import own_family
from pagedjax.weights.huggingface import np_dtype
from pagedjax.weights.locate import open_checkpoint
from pagedjax.weights.tokenizer_files import open_tokenizer

# The most steps that are made together. An arrival ends them early, and the times of the steps
# behind it were calculated in vain.
MAX_STEPS_AHEAD = 1024


class Guess(NamedTuple):
    """The drafts of a sequence for its next step."""

    drafts: int
    right: int  # how many of the first drafts the target accepts


# (sequence, its known tokens, most drafts) -> its drafts
Guesses = Callable[[Seq, int, int], Guess]


class Handover(NamedTuple):
    """A sequence on its way from one engine to another."""

    released: Released
    data: SequenceData | None  # its tokens; None: no prefixes are shared
    end: int | None = None  # its drawn length, prompt and output; None: it ends at max_tokens


def _has_share(seq: Seq, split: float) -> bool:
    """Whether a share of a sequence's tokens is computed. All its tokens are the prompt and the
    predicted output; without a prediction, the prompt and max_tokens.
    """
    request = seq.request
    output = request.max_tokens if request.predicted is None else request.predicted
    return not request.forks and seq.computed >= split * (request.prompt_len + output)


class WholeBatch(NamedTuple):
    """A batch that is computed until its last member has ended, and answered then, as in engines
    before Orca.
    """

    # for each ended member, the tokens that it sees in the next step: one more in each step
    contexts: tuple[int, ...] = ()
    pending: tuple[Event, ...] = ()  # events that are reported when the batch is over


def after_step(
    batch: WholeBatch, plan: Plan, events: tuple[Event, ...], *, over: bool
) -> tuple[WholeBatch, tuple[Event, ...]]:
    """The batch after one of its steps, and the events to report now: all events of the batch when
    it is over, else none.
    """
    pending = batch.pending + events
    if over:
        return WholeBatch(), pending
    ended = {event.request_id for event in events if isinstance(event, Finished)}
    rows = zip(plan.seqs, plan.starts, plan.counts, strict=True)
    new_contexts = [start + count for seq, start, count in rows if seq.request_id in ended]
    contexts = tuple(tokens + 1 for tokens in (*batch.contexts, *new_contexts))
    return WholeBatch(contexts, pending), ()


def with_rows(work: Work, contexts: Sequence[int], windows: Sequence[int]) -> Work:
    """The work with a further row of one token for each of `contexts`.

    Args:
        contexts: the number of tokens that each further row sees.
        windows: those of `work.seen`.
    """
    rows = len(contexts)
    context = sum(contexts)
    seen_by_rows = [sum([min(tokens, window) for tokens in contexts]) for window in windows]
    return work._replace(
        seen=tuple(
            [
                Seen(step.context + tokens, step.pairs + tokens)
                for step, tokens in zip(work.seen, seen_by_rows, strict=True)
            ]
        ),
        sequences=work.sequences + rows,
        sampled=work.sampled + rows,
        context=work.context + context,
        pairs=work.pairs + context,
        single=work.single + rows,
        single_context=work.single_context + context,
    )


class SimulatedEngine:
    """The methods of an engine that a driver uses, in virtual time.

    `now`: seconds since construction or reset.
    """

    def __init__(
        self,
        config: EngineConfig,
        seconds: StepTime,
        *,
        vocab_size: int,
        host_blocks: int = 0,
        simulate: Simulate,
        guesses: Guesses | None = None,
        plan: CachePlan | None = None,
    ) -> None:
        """`config` must give max_model_len, num_blocks and token_buckets; see `resolved`.

        Args:
            guesses: the drafts of each sequence, for example recorded ones; None draws them by
                simulate.acceptance.
            plan: the blocks of the model's layers; None: all have attention that sees all tokens.

        Raises:
            ValueError: whole batches with a policy under which requests join a batch, or an option
                that a simulation ignores.
        """
        refuse_unfelt(config, simulate, recorded=guesses is not None)
        if simulate.whole_batches and config.policy != "static":
            raise ValueError(
                f"simulate.whole_batches with engine.policy {config.policy!r}, under which "
                "requests join a batch; set engine.policy: static"
            )
        self.config = config
        self.now = 0.0
        self._seconds = seconds
        self._simulate = simulate
        self._guesses = guesses or independent(simulate.acceptance or 0.0)
        self._rules = RequestRules(
            vocab_size,
            caching=config.enable_prefix_caching,
            spare=config.speculative.num_tokens if config.speculative else 0,
        )
        assert config.max_model_len is not None, "see `resolved`"
        # an id outside the vocabulary, so that no other token is it
        self._end_tokens = frozenset({vocab_size})
        self._policy = policies.find(config.policy)
        # of a model whose layers are not all alike, and its windows
        self._shape = plan.shape if plan is not None and plan.shape.kinds else None
        self._windows = self._shape.windows if self._shape else ()
        if plan is None:
            views = kv_policies.views(config, table_width(config, config.max_model_len))
            self._limits = limits(config, host_blocks, views)
        else:
            sizes = limits(config, host_blocks, plan.views)
            self._limits = sizes._replace(shares_filling=plan.shares_filling)
        self._recorder: Recorder | None = None
        self.reset()

    def reset(self) -> None:
        self.record(None)
        self.scheduler_state = scheduler.init(self._limits)
        self._sequences: Sequences = Map()
        options = self.config.speculative
        self._drafting = (
            drafting.start(Drafter("simulated", lambda *_: ()), options) if options else None
        )
        self._batch = WholeBatch()
        # id of a sequence with a drawn end -> its length there
        self._ends: dict[str, int] = {}
        self.now = 0.0

    def record(
        self, path: str | os.PathLike[str] | None, *, times: bool = False, prompts: bool = False
    ) -> None:
        """Like `Engine.record`, with the times of this engine's clock. Call it after `reset`.

        A released sequence keeps its blocks here, which no line of a recording says: engines of
        pools are not recorded.
        """
        if self._recorder:
            self._recorder.close()
            self._recorder = None
        if path is not None:
            clock = self.clock if times else None
            policy: Any = self.config.policy
            self._recorder = Recorder(
                path,
                self._limits,
                self._policy.name,
                own_policy=policy if names_own_value(policy) else None,
                clock=clock,
                prompts=prompts,
            )

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler_state.waiting or self.scheduler_state.running.seqs)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        forks: Sequence[str] = (),
        priority: int = 0,
        user: str = "",
        predicted: int | None = None,
        service_class: str = "",
        deadline: float | None = None,
        ends_at: int | None = None,
    ) -> None:
        """Like `Engine.add`.

        Args:
            ends_at: output tokens of each branch, of which the last is an end token; None: as many
                as `params.max_tokens`.

        Raises:
            ValueError: the request could end before max_tokens, or can never run.
        """
        if not params.ignore_eos or params.stop_token_ids:
            raise ValueError(
                "a simulated request ends at max_tokens; set sampling.ignore_eos: true and leave "
                "stop_token_ids out"
            )
        if params.trace_decode_token_ids is not None:  # tokens have no meaning here
            params = dataclasses.replace(params, trace_decode_token_ids=None)
        names = (request_id, *forks)
        request = EngineRequest(
            names,
            prompt_token_ids,
            params,
            priority=priority,
            user=user,
            predicted=predicted,
            service_class=service_class,
            deadline=deadline,
        )
        prepared = prepare(self.scheduler_state, request, self._rules)
        scheduler_request = prepared.request
        if ends_at is not None:
            scheduler_request = scheduler_request._replace(stop_token_ids=self._end_tokens)
        self.scheduler_state = scheduler.submit(self.scheduler_state, scheduler_request)
        self._write(Submit(scheduler_request, prompt_token_ids))
        if ends_at is not None:
            end = len(prompt_token_ids) + ends_at
            self._ends |= dict.fromkeys(names, end)
        if self._rules.caching:  # only hashes of blocks need token values
            self._sequences = self._sequences.update(prepared.sequences)

    def _write(self, entry: Entry) -> None:
        if self._recorder:
            self._recorder.write(entry)

    def cancel(self, request_id: str, reason: FinishReason = "abort") -> tuple[Event, ...]:
        """Like `Engine.cancel`."""
        state = self.scheduler_state
        self.scheduler_state, events = scheduler.cancel(state, request_id, reason)
        if self._sequences:
            self._sequences = apply_events(self._sequences, events, state.running)
        self._ends.pop(request_id, None)
        self._write(Cancel(request_id, reason, events))
        return events

    def check(self, request: Request) -> None:
        """Raises Rejected if this engine could never adopt the request's sequences."""
        admission.check_request(self.scheduler_state, request._replace(forks=()))

    def prefilled(self, split: float | None = None) -> tuple[str, ...]:
        """Ids of running sequences that can be handed over.

        Args:
            split: the share of a sequence's tokens that must be computed; see `Pools.split`. None:
                its prompt must be computed, and its first token of output. Branches are handed over
                one by one, so their common prompt is computed before.
        """
        seqs = scheduler.running(self.scheduler_state)
        if split is not None:
            return tuple([s.request_id for s in seqs if _has_share(s, split)])
        return tuple([s.request_id for s in seqs if s.num_output and s.length - s.computed == 1])

    def release(self, request_id: str) -> Handover:
        """Let a sequence go.

        Its blocks stay taken until `free`, because their pages are still to be read.

        Raises:
            ValueError: see `scheduler.release`.
        """
        state = self.scheduler_state
        # a first release says which blocks they are; their second owner keeps them when they are
        # released
        _, released = scheduler.release(state, request_id)
        state = state._replace(pool=blocks.share(state.pool, released.blocks))
        self.scheduler_state, _ = scheduler.release(state, request_id)
        data = self._sequences.get(request_id)
        if data is not None:
            self._sequences = self._sequences.delete(request_id)
        return Handover(released, data, self._ends.pop(request_id, None))

    def free(self, handover: Handover) -> None:
        """Free the blocks of a released sequence, whose pages are elsewhere now."""
        state = self.scheduler_state
        pool = blocks.release(state.pool, handover.released.blocks[::-1])
        self.scheduler_state = state._replace(pool=pool)

    def adopt(self, handover: Handover) -> bool:
        """Go on with a sequence of another engine; False, and nothing changes, if there is no room.

        Raises:
            Rejected: see `scheduler.adopt`.
        """
        released = handover.released
        if not scheduler.has_room(self.scheduler_state, self._policy, released):
            return False
        self.scheduler_state, _ = scheduler.adopt(self.scheduler_state, self._policy, released)
        if handover.end is not None:
            self._ends[released.request.request_id] = handover.end
        if handover.data is not None:
            self._sequences = self._sequences.set(released.request.request_id, handover.data)
        return True

    def step(self) -> StepResult | None:
        """Make the next step.

        Returns:
            The step's result. None if no step is made: nothing is unfinished, or released sequences
            hold the blocks that a step needs.
        """
        if not self.has_work:
            return None
        started = self.now
        guesses = self._guess()
        num_drafts = {name: guess.drafts for name, guess in guesses.items()}
        state, plan = scheduler.schedule(self.scheduler_state, self._policy, num_drafts, started)
        if not (plan.seqs or plan.preempted or plan.rejected):
            return None
        ended_contexts = self._batch.contexts
        padded = self._padded(plan.num_tokens + len(ended_contexts))
        work = work_of(
            plan,
            padded,
            cached=self._simulate.kv_cache,
            config=self._limits,
            shape=self._shape,
        )
        if ended_contexts:
            work = with_rows(work, ended_contexts, self._windows)
        seconds = self._seconds(work)
        seconds += self._simulate.draft_s * max(plan.drafts, default=0)
        samples = self._samples(plan, guesses)
        hashes = NO_HASHES
        if self._sequences:
            accepted_drafts = cut_at_the_end(plan, samples) if plan.drafts else ()
            hashes = hashes_of_filled(
                plan, self._sequences, self.config.block_size, accepted_drafts
            )
        self.scheduler_state, events = scheduler.commit(state, plan, samples, hashes)
        self.now = started + seconds + self._simulate.host_s
        self._write(Schedule(plan, num_drafts, started))
        self._write(Commit(plan, samples, dict(hashes), {}, events))
        if self._sequences:
            self._sequences = apply_events(
                self._sequences, events, state.running, self._rules.spare
            )
        if self._ends:
            for event in events:
                if isinstance(event, Finished):
                    self._ends.pop(event.request_id, None)
        if self._simulate.whole_batches:
            self._batch, events = after_step(
                self._batch, plan, events, over=not self.scheduler_state.running.seqs
            )
        result = StepResult(plan, events, started, self.now, seconds, padded, 0)
        if self._drafting:
            self._drafting = drafting.learned(self._drafting, result)
        return result

    def _samples(self, plan: Plan, guesses: Mapping[str, Guess]) -> list[Sample]:
        """The samples of each row: a token, or with drafts the accepted drafts and a token.

        Accepted drafts are written into the tokens of their sequence.
        """
        samples: list[Sample] = [
            self._token(seq, length) for seq, length in zip(plan.seqs, plan.lengths, strict=True)
        ]
        for i, num_drafts in enumerate(plan.drafts):
            seq = plan.seqs[i]
            length = plan.lengths[i]
            num_right = min(guesses[seq.request_id].right, num_drafts) if num_drafts else 0
            tokens = [self._token(seq, length + j) for j in range(num_right + 1)]
            if self._sequences:
                self._sequences[seq.request_id].tokens[length : length + num_right] = tokens[
                    :num_right
                ]
            samples[i] = tuple(tokens)
        return samples

    def _token(self, seq: Seq, length: int) -> int:
        """The token that a sequence gets after `length` known ones."""
        if self._ends and self._ends.get(seq.request_id) == length + 1:
            return self._rules.vocab_size
        return sampled(seq.arrival, length, self._rules.vocab_size)

    def next_step_times(self) -> StepTimes | None:
        """The times of the next steps, if several of them only decode; `advance` makes them.

        Else None. With a recording it is None, too: a recording has each step.
        """
        if self._recorder:
            return None
        if self._drafting or self._simulate.whole_batches or not self._simulate.kv_cache:
            return None
        if self._policy.init is not None:
            return None
        if self._windows and self._windows[0] < self._limits.max_model_len:
            return None  # what a row sees does not grow beyond a window
        steps = min(decode_spans.steps_ahead(self.scheduler_state, self._ends), MAX_STEPS_AHEAD)
        if steps < 2:
            return None
        lengths = self.scheduler_state.running.lengths
        rows = len(lengths)
        context = sum(lengths)
        work = Work(
            tokens=self._padded(rows),
            sequences=rows,
            sampled=rows,
            context=context,
            pairs=context,
            single=rows,
            single_context=context,
            seen=(Seen(context, context),) * len(self._windows),
        )
        return step_times(self.now, steps, work, self._seconds, self._simulate.host_s)

    def advance(self, times: StepTimes) -> DecodeSpan:
        """Make the steps that `next_step_times` gave, or the first of these. Afterwards the state is
        that after so many calls of `step`.
        """
        state = self.scheduler_state
        steps = len(times.started)
        seqs, lengths, computed = state.running
        hashes = NO_HASHES
        if self._sequences:
            for seq, length in zip(seqs, lengths, strict=True):
                tokens = sampled(seq.arrival, length + np.arange(steps), self._rules.vocab_size)
                data = self._sequences[seq.request_id]
                extended_data = extended(data, length, tokens, self._rules.spare)
                if extended_data is not data:
                    self._sequences = self._sequences.set(seq.request_id, extended_data)
            plan = EMPTY_PLAN._replace(seqs=seqs, starts=computed, counts=(steps,) * len(seqs))
            hashes = hashes_of_filled(plan, self._sequences, self.config.block_size)
        self.scheduler_state, allocated = decode_spans.after_decodes(state, steps, hashes)
        self.now = float(times.finished[-1])
        return DecodeSpan(
            step=state.step,
            times=times,
            seqs=self.scheduler_state.running.seqs,
            lengths=lengths,
            vocabulary=self._rules.vocab_size,
            padded=self._padded(len(seqs)),
            waiting=len(state.waiting),
            blocks=state.pool.num_blocks - state.pool.num_free,
            allocated=allocated,
            listed=sum([len(seq.blocks) for seq in seqs]),
            num_blocks=state.pool.num_blocks,
        )

    def _guess(self) -> Mapping[str, Guess]:
        """The drafts for the next step, by sequence id."""
        running = self.scheduler_state.running
        buckets = self.config.token_buckets
        if not (self._drafting and buckets):
            return {}
        draftable, num_tokens = drafting.candidates(self._drafting, running, buckets)
        if not num_tokens:
            return {}
        seqs = {seq.request_id: seq for seq in running.seqs}
        return {name: self._guesses(seqs[name], length, num_tokens) for name, length in draftable}

    def _padded(self, tokens: int) -> int:
        if not self._simulate.padded:
            return tokens
        assert self.config.token_buckets is not None
        return next((size for size in self.config.token_buckets if size >= tokens), tokens)


def independent(probability: float) -> Guesses:
    """A drafter that always gives as many drafts as the scheduler wants. A draft is accepted with
    this probability if the drafts before it are accepted.
    """
    return lambda seq, length, k: Guess(k, num_accepted(seq.arrival, length, k, probability))


def num_accepted(arrival: int, length: int, k: int, probability: float) -> int:
    """How many of k drafts are accepted: each with a probability, by a random number of (arrival,
    position).
    """
    for j in range(k):
        z = (arrival << 32) + length + j + 0x9E3779B97F4A7C15  # splitmix64 (Steele et al. 2014)
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        if (z ^ (z >> 31)) / 2**64 >= probability:
            return j
    return k


def resolved(config: EngineConfig, shape: Shape, memory: float | None) -> EngineConfig:
    """The configuration with lengths, blocks and buckets chosen as for a device with `memory`
    bytes.

    `shape` is what this device has of the model: on a mesh, its part.

    Raises:
        ValueError: max_model_len is beyond the model's, or the blocks do not fit.
    """
    length = config.max_model_len or shape.longest
    check_model_len(length, shape.longest)
    num_blocks = config.num_blocks
    block_bytes = cache_plan(dataclasses.replace(config, max_model_len=length), shape).block_bytes
    if memory is None and num_blocks is None:
        raise ValueError(
            "no chip, so no memory to size the cache by; set cache_tokens or engine.num_blocks"
        )
    if memory is not None:
        free_bytes = memory - shape.total_bytes
        if num_blocks is None:
            most_used_blocks = config.max_num_seqs * table_width(config, length)
            num_blocks = min(
                most_used_blocks, int(config.memory_fraction * free_bytes / block_bytes)
            )
        if num_blocks < 1 or num_blocks * block_bytes > free_bytes:
            raise ValueError(
                f"weights of {shape.total_bytes / 1e9:.1f} GB leave "
                f"{max(free_bytes, 0) / 1e9:.1f} of {memory / 1e9:.1f} GB, room for "
                f"{max(int(free_bytes / block_bytes), 0)} blocks of {config.block_size} tokens, "
                f"and {num_blocks} are wanted; lower num_blocks, or use more or larger chips"
            )
    buckets = config.token_buckets or token_buckets(config.max_num_batched_tokens)
    return dataclasses.replace(
        config, max_model_len=length, num_blocks=num_blocks, token_buckets=buckets
    )


class SimulatedLLM:
    """The attributes of an `LLM` that `experiments.core.drive.measure` uses."""

    def __init__(
        self, simulate: Simulate, config: EngineConfig, model: str, count: int = 1
    ) -> None:
        """Make the engines.

        `engines` are equal, and `engine` is the first of them. `block_bytes` are the bytes of a
        block of the pool on all devices together.

        Args:
            model: gives the shape if the simulation names none, and the tokenizer if a workload has
                text.
            count: the number of engines.
        """
        shape = _shape(simulate, config, model)
        vocabulary = shape.vocabulary
        memory = None
        devices = 1
        roofline: Roofline | None = None
        if simulate.fit is not None:
            steps = cost.read_steps((Path(simulate.fit) / cost.STEPS).read_text(encoding="utf-8"))
            self.step_time: StepTime = cost.fit(steps)
        elif (seconds := simulate.step_s) is not None:
            self.step_time = lambda work: seconds
        elif simulate.cost is not None:
            self.step_time = cost.own_step_time(simulate.cost)
        elif simulate.profile is not None:
            self.step_time = profiles.find(simulate.profile)
        else:
            roofline = _roofline(simulate, config, shape)
            memory = roofline.chips * roofline.chip.memory
            devices = roofline.devices
        # on a mesh, the part of a device: its memory decides
        part = roofline.shape if roofline else shape
        config = resolved(config, part, memory)
        plan = cache_plan(config, part)
        if roofline is not None:
            self.step_time = roofline._replace(pool=plan) if part.kinds else roofline
        self.block_bytes = config.block_size * shape.token_bytes
        if part.kinds:
            self.block_bytes = devices * plan.block_bytes / plan.groups
        host_blocks = 0
        if config.preemption == "swap":
            swap_bytes = config.swap_space_gib * 2**30
            host_blocks = int(swap_bytes / (devices * plan.block_bytes)) * plan.groups
        self.engines = tuple(
            SimulatedEngine(
                config,
                self.step_time,
                vocab_size=vocabulary,
                host_blocks=host_blocks,
                simulate=simulate,
                plan=plan,
            )
            for _ in range(count)
        )
        self.engine = self.engines[0]
        self.tokenizer = _Tokenizer(model, vocabulary)
        self.startup: dict[str, float] = {}


class _Tokenizer:
    """A tokenizer that is loaded when a workload has text; most simulated workloads have none."""

    def __init__(self, model: str, vocab_size: int) -> None:
        self._model = model
        self._tokenizer = None
        self.vocab_size = vocab_size

    def encode(self, text: str) -> Sequence[int]:
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self._model)
        return self._tokenizer.encode(text)


def _shape(simulate: Simulate, config: EngineConfig, model: str) -> Shape:
    """The sizes of the simulated model, with the bytes of its weights and of the cache."""
    dtype = config.dtype or "bfloat16"
    if config.weight_dtype == AS_STORED:
        raise ValueError(
            "weight_dtype is 'stored', and a simulation reads no weights; simulate 'int8' or a dtype"
        )
    stored = formats.find(formats.name_of(config.weight_dtype))
    weight_bytes = np_dtype(stored.numbers_dtype(config.weight_dtype or dtype)).itemsize
    kv_bytes = np_dtype(config.kv_cache_dtype or dtype).itemsize
    if simulate.model is not None:
        shape = cost.named_shape(simulate.model)
        return shape._replace(weight_bytes=weight_bytes, kv_bytes=kv_bytes)
    family = own_family(config.model_family)
    checkpoint = open_checkpoint(model, family=family)
    return cost.shape_of(checkpoint.config, weight_bytes, kv_bytes, family=family)


def _roofline(simulate: Simulate, config: EngineConfig, shape: Shape) -> Roofline:
    """The roofline of the chips, or of a mesh of chips."""
    roofline = Roofline(
        shape=shape,
        chip=simulate.chip_limits,
        chips=simulate.chips,
        bandwidth_share=simulate.bandwidth_share,
        rate_share=simulate.rate_share,
        block_size=config.block_size,
        batched_moves=simulate.batched_moves,
        activation_bytes=np_dtype(config.dtype or "bfloat16").itemsize,
    )
    if simulate.mesh is None:
        return roofline
    return cost.of_mesh(roofline, simulate.mesh, simulate.hop_s)
