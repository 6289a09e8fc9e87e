"""The values of a key over all cells of a sweep: paired differences, pooled, corrected by Holm."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import compare
from experiments.analysis import by_key
from experiments.analysis.ratios import NO_NOISE, effect_of_pairs, holm
from tests.experiments.test_compare import RATE, put

POLICY = "engine.policy"
REQUEST_RATE = "workload.arrivals.rate"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_is_the_closed_test_of_bonferroni(values: list[float]):
    """A hypothesis is rejected at a if Bonferroni rejects every set of hypotheses that has it."""
    places = range(len(values))
    sets = [
        chosen
        for size in range(1, len(values) + 1)
        for chosen in itertools.combinations(places, size)
    ]
    for place, corrected in enumerate(holm(values)):
        largest = max(
            min(1.0, len(chosen) * min(values[i] for i in chosen))
            for chosen in sets
            if place in chosen
        )
        assert corrected == pytest.approx(largest)


def effect_of_three(values: Sequence[float], confidence: float) -> tuple[float, ...]:
    """(mean, low, high, p) by Student's t of two degrees of freedom, which has a closed form."""
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(3)
    t = abs(mean) / error
    reach = confidence * math.sqrt(2 / (1 - confidence**2)) * error
    return mean, mean - reach, mean + reach, 1 - t / math.sqrt(2 + t * t)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-5, 5), min_size=3, max_size=3).filter(lambda x: max(x) - min(x) > 1e-3),
    st.floats(0.5, 0.99),
)
def test_interval_and_p_are_those_of_t(values: list[float], confidence: float):
    exact = effect_of_three(values, confidence)
    effect = effect_of_pairs(values, "difference", confidence)
    assert effect[2:] == pytest.approx(exact, rel=1e-6, abs=1e-9)
    ratio = effect_of_pairs(values, "ratio", confidence)
    assert ratio[2:5] == pytest.approx([math.exp(min(x, 700)) for x in exact[:3]], rel=1e-6)
    assert ratio.p == effect.p


def put_point(
    folder: Path, repeat: int, value: float, swept: dict[str, Any], **fields: Any
) -> None:
    fields.setdefault("point", "-".join(map(str, reversed(swept.values()))))
    put(folder, repeat, value, swept, **fields)


def put_grid(folder: Path, factors: dict[str, float], repeats: int = 3, seed: int = 0) -> None:
    """A sweep over policies and rates. Each repeat has a noise that all its runs share, and each
    run its own.
    """
    draw = np.random.default_rng(seed)
    shared = draw.lognormal(0, 0.5, repeats)
    for rate, repeat, (policy, factor) in itertools.product(
        (2.0, 4.0), range(repeats), factors.items()
    ):
        value = 100 * rate * shared[repeat] * factor * draw.lognormal(0, 0.01)
        put_point(folder, repeat, value, {POLICY: policy, REQUEST_RATE: rate})


@pytest.fixture
def compare_by(tmp_path, capsys) -> Any:
    """What the command prints of tmp_path/grid, and its JSON."""

    def output(*words: str, status: int = 0) -> tuple[str, list[dict[str, Any]]]:
        file = tmp_path / "comparison.json"
        metric = () if "--metric" in words else ("--metric", RATE)
        arguments = [str(tmp_path / "grid"), *words, "--json", str(file), *metric]
        assert compare.main(arguments) == status
        printed = capsys.readouterr()
        if status:
            return printed.err, []
        return printed.out, json.loads(file.read_text())["comparisons"]

    return output


