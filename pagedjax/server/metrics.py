"""Prometheus metrics, counted from the engine's events.

They have vLLM's names and the prefix of this project.
https://docs.vllm.ai/en/latest/usage/metrics.html explains the names. A dashboard for vLLM works
after its prefix is changed. Times are seconds, with the definitions of experiments/core/metrics.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import prometheus_client as prometheus

from pagedjax.engine.background import BackgroundPrograms
from pagedjax.engine.session import GenerationRequest
from pagedjax.host.first_admissions import FirstAdmissions
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import (
    Beamed,
    BeamResult,
    Event,
    Finished,
    Preempted,
    Sampled,
    StepResult,
    Verified,
)
from pagedjax.options.config import Resolved
from pagedjax.options.params import BeamSearchParams

PREFIX = "pagedjax"
SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.15,
    0.3,
    0.5,
    0.8,
    1.5,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    320.0,
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
COUNTS = (1, 2, 5, 10, 20)


@dataclass
class _Request:
    """Times of a request, in seconds of time.perf_counter. Its branches share the prompt."""

    added: float
    branches: int
    adapter: str | None
    scheduled: float | None = None


@dataclass
class _Branch:
    """Times and tokens of a branch. The beams of a search share one record."""

    request: _Request
    last: float | None = None  # time of the last token
    first: float | None = None  # time of the first token
    tokens: int = 0
    sequences: tuple[int, ...] = ()  # tokens of each sequence that a beam search found


class Metrics:
    """An `Observer` that counts."""

    CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST

    def __init__(self, model: str, config: Resolved) -> None:
        self.registry = prometheus.CollectorRegistry()
        self._model = model
        self._branches: dict[str, _Branch] = {}
        self._admissions = FirstAdmissions()
        self._state: SchedulerState | None = None
        gauges = {
            "num_requests_running": "Sequences in the running set",
            "num_requests_waiting": "Requests that are not admitted yet",
            "num_requests_swapped": "Sequences whose blocks are in host memory",
            "kv_cache_usage_perc": "Share of the cache's blocks that have an owner, 1 is all",
            "missing_programs": "Programs that are not compiled yet; until then steps are padded "
            "to larger ones",
        }
        counters = {
            "prompt_tokens": "Prompt tokens computed, those found in the cache left out",
            "generation_tokens": "Tokens generated",
            "prefix_cache_queries": "Tokens of admitted requests, looked up in the prefix cache",
            "prefix_cache_hits": "Of these, tokens that were found in it",
            "num_preemptions": "Sequences that gave their blocks up",
        }
        if config.speculative:
            counters |= {
                "spec_decode_num_drafts": "Rows of steps that had drafts",
                "spec_decode_num_draft_tokens": "Draft tokens that steps verified",
                "spec_decode_num_accepted_tokens": "Of these, tokens that were accepted",
            }
        times = {
            "time_to_first_token_seconds": "From arrival to the first token",
            "inter_token_latency_seconds": "Between two tokens of a branch",
            "request_time_per_output_token_seconds": "Of a branch: time between tokens, on average",
            "e2e_request_latency_seconds": "From arrival to the end of a branch",
            "request_queue_time_seconds": "From arrival to the first step with the request",
            "request_prefill_time_seconds": "From the first step to the first token",
            "request_decode_time_seconds": "From the first token to the last",
            "request_inference_time_seconds": "From the first step to the last token",
        }
        sizes = {
            "iteration_tokens_total": ("Tokens computed in a step", TOKENS),
            "request_prompt_tokens": ("Prompt tokens of a request", TOKENS),
            "request_generation_tokens": ("Tokens generated for a branch", TOKENS),
            "request_params_n": ("Branches of a request", COUNTS),
            "request_params_max_tokens": ("The max_tokens of a request", TOKENS),
        }
        self._gauges = {
            name: self._metric(prometheus.Gauge, name, text) for name, text in gauges.items()
        }
        self._counters = {
            name: self._metric(prometheus.Counter, name, text) for name, text in counters.items()
        }
        self._histograms = {
            name: self._metric(prometheus.Histogram, name, text, buckets=SECONDS)
            for name, text in times.items()
        } | {
            name: self._metric(prometheus.Histogram, name, text, buckets=buckets)
            for name, (text, buckets) in sizes.items()
        }
        self._success = prometheus.Counter(
            f"{PREFIX}:request_success",
            "Branches that ended, by reason",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._positions: Any = None
        if config.speculative:
            counter = prometheus.Counter(
                f"{PREFIX}:spec_decode_num_accepted_tokens_per_pos",
                "Accepted draft tokens, by their place in a draft",
                ("model_name", "position"),
                registry=self.registry,
            )
            self._positions = [
                counter.labels(model, i) for i in range(config.speculative.num_tokens)
            ]
        self._max_loras = config.max_loras
        self._adapters = None
        if config.enable_lora:
            self._adapters = prometheus.Gauge(
                f"{PREFIX}:lora_requests_info",
                "Adapters of unfinished requests, at a time in seconds since 1970",
                ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
                registry=self.registry,
            )
        info = prometheus.Info(f"{PREFIX}:cache_config", "Of the cache", registry=self.registry)
        fields = (
            "block_size",
            "num_blocks",
            "enable_prefix_caching",
            "kv_cache_dtype",
            "swap_space_gib",
        )
        info.info({name: str(getattr(config, name)) for name in fields})

    def _metric(self, kind: Any, name: str, text: str, **options: Any) -> Any:
        metric = kind(f"{PREFIX}:{name}", text, ("model_name",), registry=self.registry, **options)
        return metric.labels(self._model)

    def text(self, waiting: int, programs: BackgroundPrograms | None = None) -> str:
        """The metrics in Prometheus's text format.

        Args:
            waiting: requests that are not admitted yet.
            programs: those that are compiled while steps run.
        """
        self._gauges["missing_programs"].set(0 if programs is None else programs.missing)
        state = self._state
        if state is not None:
            self._gauges["num_requests_running"].set(len(state.running.seqs))
            self._gauges["num_requests_swapped"].set(sum(bool(seq.blocks) for seq in state.waiting))
            usage = blocks_in_use(state) / state.config.num_blocks
            self._gauges["kv_cache_usage_perc"].set(usage)
        self._gauges["num_requests_waiting"].set(waiting)
        if self._adapters is not None:
            running = "" if state is None else self._adapter_names(state.running.seqs)
            queued = "" if state is None else self._adapter_names(state.waiting)
            self._adapters.clear()  # as vLLM has it: names are labels, the value is the time
            self._adapters.labels(self._max_loras, running, queued).set(time.time())
        return prometheus.generate_latest(self.registry).decode()

    def _adapter_names(self, seqs: Iterable[Any]) -> str:
        """The adapters of sequences, as a list with commas."""
        names = set()
        for seq in seqs:
            branch = self._branches.get(seq.request_id)
            if branch and branch.request.adapter:
                names.add(branch.request.adapter)
        return ",".join(sorted(names))

    # as an observer, in the engine's thread -------------------------------------------------------

    def added(
        self, names: Sequence[str], request: GenerationRequest, at: float, after: SchedulerState
    ) -> None:
        times = _Request(at, len(names), request.adapter)
        # another engine made the first token of what goes on here, and its client waits since then
        last = at if request.progress else None
        self._branches |= {name: _Branch(times, last) for name in names}
        params = request.params
        width = params.beam_width if isinstance(params, BeamSearchParams) else params.n
        self._histograms["request_prompt_tokens"].observe(len(request.prompt_token_ids))
        self._histograms["request_params_n"].observe(params.n or width)
        self._histograms["request_params_max_tokens"].observe(params.max_tokens)

    def stepped(
        self,
        before: SchedulerState,
        result: StepResult | None,
        events: tuple[Event, ...],
        after: SchedulerState,
    ) -> None:
        self._state = after
        if result is not None:
            self._histograms["iteration_tokens_total"].observe(result.plan.num_tokens)
            self._count_step(result)
            for search in result.beams:
                self._count_search(search, result.finished)
        for admitted in self._admissions.among(events):
            self._counters["prefix_cache_queries"].inc(admitted.num_tokens)
            self._counters["prefix_cache_hits"].inc(admitted.num_cached)
        for event in events:
            self._count_event(event, result)

    def _count_step(self, result: StepResult) -> None:
        """Count the prompt tokens of a step, and the requests that it has for the first time."""
        plan = result.plan
        computed = 0
        for seq, start, count in zip(plan.seqs, plan.starts, plan.counts, strict=True):
            computed += max(0, min(start + count, seq.request.prompt_len) - start)
            branch = self._branches.get(seq.request_id)
            if branch is not None and branch.request.scheduled is None:
                branch.request.scheduled = result.started
                for _ in range(branch.request.branches):
                    self._histograms["request_queue_time_seconds"].observe(
                        result.started - branch.request.added
                    )
        self._counters["prompt_tokens"].inc(computed)

    def _count_search(self, search: BeamResult, at: float) -> None:
        """Count the tokens of the sequences that a beam search found, when it ends."""
        lengths = tuple(len(sequence.token_ids) for sequence in search.sequences)
        self._counters["generation_tokens"].inc(sum(lengths))
        self._count_tokens((search.request_id,), at)
        branch = self._branches.get(search.request_id)
        if branch is not None:
            branch.sequences = lengths

    def _count_event(self, event: Event, result: StepResult | None) -> None:
        if isinstance(event, Preempted):
            self._counters["num_preemptions"].inc()
        elif isinstance(event, Sampled) and result is not None:
            self._counters["generation_tokens"].inc(len(event.token_ids))
            self._count_tokens(event.request_ids, result.finished)
        elif isinstance(event, Beamed) and result is not None:
            self._count_tokens(event.request_ids, result.finished)
        elif isinstance(event, Verified):
            self._count_drafts(event)
        elif isinstance(event, Finished):
            self._success.labels(self._model, event.reason).inc()
            self._count_end(event)

    def _count_drafts(self, event: Verified) -> None:
        self._counters["spec_decode_num_drafts"].inc(len(event.request_ids))
        self._counters["spec_decode_num_draft_tokens"].inc(sum(event.drafts))
        self._counters["spec_decode_num_accepted_tokens"].inc(sum(event.accepted))
        for accepted in event.accepted:
            for counter in self._positions[:accepted]:
                counter.inc()

    def _count_tokens(self, names: Iterable[str], at: float) -> None:
        """Count one token of each branch."""
        gaps = self._histograms["inter_token_latency_seconds"]
        first_tokens = self._histograms["time_to_first_token_seconds"]
        for name in names:
            branch = self._branches.get(name)
            if branch is None:
                continue
            if branch.last is None:
                first_tokens.observe(at - branch.request.added)
                branch.first = at
            else:
                gaps.observe(at - branch.last)
            branch.last = at
            branch.tokens += 1

    def _count_end(self, event: Finished) -> None:
        branch = self._branches.pop(event.request_id, None)
        if branch is None or event.reason == "abort" or branch.first is None or branch.last is None:
            return
        histograms = self._histograms
        scheduled = branch.request.scheduled or branch.first
        for count in branch.sequences or (branch.tokens,):
            histograms["request_generation_tokens"].observe(count)
        histograms["e2e_request_latency_seconds"].observe(branch.last - branch.request.added)
        histograms["request_prefill_time_seconds"].observe(branch.first - scheduled)
        histograms["request_decode_time_seconds"].observe(branch.last - branch.first)
        histograms["request_inference_time_seconds"].observe(branch.last - scheduled)
        if branch.tokens > 1:
            per_token = (branch.last - branch.first) / (branch.tokens - 1)
            histograms["request_time_per_output_token_seconds"].observe(per_token)


def blocks_in_use(state: SchedulerState) -> int:
    """Blocks that have an owner."""
    return state.config.num_blocks - state.pool.num_free
