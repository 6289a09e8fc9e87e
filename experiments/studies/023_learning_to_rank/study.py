"""023: the latency of an order by predicted lengths, against Kendall's tau of the predictions, after
Fu et al. (arXiv 2408.15792).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from experiments.analysis import figures
from experiments.core.config import Point
from experiments.core.drive import Measured
from experiments.studies import load
from experiments.studies.findings import (
    Claim,
    Findings,
    Interval,
    exactly,
    interval,
    markdown,
    rounded,
    simulated,
)

QUESTION = "What is the order of predicted lengths worth, against Kendall's tau of the order?"
FCFS = "first come, first served"
GUARDED = "predicted, urgent after 256 steps"
PAPER = "Fu et al. (arXiv 2408.15792)"
BLOG = "the authors' page on vllm-ltr"
TAUS = {
    "ShareGPT": 0.52,
    "LMSYS-Chat-1M": 0.64,
}  # of the authors' predictors (train.sh), Llama-3-8B
EXAMPLE = (
    "simulate={step_s: 1.0, model: llama-3-8b}",
    "engine.max_num_seqs=1",
    "workload={kind: example.py:requests, predicted: {error: 0.0}}",
)
QUICK = "sweep.list=[{engine.policy: fcfs}, {workload.predicted.error: 1.2}, " + (
    "{workload.predicted.error: 0.0}, {workload.predicted.error: 0.0, engine.policy: srtf}]"
)
WHY_LENGTHS = (
    "the load of the published factor is not known here (the authors give 2.8, and elsewhere up to "
    "6.9), nor are the lengths of Llama-3's answers; ours are exponential with the means of "
    "ShareGPT's"
)


class Order(NamedTuple):
    """What an order of the queue gave; each list has a number for each seed.

    error: of the predictions; None: it reads none.
    taus: Kendall's tau of predictions and true lengths; 0 of an order that reads none.
    latencies: seconds a token from arrival to the end, the mean over requests.
    seconds: from arrival to the end, the mean.
    """

    name: str
    error: float | None
    taus: list[float]
    latencies: list[float]
    seconds: list[float]


def orders(folder: Path, *overrides: str, repeats: int | None) -> list[Order]:
    """The orders of the sweep, in its order."""
    results: dict[str, Order] = {}

    def on_run(point: Point, measured: Measured) -> None:
        policy = str(point.experiment.engine.policy)
        error = None if policy == "fcfs" else point.swept["workload.predicted.error"]
        name = {"fcfs": FCFS, "srtf": GUARDED}.get(policy, f"predicted, error of {error}")
        order = results.setdefault(name, Order(name, error, [], [], []))
        order.taus.append(0.0 if error is None else tau(measured))
        order.latencies.append(load.normalised(measured, statistics.fmean))
        order.seconds.append(statistics.fmean([r.e2e or 0.0 for r in measured.requests]))

    simulated(folder / "config.yaml", *overrides, repeats=repeats, on_run=on_run)
    return list(results.values())


def tau(measured: Measured) -> float:
    """Kendall's tau of the predictions and the lengths."""
    predictions = [request.predicted for request in measured.requests]
    lengths = [request.max_tokens for request in measured.requests]
    result: Any = stats.kendalltau(predictions, lengths)
    return float(result.statistic)


def example(folder: Path) -> dict[str, float]:
    """The mean seconds a token of the authors' example, by policy."""
    latencies = {}

    def on_run(point: Point, measured: Measured) -> None:
        policy = str(point.experiment.engine.policy)
        latencies[policy] = load.normalised(measured, statistics.fmean)

    sweep = "sweep={grid: {engine.policy: [fcfs, srtf]}}"
    simulated(folder / "config.yaml", *EXAMPLE, sweep, repeats=1, on_run=on_run)
    return latencies


def gain_at(levels: Sequence[Order], first_come: Order, target: float) -> Interval:
    """The latency of first come, first served over that of an order with this tau: for each seed
    interpolated between the orders with the next taus.
    """
    gains = []
    for seed, below in enumerate(first_come.latencies):
        points = sorted((order.taus[seed], order.latencies[seed]) for order in levels)
        taus = [tau for tau, _ in points]
        latencies = [latency for _, latency in points]
        gains.append(below / float(np.interp(target, taus, latencies)))
    return interval(gains)


