"""Whether two points differ in a number: an interval over their repeats. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from experiments.analysis import ratios
from experiments.analysis.sides import request_totals
from experiments.analysis.sweep_points import Metric, PointRow, number

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """sign: 1 above, -1 below, 0: no difference can be told."""

    sign: int
    words: str


def of_points(reference: PointRow, row: PointRow, metric: Metric) -> Difference | None:
    """How a point differs from another one; None if fewer than two repeats of either have the
    number.

    Repeats with one workload are paired. Numbers above 0 are compared by their ratio, as
    `experiments.compare` does, others by their difference.
    """
    samples = [point.samples.get(metric.column, {}) for point in (reference, row)]
    common = sorted(samples[0].keys() & samples[1].keys())
    paired = len(common) > 1 and all(
        request_totals(reference.workloads[repeat]) == request_totals(row.workloads[repeat])
        for repeat in common
    )
    if paired:
        below, above = ([sample[repeat] for repeat in common] for sample in samples)
    else:
        below, above = (list(sample.values()) for sample in samples)
    if min(len(below), len(above)) < 2:
        return None
    difference = _by_ratio if min(*below, *above) > 0 else _by_difference
    sign, text = difference(below, above, paired=paired, unit=metric.unit)
    verdict = "shown" if sign else "no difference can be told"
    pairs = f"{len(common)} pairs of repeats" if paired else "repeats that are not paired"
    return Difference(sign, f"{text} {reference.label}: {verdict}, over {pairs}")


def _by_ratio(
    below: Sequence[float], above: Sequence[float], *, paired: bool, unit: str
) -> tuple[int, str]:
    ratio = ratios.of_runs(below, above, paired=paired, confidence=CONFIDENCE)
    assert ratio.ratio is not None, "all numbers are above 0"
    assert ratio.low is not None, "all numbers are above 0"
    assert ratio.high is not None, "all numbers are above 0"
    low, high = (ratios.times(bound) for bound in (ratio.low, ratio.high))
    sign = _sign(math.log(ratio.low), math.log(ratio.high))
    return sign, f"{ratios.times(ratio.ratio)} ({low} to {high}) times"


def _by_difference(
    below: Sequence[float], above: Sequence[float], *, paired: bool, unit: str
) -> tuple[int, str]:
    middle = float(np.mean(above) - np.mean(below))
    spreads = [np.ptp(np.subtract(above, below))] if paired else [np.ptp(above), np.ptp(below)]
    low = high = middle
    if max(spreads) > 0:
        test = (
            stats.ttest_rel(above, below)
            if paired
            else stats.ttest_ind(above, below, equal_var=False)
        )
        low, high = map(float, test.confidence_interval(CONFIDENCE))
    words = f"{number(middle)} {unit} ({number(low)} to {number(high)}) more than"
    return _sign(low, high), words


def _sign(low: float, high: float) -> int:
    """The sign of all numbers of an interval; 0 if it has both, or 0."""
    if low > 1e-9:
        return 1
    return -1 if high < -1e-9 else 0
