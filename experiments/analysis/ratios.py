"""How one side differs from another: over several runs each, or over the requests of one run each.
An effect has an interval and a p, which is corrected by Holm's method for many comparisons, and a
verdict in words. `experiments.compare`, `experiments.capacity` and the marks and sentences of a
report all have their words from here.

Pure functions.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.analysis.sweep_points import number
from experiments.core.records import RequestRecord

RESAMPLES = 1000
MIN_REQUESTS = 10  # requests; with fewer a percentile has no bootstrap
MIN_ABOVE = 2  # at least so many requests must be above the percentile
LATENCIES = {
    "ttft_s": lambda request: [request.ttft],
    "itl_s": lambda request: [gap for branch in request.branches for gap in branch.gaps],
    "tpot_s": lambda request: [branch.tpot for branch in request.branches],
    "e2e_s": lambda request: [request.e2e],
    "queue_s": lambda request: [request.queue],
}
CONFIDENCE = 0.95  # where a user cannot choose another one
NOISE = "the noise between runs is not known"
ONE_PAIR = f"one pair: {NOISE}"
SAME = "the same in every repeat"
NO_NOISE = "the same difference in every repeat: without noise, of this workload"

Scale = Literal["ratio", "difference"]


class Effect(NamedTuple):
    """The mean of differences with its interval, and p of the hypothesis that it is zero.

    low, high and p need noise: they are None if there is one pair, or if all pairs differ equally.
    Over the requests of one pair of runs, there is an interval and no p.

    scale: "ratio": the differences are of logarithms, and the numbers are their exponentials.
    pairs: 0 if the runs are not paired.
    """

    scale: Scale
    pairs: int
    estimate: float
    low: float | None = None
    high: float | None = None
    p: float | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high); the estimate where there is no interval."""
        low = self.estimate if self.low is None else self.low
        high = self.estimate if self.high is None else self.high
        return low, high

    @property
    def neutral(self) -> float:
        """The estimate of no difference."""
        return 1.0 if self.scale == "ratio" else 0.0

    @property
    def is_neutral(self) -> bool:
        return abs(self.estimate - self.neutral) < 1e-12

    @property
    def sign(self) -> int:
        """1: above no difference, -1: below."""
        if self.is_neutral:
            return 0
        return 1 if self.estimate > self.neutral else -1


class Comparison(NamedTuple):
    """A number of two sides, and how the second side differs from the first.

    a, b: medians; None: there is no such number.
    note: why there is no effect, or no p.
    p_holm: p, corrected for a family of comparisons.
    family: the number of p in this family.
    """

    a: float | None = None
    b: float | None = None
    effect: Effect | None = None
    note: str = ""
    p_holm: float | None = None
    family: int = 0

    def is_shown(self, confidence: float) -> bool | None:
        """Whether there is a difference beyond noise and chance; None: there is no p."""
        return None if self.p_holm is None else self.p_holm <= 1 - confidence

    def verdict(self, confidence: float) -> str:
        """What the comparison shows, in words."""
        if self.effect is None or self.effect.p is None:
            return self.note
        direction = "higher" if self.effect.sign > 0 else "lower"
        if self.is_shown(confidence):
            return f"{direction}: shown"
        if self.effect.p <= 1 - confidence:
            return f"{direction} by itself, not shown among {self.family} comparisons"
        return "no difference is shown"

    def json_fields(self, confidence: float) -> dict[str, Any]:
        """The effect as fields of a JSON object."""
        effect = self.effect._asdict() if self.effect else {}
        numbers = ("scale", "estimate", "low", "high", "p")
        return {
            **{name: effect.get(name) for name in numbers},
            "p_holm": self.p_holm,
            "shown": self.is_shown(confidence),
            "verdict": self.verdict(confidence),
        }


