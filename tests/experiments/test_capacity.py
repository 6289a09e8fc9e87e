"""The search for capacity finds known limits, probes no rate twice, and reports failures."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from experiments import capacity
from experiments.analysis import capacities, run_length
from experiments.analysis.capacities import CellAnswer, SeedAnswer
from experiments.analysis.sweep_points import number
from experiments.capacity import Bounds, Probe, bracket, met_above_limit, next_rate
from experiments.core import store, sweep
from experiments.core.records import BranchRecord, RequestRecord

MD1 = {  # one request of one step at a time, Poisson arrivals: an M/D/1 queue
    "name": "md1",
    "model": "llama-3-8b",
    "engine": {"max_num_seqs": 1, "max_model_len": 64, "enable_prefix_caching": False},
    "cache_tokens": 256,
    "workload": {
        "kind": "synthetic",
        "count": 800,
        "prompt": {"dist": "fixed", "value": 16},
        "output": {"dist": "fixed", "value": 1},
        "arrivals": {"process": "poisson", "rate": 100.0},
    },
    "sampling": {"temperature": 0.0, "ignore_eos": True},
    "slo": {"ttft": 0.02},
    "simulate": {"chip": "h200", "model": "llama-3-8b"},
}


def probes_of(met: Callable[[float], bool], bounds: Bounds, alone: float = 0.0) -> list[Probe]:
    """The probes of a search; up to the rate `alone`, no two requests overlap."""
    probes: list[Probe] = []
    while (rate := next_rate(probes, bounds)) is not None:
        assert rate not in {probe.rate for probe in probes}
        probes.append(Probe(rate, met(rate), rate <= alone, {}))
        assert len(probes) < 60
    return probes


@pytest.mark.parametrize("limit", [0.0013, 1.0, 7.77, 900.0])
@pytest.mark.parametrize("tolerance", [0.001, 0.05, 0.5])
@pytest.mark.parametrize("given_ends", [(), ("low",), ("high",), ("low", "high")])
def test_search_finds_known_limit(limit: float, tolerance: float, given_ends: tuple[str, ...]):
    ends = {"low": limit / 50, "high": limit * 50}
    bounds = Bounds(1.0, **{name: ends[name] for name in given_ends}, tolerance=tolerance)
    probes = probes_of(lambda rate: rate <= limit, bounds)
    met, unmet = bracket(probes)
    assert met <= limit < unmet
    assert unmet <= met * (1 + tolerance) or math.isclose(unmet, met, rel_tol=2e-3)
    assert met_above_limit(probes) == []
    assert all((bounds.low or 0) <= probe.rate <= (bounds.high or math.inf) for probe in probes)
    assert f"Capacity: {met:g} requests/s ({unmet:g} is too much)" in answer_of(probes, bounds)


def answer_of(probes: list[Probe], bounds: Bounds) -> str:
    criterion = capacity.Criterion(capacity.Slo(ttft=1.0))
    return " ".join(capacity.answer_sentences(probes, bounds, criterion, "requests/s"))


def test_non_monotone_rates_are_reported():
    probes = probes_of(lambda rate: rate <= 3.0 or 3.15 < rate < 3.3, Bounds(1.0))
    assert bracket(probes)[0] <= 3.0 < bracket(probes)[1]
    assert "Not monotone: met at 3.238 although not at 3.084" in answer_of(probes, Bounds(1.0))
    upside_down = probes_of(lambda rate: rate > 5.0, Bounds(1.0, 2.0, 8.0))
    assert met_above_limit(upside_down) == [8.0]
    assert answer_of(upside_down, Bounds(1.0, 2.0, 8.0)).startswith(
        "No capacity found: not met even at 2 requests/s"
    )


@pytest.mark.parametrize(
    ("met", "bounds", "alone", "probes", "message"),
    [
        (
            False,
            Bounds(1.0),
            0.3,
            3,
            "No capacity: not met at 0.25 requests/s, where no two requests overlap.",
        ),
        (False, Bounds(1.0), 0.0, 13, "No capacity found: not met even at 0.0002441 requests/s."),
        (False, Bounds(1.0, 0.5), 0.0, 1, "not met even at 0.5 requests/s. Give a lower --low"),
        (
            True,
            Bounds(1.0),
            0.0,
            13,
            "met even at 4096 requests/s. The number of requests is too small for a limit",
        ),
        (True, Bounds(1.0, high=4.0), 0.0, 1, "met even at 4 requests/s. Give a higher --high."),
    ],
)
def test_search_without_limit_ends_with_reason(
    met: bool, bounds: Bounds, alone: float, probes: int, message: str
):
    search = probes_of(lambda rate: met, bounds, alone)
    assert len(search) == probes
    assert message in answer_of(search, bounds)


def write(folder: Path, **sections: Any) -> Path:
    path = folder / "md1.yaml"
    path.write_text(yaml.safe_dump({**MD1, **sections}, sort_keys=False))
    return path


def share_in_time(arrivals: np.ndarray, step: float, target: float) -> float:
    """Of requests whose first token comes within `target` when each takes one step: Lindley's
    recursion.
    """
    wait = 0.0
    good = 0
    for gap in [math.inf, *np.diff(arrivals)]:
        wait = max(0.0, wait + step - gap)
        good += wait + step <= target
    return good / len(arrivals)


@pytest.mark.slow
def test_capacity_of_md1_queue_matches_theory(tmp_path, monkeypatch, capsys):
    measured: list[float] = []
    measure_run = sweep.measure_run

    def counting_measure_run(task: Any, *arguments: Any) -> Any:
        measured.append(task.point.swept["workload.arrivals.rate"])
        if len(measured) == 4:
            raise KeyboardInterrupt  # the search is stopped in its fourth probe
        return measure_run(task, *arguments)

    monkeypatch.setattr(sweep, "measure_run", counting_measure_run)
    command = [str(write(tmp_path)), "--out", str(tmp_path / "runs"), "--quiet"]
    assert capacity.main(command) == 130
    assert capacity.main(command) == 0
    folder = tmp_path / "runs" / "md1-capacity"
    report = json.loads((folder / "capacity.json").read_text())
    probes = [probe["rate"] for probe in report["probes"]]
    # the one that was stopped is the only one to come twice
    assert measured == [*probes[:4], *probes[3:]]
    assert [row["swept"]["workload.arrivals.rate"] for row in store.read_runs(folder)] == sorted(
        probes
    )
    capsys.readouterr()
    assert capacity.main(command) == 0
    assert len(measured) == len(probes) + 1  # and not one again
    printed = capsys.readouterr().out
    assert f"Capacity: {report['met']:g} requests/s ({report['unmet']:g} is too much)" in printed

    slowest = Path(store.read_runs(folder)[0]["run"])
    step = json.loads((slowest / "steps.jsonl").read_text().splitlines()[0])["seconds"]
    draws = min(probes) * np.array([request.arrival for request in store.read_requests(slowest)])
    # the same draws at every rate: the queue is known request by request
    for probe in report["probes"]:
        exact = share_in_time(draws / probe["rate"], step, 0.02)
        assert probe["values"]["goodput.share"] == pytest.approx(exact, abs=2e-3)
    assert report["met"] < report["unmet"] <= report["met"] * 1.05


@pytest.mark.slow
def test_capacity_of_a_model_with_windows_says_what_a_sequence_keeps(tmp_path, capsys):
    """More requests fit if blocks before the windows are given back, so the capacity is higher."""
    path = write(
        tmp_path,
        model="gpt-oss-20b",
        simulate={"chip": "h200", "model": "gpt-oss-20b"},
        engine={"max_num_seqs": 64, "max_model_len": 4096, "enable_prefix_caching": False},
        cache_tokens=12_000,
        workload={
            **MD1["workload"],
            "count": 150,
            "prompt": {"dist": "fixed", "value": 2000},
            "output": {"dist": "fixed", "value": 60},
        },
        slo={"ttft": 0.5},
        sweep={"grid": {"engine.free_window_blocks": [True, False]}},
    )
    command = [str(path), "--out", str(tmp_path / "runs"), "--quiet", "--tolerance", "0.2"]
    assert capacity.main(command) == 0
    folder = tmp_path / "runs" / "md1-capacity"
    freed, full = json.loads((folder / "capacity.json").read_text())["cells"]
    assert freed["capacity"] > full["capacity"]
    # windows of 128 tokens lie in 9 blocks of 16
    sentence = "2 groups of layers: a sequence of 4,096 tokens keeps 265 of 512 blocks (52 %)"
    assert sentence in capsys.readouterr().out
    assert sentence in (folder / "capacity.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_trace_capacity_by_time_scale_and_percentile(tmp_path):
    stamps = [f"2023-11-16 18:15:{10 + i // 10}.{i % 10}00000,16,4" for i in range(80)]
    (tmp_path / "trace.csv").write_text(
        "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *stamps])
    )
    workload = {"kind": "trace", "file": "trace.csv", "time_scale": 0.0}
    path = write(tmp_path, workload=workload, slo={"ttft": 0.05, "itl": 0.05})
    command = [str(path), "--out", str(tmp_path), "--quiet"]
    assert capacity.main([*command, "--percentile", "90", "--tolerance", "0.2"]) == 0
    report = json.loads((tmp_path / "md1-capacity" / "capacity.json").read_text())
    assert (report["unit"], report["criterion"]) == (
        "times as recorded",
        "p90: TTFT within 0.05 s and ITL within 0.05 s",
    )
    assert report["probes"][0]["rate"] == 1.0
    assert {len(probe["values"]) for probe in report["probes"]} == {2}
    steps = json.loads(next(tmp_path.glob("md1-capacity/*/0/summary.json")).read_text())["metrics"][
        "step_s"
    ]
    # ten requests a second of four steps each keep the engine busy at a speed of 1 / 40 steps
    assert report["met"] == pytest.approx(1 / (40 * steps["mean"]), rel=0.3)


def test_the_rate_of_a_trace_is_searched(tmp_path):
    """The gaps are equal, so the engine, which takes one request at a time, serves 1 / (2 steps)."""
    stamps = [f"2023-11-16 18:15:{10 + i // 10}.{i % 10}00000,16,2" for i in range(80)]
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    (tmp_path / "trace.csv").write_text("\n".join([header, *stamps]))
    path = write(
        tmp_path,
        workload={"kind": "trace", "file": "trace.csv", "rate": 2.0},
        simulate={"step_s": 0.02, "model": "llama-3-8b"},
        slo={"ttft": 0.03},
    )
    command = [str(path), "--out", str(tmp_path), "--quiet", "--tolerance", "0.02"]
    assert capacity.main(command) == 0
    report = json.loads((tmp_path / "md1-capacity" / "capacity.json").read_text())
    assert report["unit"] == "requests/s"
    assert report["probes"][0]["rate"] == 2.0
    assert report["met"] == pytest.approx(25, rel=0.05)


NULL_TARGET = "sweep={grid: {slo.ttft: [0.3, null]}}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "slo={}"], "slo has no target to meet; give one in seconds"),
        (
            ["--set", "workload.arrivals={process: at_once}"],
            "at_once, which has no rate; set one that has",
        ),
        (
            ["--set", "sweep={grid: {workload.arrivals.rate: [1, 2]}}"],
            "the config sweeps workload.arrivals.rate, which is the rate that is looked for; fix it "
            "with --set workload.arrivals.rate=1, where the search begins",
        ),
        (
            ["--set", "sweep={grid: {seed: [1, 2]}}", "--set", "repeats=2", "--set", "reseed=true"],
            "two searches are of one point, seed 2: seed is swept, and with reseed repeat r has",
        ),
        (
            ["--percentile=90", "--set", "slo.itl=0.1", "--set", NULL_TARGET],
            "slo.ttft is null in some cells and a target in others",
        ),
        (
            ["--by", "polcy", "--set", "sweep={grid: {engine.policy: [fcfs, shortest]}}"],
            "--by is 'polcy'; it must be one of 'engine.policy'",
        ),
        (["--jobs", "0"], "--jobs is 0; it must be at least 1"),
        (["--share", "90"], "--share is 90.0; it must be above 0 and at most 1"),
        (["--low", "0"], "--low is 0.0; it must be a rate above 0"),
        (["--low", "3", "--high", "2"], "--low is 3 and --high 2; the lower bound must be below"),
        (["--tolerance", "5"], "--tolerance is 5.0; it is a share of the rate"),
    ],
)
def test_bad_arguments_fail_before_anything_runs(
    tmp_path, arguments: list[str], message: str, capsys
):
    assert capacity.main([str(write(tmp_path)), "--out", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("summary.json"))


def test_failed_probe_ends_search(tmp_path, capsys):
    path = write(tmp_path, workload={**MD1["workload"], "prompt": {"dist": "fixed", "value": 99}})
    assert capacity.main([str(path), "--out", str(tmp_path)]) == 1
    assert (
        "error: the run at rate 100, repeat 0, failed: ValueError: the engine refused"
        in capsys.readouterr().err
    )


def test_criterion_uses_median_of_repeats():
    latency = {"ttft_s": {"p99": 1.0}, "itl_s": {"p99": None}}  # outputs of one token have no gaps
    runs = [{"metrics": {"goodput": {"share": share}, **latency}} for share in (0.99, 0.91, 0.2)]
    slo = capacity.Slo(ttft=1.0, itl=0.1)
    by_share = capacity.Criterion(slo)
    by_tail = capacity.Criterion(slo, percentile=99)
    assert by_share.values(runs) == {"goodput.share": 0.91}
    assert by_tail.values(runs) == {"ttft_s.p99": 1.0}
    assert by_share.is_met({"goodput.share": 0.9})
    assert not by_share.is_met({"goodput.share": 0.89})
    assert by_tail.is_met({"ttft_s.p99": 1.0})
    assert not by_tail.is_met({"ttft_s.p99": 0.5, "itl_s.p99": 0.11})


@pytest.mark.parametrize("criterion", [("--percentile", "90"), ("--share", "0.9")])
def test_itl_alone_needs_requests_with_a_second_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], criterion: tuple[str, str]
) -> None:
    workload = {**MD1["workload"], "count": 20}  # of one token each
    path = write(tmp_path, workload=workload, slo={"itl": 0.05})
    assert capacity.main([str(path), "--out", str(tmp_path), "--quiet", *criterion]) == 2
    assert "slo has itl alone, and no request has a second token" in capsys.readouterr().err


def test_alone_means_no_overlapping_requests():
    first = RequestRecord(
        "r0", 0.0, 5, 2, 0.0, (BranchRecord("r0", (0.5, 2.0), (1, 2), 0, "length"),)
    )
    assert not capacity.never_overlap([first, first._replace(arrival=1.9)])
    assert capacity.never_overlap([first, first._replace(arrival=2.0)])


CELLS = {
    "workload": {**MD1["workload"], "count": 40},
    "sweep": {"grid": {"engine.max_num_seqs": [1, 2]}},
    "repeats": 2,
    "reseed": True,
}
BOUNDS = ("--low", "150", "--high", "1200", "--tolerance", "0.5", "--quiet")


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> Any:
    """The folder of capacities of two cells with two seeds each, and what the command printed."""
    folder = tmp_path_factory.mktemp("cells")
    path = write(folder, **CELLS)
    printed = io.StringIO()
    with redirect_stdout(printed):
        words = [str(path), "--out", str(folder), "--json", str(folder / "c.json"), *BOUNDS]
        assert capacity.main(words) == 0
    return folder, printed.getvalue()


def test_each_cell_and_seed_has_its_capacity(cells):
    folder, printed = cells
    result = json.loads((folder / "c.json").read_text())
    assert (folder / "md1-capacity" / "capacity.json").read_text() == (
        folder / "c.json"
    ).read_text()
    assert [cell["cell"] for cell in result["cells"]] == [
        {"engine.max_num_seqs": 1},
        {"engine.max_num_seqs": 2},
    ]
    for cell in result["cells"]:
        assert [seed["seed"] for seed in cell["seeds"]] == [0, 1]
        logs = [math.log(seed["met"]) for seed in cell["seeds"]]
        assert cell["capacity"] == pytest.approx(math.exp(sum(logs) / 2))
        if logs[0] != logs[1]:  # Student's t of one degree of freedom is Cauchy's distribution
            reach = math.tan(0.475 * math.pi) * abs(logs[0] - logs[1]) / 2
            assert math.log(cell["high"] / cell["capacity"]) == pytest.approx(reach)
        assert f"{cell['label']}  {number(cell['capacity'])}" in printed
    assert result["cells"][1]["capacity"] > 1.5 * result["cells"][0]["capacity"]


def test_a_seed_is_searched_alone(cells):
    """Its answer is that of the queue of its own arrivals, by Lindley's recursion."""
    folder, _ = cells
    (cell, _) = json.loads((folder / "c.json").read_text())["cells"]
    runs = [run for run in store.read_runs(folder) if run["swept"]["engine.max_num_seqs"] == 1]
    for seed in cell["seeds"]:
        run = next(run for run in runs if run["repeat"] == seed["seed"])
        step = json.loads((Path(run["run"]) / "steps.jsonl").read_text().splitlines()[0])["seconds"]
        arrivals = np.array([r.arrival for r in store.read_requests(Path(run["run"]))])
        draws = run["swept"]["workload.arrivals.rate"] * arrivals
        for probe in seed["probes"]:
            exact = share_in_time(draws / probe["rate"], step, 0.02)
            assert probe["values"]["goodput.share"] == pytest.approx(exact, abs=0.03)
            assert probe["met"] == (probe["values"]["goodput.share"] >= 0.9)
        assert seed["met"] == max(p["rate"] for p in seed["probes"] if p["met"])


