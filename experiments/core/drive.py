"""Drivers: requests arrive at their times, whether or not the engine keeps up, or when a client is
free.

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
from experiments.core.metrics import OfSteps, OfTokens
from experiments.core.pools import OF_ONE_ENGINE, drive_pools, of_pools
from experiments.core.records import (
    RequestRecord,
    RequestRecorder,
    StepRecord,
    StepRecorder,
    request_records,
    step_records,
)
from experiments.core.replicas import Present, StepLoad, by_end, drive_replicas, of_replicas
from experiments.core.submit import LONGEST_SLEEP, Engine, Sender, submit, with_arrivals
from experiments.core.totals import Totals
from experiments.core.workloads import WorkItem, Workload, build
from experiments.simulation.spans import DecodeSpan
from pagedjax import routing
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
    while sender.left or engine.has_work:
        while (at := sender.next) is not None and at <= clock() - start:
            submit(engine, *sender.send())
        result = engine.step() if engine.has_work else None
        if result is not None:
            results.append(result)
            sender.ended(result, result.finished - start)
        elif at is not None:
            sleep(min(max(start + at - clock(), 0.0), LONGEST_SLEEP))
        else:
            raise RuntimeError("the engine has work but makes no step: its scheduler is stuck")
    return start, results


def warm_up(engine: Engine, experiment: Experiment, items: Sequence[WorkItem]) -> None:
    """Run the first few requests, shortened and all at once, to touch every page and code path."""
    warm = experiment.warmup
    first = [
        item._replace(arrival=0.0, max_tokens=min(item.max_tokens, warm.max_tokens))
        for item in items[: warm.requests]
    ]
    sampling = dataclasses.replace(experiment.sampling, min_tokens=0)
    drive(engine, first, sampling)


def measure(llm: Any, point: Point, repeat: int) -> Measured:
    """One repeat of a point on an engine of its configuration: warm up, reset, run, summarize."""
    experiment, engine = point.experiment, llm.engine
    several = experiment.replicas or experiment.pools
    engines = llm.engines if several else (engine,)
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
    for one in engines:
        one.reset()  # removes cached prefixes and counters of the warm-up
    kept = _recorded(llm, engines, experiment, workload)
    requests = with_arrivals(kept.requests, workload.clients)
    sent = zip(workload.items, requests, strict=True)
    workload = workload._replace(
        items=tuple(item._replace(arrival=request.arrival) for item, request in sent)
    )
    present, of_steps = experiment.replicas, kept.of_steps
    replicas = present.until(of_steps.end) if present else experiment.num_replicas
    speculates = engine.config.speculative is not None
    options = {"speculates": speculates, "replicas": replicas}
    summary = metrics.summary(
        requests, of_steps, kept.of_tokens, engine.config.block_size, experiment.slo, **options
    )
    if present:
        where = [request.replica for request in requests]
        summary["replicas"] = of_replicas(where, kept.loads, summary["duration_s"], range(replicas))
    if pools := experiment.pools:
        counts = pools.prefill.count, pools.decode.count
        summary |= dict.fromkeys(OF_ONE_ENGINE)
        summary["pools"] = of_pools(requests, kept.steps, counts, summary["duration_s"])
    return Measured(workload, requests, kept.steps, summary, why_failed(kept.steps, summary))


class Kept(NamedTuple):
    """What is known of a run.

    Of one that keeps sums there are no `steps`, and `loads` are sums of each replica.
    """

    requests: list[RequestRecord]
    steps: list[StepRecord]
    of_steps: OfSteps
    of_tokens: OfTokens
    loads: Sequence[StepLoad]


def _recorded(llm: Any, engines: Sequence[Any], experiment: Experiment, workload: Workload) -> Kept:
    """Run the requests. The records of a real engine are made after the run."""
    engine, sampling, replicas = engines[0], experiment.sampling, experiment.replicas
    items, clients, branches = workload.items, workload.clients, sampling.drawn().n
    if experiment.simulate is None and experiment.pools is None:
        start, results = drive(engine, items, sampling, clients=clients)
        steps = step_records(
            results, start, engine.config.block_size, engine.scheduler_state.config
        )
        return _kept(request_records(results, items, start, branches), steps)
    if experiment.pools:
        note, (prefill, decode) = Recorder(engines, items, branches), llm.fleets(routing.find)
        moved = drive_pools(prefill, decode, llm.link, items, sampling, note, clients)
        return _kept(note.requests.records(moved.prefill, moved.transfers), by_end(note.steps))
    options = replicas or Replicas(router=routing.ROUND_ROBIN.name)
    known = engine.config.num_blocks if options.known_blocks is None else options.known_blocks
    router, present = routing.find(options.router), Present(options.count, options.changes)
    if experiment.records == "sums":
        totals = Totals(engines, items, branches)
        where = drive_replicas(engines, router, known, items, sampling, totals, clients, present)
        return Kept(
            totals.records(where), [], totals.of_steps(), totals.of_tokens(), totals.replicas
        )
    note = Recorder(engines, items, branches)
    present = present._replace(anew=note.requests.anew)
    where = drive_replicas(engines, router, known, items, sampling, note, clients, present)
    return _kept(note.requests.records(where), by_end(note.steps))


def _kept(requests: list[RequestRecord], steps: list[StepRecord]) -> Kept:
    return Kept(requests, steps, metrics.of_steps(steps), metrics.of_tokens(requests), steps)


class Recorder:
    """The records of several engines, made after each step."""

    def __init__(self, engines: Sequence[Any], items: Sequence[WorkItem], branches: int) -> None:
        self.requests = RequestRecorder(items, 0.0, branches)
        self.steps: list[list[StepRecord]] = [[] for _ in engines]
        self._recorders = [
            StepRecorder(0.0, one.config.block_size, one.scheduler_state.config, i)
            for i, one in enumerate(engines)
        ]

    def step(self, replica: int, result: StepResult) -> None:
        self.requests.add(result)
        self.steps[replica].append(self._recorders[replica].record(result))

    def span(self, replica: int, span: DecodeSpan) -> None:
        self.requests.add_span(span)
        self.steps[replica] += self._recorders[replica].record_span(span)

    def left(self, replica: int, branch_id: str) -> None:
        self._recorders[replica].left(branch_id)


def check_lengths(items: Sequence[WorkItem], limit: int) -> None:
    """Refuse requests that the engine would cut off at its longest length: a record would count
    them as served.

    A prompt that is too long alone is not checked here; the engine refuses it.

    Raises:
        ValueError: there are such requests; the message names the first.
    """
    cut = [
        item
        for item in items
        if len(item.prompt_token_ids) < limit < len(item.prompt_token_ids) + item.max_tokens
    ]
    if cut:
        first, prompt = cut[0], len(cut[0].prompt_token_ids)
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
        where = ", ".join(
            f"{step.step} ({step.tokens} tokens, {step.sequences} sequences)"
            for step in compiled[:5]
        )
        return (
            f"compiled in the measured run: {summary['compilations']} compilations, in step {where}"
            f"{' ...' if len(compiled) > 5 else ''}. Times with a compilation in them are not the "
            "engine's"
        )
    if summary["unfinished"]:
        return f"{summary['unfinished']} of {summary['requests']} requests did not finish"
    return None
