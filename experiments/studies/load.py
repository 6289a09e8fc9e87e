"""How much load an engine serves at a latency: curves of latency by rate, and where they meet a target.

A latency here is what the papers plot, *normalised*: seconds from a request's arrival to its end, by output token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from experiments.config import Point
from experiments.drive import Measured
from experiments.studies.findings import Interval, interval, simulated

Curves = dict[str, list[list[float]]]  # latencies by rate, then by seed; of each engine


def normalised(measured: Measured, average: Callable[[Sequence[float]], float] = statistics.median) -> float:
    """Over requests: seconds from arrival to the end, by output token."""
    return average([(r.e2e or float("inf")) / r.max_tokens for r in measured.requests])


def by_rate(
    config: Path,
    names: Sequence[str],
    rates: Sequence[float],
    *overrides: str,
    repeats: int | None = None,
    average: Callable[[Sequence[float]], float] = statistics.median,
) -> Curves:
    """The normalised latency of each point of a config, which are `names` in order, at each of the rates."""
    found: Curves = {name: [] for name in names}
    for rate in rates:
        runs: dict[str, list[float]] = {}

        def also(point: Point, measured: Measured, runs: dict[str, list[float]] = runs) -> None:
            runs.setdefault(point.label, []).append(normalised(measured, average))

        simulated(config, f"workload.arrivals.rate={rate}", *overrides, repeats=repeats, also=also)
        for name, values in zip(names, runs.values(), strict=True):
            found[name].append(values)
    return found


def highest(rates: Sequence[float], latencies: Sequence[float], target: float) -> float:
    """The rate at which a latency curve meets a target: interpolated in logarithms, before it first fails."""
    for i, latency in enumerate(latencies):
        if latency > target:
            if i == 0:
                return rates[0]
            x = np.log([latencies[i - 1], latency])
            return float(np.exp(np.interp(np.log(target), x, np.log(rates[i - 1 : i + 1]))))
    return rates[-1]


def gain(found: Curves, rates: Sequence[float], target: float, above: str, below: str) -> Interval:
    """How many times the rate of one engine another serves at a latency, seed by seed."""
    best = {name: [highest(rates, seed, target) for seed in zip(*found[name], strict=True)] for name in (above, below)}
    return interval([a / b for a, b in zip(best[above], best[below], strict=True)])


def lines(found: Curves, rates: Sequence[float]) -> dict[str, list[tuple[float, float]]]:
    """For a figure: the mean over seeds."""
    return {
        name: [(rate, statistics.fmean(values)) for rate, values in zip(rates, several, strict=True)]
        for name, several in found.items()
    }