def test_a_run_that_is_too_short_is_said(cells):
    folder, printed = cells
    result = json.loads((folder / "c.json").read_text())
    assert all(cell["too_short"] for cell in result["cells"])
    assert "2 of 2 seeds" in printed
    sentence = (
        "few decide: 4 of 40 requests may miss the targets, and 10 are needed. Raise the number of"
    )
    assert (
        f"Too short for the answer: max_num_seqs=1, seed 0: {sentence} requests to 100." in printed
    )


def test_capacities_are_compared_by_seed(cells):
    folder, printed = cells
    result = json.loads((folder / "c.json").read_text())
    (row,) = result["comparisons"]
    met = [[seed["met"] for seed in cell["seeds"]] for cell in result["cells"]]
    logs = [math.log(above / below) for below, above in zip(*met, strict=True)]
    assert row["differences"] == pytest.approx(logs)
    assert row["estimate"] == pytest.approx(math.exp(sum(logs) / 2))
    margin = math.log(1.5)  # of the search
    deviation = max(abs(logs[0] - logs[1]) / math.sqrt(2), margin / math.sqrt(6))
    reach = math.tan(0.475 * math.pi) * deviation / math.sqrt(2)  # Cauchy's distribution
    assert math.log(row["high"] / row["estimate"]) == pytest.approx(reach + margin)
    assert (result["by"], result["baseline"], row["value"]) == ("engine.max_num_seqs", 1, 2)
    assert row["units"] == [{"seed": seed, "repeat": None} for seed in (0, 1)]
    assert "capacity: engine.max_num_seqs=2 against 1\n" in printed
    assert row["verdict"] == "no difference is shown"
    assert row["verdict"] in printed
    assert "A capacity is up to 50 % too low" in printed
    page = (folder / "md1-capacity" / "capacity.html").read_text()
    assert "<h2>Compared by engine.max_num_seqs</h2>" in page
    assert "capacity: engine.max_num_seqs=2 against 1\n" in page


