"""The imperative shell: schedule -> pack -> step -> commit, and the tokens of the requests under way.

It knows requests and arrays, and nothing of text. Everything it yields is a `StepResult`; it counts nothing.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from pagedjax import attention, cache, memory, monitor, prefix, scheduler
from pagedjax.batch import MAX_LISTED, Shapes, Source, blank_sampling, pack, token_buckets
from pagedjax.config import EngineConfig, Resolved
from pagedjax.models import Model
from pagedjax.policies import POLICIES
from pagedjax.replay import Recorder
from pagedjax.step import StepOutput, copy_blocks, make_step
from pagedjax.swap import SwapSpace
from pagedjax.types import EMPTY_PLAN, Event, Finished, FinishReason, Plan, Request, Sampled, StepResult, TokenLogprobs


class Engine:
    """One model, one cache, one scheduler state.

        engine.add("a", prompt_token_ids, SamplingParams())
        while engine.has_work:
            result = engine.step()

    Attributes:
        config: the `Resolved` configuration.
        memory: the `MemoryReport`: where the device's memory goes and how many blocks it holds.
        startup: seconds by stage ("compile", "warmup") and the number of compilations.
    """

    def __init__(
        self, model: Model, config: EngineConfig, *, eos_token_ids: Sequence[int] = (), progress: bool = False
    ) -> None:
        self.model = model
        found = memory.read(jax.devices()[0])  # before the cache takes its share
        self.config = resolve(config, model, found)
        self.eos_token_ids = tuple(eos_token_ids)
        c, m = self.config, model.config
        self._policy = POLICIES[c.policy]
        self._shapes = _shapes(c, model)
        step = make_step(model.graphdef, attention.attend(c.attention_impl, m.head_dim**-0.5), c.seed)
        self._recorder: Recorder | None = None
        self._cache: cache.KVCache | None = None
        self._steps, self._blanks, self.memory, self.startup = self._warm_up(step, config, found, progress)
        if progress:
            tqdm.write(str(self.memory), file=sys.stderr)

    # requests ---------------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: Any,
        *,
        forks: Sequence[str] = (),
        priority: int = 0,
        user: str = "",
    ) -> None:
        """Queue a request. `priority` and `user` matter to the policies of those names, see policies.py.

        Args:
            forks: ids of further branches. All share the prompt's blocks; branch i draws with the request's seed + i,
                as a request of its own with that seed would.

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

        root, hashes = self._prompt_hashes(prompt, params)
        request = Request(
            request_id=request_id,
            prompt_len=len(prompt),
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=frozenset(stops),
            priority=priority,
            user=user,
            forks=tuple(forks),
            hashes=hashes,
        )
        state = scheduler.submit(self._state, request)
        tokens = np.zeros(scheduler.final_length(request, state.config), np.int32)
        tokens[: len(prompt)] = prompt
        for i, name in enumerate((request_id, *forks)):
            drawn = 0x9E3779B9 * (self._state.arrivals + 1 + i)
            seed = (drawn if params.seed is None else params.seed + i) % 2**32
            self._sources[name] = Source(params, seed, len(prompt), tokens.copy(), len(prompt), stops, root)
        self._state = state
        if self._recorder:
            self._recorder.submit(request)

    def _prompt_hashes(self, prompt: np.ndarray, params: Any) -> tuple[str | None, tuple[str, ...]]:
        """What the hashes of a request grow from, and those of its prompt's full blocks.

        Log-probabilities of a prompt need every one of its tokens computed, so such a request shares nothing.
        """
        c = self.config
        if not (c.enable_prefix_caching and params.enable_prefix_caching) or params.prompt_logprobs is not None:
            return None, ()
        root = prefix.root(params.cache_salt, c.block_size)
        return root, prefix.chain(root, prompt, c.block_size)

    def reset_prefix_cache(self) -> None:
        """Forget what cached blocks hold. Requests under way go on."""
        self._state = scheduler.forget(self._state)
        if self._recorder:
            self._recorder.forget()

    def cancel(self, request_id: str, reason: FinishReason = "abort") -> tuple[Event, ...]:
        """End a request at any time; its blocks are free at once. An unknown id does nothing."""
        self._state, events = scheduler.cancel(self._state, request_id, reason)
        self._take_in(events)
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
        assert self._cache is not None, "only `reset` takes it away, and gives a new one"
        self._cache, output = self._steps[t](self.model.params, self._moved(plan, self._cache), batch)
        tokens = np.asarray(output.sampled.tokens)
        device_seconds = time.perf_counter() - dispatched

        sampled = tokens[: len(plan.seqs)].tolist()
        if self._recorder:
            self._recorder.schedule(plan)
        hashes = _filled(plan, self._sources, self.config.block_size)
        self._state, events = scheduler.commit(state, plan, sampled, hashes)
        if self._recorder:
            self._recorder.commit(sampled, hashes, events)
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

    def _moved(self, plan: Plan, pages: cache.KVCache) -> cache.KVCache:
        """Move whole blocks before any is written: out to the host, back from there, then copies on the device."""
        if plan.swap_out:
            self._swap.out(pages, plan.swap_out)
        if plan.swap_in:
            pages = self._swap.back(pages, plan.swap_in)
        if plan.copies:
            pages = self._copy(pages, *_padded(plan.copies, self._shapes.max_seqs))
        return pages

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
        self._state = scheduler.init(scheduler.SchedulerConfig(*limits, _host_blocks(c, self.model)))
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

    def _warm_up(
        self, step: Any, config: EngineConfig, found: memory.DeviceMemory, progress: bool
    ) -> tuple[dict[int, Callable], dict[int, Any], memory.MemoryReport, dict[str, Any]]:
        """Compile every bucket, settle the number of blocks, and run the smallest once so that the first request meets
        warm code. Compiling needs the shapes of a cache and not its memory, which is taken only when it surely fits."""
        before, started = monitor.compilations(), time.perf_counter()
        blanks = {t: jax.device_put(blank_sampling(self._shapes, t)) for t in self._shapes.tokens}
        block = _block(self.config, self.model, self.config.dtype)

        def build(t: int) -> Any:
            pages = jax.eval_shape(lambda: cache.init(blocks=self.config.num_blocks, **block))
            batch = pack(EMPTY_PLAN, {}, self._shapes._replace(tokens=(t,)), blanks)
            return step.lower(self.model.params, pages, batch).compile()

        steps, largest = {}, self._shapes.tokens[-1]
        bar = tqdm(self._shapes.tokens[::-1], desc="compiling", unit="bucket", disable=not progress, leave=False)
        for t in bar:
            bar.set_postfix_str(f"{t} tokens")
            steps[t] = build(t)
            if t == largest:  # the first: what it needs says how many blocks fit beside it
                fitted = resolve(config, self.model, found, memory.activations_peak(steps[t]))
                if fitted.num_blocks != self.config.num_blocks:
                    self.config = fitted
                    steps[t] = build(t)
        pages = jax.eval_shape(lambda: cache.init(blocks=self.config.num_blocks, **block))
        self._copy = copy_blocks.lower(pages, *_padded((), self._shapes.max_seqs)).compile()
        if self.config.preemption == "swap":
            self._swap = SwapSpace(pages, _host_blocks(self.config, self.model), self._shapes.table_width)
        self.reset()
        compiled = time.perf_counter()
        t = self._shapes.tokens[0]
        empty = pack(EMPTY_PLAN, {}, self._shapes._replace(tokens=(t,)), blanks)
        self._cache, output = steps[t](self.model.params, self._cache, empty)
        jax.block_until_ready(output)
        report = memory.report(
            found,
            weights=sum(array.nbytes for array in jax.tree.leaves(self.model.params)),
            activations=memory.activations_peak(steps[largest]),
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            block_bytes=cache.block_bytes(**block),
            max_model_len=self.config.max_model_len,
            swap_space_gib=self.config.swap_space_gib if self.config.preemption == "swap" else 0,
        )
        startup = {
            "compile": compiled - started,
            "warmup": time.perf_counter() - compiled,
            "compilations": monitor.compilations() - before,
        }
        return steps, blanks, report, startup


