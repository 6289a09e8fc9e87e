"""Workloads, metrics, chips and cost models of one's own: in a config, in its key, in results."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import experiments
from experiments.analysis import sweep_points
from experiments.analysis.sides import Side, choose_metrics
from experiments.core import engines, execution, store
from experiments.core.config import Point, expand, load
from experiments.core.environment import environment
from experiments.simulation.cost import CHIPS, OwnChip
from pagedjax.options.own_errors import OwnError
from tests.experiments.core.summaries import (
    BASE,
    run_files,
    simulated_run,
    simulated_run_at,
)

SOURCE = """
def bursts(rng, *, count, size=3):
    for i in range(count):
        yield int(rng.integers(4, 30)), 2 + i % 5, i // size * 0.1

def spoken(rng, content):
    return [{"prompt": [20 + ord(c) for c in line], "output": 3} for line in content.split()]

def jain(requests, steps):
    shares = [1 / request.e2e for request in requests if request.done]
    return {"index": sum(shares) ** 2 / (len(shares) * sum(x * x for x in shares)), "none": None}

def longest(requests, steps):
    return max(step.seconds for step in steps)

def text(requests, steps):
    return "fast"

def seconds(work, *, a=0.001, b=0.0001):
    return a + b * work.context

def negative(work):
    return -1.0

def unfinished(work):
    0.001 * work.tokens

def broken(*records, **options):
    return records[0]["no such key"]

def late(rng):
    yield 5, 5
    yield 5, 1 // 0