def test_values_are_paired_in_every_cell_and_pooled(tmp_path, compare_by: Any):
    factors = {"fcfs": 1.0, "shortest": 1.3, "mine.py:AGED": 1.0}
    put_grid(tmp_path / "grid", factors)
    text, rows = compare_by("--by", "policy")
    runs = {
        (run["swept"][POLICY], run["swept"][REQUEST_RATE], run["repeat"]): run["metrics"][RATE]
        for run in map(json.loads, (p.read_text() for p in tmp_path.glob("grid/*/*/summary.json")))
    }
    exact: dict[tuple[str, float | None], tuple[float, ...]] = {}
    for policy in ("shortest", "mine.py:AGED"):
        logs = np.array(
            [
                [math.log(runs[policy, rate, i] / runs["fcfs", rate, i]) for i in range(3)]
                for rate in (2.0, 4.0)
            ]
        )
        exact |= {
            (policy, rate): effect_of_three(logs[i], 0.95) for i, rate in enumerate((2.0, 4.0))
        }
        exact[policy, None] = effect_of_three(logs.mean(0), 0.95)
    assert len(rows) == len(exact) == 6
    for row in rows:
        rate = None if row["cell"] is None else row["cell"][REQUEST_RATE]
        mean, low, high, p = exact[row["value"], rate]
        assert [row["estimate"], row["low"], row["high"]] == pytest.approx(
            [math.exp(mean), math.exp(low), math.exp(high)]
        )
        assert row["p"] == pytest.approx(p)
        assert (row["pairs"], row["scale"]) == (3, "ratio")
    for of_cells in (True, False):  # the families of Holm
        family = [row for row in rows if (row["cell"] is not None) == of_cells]
        assert [row["p_holm"] for row in family] == pytest.approx(
            holm([row["p"] for row in family])
        )
    shown_rows = {(row["value"], row["label"]) for row in rows if row["shown"]}
    assert shown_rows == {("shortest", label) for label in ("rate=2.0", "rate=4.0", "pooled")}
    assert f"{RATE}: engine.policy=shortest against fcfs" in text
    assert "higher: shown (higher in 2 and lower in 0 of 2 cells)" in text
    assert "Holm's method: 4 of cells and 2 pooled ones, each a family" in text
    assert "The ratio is one of geometric means" in text


def test_baseline_and_cells_are_chosen(tmp_path, compare_by: Any):
    put_grid(tmp_path / "grid", {"fcfs": 1.0, "shortest": 2.0})
    text, rows = compare_by("rate=4", "--by", POLICY, "--baseline", "shortest")
    assert [(row["value"], row["cell"]) for row in rows] == [("fcfs", {REQUEST_RATE: 4.0})]
    assert rows[0]["estimate"] == pytest.approx(0.5, rel=0.05)
    assert "lower: shown" in text
    assert "pooled:" not in text


def test_swept_seeds_are_repeats(tmp_path, compare_by: Any):
    draw = np.random.default_rng(1)
    for seed, policy in itertools.product((7, 8, 9), ("fcfs", "shortest")):
        put_point(tmp_path / "grid", 0, draw.lognormal(), {POLICY: policy, "seed": seed})
    _, (row,) = compare_by("--by", POLICY)
    assert (row["pairs"], row["cell"]) == (3, {})
    assert row["units"] == [{"seed": seed, "repeat": None} for seed in (7, 8, 9)]
    assert row["p"] is not None


def run_of(policy: str, seed: int, repeat: int, number: float, workload: int = 0) -> dict[str, Any]:
    """A summary of a sweep over policies and seeds."""
    return {
        "swept": {POLICY: policy, "seed": seed},
        "repeat": repeat,
        "run": f"{policy}/{seed}/{repeat}",
        "label": "",
        "workload": {"prompt_tokens": workload},
        "metrics": {"number": number},
    }


def row_of_seeds(ratios: dict[tuple[int, int], float], reseed: bool = False) -> by_key.Row:
    """The row of b against a. ratios: by seed and repeat."""
    runs = [
        run_of(policy, seed, repeat, number, seed + reseed * repeat)
        for (seed, repeat), ratio in ratios.items()
        for policy, number in (("a", 1.0), ("b", ratio))
    ]
    cells = by_key.cells_of(runs, POLICY)
    (row,) = by_key.rows_of(cells, ["a", "b"], "a", ["number"], 0.95)
    return row


def test_equal_repeats_of_a_swept_seed_are_one_pair():
    """They have one workload, so they make no more equal things different."""
    draw = np.random.default_rng(4)
    num_shown = 0
    for _ in range(200):
        ratios = {
            (seed, repeat): value
            for seed, value in enumerate(draw.lognormal(0, 0.02, 3))
            for repeat in range(3)
        }
        row = row_of_seeds(ratios)
        effect = row.comparison.effect
        num_shown += effect is not None and effect.p is not None and effect.p < 0.05
    assert num_shown / 200 < 0.12  # 0.05 plus the error of 200 draws; 0.37 if repeats counted


