"""The driver of an engine on a device, and one measured run of a point.

A driver sends the requests of a workload to engines. In an open loop, requests arrive at their
times, whether or not the engine keeps up. In a closed loop, a request arrives when a client is
free.

`drive` runs one engine on a device. `replicas.drive_replicas` runs simulated engines behind a
router, or a single one, and `pools.drive_pools` the simulated engines of two pools. All three use
the loop of events in fleet.py.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

from experiments.core import metrics, own_metrics
from experiments.core.config import Experiment, Point, Replicas
from experiments.core.fleet import Source, run_events
from experiments.core.metrics import StepSums, TokenSums
from experiments.core.pools import OF_ONE_ENGINE, drive_pools, pools_summary
from experiments.core.records import (
    RequestRecord,
    RequestRecorder,
    StepRecord,
    StepRecorder,
    Transfer,
    request_records,
    step_records,
)
from experiments.core.replicas import (
    ReplicaCount,
    StepLoad,
    by_end,
    drive_replicas,
    replicas_summary,
)
from experiments.core.submit import (
    LONGEST_SLEEP,
    DrawnEnds,
    Engine,
    Sender,
    submit,
    with_arrivals,
)
from experiments.core.totals import StepTotals, TokenCounts
from experiments.core.workloads import (
    RecordedRun,
    WorkItem,
    Workload,
    build,
    has_text,
    planned,
)
from experiments.simulation.spans import DecodeSpan
from pagedjax import routing
from pagedjax.engine.garbage import collect_rarely
from pagedjax.host.types import StepResult
from pagedjax.options.config import EngineConfig
from pagedjax.options.params import SamplingParams


class Measured(NamedTuple):
    """One measured run. `failed` is None, or the reason why its numbers must not be used."""

    workload: Workload
    requests: list[RequestRecord]
    steps: list[StepRecord]
    summary: dict[str, Any]
    failed: str | None
    logs: tuple[str, ...] = ()  # the text of each engine's recording, in a run with `record`


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

    A branch that has as many tokens as its request's `ends_at` is cancelled between two steps. Its
    reason is "stop", as if a stop string had ended it.

    Args:
        clients: the number of clients of a closed loop; None: an open loop (see `Sender`).

    Raises:
        ValueError: the engine refused a request (with its reason), or items are not in order of
            arrival.
        RuntimeError: the engine has work but makes no step.
    """
    sender = Sender(items, sampling, clients)
    ends = DrawnEnds(items, sampling.drawn().n)
    results: list[StepResult] = []
    start = clock()

    def send() -> None:
        arrival = sender.next()
        while clock() - start < arrival:
            sleep(min(max(start + arrival - clock(), 0.0), LONGEST_SLEEP))
        item, params = sender.take_next()
        submit(engine, item._replace(ends_at=None), params)

    def next_step() -> float:
        return clock() - start if engine.has_work else math.inf

    def step() -> None:
        result = engine.step()
        if result is None:
            raise RuntimeError("the engine has work but makes no step: its scheduler is stuck")
        for branch_id in ends.reached(result):
            events = engine.cancel(branch_id, "stop")
            result = result._replace(events=(*result.events, *events))
        results.append(result)
        sender.end_branches(result, result.finished - start)

    run_events(Source(sender.next, send), Source(next_step, step))
    return start, results


def warm_up(engine: Engine, experiment: Experiment, items: Sequence[WorkItem]) -> None:
    """Run the first few requests, shortened and all at once, to touch every page and code path."""
    warmup = experiment.warmup
    first = [
        item._replace(
            arrival=0.0,
            max_tokens=min(item.longest_output, warmup.max_tokens),
            ends_at=None,
            follows="",
            history=0,
        )
        for item in items[: warmup.requests]
    ]
    sampling = dataclasses.replace(experiment.sampling, min_tokens=0)
    if sampling.prompt_logprobs is not None:  # whose programs are compiled at their first use
        runtime: Any = cast(
            "Any", engine
        ).runtime  # of a real engine: a simulated one has no warm-up
        for shape in runtime.shapes.prompt_steps:
            _ = runtime.prompt_programs[shape]
    drive(engine, first, sampling)


