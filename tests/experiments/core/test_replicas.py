"""Several simulated engines behind a router: times, records, configs, and the example of
configs/.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments.core import store
from experiments.core.config import expand, load
from experiments.core.drive import drive
from experiments.core.engines import simulated_llm
from experiments.core.records import request_records, step_records
from experiments.core.replicas import drive_replicas
from experiments.core.submit import with_arrivals
from experiments.core.workloads import WorkItem, build
from experiments.simulation.cost import Simulate
from experiments.simulation.simulate import SimulatedEngine
from experiments.simulation.spans import DecodeSpan
from pagedjax.host.types import StepResult
from pagedjax.options.config import EngineConfig
from pagedjax.routing import LEAST_LOADED, ROUND_ROBIN, ROUTERS, Router
from tests.experiments.core.summaries import (
    BASE,
    GREEDY,
    changed_workload,
    run_files,
    simulated_run,
    simulated_run_at,
    summarize,
)

CONFIGS = Path(__file__).parents[3] / "configs"
RAW = {**BASE, "workload": changed_workload(count=60, shared_prefix=64, prefixes=6)}


@pytest.mark.default_cases(
    "closed-least_loaded",
    "busy-prefix",
    "at once-round_robin",
    "idle-prefix",
    "bursts-least_loaded",
    "branches-prefix",
    "batches-prefix",
)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"workload": {key: value for key, value in RAW["workload"].items() if key != "arrivals"}},
        # with idle gaps
        {"workload": {**RAW["workload"], "arrivals": {"process": "poisson", "rate": 3.0}}},
        {
            "workload": {
                **RAW["workload"],
                "arrivals": {"process": "gamma", "rate": 300.0, "burstiness": 0.1},
            }
        },
        {"workload": {**RAW["workload"], "arrivals": {"process": "closed_loop", "clients": 5}}},
        {"sampling": {"temperature": 0.8, "ignore_eos": True, "n": 3}, "cache_tokens": 512},
        {
            "engine": {**RAW["engine"], "policy": "static", "mixed_steps": False},
            "simulate": {"step_s": 0.01, "model": "llama-3-8b", "whole_batches": True},
        },
    ],
    ids=["busy", "at once", "idle", "bursts", "closed", "branches", "batches"],
)
def test_one_replica_is_the_engine_without_a_router(router: str, change: dict):
    """The engine makes its steps one by one, and the replica several together where they only
    decode.
    """
    (point,) = expand({**RAW, **change}, folder=Path())
    llm = simulated_llm(point.experiment)
    spec = point.experiment.workload
    load = build(spec, "", 0, llm.tokenizer.vocab_size, llm.tokenizer.encode)
    engine = llm.engine
    sampling = point.experiment.sampling
    _, results = drive(engine, load.items, sampling, engine.clock, engine.sleep, load.clients)
    records = request_records(results, load.items, 0.0, sampling.n)
    routed = simulated_run({**RAW, **change, "replicas": {"router": router}})
    assert routed.requests == with_arrivals(records, load.items, load.clients)
    assert routed.steps == step_records(results, 0.0, 8, engine.scheduler_state.config)
    assert routed.summary.pop("replicas")["count"] == 1
    assert routed.summary == summarize(routed.requests, routed.steps, 8)
    assert routed.summary == simulated_run({**RAW, **change}).summary


def engines(count: int, **options) -> list[SimulatedEngine]:
    settings = EngineConfig(max_model_len=64, num_blocks=32, token_buckets=(2048,), **options)
    simulate = Simulate(step_s=1.0)
    return [
        SimulatedEngine(settings, lambda work: 1.0, vocab_size=1000, simulate=simulate)
        for _ in range(count)
    ]


class Times:
    """Of each replica, its steps: begin, end, sequences."""

    def __init__(self, replicas: int = 2) -> None:
        self.steps: list[list[tuple[float, float, int]]] = [[] for _ in range(replicas)]

    def step(self, replica: int, result: StepResult) -> None:
        self.steps[replica].append((result.started, result.finished, len(result.plan.seqs)))

    def span(self, replica: int, span: DecodeSpan) -> None:
        times = zip(span.times.started.tolist(), span.times.finished.tolist(), strict=True)
        self.steps[replica] += [(started, finished, len(span.seqs)) for started, finished in times]


def test_each_replica_steps_on_its_own_clock():
    """Steps of one second; each request takes as many as it has output tokens."""
    work = [
        WorkItem("a", 0.0, (20,) * 5, 3),
        WorkItem("b", 0.5, (20,) * 5, 2),
        WorkItem("c", 1.5, (20,) * 5, 1),
    ]
    times = Times()
    assert drive_replicas(engines(2), ROUND_ROBIN, 32, work, GREEDY, times) == {
        "a": 0,
        "b": 1,
        "c": 0,
    }
    assert times.steps == [
        [(0.0, 1.0, 1), (1.0, 2.0, 1), (2.0, 3.0, 2)],
        [(0.5, 1.5, 1), (1.5, 2.5, 1)],
    ]


@pytest.mark.parametrize(("arrival", "load"), [(1.99, 1), (2.0, 0), (2.5, 0)])
def test_the_end_of_a_request_is_known_when_its_last_step_has_ended(arrival: float, load: int):
    """Replica 0 has a request until 2 s."""
    work = [
        WorkItem("a", 0.0, (20,) * 5, 2),
        WorkItem("b", 0.0, (20,) * 5, 9),
        WorkItem("c", arrival, (20,) * 5, 1),
    ]
    loads = []

    def choose(state, request):
        loads.append((state.loads[0].requests, state.loads[1].requests))
        return LEAST_LOADED.choose(state, request)

    drive_replicas(engines(2), Router("seeing", choose), 32, work, GREEDY, Times())
    assert loads == [(0, 0), (1, 0), (load, 1)]


def test_a_router_sees_the_hashes_that_the_engine_publishes():
    work = [WorkItem(name, i, (20 + i % 2,) * 33 + (i,), 1) for i, name in enumerate("abcd")]
    replicas = engines(1)
    requests = []

    def choose(state, request):
        requests.append(request)
        return 0

    drive_replicas(replicas, Router("seeing", choose), 32, work, GREEDY, Times())
    assert {key for request in requests for key in request.hashes} == set(
        replicas[0].scheduler_state.pool.contents
    )
    assert [request.tokens for request in requests] == [35] * 4
    requests.clear()
    drive_replicas(
        engines(1, enable_prefix_caching=False), Router("seeing", choose), 32, work, GREEDY, Times()
    )
    assert [request.hashes for request in requests] == [()] * 4


def test_replicas_share_no_blocks_and_each_request_has_one():
    result = simulated_run({**RAW, "replicas": {"count": 3, "router": "round_robin"}})
    assert result.failed is None
    assert [request.replica for request in result.requests] == [i % 3 for i in range(60)]
    assert {step.replica for step in result.steps} == {0, 1, 2}
    ends = [step.started + step.seconds for step in result.steps]
    assert ends == sorted(ends)
    assert result.summary["duration_s"] == ends[-1]
    assert result.summary["replicas"]["requests"] == {"least": 20, "mean": 20, "most": 20}
    idle = 1 - result.summary["replicas"]["busy_share"]["mean"]
    assert result.summary["between_steps_s"] == pytest.approx(3 * idle * ends[-1])
    assert result == simulated_run({**RAW, "replicas": {"count": 3, "router": "round_robin"}})


def test_prefix_finds_more_than_the_others_on_the_example():
    points = load(CONFIGS / "routers.yaml", ("workload.count=200",))
    summaries = {
        point.swept["replicas.router"]: simulated_run_at(point).summary for point in points
    }
    prefix = summaries.pop("prefix")
    for summary in summaries.values():
        assert prefix["prefix_hit_share"] > 1.2 * summary["prefix_hit_share"]
        assert prefix["ttft_s"]["mean"] < summary["ttft_s"]["mean"]


def test_known_blocks_bound_what_prefix_finds():
    shares = {
        known_blocks: simulated_run(
            {**RAW, "replicas": {"count": 3, "known_blocks": known_blocks}}
        ).summary["prefix_hit_share"]
        for known_blocks in (0, None)
    }
    assert shares[0] < shares[None]


@pytest.mark.slow
def test_a_run_records_replicas(tmp_path):
    sweep = {"grid": {"replicas.router": ["least_loaded", "round_robin"], "replicas.count": [1, 2]}}
    runs = run_files(tmp_path, {**RAW, "sweep": sweep})
    summaries = store.read_runs(runs)
    assert [summary["metrics"]["replicas"]["count"] for summary in summaries] == [1, 2, 1, 2]
    folder = Path(summaries[3]["run"])
    assert {request.replica for request in store.read_requests(folder)} == {0, 1}
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert {step["replica"] for step in steps} == {0, 1}
    assert "Replica 0 in the first repeat" in (runs / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replicas": {"count": 0}}, "replicas.count is 0; it must be at least 1"),
        (
            {"replicas": {"known_blocks": -1}},
            r"replicas.known_blocks is -1; it must be at least 0, or null for the",
        ),
        (
            {"replicas": {"router": "prefixes"}},
            "replicas.router is 'prefixes'; write one of round_robin, least_loaded",
        ),
        (
            {"replicas": {"router": "bad.py:A"}},
            "replicas.router is '.*', whose file raises ZeroDivisionError.*correct",
        ),
        (
            {"replicas": {"count": 2}, "simulate": None},
            "replicas.count is 2 and there is no simulate section, but a measured run has 1 engine; add one, or leave",
        ),
        (
            {"workload": {**RAW["workload"], "prefixes": 0}},
            "workload.prefixes is 0; it must be at least 1",
        ),
        (
            {"workload": {**RAW["workload"], "shared_prefix": 0}},
            "workload.prefixes is 6 and shared_prefix is 0; set shared_prefix to their length",
        ),
    ],
)
def test_wrong_sections_are_reported(tmp_path, change: dict, message: str):
    (tmp_path / "bad.py").write_text("1 / 0", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        expand({**RAW, **change}, folder=tmp_path)


@pytest.fixture
def documented() -> list[str]:
    """The code of docs/design/routing.md."""
    text = (CONFIGS.parent / "docs/design/routing.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_documented_transitions_run(documented):
    exec(compile(documented[0], "routing.md", "exec"), {})


def test_the_documented_router_runs_in_the_simulator(documented, tmp_path):
    (tmp_path / "mine.py").write_text(documented[1], encoding="utf-8")
    (point,) = expand(
        {**RAW, "replicas": {"count": 4, "router": "mine.py:TWO_CHOICES"}}, folder=tmp_path
    )
    result = simulated_run_at(point)
    assert result.failed is None
    assert {request.replica for request in result.requests} == {0, 1, 2, 3}