def cell(policy: str, size: int, *met: float) -> CellAnswer:
    """The highest met rate of each seed; 0: there is none."""
    answers = [
        SeedAnswer(seed, rate, 1.05 * rate or 1.0, (), (), ()) for seed, rate in enumerate(met)
    ]
    swept = {"policy": policy, "size": size}
    return CellAnswer(swept, f"{policy} {size}", "", tuple(answers))


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.0, "no difference is shown"), (1.049, "no difference is shown"), (1.2, "higher: shown")],
)
def test_a_step_of_the_search_is_no_difference(ratio: float, verdict: str):
    rates = [10.0, 12.0, 15.0]
    above = [float(f"{ratio * rate:.4g}") for rate in rates]  # as rates are rounded
    (row,) = capacities.compared([cell("a", 1, *rates), cell("b", 1, *above)], "policy", 0.05).rows
    assert row.comparison.verdict(0.95) == verdict


def test_seeds_without_a_capacity_are_no_pair():
    cells = [
        cell("a", 1, 1.0, 2.0, 3.0, 0.0),
        cell("a", 2, 1.0, 1.0, 1.0, 1.0),
        cell("b", 1, 3.0, 6.1, 9.0, 9.0),
        cell("b", 2, 3.0, 3.1, 3.0, 3.2),
    ]
    of_policy = capacities.compared(cells, "policy", 0.05)
    assert [len(row.units) for row in of_policy.rows] == [3, 4, 3]
    verdicts = [row.comparison.verdict(0.95) for row in of_policy.rows]
    assert verdicts == ["higher: shown"] * 3
    assert "higher in 2 and lower in 0 of 2 cells" in of_policy.text