def ordered_pairs(levels: Sequence[Order]) -> float:
    """The share of pairs of orders, in %, of which the one with the higher tau has the lower
    latency, both as means over seeds.
    """
    means = [(statistics.fmean(o.taus), statistics.fmean(o.latencies)) for o in levels]
    pairs = list(combinations(sorted(means), 2))
    return 100 * sum(higher < lower for (_, lower), (_, higher) in pairs) / len(pairs)


def run(folder: Path, quick: bool) -> Findings:
    overrides = (QUICK, "workload.count=60", "engine.max_num_seqs=16") if quick else ()
    results = orders(folder, *overrides, repeats=1 if quick else None)
    first_come = results[0]
    levels = [order for order in results if order.name != GUARDED]  # first come has a tau of 0
    latencies = example(folder)
    gains = {data: gain_at(levels, first_come, target) for data, target in TAUS.items()}
    burst = "mean seconds a token, first come over ranked"
    claims = [
        Claim(
            BLOG,
            "three requests, one place, a second a token: first come, mean",
            20 / 3,
            exactly(latencies["fcfs"]),
            1.01,
            "s/token",
        ),
        Claim(
            BLOG,
            "three requests, one place, a second a token: shortest first, mean",
            1.27,
            exactly(latencies["srtf"]),
            1.01,
            "s/token",
        ),
        Claim(
            f"{PAPER}, Fig. 2b",
            "pairs of orders of which that with the higher tau has the lower mean latency",
            100.0,
            exactly(ordered_pairs(levels)),
            1.0,
            "%",
            "the orders at low tau are those of chance",
        ),
        Claim(
            f"{PAPER}, abstract",
            f"{burst}, tau of {TAUS['ShareGPT']} as of their predictor for ShareGPT",
            2.8,
            gains["ShareGPT"],
            1.5,
            "x",
            WHY_LENGTHS,
        ),
        Claim(
            f"{BLOG}: up to",
            f"{burst}, tau of {TAUS['LMSYS-Chat-1M']} as of their predictor for LMSYS-Chat-1M",
            6.9,
            gains["LMSYS-Chat-1M"],
            1.5,
            "x",
            WHY_LENGTHS,
        ),
    ]
    return Findings(
        claims, answer(results, gains), {"tau.svg": figure(levels)}, [table(results, first_come)]
    )


def answer(results: Sequence[Order], gains: dict[str, Interval]) -> list[str]:
    first_come = results[0]
    exact = next(order for order in results if order.error == 0 and order.name != GUARDED)
    guarded = next(order for order in results if order.name == GUARDED)

    def over(order: Order, field: str) -> str:
        pairs = zip(getattr(first_come, field), getattr(order, field), strict=True)
        return rounded(interval([a / b for a, b in pairs]).middle, 2)

    return [
        "In a burst the order by predicted lengths has "
        + " and ".join(f"1/{rounded(gain.middle, 2)}" for gain in gains.values())
        + " of the seconds a token of first come, first served with the taus of the authors' "
        f"predictors ({' and '.join(map(str, TAUS.values()))}), and 1/{over(exact, 'latencies')} "
        "with exact predictions.",
        "This mean is over requests, so that short ones count as much as long ones. The mean time "
        f"from arrival to the end falls less, to 1/{over(exact, 'seconds')} with exact predictions.",
        "With a guard against starvation, requests that are urgent after 256 steps (the default of "
        f"srtf), exact predictions give 1/{over(guarded, 'latencies')}.",
        f"Not the same as in the paper: {WHY_LENGTHS}. The predictor costs nothing here.",
    ]


def figure(levels: Sequence[Order]) -> str:
    points = [(statistics.fmean(o.taus), statistics.fmean(o.latencies)) for o in levels]
    first_come = points[0][1]
    lines = {
        "order by predictions": sorted(points[1:]),
        FCFS: [(0.0, first_come), (1.0, first_come)],
    }
    return figures.curves(
        {"Llama-3-8B, A100, a burst": lines},
        "Kendall's tau of predictions and lengths",
        "seconds a token, mean",
        lowest=0,
        dashed=(FCFS,),
    )


def table(results: Sequence[Order], first_come: Order) -> str:
    rows = []
    for order in results:
        latency = statistics.fmean(order.latencies)
        gain = statistics.fmean(first_come.latencies) / latency
        tau_text = rounded(statistics.fmean(order.taus), 2)
        rows.append((order.name, tau_text, latency, statistics.fmean(order.seconds), gain))
    head = ("order", "tau", "seconds a token, mean", "seconds, mean", "first come over it")
    return markdown(head, rows)
