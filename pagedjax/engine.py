"""The imperative shell: schedule -> pack -> step -> commit, and the tokens of the requests under way.

It knows requests and arrays, and nothing of text. Everything it yields is a `StepResult`; it counts nothing.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from pagedjax import attention, cache, memory, monitor, scheduler
from pagedjax.batch import MAX_LISTED, Shapes, Source, blank_sampling, pack, token_buckets
from pagedjax.config import EngineConfig, Resolved
from pagedjax.models import Model
from pagedjax.policies import POLICIES
from pagedjax.replay import Recorder
from pagedjax.step import StepOutput, make_step
from pagedjax.types import Event, Finished, FinishReason, Plan, Request, Sampled, StepResult, TokenLogprobs


class Engine:
    """One model, one cache, one scheduler state.

        engine.add("a", prompt_token_ids, SamplingParams())
        while engine.has_work:
            result = engine.step()

    Attributes:
        config: the `Resolved` configuration.
        startup: seconds by stage ("compile", "warmup") and the number of compilations.
    """

    def __init__(
        self, model: Model, config: EngineConfig, *, eos_token_ids: Sequence[int] = (), progress: bool = False
    ) -> None:
        self.model = model
        self.config = resolve(config, model)
        self.eos_token_ids = tuple(eos_token_ids)
        c, m = self.config, model.config
        self._policy = POLICIES[c.policy]
        self._shapes = _shapes(c, model)
        step = make_step(model.graphdef, attention.attend(c.attention_impl, m.head_dim**-0.5), c.seed)
        self._recorder: Recorder | None = None
        self._cache: cache.KVCache | None = None
        self.reset()
        self._steps, self._blanks, self.startup = self._warm_up(step, progress)

    # requests ---------------------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt_token_ids: Sequence[int], params: Any) -> None:
        """Queue a request.

        Raises:
            ValueError: the request can never run (see `scheduler.submit`), a token id outside the vocabulary, or
                more listed tokens than MAX_LISTED. The engine is as it was before.
        """
        prompt = np.asarray(prompt_token_ids, np.int64).reshape(-1)
        vocab = self.model.config.vocab_size
        if prompt.size and (prompt.min() < 0 or prompt.max() >= vocab):
            bad = next(int(t) for t in prompt if not 0 <= t < vocab)
            raise ValueError(f"request {request_id!r} has token id {bad}; the vocabulary is 0 to {vocab - 1}")
        stops = () if params.ignore_eos else self.eos_token_ids
        stops = tuple(dict.fromkeys((*stops, *params.stop_token_ids)))
        _check_listed(request_id, params, stops, vocab)

        request = Request(request_id, len(prompt), params.max_tokens, params.min_tokens, frozenset(stops))
        state = scheduler.submit(self._state, request)
        tokens = np.zeros(scheduler.final_length(request, state.config), np.int32)
        tokens[: len(prompt)] = prompt
        seed = params.seed if params.seed is not None else (0x9E3779B9 * (self._state.arrivals + 1)) % 2**32
        self._sources[request_id] = Source(params, seed, len(prompt), tokens, len(prompt), stops)
        self._state = state
        if self._recorder:
            self._recorder.submit(request)

    def cancel(self, request_id: str, reason: FinishReason = "abort") -> tuple[Event, ...]:
        """End a request at any time; its blocks are free at once. An unknown id does nothing."""
        self._state, events = scheduler.cancel(self._state, request_id, reason)
        if events:
            del self._sources[request_id]
        if self._recorder:
            self._recorder.cancel(request_id, reason, events)
        return events

    @property
    def has_work(self) -> bool:
        return bool(self._state.waiting or self._state.running.seqs)

    @property
    def state(self) -> scheduler.SchedulerState:
        """The scheduler's state: immutable, so looking cannot disturb."""
        return self._state

    # steps ------------------------------------------------------------------------------------------------------

    def step(self) -> StepResult | None:
        """Run one step; None when there is nothing to do."""
        if not self.has_work:
            return None
        started, compiled = time.perf_counter(), monitor.compilations()
        state, plan = scheduler.schedule(self._state, self._policy)
        batch = pack(plan, self._sources, self._shapes, self._blanks)
        t = len(batch.tokens)

        dispatched = time.perf_counter()
        self._cache, output = self._steps[t](self.model.params, self._cache, batch)
        tokens = np.asarray(output.sampled.tokens)
        device_seconds = time.perf_counter() - dispatched

        sampled = tokens[: len(plan.seqs)].tolist()
        if self._recorder:
            self._recorder.schedule(plan)
        self._state, events = scheduler.commit(state, plan, sampled)
        if self._recorder:
            self._recorder.commit(sampled, events)
        logprobs = _logprobs(plan, self._sources, output)
        self._take_in(events)
        return StepResult(
            plan=plan,
            events=events,
            started=started,
            finished=time.perf_counter(),
            device_seconds=device_seconds,
            padded_tokens=t,
            compilations=monitor.compilations() - compiled,
            logprobs=logprobs,
        )

    def _take_in(self, events: Sequence[Event]) -> None:
        """Append new tokens to their requests and forget the requests that ended."""
        for event in events:
            if isinstance(event, Sampled):
                for request_id, token in zip(event.request_ids, event.token_ids, strict=True):
                    source = self._sources[request_id]
                    source.tokens[source.length] = token
                    source.length += 1
            elif isinstance(event, Finished):
                del self._sources[event.request_id]

    # state ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every request and all cache content, and end a recording; compiled steps stay."""
        if self._recorder:
            self._recorder.close()
            self._recorder = None
        c, m = self.config, self.model.config
        limits = (c.block_size, c.num_blocks, c.max_num_batched_tokens, c.max_num_seqs, c.max_model_len)
        self._state = scheduler.init(scheduler.SchedulerConfig(*limits))
        self._sources: dict[str, Source] = {}
        self._cache = None  # the old one goes before the new one comes
        self._cache = cache.init(
            layers=m.layers,
            blocks=c.num_blocks,
            block_size=c.block_size,
            kv_heads=m.kv_heads,
            head_dim=m.head_dim,
            dtype=c.dtype,
        )

    def record(self, path: str | os.PathLike[str] | None) -> None:
        """Write every scheduler input and outcome to a JSONL file from now on (see pagedjax/replay.py); None stops.

        Raises:
            ValueError: requests are under way; a replay starts from an empty scheduler.
        """
        if path is not None and self.has_work:
            raise ValueError("recording must start while no request is under way; a replay starts from nothing")
        if self._recorder:
            self._recorder.close()
        if path is not None:
            self._state = scheduler.init(self._state.config)  # where a replay starts
        self._recorder = Recorder(path, self._state.config, policy=self._policy.name) if path is not None else None

    def _warm_up(self, step: Any, progress: bool) -> tuple[dict[int, Callable], dict[int, Any], dict[str, Any]]:
        """Compile every bucket, and run the smallest once so that the first request meets warm code."""
        before, started = monitor.compilations(), time.perf_counter()
        blanks = {t: jax.device_put(blank_sampling(self._shapes, t)) for t in self._shapes.tokens}
        nothing = Plan(0, (), (), (), (), (), (), 0, 0, 1)
        steps = {}
        bar = tqdm(self._shapes.tokens, desc="compiling", unit="bucket", disable=not progress, leave=False)
        for t in bar:
            bar.set_postfix_str(f"{t} tokens")
            shapes = self._shapes._replace(tokens=(t,))
            steps[t] = step.lower(self.model.params, self._cache, pack(nothing, {}, shapes, blanks)).compile()
        compiled = time.perf_counter()
        t = self._shapes.tokens[0]
        empty = pack(nothing, {}, self._shapes._replace(tokens=(t,)), blanks)
        self._cache, output = steps[t](self.model.params, self._cache, empty)
        jax.block_until_ready(output)
        startup = {
            "compile": compiled - started,
            "warmup": time.perf_counter() - compiled,
            "compilations": monitor.compilations() - before,
        }
        return steps, blanks, startup