def test_repeats_with_a_workload_each_are_pairs_by_its_seed():
    """With reseed, repeat r of seed s has the workload of seed s + r: 0 + 1 and 1 + 0 are one."""
    ratios = {(0, 0): 2.0, (0, 1): 4.0, (1, 0): 1.0, (1, 1): 8.0}
    row = row_of_seeds(ratios, reseed=True)
    assert row.units == ((0, None), (1, None), (2, None))
    assert np.exp(row.differences) == pytest.approx([2.0, 2.0, 8.0])
    assert row_of_seeds({(7, 0): 2.0, (7, 1): 4.0}).units == ((7, 0), (7, 1)), "one seed is chosen"


def test_a_value_of_zero_makes_differences(tmp_path, compare_by: Any):
    for repeat, policy in itertools.product(range(3), ("fcfs", "shortest")):
        lost = 0 if policy == "fcfs" else 3 + repeat
        put_point(
            tmp_path / "grid", repeat, 1.0, {POLICY: policy}, metrics={RATE: 1.0, "lost": lost}
        )
    text, rows = compare_by("--by", POLICY, "--metric", RATE, "lost")
    assert [row["scale"] for row in rows] == ["ratio", "difference"]
    assert rows[1]["estimate"] == 4.0
    assert "+4 (+1.52 to +6.48)" in text
    assert rows[0]["verdict"] == "the same in every repeat"
    assert rows[0]["p_holm"] is None, "not in the family"


def test_one_pair_has_no_p_and_an_interval_over_requests(tmp_path, compare_by: Any):
    draw = np.random.default_rng(2)
    first = draw.lognormal(0, 0.5, 60)
    for policy, factor in (("fcfs", 1.0), ("shortest", 1.3)):
        times = (factor * first * draw.lognormal(0, 0.02, 60)).tolist()
        put_point(tmp_path / "grid", 0, 100.0 / factor, {POLICY: policy}, first=times)
    text, (rate, latency) = compare_by("--by", POLICY, "--metric", RATE, "ttft_s.p50")
    assert (rate["low"], rate["p"], latency["p"]) == (None, None, None)
    assert 1.0 < latency["low"] < 1.3 < latency["high"]
    assert latency["verdict"].endswith("not known; the interval is over 60 requests")
    assert "No comparison has a p: it needs two pairs" in text


def test_missing_and_failed_runs_leave_their_pairs_out(tmp_path, compare_by: Any):
    put_grid(tmp_path / "grid", {"fcfs": 1.0, "shortest": 1.3}, repeats=4)
    put_point(
        tmp_path / "grid", 3, 1.0, {POLICY: "fcfs", REQUEST_RATE: 2.0}, failed="broke", metrics=None
    )
    text, rows = compare_by("--by", POLICY)
    assert [row["pairs"] for row in rows] == [3, 4, 3]
    assert [unit["repeat"] for unit in rows[2]["units"]] == [0, 1, 2]
    assert "1 of 16 runs of" in text


def test_the_pooled_row_names_the_cells_that_it_leaves_out(tmp_path, compare_by: Any):
    put_grid(tmp_path / "grid", {"fcfs": 1.0, "shortest": 1.3})
    for repeat in range(3):
        put_point(tmp_path / "grid", repeat, 1.0, {POLICY: "fcfs", REQUEST_RATE: 8.0})
    text, (*of_cells, pooled) = compare_by("--by", POLICY)
    assert "higher in 2 and lower in 0 of 2 cells; 1 of 3 left out: rate=8.0)" in text
    assert pooled["left_out"] == ["rate=8.0"]
    assert [row["left_out"] for row in of_cells] == [[], []]


def test_a_difference_without_noise_is_of_this_workload():
    row = row_of_seeds({(7, repeat): 1.1 for repeat in range(3)})
    assert row.comparison.verdict(0.95) == NO_NOISE


def test_other_workloads_are_said(tmp_path, compare_by: Any):
    for repeat, rate in itertools.product(range(2), (2.0, 4.0)):
        workload = {"requests": 4, "last_arrival_s": 10 / rate}
        put_point(tmp_path / "grid", repeat, rate + repeat, {REQUEST_RATE: rate}, workload=workload)
    text, _ = compare_by("--by", "rate")
    assert "The values run different workloads in 1 of 1 cells (such as all runs)" in text


def test_predictions_are_no_part_of_a_workload(tmp_path, compare_by: Any):
    for repeat, error in itertools.product(range(2), (0.0, 0.5)):
        workload = {"requests": 4, "predicted_error": error}
        swept = {"workload.predicted.error": error}
        put_point(tmp_path / "grid", repeat, 1 + error + repeat, swept, workload=workload)
    text, _ = compare_by("--by", "error")
    assert "different workloads" not in text


