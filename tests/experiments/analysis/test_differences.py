"""Whether two points differ: signs, pairs, and what cannot be told."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.analysis.differences import of_points
from experiments.analysis.ratios import NO_NOISE, of_runs
from experiments.analysis.sweep_points import ATTAINMENT, THROUGHPUT, Metric, PointRow

NOISY = [100.0, 300.0, 50.0, 170.0]


def point(
    metric: Metric, values: list[float], prompt_tokens: int = 10, error: float = 0.0
) -> PointRow:
    samples = {metric.column: dict(enumerate(values))}
    repeats = {
        repeat: {"prompt_tokens": prompt_tokens + repeat, "predicted_error": error}
        for repeat in range(len(values))
    }
    return PointRow("label", "key", {}, len(values), {}, samples, repeats)


def test_pairs_show_what_the_noise_of_seeds_hides():
    faster = [1.1 * value + i for i, value in enumerate(NOISY)]
    reference = point(THROUGHPUT, NOISY)
    paired = of_points(reference, point(THROUGHPUT, faster, error=0.5), THROUGHPUT)
    assert paired is not None
    assert paired.sign == 1
    assert "4 pairs of repeats" in paired.words
    slower = of_points(point(THROUGHPUT, faster), reference, THROUGHPUT)
    assert slower is not None
    assert slower.sign == -1
    apart = of_points(reference, point(THROUGHPUT, faster, prompt_tokens=20), THROUGHPUT)
    assert apart is not None
    assert apart.sign == 0
    assert "no difference can be told, over repeats that are not paired" in apart.words


@pytest.mark.parametrize("seed", range(6))
def test_signs_agree_with_the_intervals_of_compare(seed: int):
    draws = np.random.default_rng(seed)
    below = list(draws.uniform(1, 3, 4))
    above = list(draws.uniform(1, 3 + seed, 4))
    difference = of_points(point(THROUGHPUT, below), point(THROUGHPUT, above), THROUGHPUT)
    ratio = of_runs(below, above, paired=True, confidence=0.95)
    assert difference is not None
    assert (difference.sign != 0) == ("real" in ratio.verdict)


def test_zeros_are_compared_by_differences():
    zeros = [0.0, 1.0, 0.0]
    difference = of_points(
        point(ATTAINMENT, zeros), point(ATTAINMENT, [60.0, 64.0, 61.0]), ATTAINMENT
    )
    assert difference is not None
    assert difference.sign == 1
    assert "61.3 % " in difference.words
    same = of_points(point(ATTAINMENT, zeros), point(ATTAINMENT, zeros), ATTAINMENT)
    assert same is not None
    assert same.sign == 0


@pytest.mark.parametrize("metric", [THROUGHPUT, ATTAINMENT])
@pytest.mark.parametrize("prompt_tokens", [10, 20])
def test_a_difference_without_noise_shows_nothing_of_other_workloads(
    metric: Metric, prompt_tokens: int
):
    reference = point(metric, [100.0 if metric is THROUGHPUT else 0.0] * 3)
    row = point(metric, [110.0] * 3, prompt_tokens)
    difference = of_points(reference, row, metric)
    assert difference is not None
    assert difference.sign == 0
    assert NO_NOISE in difference.words


def test_one_repeat_tells_nothing():
    assert of_points(point(THROUGHPUT, [1.0]), point(THROUGHPUT, [2.0]), THROUGHPUT) is None
    assert of_points(point(THROUGHPUT, []), point(THROUGHPUT, [2.0, 3.0]), THROUGHPUT) is None