def resolve(
    config: EngineConfig, model: Model, found: memory.DeviceMemory | None = None, activations: int = 0
) -> Resolved:
    """Choose, once, what the user left open.

    Args:
        found: the device's memory; None reads it now.
        activations: bytes that a step needs beside weights and cache, once that is known.

    Raises:
        ValueError: max_model_len beyond the model's own limit, or a cache that does not fit.
    """
    m, device = model.config, jax.devices()[0]
    found = found or memory.read(device)
    dtype = config.dtype or str(jax.tree.leaves(model.params)[0].dtype)
    length = config.max_model_len or m.max_len
    if length > m.max_len:
        raise ValueError(f"max_model_len is {length}, but the model was made for {m.max_len} tokens; lower it")
    size = cache.block_bytes(**_block(config, model, dtype))
    blocks = config.num_blocks
    if blocks is None:
        useful = config.max_num_seqs * -(-length // config.block_size)
        blocks = min(useful, memory.blocks_that_fit(size, config.memory_fraction, found, activations))
    memory.check_fit(blocks, size, found, activations)
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
        "attention_impl": config.attention_impl or attention.default_impl(device.platform, dtype, m.head_dim),
        "token_buckets": buckets,
    }
    return Resolved(**values)


def _block(c: EngineConfig, model: Model, dtype: str) -> dict[str, Any]:
    """What a cache's blocks look like, for `cache`."""
    m = model.config
    heads = {"kv_heads": m.kv_heads, "head_dim": m.head_dim}
    return {"layers": m.layers, "block_size": c.block_size, **heads, "dtype": dtype}


