"""How points differ: marks, words, pairs, and which point is shown to be the best."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.analysis.differences import lead, mark_of, of_points, words_of
from experiments.analysis.ratios import NO_NOISE, SAME, Comparison, corrected
from experiments.analysis.sweep_points import ATTAINMENT, THROUGHPUT, TTFT, Metric, PointRow, Range

NOISY = [100.0, 300.0, 50.0, 170.0]


def point(metric: Metric, values: list[float], label: str = "label") -> PointRow:
    samples = {metric.column: dict(enumerate(values))}
    spread = Range(float(np.median(values)), min(values), max(values))
    return PointRow(label, label, {}, len(values), {metric.column: spread}, samples)


def compared(metric: Metric, below: list[float], above: list[float]) -> Comparison:
    """The comparison of two points, alone in its family."""
    result = of_points(point(metric, below), point(metric, above), metric)
    assert result is not None
    return corrected([result])[0]


def test_pairs_show_what_the_noise_of_seeds_hides():
    faster = [1.1 * value + i for i, value in enumerate(NOISY)]
    result = compared(THROUGHPUT, NOISY, faster)
    assert mark_of(result) == "up"
    words = words_of(result, "a", "tokens/s")
    assert words.endswith(" times a, higher: shown, over 4 pairs of repeats")
    assert mark_of(compared(THROUGHPUT, faster, NOISY)) == "down"
    apart = compared(THROUGHPUT, NOISY, faster[::-1])
    assert mark_of(apart) == "open"
    assert "no difference is shown" in words_of(apart, "a", "")


def test_zeros_are_compared_by_differences():
    zeros = [0.0, 1.0, 0.0]
    result = compared(ATTAINMENT, zeros, [60.0, 64.0, 61.0])
    assert mark_of(result) == "up"
    assert "+61.3 (" in words_of(result, "a", "%")
    assert ") % against a, higher: shown" in words_of(result, "a", "%")


@pytest.mark.parametrize("metric", [THROUGHPUT, ATTAINMENT])
def test_a_difference_without_noise_has_a_mark_of_its_own(metric: Metric):
    number = 100.0 if metric is THROUGHPUT else 0.0
    result = compared(metric, [number] * 3, [110.0] * 3)
    assert mark_of(result) == "hollow up"
    assert NO_NOISE in words_of(result, "a", "")
    equal_points = compared(metric, [number] * 3, [number] * 3)
    assert mark_of(equal_points) == "same"
    assert SAME in words_of(equal_points, "a", "")


def test_one_repeat_tells_nothing():
    single_run = point(THROUGHPUT, [1.0])
    assert of_points(single_run, point(THROUGHPUT, [2.0, 3.0]), THROUGHPUT) is None


def test_a_best_point_is_shown_against_every_other_one():
    rows = {
        "slow": [99.0, 101.0, 100.0],
        "fast": [199.0, 203.0, 200.0],
        "equal": [199.0, 203.0, 200.0],
        "near": [205.0, 190.0, 196.0],
        "exact": [199 / 2, 203 / 2, 100.0],
        "once": [50.0],
    }
    points = [point(THROUGHPUT, values, label) for label, values in rows.items()]
    result = lead(points, THROUGHPUT)
    assert result is not None
    assert result.row.label == "fast"
    assert {row.label: standing for row, standing in result.others} == {
        "equal": "same",
        "near": "open",
        "slow": "beaten",
        "exact": "exact",
        "once": "unknown",
    }
    assert [row.label for row in result.rivals] == ["equal", "near", "once"]
    latencies = [point(TTFT, [value, 1.1 * value + 1]) for value in (3.0, 1.0)]
    lowest = lead(latencies, TTFT)
    assert lowest is not None
    assert lowest.row is latencies[1]
    assert lead(points, TTFT) is None


def test_equal_points_have_no_leader():
    """Of four equal points, at most one in twenty sets has a point that is shown to be the best."""
    draw = np.random.default_rng(0)
    num_led = 0
    for _ in range(200):
        rows = [point(THROUGHPUT, draw.lognormal(3, 0.05, 3).tolist()) for _ in range(4)]
        result = lead(rows, THROUGHPUT)
        assert result is not None
        num_led += not result.rivals
    assert num_led / 200 < 0.05