"""
OWN = {"kind": {"name": "mine.py:bursts", "count": 20}}
OF_COST = {"cost": "mine.py:seconds", "model": "llama-3-8b"}


def of_bursts(**parameters: Any) -> dict[str, Any]:
    return {"workload": {"kind": {"name": "mine.py:bursts", **parameters}}}


CHIP = {"name": "next", "like": "h100", "bandwidth": 6.7e12}


def point_of(folder: Path, sections: dict[str, Any], source: str = SOURCE) -> Point:
    (folder / "mine.py").write_text(source, encoding="utf-8")
    (point,) = expand({**BASE, **sections}, folder=folder)
    return point


def test_a_function_of_ones_own_makes_a_workload(tmp_path):
    workload = {**OWN, "max_tokens": 40, "predicted": {"error": 0.0}}
    measured = simulated_run_at(point_of(tmp_path, {"workload": workload}))
    items = measured.workload.items
    assert [item.arrival for item in items] == [i // 3 * 0.1 for i in range(20)]
    assert [item.ends_at for item in items] == [2 + i % 5 for i in range(20)]
    assert {item.max_tokens for item in items} == {40}
    assert [item.predicted for item in items] == [item.ends_at for item in items]
    assert len({len(item.prompt_token_ids) for item in items}) > 5
    second_run = simulated_run_at(point_of(tmp_path, {"workload": workload}))
    assert second_run.workload == measured.workload
    run_of_other_seed = simulated_run_at(point_of(tmp_path, {"workload": workload, "seed": 1}))
    assert run_of_other_seed.workload != measured.workload
    poisson = {**OWN, "arrivals": {"process": "poisson", "rate": 100.0}}
    arrived = simulated_run_at(point_of(tmp_path, {"workload": poisson})).workload.items
    assert len({item.arrival for item in arrived}) == 20


def test_a_function_of_ones_own_reads_a_file(tmp_path):
    (tmp_path / "words.txt").write_text("one three", encoding="utf-8")
    workload = {"kind": "mine.py:spoken", "file": "words.txt"}
    items = simulated_run_at(point_of(tmp_path, {"workload": workload})).workload.items
    assert [len(item.prompt_token_ids) for item in items] == [3, 5]
    assert items[0].prompt_token_ids[0] == 20 + ord("o")


def test_metrics_of_ones_own_are_in_summaries_tables_and_comparisons(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE, encoding="utf-8")
    metrics = ["mine.py:jain", "mine.py:longest"]
    runs = run_files(tmp_path, {**BASE, "metrics": metrics}, with_report=True)
    (run,) = store.read_runs(runs)
    own_metrics = run["metrics"]["own"]
    assert own_metrics["longest"] == pytest.approx(run["metrics"]["step_s"]["max"], abs=1e-6)
    assert 0 < own_metrics["jain"]["index"] <= 1
    assert own_metrics["jain"]["none"] is None
    assert experiments.load_runs(runs)["own.longest"][0] == own_metrics["longest"]
    rows = sweep_points.points([run])
    assert "own.jain.index" in rows[0].values
    assert "longest" in sweep_points.text_table(rows).splitlines()[0]
    assert "jain.index" in (runs / "report.html").read_text(encoding="utf-8")
    side = Side("mine", (run,))
    columns = choose_metrics(None, side, side)
    assert columns[-3:] == ("own.jain.index", "own.jain.none", "own.longest")


def test_a_chip_of_ones_own_is_one_that_is_known_or_like_one(tmp_path):
    times = {}
    for name, chip in (("like", CHIP), ("known", "h100")):
        simulate = {"chip": chip, "model": "llama-3-8b"}
        measured = simulated_run({**BASE, "simulate": simulate})
        times[name] = measured.summary["step_s"]["mean"]
    assert times["like"] < 0.75 * times["known"], "decodes read their weights twice as fast"
    h100 = CHIPS["h100"]._replace(network=None)
    values = {key: value for key, value in h100._asdict().items() if key != "network"}
    assert OwnChip("same", **values).limits == h100
    (point,) = expand({**BASE, "simulate": {"chip": CHIP, "model": "llama-3-8b"}}, folder=tmp_path)
    simulate = point.experiment.simulate
    assert simulate is not None
    assert simulate.name == "simulated next"
    network = {"bandwidth": 1e11, "neighbours": False, "devices": 4}
    mesh = {"chip": {**CHIP, "network": network}, "mesh": {"tensor": 4}, "model": "llama-3-8b"}
    assert simulated_run({**BASE, "simulate": mesh}).failed is None


def test_a_cost_model_of_ones_own_gives_the_seconds_of_steps(tmp_path):
    cost = {"name": "mine.py:seconds", "a": 0.5, "b": 0.25}
    point = point_of(tmp_path, {"simulate": {**OF_COST, "cost": cost}})
    steps = simulated_run_at(point).steps
    assert all(math.isclose(s.device_seconds, 0.5 + 0.25 * s.context_tokens) for s in steps)
    assert point.experiment.simulate is not None
    assert point.experiment.simulate.name == "simulated, mine.py:seconds(a=0.5, b=0.25)"


@pytest.mark.parametrize(("function", "value"), [("negative", r"-1\.0"), ("unfinished", "None")])
def test_a_cost_model_that_returns_no_seconds_is_named(tmp_path, function, value):
    simulate = {"cost": f"mine.py:{function}", "model": "llama-3-8b"}
    with pytest.raises(
        ValueError,
        match=rf"^simulate\.cost is .*:{function}', which returned {value} for Work\(.*; it must "
        r"return the seconds of the step: a number above 0, and finite$",
    ):
        simulated_run_at(point_of(tmp_path, {"simulate": simulate}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"workload": {"kind": "mine.py:broken"}}, r"workload\.kind is .*, which raised TypeError"),
        (
            {"workload": {"kind": "mine.py:late"}},
            r"workload\.kind is .*, which raised ZeroDivisionError: .* in late \(.*mine\.py, line 33\)",
        ),
        (
            {"simulate": {"cost": "mine.py:broken", "model": "llama-3-8b"}},
            r"simulate\.cost is .*, which raised TypeError: .* in broken \(.*mine\.py, line 29\)",
        ),
    ],
    ids=["a workload", "a generator", "a cost model"],
)
def test_an_error_in_a_function_of_ones_own_has_its_place(tmp_path, sections, message):
    with pytest.raises(OwnError, match=message):
        simulated_run_at(point_of(tmp_path, sections))


def test_a_recording_changes_no_time_of_a_cost_model_of_ones_own(tmp_path):
    source = (
        "import numpy as np\ndef most(work):\n    return 1e-5 * float(np.max([work.context]))\n"
    )
    simulate = {"cost": "mine.py:most", "model": "llama-3-8b"}
    points = [
        point_of(tmp_path, {"simulate": simulate, "record": record}, source)
        for record in (False, True)
    ]
    assert points[0].key == points[1].key
    summaries = [simulated_run_at(point).summary for point in points]
    assert summaries[0] == summaries[1]


PARTS = [
    {"workload": OWN},
    {"metrics": ["mine.py:longest"]},
    {"simulate": OF_COST},
    {"pools": {"prefill": {"simulate": OF_COST}}},
]


@pytest.mark.parametrize("sections", PARTS, ids=["workload", "metrics", "cost", "a pool's cost"])
def test_a_file_of_ones_own_is_in_the_key_and_in_the_folder_of_a_run(tmp_path, sections):
    point = point_of(tmp_path, sections)
    assert point.key == point_of(tmp_path, sections).key
    assert point.key != point_of(tmp_path, sections, SOURCE + "# changed\n").key
    assert point.key != point_of(tmp_path, {}).key
    point = point_of(tmp_path, sections)
    run = engines.Run(point, 0, 0)
    files, summary = execution.measure_run(
        run, engines.simulated_engines(), environment(device=False)
    )
    (tmp_path / "mine.py").unlink()
    folder = tmp_path / "run"
    store.write_run(folder, files)
    (repeated,) = load(folder / "config.yaml")
    assert simulated_run_at(repeated).summary == summary["metrics"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"workload": {"kind": "mine.py:burst"}},
            r"^workload\.kind is .*; those in it: \['broken', 'bursts'",
        ),
        (
            {"workload": {"kind": "no.py:burst"}},
            r"^workload\.kind is 'no\.py:burst', but there is no",
        ),
        (
            of_bursts(cuont=3),
            r"^workload\.kind\.cuont is no parameter of bursts .*; did you mean 'count'\?$",
        ),
        (
            {"workload": {"kind": "mine.py:bursts"}},
            r"^workload\.kind\.count is missing: bursts .* has no",
        ),
        (of_bursts(count=0), r"which returned no requests"),
        (
            {"workload": {"kind": {"name": "mine.py:spoken", "content": "x"}, "file": "mine.py"}},
            r"^workload\.kind\.content is given, and the section gives it too; leave it out",
        ),
        ({"workload": {**OWN, "rate": 3}}, r"^unknown key workload\.'rate'"),
        (
            {"metrics": ["mine.py:seconds"]},
            r"^metrics: seconds \(mine\.py, line 19\) takes 1 arguments before its parameters, and it gets 2",
        ),
        ({"metrics": ["mine.py:jain"] * 2}, r"^metrics has two functions named 'jain'; rename"),
        ({"metrics": ["mine.py:jain"], "records": "sums"}, r"metrics has .*, which reads records"),
        (
            {"simulate": {**OF_COST, "cost": {"name": "mine.py:seconds", "c": 3}}},
            r"^simulate\.cost\.c is no parameter of seconds .*; its parameters are a, b$",
        ),
        ({"simulate": {**OF_COST, "chip": "h100"}}, r"^simulate\.needs one of chip"),
        (
            {"simulate": {"chip": {"name": "x"}}},
            r"^simulate\.chip\.bandwidth is missing; give it in",
        ),
        (
            {"simulate": {"chip": {"name": "h100"}}},
            r"^simulate\.chip\.name is 'h100'; it must be text",
        ),
        (
            {"simulate": {"chip": {**CHIP, "rate": 0}}},
            r"^simulate\.chip\.rate is 0\.0; it must be above 0 operations/s, and finite",
        ),
        ({"simulate": {"chip": {**CHIP, "like": "h10"}}}, r"^simulate\.chip\.like is 'h10'"),
    ],
)
def test_a_wrong_part_of_ones_own_is_an_error_that_says_what_to_do(tmp_path, sections, message):
    with pytest.raises(ValueError, match=message):
        point_of(tmp_path, sections)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("3", r"is 3; write \(prompt, output\)"),
        ("(0, 3)", r"has the prompt 0; it must be token ids, or their number, at least 1"),
        ("([], 3)", r"has the prompt \[\]"),
        ("('a b', 3)", r"has the prompt 'a b'"),
        ("([5, -1], 3)", r"has token id -1; it is outside \[0"),
        ("(4, 0)", r"has output 0; it must be an integer, at least 1"),
        ("(4, 2, -0.5)", r"has arrival -0\.5; it must be seconds, at least 0"),
        ("{'prompt': 3, 'out': 2}", r"is \{'prompt': 3, 'out': 2\}; write"),
    ],
)
def test_a_wrong_request_of_ones_own_is_named(tmp_path, request_, message):
    source = f"def wrong(rng):\n    return [(5, 5), {request_}]\n"
    with pytest.raises(
        ValueError, match=rf"^workload\.kind is .*:wrong', whose request 1 {message}"
    ):
        point_of(tmp_path, {"workload": {"kind": "mine.py:wrong"}}, source)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("text", r"metrics: .*:text returned 'fast'; it must be a finite number"),
        ("broken", r"metrics: .*:broken raised TypeError: .* in broken \(.*mine\.py, line 29\)"),
    ],
)
def test_a_metric_without_a_number_leaves_the_records_of_its_run(tmp_path, function, message):
    (tmp_path / "mine.py").write_text(SOURCE, encoding="utf-8")
    metrics = [f"mine.py:{function}", "mine.py:longest"]
    runs = run_files(tmp_path, {**BASE, "metrics": metrics}, status=1, with_report=True)
    (run,) = store.read_runs(runs)
    assert re.match(message, run["failed"])
    own_metrics = run["metrics"].pop("own")
    assert own_metrics[function] is None
    assert own_metrics["longest"] == pytest.approx(run["metrics"]["step_s"]["max"], abs=1e-6)
    (file,) = runs.rglob("requests.jsonl")
    assert len(file.read_text(encoding="utf-8").splitlines()) == run["metrics"]["requests"] > 0
    assert len(experiments.load_requests(runs)) == run["metrics"]["requests"]
    assert f"{function} " in (runs / "report.html").read_text(encoding="utf-8")


def test_metrics_have_parameters_and_their_names(tmp_path):
    source = "def above(requests, steps, *, least: int):\n    return sum(r.e2e > least for r in requests)\n"
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    metrics = [{"name": "mine.py:above", "least": minimum} for minimum in (0, 1000)]
    (point,) = expand({**BASE, "metrics": metrics}, folder=tmp_path)
    own_metrics = simulated_run_at(point).summary["own"]
    assert own_metrics == {"above(least=0)": 40, "above(least=1000)": 0}


def test_a_generator_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.core.workloads.MOST_REQUESTS", 100)
    source = "def endless(rng):\n    while True:\n        yield 5, 5\n"
    with pytest.raises(ValueError, match="which returned more than 100 requests; let it end"):
        point_of(tmp_path, {"workload": {"kind": "mine.py:endless"}}, source)


@pytest.mark.slow
def test_users_and_predictions_are_columns_of_requests_and_users_share_by_fair(tmp_path):
    """The heavy user's requests come first; `fair` lets the other one pass."""
    source = "def crowd(rng):\n    return [(30, 20, 0.0, 'heavy')] * 12 + [(30, 20, 0.001, 'light')] * 2\n"
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    waits = {}
    for policy in ("fcfs", "fair"):
        engine = {**BASE["engine"], "max_num_seqs": 2, "policy": policy}
        workload = {"kind": "mine.py:crowd", "predicted": {"error": 0.0}}
        run_files(tmp_path, {**BASE, "name": policy, "engine": engine, "workload": workload})
        requests = experiments.load_requests(tmp_path / "runs" / policy)
        assert set(requests.predicted) == {20}
        assert requests.user.value_counts().to_dict() == {"heavy": 12, "light": 2}
        waits[policy] = requests[requests.user == "light"].ttft_s.max()
    assert waits["fair"] < waits["fcfs"] / 2
    (file,) = (tmp_path / "runs" / "fair").rglob("requests.jsonl")
    row = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    assert (row["predicted"], row["user"]) == (20, "heavy")
    run_files(tmp_path, {**BASE, "name": "plain"})
    (file,) = (tmp_path / "runs" / "plain").rglob("requests.jsonl")
    row = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    assert not {"predicted", "user"} & row.keys()