def comparison(effect: Effect, a: Sequence[float] = (), b: Sequence[float] = ()) -> Comparison:
    """The comparison of the numbers of several runs each."""
    note = ""
    if effect.pairs == 1:
        note = ONE_PAIR
    elif effect.p is None:
        note = SAME if effect.is_neutral else NO_NOISE
    return Comparison(median(a), median(b), effect, note)


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def corrected(family: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons of one family with their p corrected by Holm's method."""
    with_p = {
        place: row.effect.p
        for place, row in enumerate(family)
        if row.effect is not None and row.effect.p is not None
    }
    p_holm = dict(zip(with_p, holm(list(with_p.values())), strict=True))
    return [
        row._replace(p_holm=p_holm.get(place), family=len(with_p))
        for place, row in enumerate(family)
    ]


def columns(
    comparisons: Sequence[Comparison], a: str, b: str, confidence: float
) -> dict[str, list[str]]:
    """The columns of a table for a terminal, from the medians to the verdict.

    Args:
        a, b: the names of the sides.
    """
    effects = [row.effect for row in comparisons]
    scales = dict.fromkeys(effect.scale for effect in effects if effect)
    estimate = " or ".join(scales) or "ratio"
    if a == b:
        b = f"{b} "  # a column of its own
    return {
        a: [number(row.a) for row in comparisons],
        b: [number(row.b) for row in comparisons],
        estimate: [effect_text(effect) for effect in effects],
        "p": [_p_text(effect.p if effect else None) for effect in effects],
        "p (Holm)": [_p_text(row.p_holm) for row in comparisons],
        "verdict": [row.verdict(confidence) for row in comparisons],
    }


def _p_text(p: float | None) -> str:
    return "-" if p is None else f"{p:.2g}"


def method_notes(families: Mapping[str, int], confidence: float) -> list[str]:
    """How the numbers of `columns` were made, and what they do not show.

    Args:
        families: the number of p of each family, by the words that follow this number.
    """
    texts = [
        "The values of a side are medians over its runs. The ratio is one of geometric means, and "
        "a difference one of means, so it may differ from that of the medians."
    ]
    sizes = [f"{size} {name}".strip() for name, size in families.items() if size]
    if not sizes:
        return [
            *texts,
            "No comparison has a p: it needs two pairs of runs whose differences are not all equal. "
            "With fewer repeats than that, set `repeats` to 3 or more, with `reseed: true`.",
        ]
    several_families = ", each a family" if len(sizes) > 1 else ""
    return [
        *texts,
        "p is of a t test, two-sided. p (Holm) is corrected for many comparisons by Holm's method: "
        f"{' and '.join(sizes)}{several_families}. shown: p (Holm) is at most {1 - confidence:.2g}.",
        f"Intervals are at {confidence:g}, of one comparison each, not corrected.",
    ]


def effect_of_pairs(
    differences: Sequence[float] | np.ndarray,
    scale: Scale,
    confidence: float,
    margin: float = 0.0,
) -> Effect:
    """The mean of the differences by Student's t over independent pairs.

    Args:
        differences: of each pair; with the scale "ratio", of logarithms.
        margin: by how much a difference may be wrong, in either direction. Each end of the interval
            is moved outwards by it. p is computed of the mean after it was moved towards zero by
            it. The standard deviation of the differences is at least that of such an error. A
            difference of two numbers that are rounded down by up to the margin has margin /
            sqrt(6).
    """
    values = np.asarray(differences, float)
    mean = float(values.mean())
    to_scale = _exponential if scale == "ratio" else float
    has_noise = margin > 0 or np.ptp(values) > 1e-12 * max(1.0, abs(mean))
    if len(values) < 2 or not has_noise:
        return Effect(scale, len(values), to_scale(mean))
    from scipy import special  # takes half a second to import

    freedom = len(values) - 1
    deviation = max(float(values.std(ddof=1)), margin / math.sqrt(6))
    error = deviation / math.sqrt(len(values))
    reach = float(special.stdtrit(freedom, (1 + confidence) / 2)) * error + margin
    p = 2 * float(special.stdtr(freedom, -max(0.0, abs(mean) - margin) / error))
    return Effect(
        scale, len(values), to_scale(mean), to_scale(mean - reach), to_scale(mean + reach), p
    )


def _exponential(value: float) -> float:
    return math.exp(min(value, 700.0))  # avoids overflow


def holm(values: Sequence[float]) -> list[float]:
    """p values of one family, corrected by Holm's step-down method (Scand. J. Statist. 6, 1979).

    If all hypotheses are rejected whose corrected p is at most a, the chance of any false rejection
    is at most a, however the hypotheses depend on each other.
    """
    p_holm = [0.0] * len(values)
    smallest_first = sorted(range(len(values)), key=values.__getitem__)
    largest = 0.0
    for rank, place in enumerate(smallest_first):
        hypotheses_left = len(values) - rank
        largest = max(largest, min(1.0, hypotheses_left * values[place]))
        p_holm[place] = largest
    return p_holm


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
    to_scale = _exponential if scale == "ratio" else float
    estimate = to_scale(float(values_b.mean() - values_a.mean()))
    if max(np.ptp(values_a), np.ptp(values_b)) < 1e-12:
        return Effect(scale, 0, estimate)
    from scipy import stats  # takes a second to import

    # one side without noise is allowed
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        test: Any = stats.ttest_ind(values_b, values_a, equal_var=False)
    low, high = (to_scale(float(bound)) for bound in test.confidence_interval(confidence))
    return Effect(scale, 0, estimate, low, high, float(test.pvalue))


def effect_of_requests(
    a: Sequence[RequestRecord],
    b: Sequence[RequestRecord],
    name: str,
    percentile: int,
    confidence: float,
) -> tuple[Effect | None, str]:
    """The ratio of a percentile of one latency over the same requests in two runs, and words about
    its interval; None: there is no ratio.
    """
    min_requests = max(MIN_REQUESTS, math.ceil(100 * MIN_ABOVE / (100 - percentile)))
    if len(a) < min_requests:
        return None, f"{len(a)} requests are too few for p{percentile}, which needs {min_requests}"
    sides = [_latencies(a, name), _latencies(b, name)]
    if not all(len(values) and np.percentile(values, percentile) > 0 for _, values in sides):
        return None, "no ratio can be computed: there is a zero, or no value"

    from scipy import stats  # takes a second to import

    ratio_of = partial(_ratio_of, sides=sides, percentile=percentile)
    all_requests = np.arange(len(a))
    effect = Effect("ratio", 1, ratio_of(all_requests))
    # resamples without a ratio cause warnings
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
        return effect, (
            f"no interval can be computed: {num_lost} of {RESAMPLES} resamples have no value, or a "
            "zero"
        )
    low, high = map(float, bootstrap.confidence_interval)
    return effect._replace(low=low, high=high), f"the interval is over {len(a)} requests"


def _ratio_of(
    drawn: np.ndarray, sides: Sequence[tuple[np.ndarray, np.ndarray]], percentile: int
) -> float:
    """The ratio over the requests in `drawn`, each drawn on both sides with all its gaps.

    Args:
        sides: the result of `_latencies` for each side.
    """
    counts = np.bincount(drawn, minlength=len(drawn))
    samples = [np.repeat(values, counts[owners]) for owners, values in sides]
    if not all(map(len, samples)):
        return math.nan
    number_a = np.percentile(samples[0], percentile)
    number_b = np.percentile(samples[1], percentile)
    return float(number_b / number_a) if number_a else math.nan


def _latencies(requests: Sequence[RequestRecord], name: str) -> tuple[np.ndarray, np.ndarray]:
    """One latency of all requests: the index of the request of each value, int64 [values], and the
    values, float64 [values].
    """
    values = [
        [value for value in LATENCIES[name](request) if value is not None] for request in requests
    ]
    owners = np.repeat(np.arange(len(values)), [len(numbers) for numbers in values])
    return owners, np.array([value for numbers in values for value in numbers])


def effect_text(effect: Effect | None) -> str:
    """An effect and its interval: "0.85 (0.82 to 0.88)", or "+3 (+1 to +5)" of a difference."""
    if effect is None:
        return "-"
    low, high = effect.bounds
    numbers = [_signed(value) for value in (effect.estimate, low, high)]
    if effect.scale == "ratio":
        digits = digits_of(low, high)
        numbers = [ratio_text(value, digits) for value in (effect.estimate, low, high)]
    return numbers[0] if effect.low is None else f"{numbers[0]} ({numbers[1]} to {numbers[2]})"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{number(value)}"


def digits_of(low: float, high: float) -> int:
    """The decimals that show an interval's width."""
    return 2 if high <= low else max(2, -math.floor(math.log10(high - low)))


def ratio_text(ratio: float, digits: int) -> str:
    """A ratio with so many decimals: "0.85"; far from 1 with two significant digits: "0.012"."""
    return f"{ratio:.{min(digits, 6)}f}" if 0.1 < ratio < 1000 else f"{ratio:.2g}"
