"""Ratios of two sides with intervals: over several runs each, or over the requests of one run each.

Pure functions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from experiments.core.records import RequestRecord

RESAMPLES = 1000
# least number of requests, and of requests above a percentile, for its bootstrap
FEWEST, BEYOND = (10, 2)
LATENCIES = {
    "ttft_s": lambda request: [request.ttft],
    "itl_s": lambda request: [gap for branch in request.branches for gap in branch.gaps],
    "tpot_s": lambda request: [branch.tpot for branch in request.branches],
    "e2e_s": lambda request: [request.e2e],
    "queue_s": lambda request: [request.queue],
}
NOISE = "the noise between runs is not known"
ONCE = f"one run each: {NOISE}"


class Ratio(NamedTuple):
    """B / A with its interval, and the verdict in words; None for numbers that cannot be computed."""

    ratio: float | None
    low: float | None
    high: float | None
    verdict: str


def of_runs(a: Sequence[float], b: Sequence[float], *, paired: bool, confidence: float) -> Ratio:
    """The ratio of geometric means over several runs each."""
    if min(*a, *b) <= 0:
        same = sorted(a) == sorted(b)
        return Ratio(
            None,
            None,
            None,
            "the same in every run" if same else "no ratio can be computed: there is a zero",
        )
    logs_a, logs_b = np.log(a), np.log(b)
    middle = float(logs_b.mean() - logs_a.mean())
    spreads = [np.ptp(logs_b - logs_a)] if paired else [np.ptp(logs_a), np.ptp(logs_b)]
    if max(spreads) < 1e-12:  # simulated, or a count: the variance is zero
        ratio = math.exp(middle)
        same = abs(middle) < 1e-12
        words = (
            "the same in every run"
            if same
            else f"B is {times(ratio)} times A in every repeat: real, without noise"
        )
        return Ratio(ratio, ratio, ratio, words)
    with warnings.catch_warnings(
        action="ignore", category=RuntimeWarning
    ):  # one side without noise is allowed
        test = (
            stats.ttest_rel(logs_b, logs_a)
            if paired
            else stats.ttest_ind(logs_b, logs_a, equal_var=False)
        )
    interval = test.confidence_interval(confidence)
    low, high = (math.exp(min(float(bound), 700.0)) for bound in interval)  # avoids overflow
    ratio = math.exp(middle)
    return Ratio(ratio, low, high, verdict(ratio, low, high))


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
        few = f"; and {len(a)} requests are too few for p{percentile}, which needs {needed}"
        return Ratio(None, None, None, f"{ONCE}{few}")
    sides = []
    for requests in (a, b):
        values = [
            [value for value in LATENCIES[name](request) if value is not None]
            for request in requests
        ]
        owner = np.repeat(np.arange(len(values)), [len(own) for own in values])
        sides.append((owner, np.array([value for own in values for value in own])))

    def ratio_of(drawn: np.ndarray) -> float:
        """The ratio over the requests in `drawn`, each drawn on both sides with all its gaps."""
        counts = np.bincount(drawn, minlength=len(a))
        chosen = [np.repeat(values, counts[owner]) for owner, values in sides]
        if not all(map(len, chosen)):
            return math.nan
        below, above = (np.percentile(values, percentile) for values in chosen)
        return float(above / below) if below else math.nan

    everyone = np.arange(len(a))
    if not all(len(values) and np.percentile(values, percentile) > 0 for _, values in sides):
        return Ratio(None, None, None, "no ratio can be computed: there is a zero, or no value")
    ratio = ratio_of(everyone)
    with warnings.catch_warnings(
        action="ignore", category=RuntimeWarning
    ):  # from resamples without a ratio
        found = stats.bootstrap(
            (everyone,),
            ratio_of,
            vectorized=False,
            n_resamples=RESAMPLES,
            confidence_level=confidence,
            method="percentile",
            rng=np.random.default_rng(0),
        )
    lost = int((~np.isfinite(found.bootstrap_distribution)).sum())
    if lost:
        few = f"{lost} of {RESAMPLES} resamples have no value, or a zero"
        return Ratio(
            ratio,
            None,
            None,
            f"no interval can be computed: {few} (B is {times(ratio)} times A); {ONCE}",
        )
    low, high = map(float, found.confidence_interval)
    return Ratio(
        ratio, low, high, f"{verdict(ratio, low, high)}, of these {len(a)} requests; {ONCE}"
    )


def verdict(ratio: float, low: float, high: float) -> str:
    """The interval in words."""
    digits = 2 if high <= low else max(2, -math.floor(math.log10(high - low)))
    said = f"B is {times(ratio, digits)} times A ({times(low, digits)} to {times(high, digits)})"
    return f"{said}: real" if low > 1.0 or high < 1.0 else f"no difference can be shown: {said}"


def times(ratio: float, digits: int = 2) -> str:
    return f"{ratio:.{min(digits, 6)}f}" if 0.1 < ratio < 1000 else f"{ratio:.2g}"
