"""Comparison of runs: differences that are shown, false positives, and errors of a user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import compare
from experiments.analysis import ratios
from experiments.analysis.ratios import comparison, effect_of_requests, effect_of_runs
from experiments.core import store
from experiments.core.records import BranchRecord, RequestRecord
from pagedjax.server.load_client.summary import spread

RATE = "output_tokens_per_s"
WORKLOAD = {"requests": 4, "prompt_tokens": 20, "last_arrival_s": 1.0}


def requests(first: Any, gap: float = 0.05) -> list[RequestRecord]:
    """A request of three tokens for each time to first token."""
    branches = [
        BranchRecord(f"r{i}", (t, t + gap, t + 2 * gap), (1, 2, 3), 0, "length")
        for i, t in enumerate(first)
    ]
    return [RequestRecord(branch.branch_id, 0.0, 5, 3, 0.0, (branch,)) for branch in branches]


def requests_that_waited(queue: Any, tokens: int) -> list[RequestRecord]:
    """One request for each time in the queue."""
    times = tuple(1.0 + 0.1 * i for i in range(tokens))
    branch = BranchRecord("r", times, (1,) * tokens, 0, "length")
    return [RequestRecord("r", 0.0, 5, tokens, wait, (branch,)) for wait in queue]


def put(
    sweep: Path, repeat: int, rate: float, swept: dict[str, Any] | None = None, **fields: Any
) -> None:
    """A run with throughput `rate`; with requests if `first` has the times of their first tokens."""
    swept = swept or {}
    lived = fields.pop("lived", None) or requests(fields.pop("first", ()))
    env = fields.pop("env", {})
    label = ", ".join(f"{key}={value}" for key, value in swept.items()) or "one point"
    point = fields.pop("point", str(sorted(swept.items())).encode().hex()[-12:])
    metrics = {
        "output_tokens_per_s": rate,
        "preemptions": 0,
        "ttft_s": spread(request.ttft for request in lived),
        "tokens_sha256": "same",
    }
    summary = {
        "schema": store.SCHEMA,
        "label": label,
        "swept": swept,
        "point": point,
        "repeat": repeat,
        "order": 0,
        "run": f"{point}/{repeat}",
        "failed": None,
        "workload": WORKLOAD,
        "metrics": metrics,
        **fields,
    }
    rows = [
        {**request._asdict(), "branches": [b._asdict() for b in request.branches]}
        for request in lived
    ]
    files = {"summary.json": store.json_text(summary), "requests.jsonl": store.json_lines(rows)}
    files["env.json"] = store.json_text(env)
    store.write_run(store.run_folder(sweep, point, repeat), files)


@pytest.fixture
def compared(tmp_path, capsys) -> Any:
    """What the command prints of two folders of tmp_path."""

    def output(a: str, b: str, *options: str, status: int = 0) -> str:
        folders = [str(tmp_path / a), str(tmp_path / b)]
        assert compare.main([*folders, *(options or ("--metric", RATE))]) == status
        printed = capsys.readouterr()
        return printed.out if status == 0 else printed.err

    return output


def test_sweeps_are_compared_point_by_point(tmp_path, compared: Any):
    draw = np.random.default_rng(0)
    for size, ratio in ((8, 1.12), (16, 1.0)):
        # slow minutes that both sides share
        for repeat, minute in enumerate(draw.lognormal(0, 0.3, 5)):
            for name, factor in (("a", 1.0), ("b", ratio)):
                rate = 100 * minute * factor * draw.lognormal(0, 0.01)
                put(tmp_path / name, repeat, rate, {"engine.block_size": size})
    put(tmp_path / "a", 0, 5.0, {"engine.block_size": 32})
    file = tmp_path / "comparison.json"
    text = compared("a", "b", "--metric", RATE, "preemptions", "--json", str(file))
    assert "engine.block_size=8 (5 pairs of repeats)" in text
    assert "only in A: engine.block_size=32" in text
    assert "corrected for many comparisons by Holm's method: 2 comparisons. shown: p (Holm)" in text
    comparisons = {
        (row["point"], row["metric"]): row for row in json.loads(file.read_text())["comparisons"]
    }
    faster = comparisons["engine.block_size=8", "output_tokens_per_s"]
    assert 1.0 < faster["low"] < 1.12 < faster["high"] < 1.16
    assert faster["p_holm"] == pytest.approx(2 * faster["p"])
    assert (faster["verdict"], faster["shown"]) == ("higher: shown", True)
    assert f"{faster['estimate']:.2f} ({faster['low']:.2f} to {faster['high']:.2f})" in text
    unchanged = comparisons["engine.block_size=16", "output_tokens_per_s"]
    assert unchanged["low"] < 1.0 < unchanged["high"]
    assert (unchanged["verdict"], unchanged["shown"]) == ("no difference is shown", False)
    assert (
        comparisons["engine.block_size=16", "preemptions"]["verdict"] == "the same in every repeat"
    )


@pytest.mark.default_cases("True-3", "False-2")
@pytest.mark.parametrize("repeats", [2, 3, 5])
@pytest.mark.parametrize("paired", [True, False])
def test_false_positive_rate_of_repeats(repeats: int, paired: bool):
    draw = np.random.default_rng(repeats)
    called = 0
    for _ in range(400):
        a, b = draw.lognormal(4, 0.05, (2, repeats))
        effect = effect_of_runs(a.tolist(), b.tolist(), paired=paired, confidence=0.95)
        assert effect.p is not None
        assert effect.low is not None
        assert effect.high is not None
        assert (effect.p < 0.05) == (not effect.low < 1 < effect.high)
        called += effect.p < 0.05
    assert called / 400 < 0.08  # 0.05 plus the error of 400 draws


@pytest.mark.slow
@pytest.mark.default_cases("100-90")
@pytest.mark.parametrize(("count", "percentile"), [(10, 50), (100, 90), (200, 99)])
def test_false_positive_rate_of_request_bootstrap(count: int, percentile: int, monkeypatch):
    monkeypatch.setattr(ratios, "RESAMPLES", 200)
    draw = np.random.default_rng(count)
    called = 0
    for _ in range(60):
        base = draw.lognormal(0, 0.6, count)
        a, b = (requests((base * draw.lognormal(0, 0.2, count)).tolist()) for _ in range(2))
        effect, _ = effect_of_requests(a, b, "ttft_s", percentile, 0.95)
        assert effect is not None
        assert effect.low is not None
        assert effect.high is not None
        called += not effect.low < 1 < effect.high
    assert called / 60 < 0.12


def test_bootstrap_draws_requests_with_all_their_gaps():
    first = np.random.default_rng(1).lognormal(0, 0.5, 50).tolist()
    effect, words = effect_of_requests(
        requests(first, 0.05), requests(first, 0.06), "itl_s", 90, 0.95
    )
    assert effect is not None
    assert (effect.estimate, effect.low, effect.p) == (pytest.approx(1.2), pytest.approx(1.2), None)
    assert words == "the interval is over 50 requests"


def test_single_runs_give_intervals_over_requests_only(tmp_path, compared: Any):
    draw = np.random.default_rng(2)
    first = draw.lognormal(0, 0.5, 60)
    put(tmp_path / "a", 0, 100.0, first=first.tolist())
    # no repeat is its pair
    put(tmp_path / "b", 3, 90.0, first=(1.3 * first * draw.lognormal(0, 0.02, 60)).tolist())
    metrics = ("--metric", RATE, "ttft_s.p50", "ttft_s.p99")
    text = compared("a", "b", *metrics).splitlines()
    assert text[0] == "one point (one run each of the same requests)"
    assert " 0.90 " in text[2]
    assert text[2].endswith("one pair: the noise between runs is not known")
    assert text[3].endswith("the noise between runs is not known; the interval is over 60 requests")
    assert text[4].endswith("60 requests are too few for p99, which needs 200")
    put(tmp_path / "b", 3, 90.0, first=first.tolist(), workload={**WORKLOAD, "last_arrival_s": 2.0})
    text = compared("a", "b", *metrics)
    assert "(the workloads of repeat 0 differ in last_arrival_s)" in text
    assert "interval is over" not in text


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"arrival": 0.25}, "arrival of request 1: 0.0, 0.25"),
        ({"max_tokens": 9}, "max_tokens of request 1: 3, 9"),
        ({"branches": ()}, "branches of request 1: 1, 0"),
    ],
    ids=str,
)
def test_different_requests_with_equal_totals_are_not_paired(
    tmp_path, compared: Any, change: dict[str, Any], difference: str, repeats: int
):
    first, second, *other_requests = requests([0.1] * 20)
    for repeat in range(repeats):
        put(tmp_path / "a", repeat, 100.0, lived=[first, second, *other_requests])
        put(
            tmp_path / "b", repeat, 100.0, lived=[first, second._replace(**change), *other_requests]
        )
    text = compared("a", "b", "--metric", RATE, "ttft_s.p50")
    assert f"the workloads of repeat 0 differ in {difference})" in text
    assert "interval is over" not in text


def test_runs_without_requests_file_are_not_paired(tmp_path, compared: Any):
    for name in ("a", "b"):
        put(tmp_path / name, 0, 100.0, first=[0.1] * 20)
    next((tmp_path / "b").glob("*/0/requests.jsonl")).unlink()
    text = compared("a", "b", "--metric", RATE, "ttft_s.p50")
    assert "whether repeat 0 had the same requests is not known: there is no" in text
    assert "interval is over" not in text


def test_differences_of_device_and_code_are_reported(tmp_path, compared: Any):
    put(tmp_path / "a", 0, 100.0, device="cpu", commit="abc", env={"versions": {"jax": "0.7.0"}})
    put(tmp_path / "b", 0, 100.0, device="cpu", commit="def", env={"versions": {"jax": "0.7.1"}})
    text = compared("a", "b")
    assert "\ncommit differs: A abc, B def\njax differs: A 0.7.0, B 0.7.1\n" in text
    assert "differs" not in compared("a", "a")


@pytest.mark.parametrize(
    ("name", "percentile", "a", "b"),
    [
        (
            "itl_s",
            50,
            requests_that_waited([0.0] * 11, 1) + requests_that_waited([0.0], 3),
            requests_that_waited([0.0] * 11, 1) + requests_that_waited([0.0], 4),
        ),
        (
            "queue_s",
            90,
            requests_that_waited(([0.0] * 8 + [1.0] * 2) * 4, 2),
            requests_that_waited(([0.0] * 8 + [1.3] * 2) * 4, 2),
        ),
    ],
    ids=["no gap", "zeros"],
)
def test_resamples_without_ratio_give_no_interval(
    name: str, percentile: int, a: list[RequestRecord], b: list[RequestRecord]
):
    effect, words = effect_of_requests(a, b, name, percentile, 0.95)
    assert effect is not None
    assert effect.estimate == pytest.approx(1.3 if name == "queue_s" else 1.0)
    assert (effect.low, effect.high) == (None, None)
    assert "resamples have no value, or a zero" in words


def test_unpaired_runs_are_reported(tmp_path, compared: Any):
    for repeat in range(3):
        put(tmp_path / "a", repeat, 100.0 + repeat)
        put(tmp_path / "b", repeat + 1, 120.0 + repeat)
        put(tmp_path / "c", repeat, 120.0, workload={**WORKLOAD, "requests": 4 + repeat})
        put(tmp_path / "d/1", repeat, 120.0, point="other")
        put(tmp_path / "d/2", repeat, 120.0, point="other")
    put(tmp_path / "b", 4, 1.0, failed="it broke", metrics=None)
    text = compared("a", "b")
    assert "(repeats are not paired: A has repeats 0, 1, 2, B 1, 2, 3)" in text
    assert "1.20 (1.17 to 1.22)" in text  # Welch's, all the same
    assert "higher: shown" in text
    assert f"1 of 4 runs of {tmp_path / 'b'} failed and are left out" in text
    assert "(repeats are not paired: the workloads of repeat 1 differ in requests)" in compared(
        "a", "c"
    )
    assert "(repeats are not paired: B has a repeat twice)" in compared("a", "d")
    run_folder, *_ = sorted((tmp_path / "a").glob("*/0"))
    message = "A has one run: the noise between runs is not known"
    assert message in compared(str(run_folder), "b")
    assert "A has repeats 0, 1, B 0, 1, 2" in compared("a/*/[01]", "c")


def test_numbers_of_drafts_are_compared_if_a_side_has_them(tmp_path, compared: Any):
    of_side: dict[str, dict[str, Any] | None] = {
        "none": None,
        "a": {"drafts": 100, "accepted": 50, "acceptance": 0.5, "tokens_per_decode": 2.0},
        "b": {"drafts": 80, "accepted": 60, "acceptance": 0.75, "tokens_per_decode": 2.5},
        "idle": {"drafts": 0, "accepted": 0, "acceptance": None, "tokens_per_decode": 1.0},
    }
    latency = spread([])
    for name, drafts in of_side.items():
        metrics = {RATE: 100.0, "preemptions": 0, "tokens_sha256": "same"}
        metrics |= {"ttft_s": latency, "itl_s": latency, "e2e_s": latency}
        metrics |= {"speculation": drafts} if drafts else {}
        for repeat in range(2):
            put(tmp_path / name, repeat, 100.0, metrics=metrics)

    def rows(a: str, b: str) -> dict[str, str]:
        lines = [line.split() for line in compared(a, b, "--confidence", "0.95").splitlines()]
        return {
            name.removeprefix("speculation."): " ".join(cells)
            for name, *cells in filter(None, lines)
            if name.startswith("speculation.")
        }

    assert rows("none", "none") == {}
    numbers = rows("a", "b")
    assert list(numbers) == list(of_side["a"] or ())
    assert numbers["acceptance"].endswith("without noise, of this workload")
    assert rows("none", "a")["tokens_per_decode"] == "- 2 - - - only one side has this number"
    assert rows("a", "none")["accepted"] == "50 - - - - only one side has this number"
    assert rows("a", "idle")["acceptance"] == "0.500 - - - - only one side has this number"


def test_difference_without_noise_is_of_this_workload():
    def of_pairs(a: list[float], b: list[float]) -> ratios.Comparison:
        return comparison(effect_of_runs(a, b, paired=True, confidence=0.95), a, b)

    same_factor = of_pairs([10.0, 20.0], [11.0, 22.0])
    assert same_factor.effect is not None
    assert same_factor.effect[2:] == (pytest.approx(1.1), None, None, None)
    assert same_factor.verdict(0.95) == ratios.NO_NOISE
    assert of_pairs([10.0, 20.0], [10.0, 20.0]).verdict(0.95) == ratios.SAME
    with_zero = of_pairs([0.0, 1.0], [1.0, 1.0]).effect
    assert with_zero is not None
    assert (with_zero.scale, with_zero.estimate) == ("difference", 0.5)
    wild = effect_of_runs([1.0, 1e9], [1.0, 2.0], paired=False, confidence=0.99)
    assert wild.p is not None
    assert wild.p > 0.01
    json.dumps(wild, allow_nan=False)


def test_many_comparisons_of_two_sides_are_corrected(tmp_path, compared: Any):
    """Both forms of the command have one rule and one set of words."""
    draw = np.random.default_rng(5)
    for repeat in range(3):
        for size in range(6):
            for name, factor in (("a", 1.0), ("b", 1.04)):
                swept = {"engine.block_size": size, "engine.policy": name}
                rate = 100 * factor * draw.lognormal(0, 0.01)
                put(tmp_path / "both", repeat, rate, swept, point=f"{name}{size}")
    second_file = tmp_path / "two.json"
    by = tmp_path / "by.json"
    folder = str(tmp_path / "both")
    sides = [folder, "policy=a", folder, "policy=b", "--metric", RATE]
    assert compare.main([*sides, "--json", str(second_file)]) == 0
    assert compare.main([folder, "--by", "policy", "--metric", RATE, "--json", str(by)]) == 0
    rows = json.loads(second_file.read_text())["comparisons"]
    of_cells = [row for row in json.loads(by.read_text())["comparisons"] if row["cell"]]
    assert any("by itself, not shown among 6 comparisons" in row["verdict"] for row in rows)
    for key in ("estimate", "low", "high", "p", "p_holm", "shown", "verdict", "scale"):
        assert [row[key] for row in rows] == [row[key] for row in of_cells]


@pytest.mark.parametrize(
    ("folder", "options", "message"),
    [
        ("no", (), "there is no folder"),
        (
            "seeds",
            (),
            "A has 2 points over engine.block_size (8, 16), and B 2 points over seed (8, 16)",
        ),
        ("others", (), "share no point"),
        ("two", (), "B has two points with engine.block_size=8 that differ in what is not swept"),
        ("failed", (), "all 1 runs of"),
        ("sizes", ("--metric", "output_token_per_s"), "(did you mean 'output_tokens_per_s'?)"),
        ("sizes", ("--metric", "tokens_sha256"), "'tokens_sha256'; it must be one of"),
        ("sizes", ("--metric", "speculation.drafts"), "--metric is 'speculation.drafts'"),
        (
            "sizes",
            ("--confidence", "95"),
            "--confidence is 95.0; it must be above 0 and below 1",
        ),
    ],
)
def test_incomparable_folders_are_errors(
    tmp_path, compared: Any, folder: str, options: tuple[str, ...], message: str
):
    for size in (8, 16):
        put(tmp_path / "sizes", 0, 10.0, {"engine.block_size": size})
        put(tmp_path / "seeds", 0, 10.0, {"seed": size})
        put(tmp_path / "others", 0, 10.0, {"engine.block_size": 10 * size})
        put(tmp_path / "two", 0, 10.0, {"engine.block_size": 8}, point=f"point{size}")
    put(tmp_path / "failed", 0, 10.0, failed="it broke", metrics=None)
    assert message in compared("sizes", folder, *options, status=2)


def test_metrics_have_the_names_of_a_report(tmp_path, compared: Any):
    put(tmp_path / "a", 0, 10.0, first=[0.1, 0.2])
    text = compared("a", "a", "--metric", "ttft_p50", "TTFT_p99", "output")
    assert [line.split()[0] for line in text.splitlines()[2:5]] == [
        "ttft_s.p50",
        "ttft_s.p99",
        RATE,
    ]


def test_two_points_of_one_sweep_are_compared(tmp_path, compared: Any):
    for size, rate in ((8, 10.0), (16, 20.0)):
        for repeat in range(3):
            put(tmp_path, repeat, rate * (1 + 0.01 * repeat), {"seed": size}, point=f"point{size}")
    text = compared("point8", "point16")
    assert text.startswith("seed=8 (A) against seed=16 (B) (3 pairs of repeats)")
    assert "2.00   -  -         the same difference in every repeat: without noise" in text