def measure(llm: Any, point: Point, repeat: int) -> Measured:
    """One repeat of a point on an engine of its configuration: warm up, reset, run, summarize."""
    experiment = point.experiment
    engine = llm.engine
    engines = llm.engines if experiment.replicas or experiment.pools else (engine,)
    workload = build(
        experiment.workload,
        point.content,
        seed_of(experiment, repeat),
        llm.tokenizer.vocab_size,
        llm.tokenizer.encode,
    )
    check_lengths(workload.items, engine.config.max_model_len)
    engine.reset()
    with ExitStack() as stack:
        if experiment.simulate is None:
            workload = workload.in_memory()  # so that the measured run does not draw ids
            warm_up(engine, experiment, workload.items)
            stack.callback(collect_rarely())  # as a server does
        for cold_engine in engines:
            cold_engine.reset()  # removes cached prefixes and counters of the warm-up
        recording, logs = _run_with_logs(llm, engines, experiment, workload)
    workload, requests = _as_arrived(workload, recording.requests)
    summary = _summary(requests, recording, experiment, engine.config)
    failed = why_failed(recording.steps, summary)
    if experiment.metrics:
        values, errors = own_metrics.values_of(experiment.metrics, requests, recording.steps)
        summary[own_metrics.OWN] = values
        failed = failed or "; ".join(errors) or None
    return Measured(workload, requests, recording.steps, summary, failed, logs)


def _as_arrived(
    workload: Workload, records: Sequence[RequestRecord]
) -> tuple[Workload, list[RequestRecord]]:
    """The workload and its records with the arrivals of the run, in order of arrival."""
    requests = with_arrivals(records, workload.items, workload.clients)
    items = [
        item._replace(arrival=request.arrival)
        for item, request in zip(workload.items, requests, strict=True)
    ]
    if workload.num_sessions:
        items.sort(key=lambda item: item.arrival)
        requests.sort(key=lambda request: request.arrival)
    return workload._replace(items=tuple(items)), requests


def _run_with_logs(
    llm: Any, engines: Sequence[Any], experiment: Experiment, workload: Workload
) -> tuple[Recording, tuple[str, ...]]:
    """A run of engines that were reset: its records, and the logs of `Measured`."""
    if not experiment.record:
        return _record_run(llm, engines, experiment, workload), ()
    has_prompts = has_text(experiment.workload) or isinstance(experiment.workload, RecordedRun)
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.jsonl" for number in range(len(engines))]
        try:
            for engine, path in zip(engines, paths, strict=True):
                engine.record(path, times=True, prompts=has_prompts)
            recording = _record_run(llm, engines, experiment, workload)
        finally:
            for engine in engines:
                engine.record(None)
        return recording, tuple(path.read_text(encoding="ascii") for path in paths)


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
    return Recording(
        requests=requests,
        steps=steps,
        step_sums=metrics.step_sums(steps),
        token_sums=metrics.token_sums(requests),
        loads=steps,
    )


class Recorder:
    """Makes the records of several engines. A driver calls it after each step."""

    def __init__(
        self,
        engines: Sequence[Any],
        items: Sequence[WorkItem],
        branches: int,
        *,
        sums: bool = False,
    ) -> None:
        """sums: keep sums (totals.py) instead of a record of each step and the times of tokens."""
        self._recorders = [
            StepRecorder(0.0, engine.config.block_size, engine.scheduler_state.config, replica)
            for replica, engine in enumerate(engines)
        ]
        self._steps: list[list[StepRecord]] = [[] for _ in engines]
        self._step_totals = StepTotals(len(engines)) if sums else None
        self._token_counts = TokenCounts() if sums else None
        self.requests = RequestRecorder(items, 0.0, branches, self._token_counts)

    def step(self, replica: int, result: StepResult) -> None:
        self.requests.add(result)
        record = self._recorders[replica].record(result)
        if self._step_totals:
            self._step_totals.add(record)
        else:
            self._steps[replica].append(record)

    def span(self, replica: int, span: DecodeSpan) -> None:
        self.requests.add_span(span)
        recorder = self._recorders[replica]
        if self._step_totals:
            self._step_totals.add_span(replica, span, recorder.count_span(span))
        else:
            self._steps[replica] += recorder.record_span(span)

    def drop_branch(self, replica: int, branch_id: str) -> None:
        self._recorders[replica].drop_branch(branch_id)

    def recording(
        self,
        replicas: Mapping[str, int],
        transfers: Mapping[str, Sequence[Transfer]] | None = None,
    ) -> Recording:
        """The records of the run. Args: see `RequestRecorder.records`."""
        requests = self.requests.records(replicas, transfers)
        if not (self._step_totals and self._token_counts):
            return _full_recording(requests, by_end(self._steps))
        totals = self._step_totals
        token_sums = self._token_counts.sums()
        return Recording(requests, [], totals.sums(), token_sums, totals.replicas)