def test_the_page_shows_the_cells(cells):
    folder, _ = cells
    text = (folder / "md1-capacity" / "capacity.html").read_text()
    assert "prefers-color-scheme: dark" in text
    assert "Simulated h200, times of llama-3-8b: no step ran" in text
    assert "<h2>Every cell</h2>" in text
    assert "<h2>Every point</h2>" not in text
    assert "<h2>What ran</h2>" in text
    assert text.count("<svg ") == 2
    assert "Too short for the answer" in text
    assert "small lines: each seed." in text
    assert text.count('scope="col"') == 5
    assert "undefined" not in text.lower()


@pytest.mark.slow
def test_jobs_change_no_number(cells, tmp_path):
    folder, _ = cells
    words = [str(write(tmp_path, **CELLS)), "--out", str(tmp_path), "--jobs", "2", *BOUNDS]
    assert capacity.main(words) == 0
    assert (tmp_path / "md1-capacity" / "capacity.json").read_text() == (
        folder / "c.json"
    ).read_text()


def test_targets_may_be_swept(tmp_path):
    """Each cell has its own criterion; without reseed, the median of repeats counts."""
    path = write(tmp_path, sweep={"grid": {"slo.ttft": [0.01, 0.1]}}, repeats=2)
    _, points = capacity.read_config(path, [])
    searches = capacity.searches_of(points, capacity._parser().parse_args(["x"]))
    assert [str(search.criterion) for search in searches] == [
        "90% of requests: TTFT within 0.01 s",
        "90% of requests: TTFT within 0.1 s",
    ]
    assert [(search.repeats, search.seed) for search in searches] == [([0, 1], None)] * 2
    _, points = capacity.read_config(path, ["sweep={grid: {seed: [3, 5]}}"])
    searches = capacity.searches_of(points, capacity._parser().parse_args(["x"]))
    assert [(search.cell, search.seed) for search in searches] == [({}, 3), ({}, 5)]