def _host_blocks(c: Resolved, model: Model) -> int:
    """Blocks of the swap space; 0 when nothing is swapped.

    Raises:
        ValueError: swapping without room for one block.
    """
    if c.preemption != "swap":
        return 0
    size = cache.block_bytes(**_block(c, model, c.dtype))
    blocks = memory.host_blocks(c.swap_space_gib, size)
    if blocks < 1:
        raise ValueError(
            f"preemption is 'swap', but swap_space_gib {c.swap_space_gib} does not hold one block of {size} bytes; "
            "raise it, or use preemption='recompute'"
        )
    return blocks


def smallest_step(platform: str, dtype: str) -> int:
    """2 where a one-row product would convert the whole weight, every step: in 16 bit on a CPU. Else 1."""
    return 2 if platform == "cpu" and dtype != "float32" else 1


def _shapes(c: Resolved, model: Model) -> Shapes:
    width = -(-c.max_model_len // c.block_size)
    rows = max(c.max_num_seqs, smallest_step(jax.default_backend(), c.dtype))
    return Shapes(c.token_buckets, rows, c.block_size, width, c.max_model_len, model.config.vocab_size)


def _padded(copies: Sequence[tuple[int, int]], size: int) -> np.ndarray:
    """[2, size] from and to; what is left over copies the trash block onto itself."""
    pairs = np.zeros((2, size), np.int32)
    if copies:
        pairs[:, : len(copies)] = np.array(copies, np.int32).T
    return pairs


def _filled(plan: Plan, sources: dict[str, Source], size: int) -> dict[str, tuple[str, ...]]:
    """By request id, the hashes of the blocks of generated tokens that a plan fills."""
    hashes = {}
    for seq, start, count in zip(plan.seqs, plan.starts, plan.counts, strict=True):
        full, known = (start + count) // size, len(seq.hashes)
        if full > start // size and full > known:
            source = sources[seq.request.request_id]
            if source.root is not None:
                parent = seq.hashes[-1] if known else source.root
                hashes[seq.request.request_id] = prefix.chain(parent, source.tokens[known * size : full * size], size)
    return hashes


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