def _record_run(
    llm: Any, engines: Sequence[Any], experiment: Experiment, workload: Workload
) -> Recording:
    """Run a workload to its end. Returns the records."""
    items = workload.items
    sampling = experiment.sampling
    branches = sampling.drawn().n
    if experiment.simulate is None and not experiment.pools:
        # on a device; the records are made after the run
        engine = llm.engine
        start, results = drive(engine, items, sampling, clients=workload.clients)
        config = engine.scheduler_state.config
        steps = step_records(results, start, engine.config.block_size, config)
        return _full_recording(request_records(results, items, start, branches), steps)
    recorder = Recorder(engines, items, branches, sums=experiment.records == "sums")
    if experiment.pools:
        pools = experiment.pools
        placement = drive_pools(
            llm.prefill.engines,
            llm.decode.engines,
            (routing.find(pools.prefill.router), routing.find(pools.decode.router)),
            llm.link,
            items,
            sampling,
            recorder,
            workload.clients,
            pools.split,
        )
        return recorder.recording(placement.prefill, placement.transfers)
    options = experiment.replicas or Replicas(router=routing.ROUND_ROBIN.name)
    known_blocks = options.known_blocks
    replicas = drive_replicas(
        engines,
        routing.find(options.router),
        engines[0].config.num_blocks if known_blocks is None else known_blocks,
        items,
        sampling,
        recorder,
        workload.clients,
        ReplicaCount(options.count, options.changes, recorder.requests.forget_request),
    )
    return recorder.recording(replicas)


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
    num_replicas = options.count_until(end) if options else experiment.num_replicas
    summary = metrics.summary(
        requests,
        recording.step_sums,
        recording.token_sums,
        config.block_size,
        experiment.slo,
        speculates=config.speculative is not None,
        replicas=num_replicas,
        classes=experiment.workload.classes,
    )
    duration = summary["duration_s"]
    if options:
        request_replicas = [request.replica for request in requests]
        summary["replicas"] = replicas_summary(
            request_replicas, recording.loads, duration, range(num_replicas)
        )
    if pools:
        counts = (pools.prefill.count, pools.decode.count)
        summary |= dict.fromkeys(OF_ONE_ENGINE)  # None: engines of two pools have no common value
        summary["pools"] = pools_summary(requests, recording.steps, counts, duration)
    return summary


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
        if item.prompt_tokens < limit < item.prompt_tokens + item.longest_output
    ]
    if cut:
        first = cut[0]
        prompt = first.prompt_tokens
        raise ValueError(
            f"{len(cut)} of {len(items)} requests would be cut off at engine.max_model_len, "
            f"{limit} tokens: {first.request_id} has {prompt} prompt tokens and asks for "
            f"{first.longest_output}. Raise the limit, or bound the workload's lengths (max of a "
            "distribution; max_prompt_tokens and max_output_tokens of a trace), which counts what "
            "it clips"
        )


def seed_of(experiment: Experiment, repeat: int) -> int:
    """The seed of a repeat's workload."""
    return experiment.seed + (repeat if experiment.reseed else 0)


def check_planned(point: Point, limit: int) -> None:
    """Check the lengths of a point's requests, in all repeats, before anything runs. The lengths of
    texts are not known without the model, and are not checked.

    Args:
        limit: max_model_len of the point's engine.

    Raises:
        ValueError: requests do not fit.
    """
    experiment = point.experiment
    if has_text(experiment.workload):
        return
    seeds = dict.fromkeys(seed_of(experiment, repeat) for repeat in range(experiment.repeats))
    for seed in seeds:
        workload = planned(experiment.workload, point.content, seed)
        longest = max(item.prompt_tokens for item in workload.items)
        if longest >= limit:
            raise ValueError(
                f"a prompt has {longest} tokens, and engine.max_model_len is {limit}, one of them "
                "for output; raise the limit, or bound the workload's lengths"
            )
        check_lengths(workload.items, limit)


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
            f"{steps_text}{' ...' if len(compiled) > 5 else ''}. Times with a compilation in them "
            "are not the engine's"
        )
    if summary["unfinished"]:
        return f"{summary['unfinished']} of {summary['requests']} requests did not finish"
    return None
