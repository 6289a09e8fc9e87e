"""Whether two points differ in a number: an interval over their repeats. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

from experiments.analysis.ratios import NO_NOISE, SAME, Effect, effect_of_runs, times
from experiments.analysis.sides import request_totals
from experiments.analysis.sweep_points import Metric, PointRow, number

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """sign: 1 above, -1 below, 0: no difference can be told, or repeats without noise do not tell
    whether other workloads have it.
    """

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
    effect = effect_of_runs(below, above, paired=paired, confidence=CONFIDENCE)
    pairs = f"{len(common)} pairs of repeats" if paired else "repeats that are not paired"
    words = f"{_text(effect, metric.unit)} {reference.label}{_verdict(effect)}, over {pairs}"
    return Difference(_sign(effect), words)


def _text(effect: Effect, unit: str) -> str:
    """The estimate and its interval: "1.10 (1.02 to 1.20) times", "3 % (1 to 5) more than"."""
    shown = times if effect.scale == "ratio" else number
    interval = ""
    if effect.low is not None and effect.high is not None:
        interval = f" ({shown(effect.low)} to {shown(effect.high)})"
    if effect.scale == "ratio":
        return f"{shown(effect.estimate)}{interval} times"
    return f"{shown(effect.estimate)} {unit}{interval} more than"


def _verdict(effect: Effect) -> str:
    if effect.low is None:
        return f", {SAME if effect.is_neutral else NO_NOISE}"
    return ": shown" if _sign(effect) else ": no difference can be told"


def _sign(effect: Effect) -> int:
    """1 if the interval is above no difference, -1 if it is below; 0 if it has it, or there is
    none.
    """
    if effect.low is None or effect.high is None:
        return 0
    if effect.low > effect.neutral:
        return 1
    return -1 if effect.high < effect.neutral else 0