def test_the_engine_of_a_measured_cell_is_built_once(tmp_path):
    """All seeds of a cell are searched together, whatever the order of the keys."""
    path = write(tmp_path, simulate=None)
    grid = "sweep={grid: {seed: [3, 5], engine.policy: [fcfs, shortest]}}"
    _, points = capacity.read_config(path, [grid])
    searches = capacity.searches_of(points, capacity._parser().parse_args(["x"]))
    groups = [[search.name for search in group] for group in capacity._groups(searches)]
    assert groups == [
        ["policy=fcfs, seed 3", "policy=fcfs, seed 5"],
        ["policy=shortest, seed 3", "policy=shortest, seed 5"],
    ]


def requests_of(arrivals: np.ndarray, service: float) -> list[RequestRecord]:
    """Requests of one server, each of which takes `service` seconds."""
    ends = []
    for arrival in arrivals.tolist():
        ends.append(max(arrival, ends[-1] if ends else 0.0) + service)
    return [
        RequestRecord(f"r{i}", arrival, 5, 1, arrival, (BranchRecord(f"r{i}", (end,), (1,), 0, "length"),))
        for i, (arrival, end) in enumerate(zip(arrivals.tolist(), ends, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(("service", "growth"), [(0.5, 0.0), (1.25, 0.2), (2.0, 0.5)])
def test_growth_is_the_share_of_requests_that_stay(service: float, growth: float):
    """Of a request each second, a server that takes 1.25 s for each leaves a fifth behind."""
    requests = requests_of(np.arange(200.0), service)
    assert run_length.growth_at_end(requests) == pytest.approx(growth, abs=0.02)
    grown = run_length.reasons(requests, [True] * 200, 0.9, 0.05)
    assert [text.partition(":")[0] for text in grown] == ["the queue grew"] * (growth > 0)
    assert run_length.growth_at_end(requests[:7]) is None


def test_interval_of_misses_is_that_of_batch_means():
    draw = np.random.default_rng(0)
    in_time = (draw.random(200) < np.repeat(draw.uniform(0.7, 1.0, 10), 20)).tolist()
    parts = 1 - np.array(in_time).reshape(10, 20).mean(1)
    reach = 2.262157 * parts.std(ddof=1) / math.sqrt(10)  # t of 9 degrees of freedom
    interval = run_length.interval_of_misses(in_time)
    assert interval == pytest.approx((parts.mean() - reach, parts.mean() + reach), rel=1e-5)
    assert run_length.interval_of_misses([True] * 9) is None
    requests = requests_of(np.arange(200.0), 0.5)
    first_miss = [i >= 20 for i in range(200)]  # a part of ten misses: a standard error of 0.1
    assert run_length.reasons(requests, first_miss, 0.9, 0.05) == [
        "the share is not known: 0 to 33 % miss the targets, which may be more than twice the 10 % "
        "that may. Raise the number of requests."
    ]
    (share_of_all,) = run_length.reasons(requests, [True] * 200, 1.0, 0.05)
    assert share_of_all.endswith("10 are needed. Give a --share below 1.")
