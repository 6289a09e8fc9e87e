"""Drivers: requests arrive at their times, whether or not the engine keeps up, or when a client is
free; and one measured run of a point.

`drive` runs an engine on a device. `replicas.drive_replicas` runs simulated engines behind a
router, one of them without a choice, and `pools.drive_pools` those of two pools.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.core import metrics
from experiments.core.config import Experiment, Point, Replicas
from experiments.core.metrics import StepSums, TokenSums
from experiments.core.pools import OF_ONE_ENGINE, drive_pools, pools_summary
from experiments.core.records import (
    RequestRecord,
    RequestRecorder,
    StepRecord,
    StepRecorder,
    request_records,
    step_records,
)
from experiments.core.replicas import Present, StepLoad, by_end, drive_replicas, replicas_summary
from experiments.core.submit import LONGEST_SLEEP, Engine, Sender, submit, with_arrivals
from experiments.core.totals import Totals
from experiments.core.workloads import WorkItem, Workload, build
from experiments.simulation.spans import DecodeSpan
from pagedjax import routing
from pagedjax.config import EngineConfig
from pagedjax.host.types import StepResult
from pagedjax.params import SamplingParams


class Measured(NamedTuple):
    """One measured run. `failed` is None, or the reason why its numbers must not be used."""

    workload: Workload
    requests: list[RequestRecord]
    steps: list[StepRecord]
    summary: dict[str, Any]
    failed: str | None


def drive(
    engine: Engine,
    items: Sequence[WorkItem],
    sampling: SamplingParams,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    clients: int | None = None,
) -> tuple[float, list[StepResult]]:
    """Run `items` to their end. Returns the start (of `clock`) and every step's result.

    A request is added between two steps, as soon as its arrival time has passed, with as many
    branches as `sampling` draws. Branch i uses the request's seed + i.

    Args:
        clients: of a closed loop; None: an open loop (see `Sender`).

    Raises:
        ValueError: the engine refused a request (with its reason), or items are not in order of
            arrival.
        RuntimeError: the engine has work but makes no step.
    """
    sender = Sender(items, sampling, clients)
    results: list[StepResult] = []
    start = clock()
    while sender.has_unsent or engine.has_work:
        while (arrival := sender.next) is not None and arrival <= clock() - start:
            submit(engine, *sender.send())
        result = engine.step() if engine.has_work else None
        if result is not None:
            results.append(result)
            sender.end_branches(result, result.finished - start)
        elif arrival is not None:
            sleep(min(max(start + arrival - clock(), 0.0), LONGEST_SLEEP))
        else:
            raise RuntimeError("the engine has work but makes no step: its scheduler is stuck")
    return start, results


def warm_up(engine: Engine, experiment: Experiment, items: Sequence[WorkItem]) -> None:
    """Run the first few requests, shortened and all at once, to touch every page and code path."""
    warmup = experiment.warmup
    first = [
        item._replace(arrival=0.0, max_tokens=min(item.max_tokens, warmup.max_tokens))
        for item in items[: warmup.requests]
    ]
    sampling = dataclasses.replace(experiment.sampling, min_tokens=0)
    drive(engine, first, sampling)


def measure(llm: Any, point: Point, repeat: int) -> Measured:
    """One repeat of a point on an engine of its configuration: warm up, reset, run, summarize."""
    experiment = point.experiment
    engine = llm.engine
    engines = llm.engines if experiment.replicas or experiment.pools else (engine,)
    seed = experiment.seed + (repeat if experiment.reseed else 0)
    workload = build(
        experiment.workload, point.content, seed, llm.tokenizer.vocab_size, llm.tokenizer.encode
    )
    check_lengths(workload.items, engine.config.max_model_len)
    engine.reset()
    if experiment.simulate is None:
        workload = workload.drawn()  # so that the measured run does not draw ids
        warm_up(engine, experiment, workload.items)
        gc.collect()  # so that garbage of the previous run costs this one no time
    for cold_engine in engines:
        cold_engine.reset()  # removes cached prefixes and counters of the warm-up
    recording = _record_run(llm, engines, experiment, workload)
    requests = with_arrivals(recording.requests, workload.clients)
    items = tuple(
        item._replace(arrival=request.arrival)
        for item, request in zip(workload.items, requests, strict=True)
    )
    workload = workload._replace(items=items)
    summary = _summary(requests, recording, experiment, engine.config)
    failed = why_failed(recording.steps, summary)
    return Measured(workload, requests, recording.steps, summary, failed)


class Recording(NamedTuple):
    """The records of a run.

    A run that keeps sums has no `steps`, and its `loads` are the sums of each replica.
    """

    requests: list[RequestRecord]
    steps: list[StepRecord]
    step_sums: StepSums
    token_sums: TokenSums
    loads: Sequence[StepLoad]


def _full_recording(requests: list[RequestRecord], steps: list[StepRecord]) -> Recording:
    step_sums = metrics.step_sums(steps)
    return Recording(requests, steps, step_sums, metrics.token_sums(requests), steps)


def _record_run(
    llm: Any, engines: Sequence[Any], experiment: Experiment, workload: Workload
) -> Recording:
    if experiment.pools:
        return _record_pools(llm, experiment, workload)
    if experiment.simulate is None:
        return _record_device(llm.engine, experiment, workload)
    return _record_replicas(engines, experiment, workload)


def _record_device(engine: Any, experiment: Experiment, workload: Workload) -> Recording:
    """Run the requests on a device. The records are made after the run."""
    sampling = experiment.sampling
    start, results = drive(engine, workload.items, sampling, clients=workload.clients)
    steps = step_records(results, start, engine.config.block_size, engine.scheduler_state.config)
    requests = request_records(results, workload.items, start, sampling.drawn().n)
    return _full_recording(requests, steps)


def _record_pools(llm: Any, experiment: Experiment, workload: Workload) -> Recording:
    sampling = experiment.sampling
    recorder = Recorder(llm.engines, workload.items, sampling.drawn().n)
    prefill, decode = llm.fleets(routing.find)
    placement = drive_pools(
        prefill, decode, llm.link, workload.items, sampling, recorder, workload.clients
    )
    requests = recorder.requests.records(placement.prefill, placement.transfers)
    return _full_recording(requests, by_end(recorder.steps))


def _record_replicas(
    engines: Sequence[Any], experiment: Experiment, workload: Workload
) -> Recording:
    sampling = experiment.sampling
    items = workload.items
    options = experiment.replicas or Replicas(router=routing.ROUND_ROBIN.name)
    known_blocks = options.known_blocks
    if known_blocks is None:
        known_blocks = engines[0].config.num_blocks
    router = routing.find(options.router)
    present = Present(options.count, options.changes)
    if experiment.records == "sums":
        totals = Totals(engines, items, sampling.drawn().n)
        replicas = drive_replicas(
            engines, router, known_blocks, items, sampling, totals, workload.clients, present
        )
        requests = totals.records(replicas)
        return Recording(requests, [], totals.step_sums(), totals.token_sums(), totals.replicas)
    recorder = Recorder(engines, items, sampling.drawn().n)
    present = present._replace(forget_request=recorder.requests.forget_request)
    replicas = drive_replicas(
        engines, router, known_blocks, items, sampling, recorder, workload.clients, present
    )
    return _full_recording(recorder.requests.records(replicas), by_end(recorder.steps))


def _summary(
    requests: Sequence[RequestRecord],
    recording: Recording,
    experiment: Experiment,
    config: EngineConfig,
) -> dict[str, Any]:
    """The summary of a run, with the sections of replicas and pools. See `metrics.summary`."""
    options = experiment.replicas
    pools = experiment.pools
    end = recording.step_sums.end
    num_replicas = options.until(end) if options else experiment.num_replicas
    summary = metrics.summary(
        requests,
        recording.step_sums,
        recording.token_sums,
        config.block_size,
        experiment.slo,
        speculates=config.speculative is not None,
        replicas=num_replicas,
    )
    duration = summary["duration_s"]
    if options:
        request_replicas = [request.replica for request in requests]
        summary["replicas"] = replicas_summary(
            request_replicas, recording.loads, duration, range(num_replicas)
        )
    if pools:
        counts = (pools.prefill.count, pools.decode.count)
        summary |= dict.fromkeys(OF_ONE_ENGINE)
        summary["pools"] = pools_summary(requests, recording.steps, counts, duration)
    return summary


class Recorder:
    """The records of several engines, made after each step."""

    def __init__(self, engines: Sequence[Any], items: Sequence[WorkItem], branches: int) -> None:
        self.requests = RequestRecorder(items, 0.0, branches)
        self.steps: list[list[StepRecord]] = [[] for _ in engines]
        self._recorders = [
            StepRecorder(0.0, engine.config.block_size, engine.scheduler_state.config, replica)
            for replica, engine in enumerate(engines)
        ]

    def step(self, replica: int, result: StepResult) -> None:
        self.requests.add(result)
        self.steps[replica].append(self._recorders[replica].record(result))

    def span(self, replica: int, span: DecodeSpan) -> None:
        self.requests.add_span(span)
        self.steps[replica] += self._recorders[replica].record_span(span)

    def drop_branch(self, replica: int, branch_id: str) -> None:
        self._recorders[replica].drop_branch(branch_id)


def check_lengths(items: Sequence[WorkItem], limit: int) -> None:
    """Refuse requests that the engine would cut off at its longest length.

    A record would count them as served. A prompt that is too long alone is not checked here; the
    engine refuses it.

    Raises:
        ValueError: there are such requests; the message names the first.
    """
    cut = [
        item
        for item in items
        if len(item.prompt_token_ids) < limit < len(item.prompt_token_ids) + item.max_tokens
    ]
    if cut:
        first = cut[0]
        prompt = len(first.prompt_token_ids)
        raise ValueError(
            f"{len(cut)} of {len(items)} requests would be cut off at engine.max_model_len, "
            f"{limit} tokens: {first.request_id} has {prompt} prompt tokens and asks for "
            f"{first.max_tokens}. Raise the limit, or bound the workload's lengths (max of a "
            "distribution; max_prompt_tokens and max_output_tokens of a trace), which counts what "
            "it clips"
        )


def why_failed(steps: Sequence[StepRecord], summary: dict[str, Any]) -> str | None:
    """The reason why a run's numbers must not be used, or None."""
    compiled = [step for step in steps if step.compilations]
    if compiled:
        steps_text = ", ".join(
            f"{step.step} ({step.tokens} tokens, {step.sequences} sequences)"
            for step in compiled[:5]
        )
        return (
            f"compiled in the measured run: {summary['compilations']} compilations, in step "
            f"{steps_text}"
            f"{' ...' if len(compiled) > 5 else ''}. Times with a compilation in them are not the "
            "engine's"
        )
    if summary["unfinished"]:
        return f"{summary['unfinished']} of {summary['requests']} requests did not finish"
    return None