def resolve(config: EngineConfig, model: Model) -> Resolved:
    """Choose, once, what the user left open.

    Raises:
        ValueError: max_model_len beyond the model's own limit, or no memory for a block.
    """
    m, device = model.config, jax.devices()[0]
    dtype = config.dtype or str(jax.tree.leaves(model.params)[0].dtype)
    length = config.max_model_len or m.max_len
    if length > m.max_len:
        raise ValueError(f"max_model_len is {length}, but the model was made for {m.max_len} tokens; lower it")
    blocks = config.num_blocks
    fraction = config.memory_fraction
    if blocks is None:
        size = cache.block_bytes(
            layers=m.layers, block_size=config.block_size, kv_heads=m.kv_heads, head_dim=m.head_dim, dtype=dtype
        )
        useful = config.max_num_seqs * -(-length // config.block_size)
        blocks = min(useful, memory.blocks_that_fit(size, fraction, device))
    smallest = smallest_step(device.platform, dtype)
    buckets = config.token_buckets or token_buckets(config.max_num_batched_tokens, smallest=smallest)
    if buckets[0] < smallest:
        raise ValueError(
            f"token_buckets start at {buckets[0]}; in {dtype} on a CPU the smallest step is {smallest} tokens"
        )
    values = dataclasses.asdict(config) | {
        "dtype": dtype,
        "max_model_len": length,
        "num_blocks": blocks,
        "attention_impl": config.attention_impl or attention.default_impl(device.platform),
        "token_buckets": buckets,
    }
    return Resolved(**values)


def smallest_step(platform: str, dtype: str) -> int:
    """2 where a one-row product would convert the whole weight, every step: in 16 bit on a CPU. Else 1."""
    return 2 if platform == "cpu" and dtype != "float32" else 1


def _shapes(c: Resolved, model: Model) -> Shapes:
    width = -(-c.max_model_len // c.block_size)
    rows = max(c.max_num_seqs, smallest_step(jax.default_backend(), c.dtype))
    return Shapes(c.token_buckets, rows, c.block_size, width, c.max_model_len, model.config.vocab_size)


def _check_listed(request_id: str, params: Any, stops: Sequence[int], vocab: int) -> None:
    named = {"logit_bias": params.logit_bias or {}, "allowed_token_ids": params.allowed_token_ids or ()}
    for name, ids in (*named.items(), ("stop_token_ids", params.stop_token_ids)):
        bad = [t for t in ids if not 0 <= t < vocab]
        if bad:
            last = vocab - 1
            raise ValueError(f"request {request_id!r}: {name} has token id {bad[0]}; the vocabulary is 0 to {last}")
    allowed, bias = params.allowed_token_ids, params.logit_bias or {}
    entries = len(bias if allowed is None else allowed) + (len(stops) if params.min_tokens else 0)
    if entries > MAX_LISTED:
        raise ValueError(
            f"request {request_id!r} lists {entries} tokens in logit_bias, allowed_token_ids and (with min_tokens) its "
            f"stop tokens; the limit is {MAX_LISTED}; list fewer"
        )
    if allowed is not None and params.min_tokens and set(allowed) <= set(stops):
        raise ValueError(f"request {request_id!r} allows only stop tokens, but min_tokens is {params.min_tokens}")


def _logprobs(plan: Plan, sources: dict[str, Source], output: StepOutput) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities that the rows of this step asked for, prompt tokens before the sampled one."""
    wanted = [(i, seq.request.request_id) for i, seq in enumerate(plan.seqs)]
    wanted = [(i, r, sources[r].params) for i, r in wanted if r in sources]
    found: list[TokenLogprobs] = []
    if any(p.prompt_logprobs is not None for _, _, p in wanted):
        host = jax.device_get(output.prompt)
        offsets = np.concatenate([[0], np.cumsum(plan.counts)])
        for i, request_id, params in wanted:
            source, start = sources[request_id], plan.starts[i]
            if params.prompt_logprobs is None:
                continue
            for j in range(start, min(start + plan.counts[i], source.prompt_len - 1)):
                token, at = int(source.tokens[j + 1]), int(offsets[i]) + j - start
                found.append(TokenLogprobs(request_id, True, j + 1, token, *_pick(host, at, params.prompt_logprobs)))
    if any(p.logprobs is not None for _, _, p in wanted):
        host = jax.device_get(output.sampled)
        for i, request_id, params in wanted:
            source = sources[request_id]
            if params.logprobs is not None and plan.starts[i] + plan.counts[i] == plan.lengths[i]:
                at = source.length - source.prompt_len
                token = int(host.tokens[i])
                found.append(TokenLogprobs(request_id, False, at, token, *_pick(host, i, params.logprobs)))
    return tuple(found)


def _pick(host: Any, i: int, top: int) -> tuple[float, int, tuple[int, ...], tuple[float, ...]]:
    ids, logprobs = host.top_ids[i, :top].tolist(), host.top_logprobs[i, :top].tolist()
    return float(host.logprobs[i]), int(host.ranks[i]), tuple(ids), tuple(logprobs)
