"""Ratios of two sides with intervals: over several runs each, or over the requests of one run each;
paired differences, and Holm's correction for many of them.

Pure functions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from scipy import special, stats

from experiments.core.records import RequestRecord

RESAMPLES = 1000
# of the bootstrap of a percentile: least number of requests, and of requests above it
FEWEST = 10
BEYOND = 2
LATENCIES = {
    "ttft_s": lambda request: [request.ttft],
    "itl_s": lambda request: [gap for branch in request.branches for gap in branch.gaps],
    "tpot_s": lambda request: [branch.tpot for branch in request.branches],
    "e2e_s": lambda request: [request.e2e],
    "queue_s": lambda request: [request.queue],
}
NOISE = "the noise between runs is not known"
ONCE = f"one run each: {NOISE}"
SAME = "the same in every repeat"
NO_NOISE = "the same difference in every repeat: without noise, of this workload"

Scale = Literal["ratio", "difference"]


class Ratio(NamedTuple):
    """B / A with its interval, and the verdict in words; None where a number has no value."""

    ratio: float | None
    low: float | None
    high: float | None
    verdict: str


class Effect(NamedTuple):
    """The mean of paired differences with its interval, and p of the hypothesis that it is zero.

    None for all but the estimate if there is one pair, or no difference between the pairs.

    scale: "ratio": the differences are of logarithms, and the numbers are their exponentials.
    pairs: 0 if the runs are not paired; then p is None.
    """

    scale: Scale
    pairs: int
    estimate: float
    low: float | None = None
    high: float | None = None
    p: float | None = None

    @property
    def neutral(self) -> float:
        """The estimate of no difference."""
        return 1.0 if self.scale == "ratio" else 0.0

    @property
    def is_neutral(self) -> bool:
        return abs(self.estimate - self.neutral) < 1e-12


def effect_of_pairs(
    differences: Sequence[float] | np.ndarray, scale: Scale, confidence: float
) -> Effect:
    """The mean of the differences by Student's t over independent pairs.

    Args:
        differences: of each pair; with the scale "ratio", of logarithms.
    """
    values = np.asarray(differences, float)
    mean = float(values.mean())
    on_scale = _exponential if scale == "ratio" else float
    if len(values) < 2 or np.ptp(values) <= 1e-12 * max(1.0, abs(mean)):
        return Effect(scale, len(values), on_scale(mean))
    freedom = len(values) - 1
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    reach = float(special.stdtrit(freedom, (1 + confidence) / 2)) * error
    p = 2 * float(special.stdtr(freedom, -abs(mean) / error))
    return Effect(
        scale, len(values), on_scale(mean), on_scale(mean - reach), on_scale(mean + reach), p
    )


def _exponential(value: float) -> float:
    return math.exp(min(value, 700.0))  # avoids overflow


def holm(values: Sequence[float]) -> list[float]:
    """p values of one family, corrected by Holm's step-down method (Scand. J. Statist. 6, 1979).

    Rejecting those that are at most a keeps the chance of any false rejection at a, whatever their
    dependence.
    """
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = largest
    return corrected


def effect_of_runs(
    a: Sequence[float], b: Sequence[float], *, paired: bool, confidence: float
) -> Effect:
    """How b differs from a, over several runs each: a ratio if all numbers are above 0.

    By Student's t over pairs, or by Welch's t. Without noise, only the estimate is known.
    """
    scale: Scale = "ratio" if min(*a, *b) > 0 else "difference"
    values_a = np.log(a) if scale == "ratio" else np.asarray(a, float)
    values_b = np.log(b) if scale == "ratio" else np.asarray(b, float)
    if paired:
        return effect_of_pairs(values_b - values_a, scale, confidence)
    on_scale = _exponential if scale == "ratio" else float
    estimate = on_scale(float(values_b.mean() - values_a.mean()))
    if max(np.ptp(values_a), np.ptp(values_b)) < 1e-12:
        return Effect(scale, 0, estimate)
    # one side without noise is allowed
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        test = stats.ttest_ind(values_b, values_a, equal_var=False)
    low, high = (on_scale(float(bound)) for bound in test.confidence_interval(confidence))
    return Effect(scale, 0, estimate, low, high)


def of_runs(a: Sequence[float], b: Sequence[float], *, paired: bool, confidence: float) -> Ratio:
    """The ratio of geometric means over several runs each."""
    effect = effect_of_runs(a, b, paired=paired, confidence=confidence)
    if effect.scale == "difference":
        words = SAME if sorted(a) == sorted(b) else "no ratio can be computed: there is a zero"
        return Ratio(None, None, None, words)
    ratio = effect.estimate
    if effect.low is None or effect.high is None:  # simulated, or a count: the variance is zero
        words = SAME if effect.is_neutral else f"B is {times(ratio)} times A, {NO_NOISE}"
        return Ratio(ratio, None, None, words)
    return Ratio(ratio, effect.low, effect.high, verdict(ratio, effect.low, effect.high))


def of_requests(
    a: Sequence[RequestRecord],
    b: Sequence[RequestRecord],
    name: str,
    percentile: int,
    confidence: float,
) -> Ratio:
    """The ratio of a percentile of one latency over the same requests in two runs."""
    needed = max(FEWEST, math.ceil(100 * BEYOND / (100 - percentile)))
    if len(a) < needed:
        reason = f"{len(a)} requests are too few for p{percentile}, which needs {needed}"
        return Ratio(None, None, None, f"{ONCE}; and {reason}")
    sides = [_latencies(a, name), _latencies(b, name)]
    if not all(len(values) and np.percentile(values, percentile) > 0 for _, values in sides):
        return Ratio(None, None, None, "no ratio can be computed: there is a zero, or no value")

    ratio_of = partial(_ratio_of, sides=sides, percentile=percentile)
    all_requests = np.arange(len(a))
    ratio = ratio_of(all_requests)
    # from resamples without a ratio
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        bootstrap = stats.bootstrap(
            (all_requests,),
            ratio_of,
            vectorized=False,
            n_resamples=RESAMPLES,
            confidence_level=confidence,
            method="percentile",
            rng=np.random.default_rng(0),
        )
    num_lost = int((~np.isfinite(bootstrap.bootstrap_distribution)).sum())
    if num_lost:
        words = (
            f"no interval can be computed: {num_lost} of {RESAMPLES} resamples have no value, or a "
            f"zero (B is {times(ratio)} times A); {ONCE}"
        )
        return Ratio(ratio, None, None, words)
    low, high = map(float, bootstrap.confidence_interval)
    return Ratio(
        ratio, low, high, f"{verdict(ratio, low, high)}, of these {len(a)} requests; {ONCE}"
    )


def _ratio_of(
    drawn: np.ndarray, sides: Sequence[tuple[np.ndarray, np.ndarray]], percentile: int
) -> float:
    """The ratio over the requests in `drawn`, each drawn on both sides with all its gaps.

    Args:
        sides: as of `_latencies`.
    """
    counts = np.bincount(drawn, minlength=len(drawn))
    samples = [np.repeat(values, counts[owners]) for owners, values in sides]
    if not all(map(len, samples)):
        return math.nan
    below, above = (np.percentile(values, percentile) for values in samples)
    return float(above / below) if below else math.nan


def _latencies(requests: Sequence[RequestRecord], name: str) -> tuple[np.ndarray, np.ndarray]:
    """One latency of all requests: the request of each value, and the values."""
    values = [
        [value for value in LATENCIES[name](request) if value is not None] for request in requests
    ]
    owners = np.repeat(np.arange(len(values)), [len(numbers) for numbers in values])
    return owners, np.array([value for numbers in values for value in numbers])


def verdict(ratio: float, low: float, high: float) -> str:
    """The interval in words."""
    digits = digits_of(low, high)
    text = f"B is {times(ratio, digits)} times A ({times(low, digits)} to {times(high, digits)})"
    return f"{text}: real" if low > 1.0 or high < 1.0 else f"no difference can be shown: {text}"


def digits_of(low: float, high: float) -> int:
    """The decimals that show an interval's width."""
    return 2 if high <= low else max(2, -math.floor(math.log10(high - low)))


def times(ratio: float, digits: int = 2) -> str:
    return f"{ratio:.{min(digits, 6)}f}" if 0.1 < ratio < 1000 else f"{ratio:.2g}"
