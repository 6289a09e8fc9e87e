"""The load that an engine serves at a latency: curves of latency by rate, and where they meet a
target.

A latency here is *normalised*, as in the papers: seconds from a request's arrival to its end, per
output token.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from experiments.core.config import Point
from experiments.core.drive import Measured
from experiments.core.strict_yaml import load_file
from experiments.studies.findings import Interval, interval, rounded, simulated

Curves = dict[str, list[list[float]]]  # engine -> latencies by rate, then by seed


def normalised(
    measured: Measured, average: Callable[[Sequence[float]], float] = statistics.median
) -> float:
    """The average over requests of seconds from arrival to the end, per output token."""
    return average([(r.e2e or float("inf")) / r.max_tokens for r in measured.requests])


def by_rate(
    config: Path,
    names: Sequence[str],
    rates: Sequence[float],
    *overrides: str,
    repeats: int | None = None,
    average: Callable[[Sequence[float]], float] = statistics.median,
    until: float = math.inf,
) -> Curves:
    """Run each point of a config at each rate. Returns the normalised latencies.

    Args:
        names: the names of the points, in the order of the sweep's list.
        until: a latency. If an engine exceeds it with every seed, its higher rates are left out.
    """
    points = dict(zip(names, load_file(config)["sweep"]["list"], strict=True))
    curves: Curves = {name: [] for name in names}
    for rate in rates:
        runs: dict[str, list[float]] = {}
        names_left = [name for name in names if not curves[name] or min(curves[name][-1]) <= until]
        if not names_left:
            break
        sweep = f"sweep={json.dumps({'list': [points[name] for name in names_left]})}"

        def on_run(point: Point, measured: Measured, runs: dict[str, list[float]] = runs) -> None:
            runs.setdefault(point.label, []).append(normalised(measured, average))

        simulated(
            config,
            sweep,
            f"workload.arrivals.rate={rate}",
            *overrides,
            repeats=repeats,
            on_run=on_run,
        )
        for name, values in zip(names_left, runs.values(), strict=True):
            curves[name].append(values)
    return curves


def highest(rates: Sequence[float], latencies: Sequence[float], target: float) -> float | None:
    """The rate at which a latency curve first exceeds a target, interpolated in logarithms.

    None if the target is not met at the first rate, or is met at every rate.
    """
    failed = next((i for i, latency in enumerate(latencies) if latency > target), None)
    if failed is None or failed == 0:
        return None
    log_latencies = np.log([latencies[failed - 1], latencies[failed]])
    log_rates = np.log(rates[failed - 1 : failed + 1])
    return float(np.exp(np.interp(np.log(target), log_latencies, log_rates)))


def all_highest(
    curves: Curves, rates: Sequence[float], target: float, name: str
) -> list[float | None]:
    """The result of `highest` for each seed."""
    return [highest(rates, seed, target) for seed in zip(*curves[name], strict=True)]


def rate_text(curves: Curves, rates: Sequence[float], target: float, name: str) -> str:
    """The rate that an engine serves at a latency, in words: the mean over seeds, or a bound."""
    if max(curves[name][0]) > target:
        return f"not met at {rates[0]:g}"
    best = all_highest(curves, rates, target, name)
    rates_of_seeds = [rate for rate in best if rate is not None]
    if len(rates_of_seeds) == len(best):
        return rounded(interval(rates_of_seeds).middle)
    return f">= {rounded(min([*rates_of_seeds, rates[-1]]))}"


def gain(
    curves: Curves, rates: Sequence[float], target: float, above: str, below: str
) -> Interval | None:
    """The ratio of the rates that two engines serve at a latency, seed by seed.

    None if `highest` has no rate for a seed of one of them.
    """
    rates_above = all_highest(curves, rates, target, above)
    rates_below = all_highest(curves, rates, target, below)
    ratios = []
    for a, b in zip(rates_above, rates_below, strict=True):
        if a is None or b is None:
            return None
        ratios.append(a / b)
    return interval(ratios)


def multiple(gain: Interval | None) -> str:
    """The factor as a part of a sentence."""
    if gain is None:
        return "an unknown multiple, beyond the rates tried, of"
    return f"{gain.middle:.1f} times"


def fewer(rates: Sequence[float]) -> tuple[float, ...]:
    """Every third rate, and both ends."""
    return tuple(dict.fromkeys([*rates[::3], rates[-1]]))


def lines(curves: Curves, rates: Sequence[float]) -> dict[str, list[tuple[float, float]]]:
    """The curves of a figure: means over seeds."""
    return {
        name: [
            (rate, statistics.fmean(values)) for rate, values in zip(rates, latencies, strict=False)
        ]
        for name, latencies in curves.items()
    }
