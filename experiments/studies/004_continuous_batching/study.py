"""004: static batches against batching by iterations, after Orca (Yu et al. 2022, Fig. 10)."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np

from experiments.config import Point
from experiments.drive import Measured
from experiments.studies import draw
from experiments.studies.findings import Claim, Findings, interval, simulated

QUESTION = "How much more load does an engine serve at the same latency when requests join and leave at any step?"
TARGET = 2.0  # times the latency of a request that is alone; the paper says "the same level of latency"
ALONE = 0.05  # requests a second
RATES = (ALONE, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 11.0, 15.0, 20.0, 27.0, 36.0, 50.0)
NAMES = ("static batches", "iterations, reserved (Orca)", "iterations, paged, chunked")
PAPER = "Orca, Fig. 10"
WHY = (
    "it compares two engines, FasterTransformer and Orca, on pipelines of GPUs that static batches leave idle; here "
    "everything but the batching is the same"
)


def normalised(measured: Measured) -> float:
    """Median over requests of seconds from arrival to the end, by output token."""
    return statistics.median((r.e2e or float("inf")) / r.max_tokens for r in measured.requests)


def highest(rates: list[float], latencies: list[float], target: float) -> float:
    """The rate at which a latency curve meets a target: interpolated in logarithms, before it first fails."""
    for i, latency in enumerate(latencies):
        if latency > target:
            if i == 0:
                return rates[0]
            x = np.log([latencies[i - 1], latency])
            return float(np.exp(np.interp(np.log(target), x, np.log(rates[i - 1 : i + 1]))))
    return rates[-1]


def run(folder: Path, quick: bool) -> Findings:
    found: dict[str, list[list[float]]] = {name: [] for name in NAMES}  # latencies by rate, then by seed
    rates = RATES[::3] if quick else RATES
    for rate in rates:
        runs: list[list[float]] = []

        def also(point: Point, measured: Measured, runs: list[list[float]] = runs) -> None:
            if not runs or len(runs[-1]) == (1 if quick else point.experiment.repeats):
                runs.append([])
            runs[-1].append(normalised(measured))

        simulated(
            folder / "config.yaml",
            f"workload.arrivals.rate={rate}",
            f"workload.count={150 if quick else 600}",
            repeats=1 if quick else None,
            also=also,
        )
        for name, values in zip(NAMES, runs, strict=True):
            found[name].append(values)
    target = TARGET * statistics.fmean(found[NAMES[1]][0])
    best = {
        name: [highest(list(rates), list(seed), target) for seed in zip(*by_rate, strict=True)]
        for name, by_rate in found.items()
    }
    static, orca, paged = (best[name] for name in NAMES)
    gain = interval([a / b for a, b in zip(orca, static, strict=True)])
    more = interval([a / b for a, b in zip(paged, static, strict=True)])
    claims = [Claim(PAPER, "rate of iterations over static batches, same latency", 36.9, gain, 1.5, "x", WHY)]
    lines = {
        name: [(rate, statistics.fmean(values)) for rate, values in zip(rates, by_rate, strict=True)]
        for name, by_rate in found.items()
    }
    lines["target"] = [(rates[0], target), (rates[-1], target)]
    answer = [
        f"At twice the latency of a request that is alone ({1e3 * target:.0f} ms a token), batching by iterations "
        f"serves {gain.middle:.1f} times the rate of static batches with the same reservations, and {more.middle:.1f} "
        "times with paging and chunks.",
        f"The published factor is 36.9: {WHY}.",
    ]
    figure = draw.curves(
        {"175 B on 16 A100": lines},
        "requests a second",
        "seconds a token, median",
        log_x=2,
        log_y=10,
        dashed=("target",),
    )
    return Findings(claims, answer, {"latency.svg": figure})