def pooled_p(noise: np.ndarray) -> float:
    """p of the pooled row. noise: of each cell and repeat, the logarithm of the ratio."""
    runs = [
        {
            "swept": {POLICY: policy, REQUEST_RATE: cell},
            "repeat": repeat,
            "run": f"{policy}/{cell}/{repeat}",
            "label": "",
            "metrics": {"number": math.exp(value if policy == "b" else 0.0)},
        }
        for (cell, repeat), value in np.ndenumerate(noise)
        for policy in "ab"
    ]
    rows = by_key.rows_of(by_key.cells_of(runs, POLICY), ["a", "b"], "a", ["number"], 0.95)
    effect = rows[-1].comparison.effect
    assert effect is not None
    assert effect.p is not None
    return effect.p


def test_cells_that_share_their_noise_call_no_more_things_different():
    draw = np.random.default_rng(3)
    called = sum(
        pooled_p(draw.normal(0, 0.1, (1, 4)) + draw.normal(0, 0.01, (5, 4))) < 0.05
        for _ in range(60)
    )
    assert called / 60 < 0.15  # 0.05 plus the error of 60 draws; 0.5 if pairs of all cells counted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--by", "polcy"), "'polcy'; it must be one of 'engine.policy', 'workload.arrivals.rate'"),
        (("--by", "repeat"), "--by is 'repeat', which has 3 value(s) in "),
        (
            ("rate=2", "--by", "rate"),
            "has 1 value(s) in {grid} rate=2 (2.0); give a swept key with two, such as engine.policy",
        ),
        (("--by", POLICY, "--baseline", "fcsf"), "(the nearest: engine.policy=fcfs)"),
        (("--baseline", "fcfs"), "1 folders are given ({grid}); give two of them, A and B, or one"),
        (("{grid}", "--baseline", "fcfs"), "--baseline is given without --by; leave it out"),
        (("{grid}", "--by", POLICY), "--by is given with 2 folders; give one"),
        (("--by", POLICY, "--metric", "outptu"), "--metric is 'outptu'; it must be one of"),
    ],
)
def test_wrong_words_are_errors(tmp_path, compare_by: Any, words: tuple[str, ...], message: str):
    put_grid(tmp_path / "grid", {"fcfs": 1.0, "shortest": 1.0})
    grid = str(tmp_path / "grid")
    text, _ = compare_by(*(word.format(grid=grid) for word in words), status=2)
    assert message.format(grid=grid) in text


def test_keys_that_change_together_have_no_pairs(tmp_path, compare_by: Any):
    for policy, rate in (("fcfs", 2.0), ("shortest", 4.0)):
        put_point(tmp_path / "grid", 0, 1.0, {POLICY: policy, REQUEST_RATE: rate})
    text, _ = compare_by("--by", POLICY, status=2)
    assert "engine.policy changes together with workload.arrivals.rate; give" in text
    put_point(tmp_path / "grid", 0, 1.0, {POLICY: "fcfs", REQUEST_RATE: 2.0}, point="other")
    text, _ = compare_by("--by", POLICY, status=2)
    assert "two runs have engine.policy=fcfs, workload.arrivals.rate=2.0 and repeat 0 (" in text


def test_two_sides_are_chosen_by_values(tmp_path, capsys):
    grid = tmp_path / "grid"
    put_grid(grid, {"fcfs": 1.0, "shortest": 1.3})
    words = [str(grid), "policy=fcfs", str(grid), "policy=shortest", "--metric", RATE]
    assert compare.main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"A: {grid} policy=fcfs\nB: {grid} policy=shortest\n")
    assert "rate=2.0 (3 pairs of repeats)" in text
    assert "rate=4.0 (3 pairs of repeats)" in text
    assert compare.main([str(grid), "policy=fcfs", "rate=2", str(grid), "--metric", RATE]) == 2
    text = capsys.readouterr().err
    assert (
        "B 4 points over engine.policy (fcfs, shortest), workload.arrivals.rate (2.0, 4.0)" in text
    )
    one_point = [str(grid), "rate=2", "policy=fcfs", str(grid), "rate=4", "policy=shortest"]
    assert compare.main([*one_point, "--metric", RATE]) == 0
    assert " 2.55 (" in capsys.readouterr().out
