"""024: skip-join multi-level feedback queues against first come, first served, after FastServe (Wu
et al., arXiv 2305.05920).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.analysis import figures
from experiments.core.config import Point
from experiments.core.drive import Measured
from experiments.studies import lengths, load
from experiments.studies.findings import (
    Claim,
    Findings,
    Interval,
    interval,
    markdown,
    rounded,
    simulated,
)

QUESTION = "How much more load do skip-join queues with preemption serve at the same latency?"
ARTIFACT = "FastServe's artifact"
PAPER = "FastServe (arXiv 2305.05920), abstract"
FCFS = "first come, first served"
MLFQ = "skip-join MLFQ"
ORACLE = "shortest remaining first (oracle)"
STATIC = "static batches"
# The artifact's queues: 10 ms at level 0, which is less than a step, and twice as long at each
# level; a level for each doubling. A prompt of 170 tokens takes as long as a step. A request that
# waited for 3 s goes to the front at every 1,000th step, so after about 500 steps.
POLICIES = {
    FCFS: "engine.policy=fcfs",
    MLFQ: "engine.policy={name: mlfq, quantum: 1, ratio: 2, levels: 12, prompt_work: 0.006, "
    "patience: 500}",
    ORACLE: "engine.policy={name: srtf, patience: 1000000}",
    STATIC: "engine.policy=static",
}
# answers come when the longest member of a batch has ended, as in study 004
WHOLE = (
    "engine.mixed_steps=false",
    "engine.enable_prefix_caching=false",
    "engine.reservation=max",
    "simulate.whole_batches=true",
)


class Setting(NamedTuple):
    """A load of the artifact.

    data: see lengths.py.
    batch: the most requests of a step.
    target: seconds a token.
    counts: by the lowest rate that has this many requests, as in the artifact's scripts.
    rates: requests/s that are tried, by policy.
    seeds: the number of runs at each rate.
    """

    data: str
    batch: int
    target: float
    counts: Mapping[float, int]
    rates: Mapping[str, Sequence[float]]
    seeds: int = 2

    def count(self, rate: float) -> int:
        return self.counts[max(lowest for lowest in self.counts if lowest <= rate)]


SHAREGPT, ALPACA, LARGE = SETTINGS = {
    "ShareGPT, batches of 16": Setting(
        "ShareGPT",
        16,
        0.3,
        {0.0: 20, 0.2: 50, 0.5: 100, 1.0: 200, 1.5: 300, 2.0: 400},
        {
            FCFS: (1.5, 2.0, 2.5, 3.0, 4.0),
            MLFQ: (2.0, 3.0, 4.0, 5.0, 6.0, 8.0),
            STATIC: (0.05, 0.1, 0.2, 0.5, 1.0),
        },
    ),
    "Alpaca, batches of 16": Setting(
        "Alpaca",
        16,
        0.3,
        {0.0: 300, 17.0: 340, 20.0: 400, 30.0: 600, 40.0: 800},
        {
            FCFS: (11.0, 14.0, 17.0, 20.0),
            MLFQ: (17.0, 20.0, 30.0, 40.0),
            ORACLE: (17.0, 20.0, 30.0, 40.0, 60.0, 80.0),
        },
    ),
    "ShareGPT, batches of 64": Setting(
        "ShareGPT",
        64,
        0.25,
        {0.0: 600},
        {FCFS: (4.0, 5.0, 6.0, 8.0), MLFQ: (5.0, 6.5, 8.0, 10.0, 13.0)},
        seeds=1,
    ),
}
MEAN = "mean"
TAIL = "P95"
WHY_LENGTHS = f"{lengths.MEANS_ALONE}, and an evicted request's cache moves in other ways"
WHY_LARGE = (
    "a roofline's step grows less with the batch than the artifact's kernels do: first come, first "
    "served meets this target there at 2.86 requests/s, and here at more"
)
WHY_BATCHES = (
    "how the artifact's FasterTransformer makes batches is not known; here one ends with its "
    "longest member"
)
WHY_ABSTRACT = (
    "the artifact's own curves give 31.5 over FasterTransformer at this target, and 2.13 over vLLM"
)


class Latencies(NamedTuple):
    """Seconds a token from arrival to the end, by rate and then by seed."""

    rates: list[float]  # requests/s that were tried
    mean: list[list[float]]
    tail: list[list[float]]


Curves = Mapping[tuple[str, str], Latencies]  # by setting and policy
Rates = Mapping[tuple[str, str], Sequence[float]]  # at the mean of the target, for each seed


def latencies_of(folder: Path, name: str, policy: str, quick: bool) -> Latencies:
    """The latencies of a policy. Above a rate at which all seeds miss the target, none is tried."""
    setting = SETTINGS[name]
    curve = Latencies([], [], [])
    for rate in setting.rates[policy][:: 3 if quick else 1]:
        if curve.mean and min(curve.mean[-1]) > setting.target:
            break
        runs: list[list[float]] = []

        def on_run(point: Point, measured: Measured, runs: list[list[float]] = runs) -> None:
            runs.append([(r.e2e or math.inf) / r.max_tokens for r in measured.requests])

        simulated(
            folder / "config.yaml",
            *lengths.overrides(setting.data),
            POLICIES[policy],
            f"engine.max_num_seqs={setting.batch}",
            f"workload.arrivals.rate={rate}",
            f"workload.count={setting.count(rate) // (3 if quick else 1)}",
            *(WHOLE if policy == STATIC else ()),
            repeats=1 if quick else setting.seeds,
            on_run=on_run,
        )
        curve.rates.append(rate)
        curve.mean.append([statistics.fmean(run) for run in runs])
        curve.tail.append([float(np.percentile(run, 95)) for run in runs])
    return curve


def highest(curves: Curves, name: str, policy: str, number: str) -> list[float] | None:
    """The rate at the target for each seed; None if the tried rates do not include it."""
    curve = curves[name, policy]
    by_rate = curve.mean if number == MEAN else curve.tail
    rates_of_seeds = [
        load.highest(curve.rates, seed, SETTINGS[name].target)
        for seed in zip(*by_rate, strict=True)
    ]
    rates = [rate for rate in rates_of_seeds if rate is not None]
    return rates if len(rates) == len(rates_of_seeds) else None


def gain(curves: Curves, name: str, above: str, below: str, number: str = MEAN) -> Interval | None:
    """The rate of one policy over that of another, seed by seed."""
    rates_above = highest(curves, name, above, number)
    rates_below = highest(curves, name, below, number)
    if rates_above is None or rates_below is None:
        return None
    return interval([a / b for a, b in zip(rates_above, rates_below, strict=True)])


def claim(
    quantity: str,
    published: float,
    number: Interval | None,
    why: str,
    source: str = ARTIFACT,
    factor: float = 1.25,
    unit: str = "x",
) -> list[Claim]:
    """A claim; none if the tried rates do not include the target."""
    return [] if number is None else [Claim(source, quantity, published, number, factor, unit, why)]


def run(folder: Path, quick: bool) -> Findings:
    names = (ALPACA,) if quick else tuple(SETTINGS)
    curves = {
        (name, policy): latencies_of(folder, name, policy, quick)
        for name in names
        for policy in SETTINGS[name].rates
    }
    rates = {}
    for name, policy in curves:
        rates_of_seeds = highest(curves, name, policy, MEAN)
        if rates_of_seeds is not None:  # the tried rates include the target
            rates[name, policy] = rates_of_seeds
    claims = [] if quick else sharegpt_claims(curves, rates)
    claims += claim(
        f"{ALPACA}: rate over first come, first served, mean of 0.3 s a token",
        1.98,
        gain(curves, ALPACA, MLFQ, FCFS),
        WHY_LENGTHS,
    )
    return Findings(claims, answer(curves), {"latency.svg": figure(curves)}, [table(curves, rates)])


def sharegpt_claims(curves: Curves, rates: Rates) -> list[Claim]:
    """Published rates are interpolated between the points of the artifact's plot.ipynb (Fig. 11, 12
    and 14), as it does.
    """
    over_fcfs = gain(curves, SHAREGPT, MLFQ, FCFS)
    mean = f"{SHAREGPT}, mean of 0.3 s a token"
    absolute = [
        Claim(
            ARTIFACT,
            f"{mean}: {policy}",
            published,
            interval(rates[SHAREGPT, policy]),
            1.25,
            "requests/s",
            WHY_LENGTHS,
        )
        for policy, published in ((FCFS, 2.41), (MLFQ, 4.89))
        if (SHAREGPT, policy) in rates
    ]
    return [
        *absolute,
        *claim(f"{mean}: rate over first come, first served", 2.03, over_fcfs, WHY_LENGTHS),
        *claim(f"{mean}: rate over vLLM", 2.13, over_fcfs, WHY_LENGTHS),
        *claim(
            f"{SHAREGPT}, P95 of 0.3 s a token: rate over first come, first served",
            1.96,
            gain(curves, SHAREGPT, MLFQ, FCFS, TAIL),
            WHY_LENGTHS,
        ),
        *claim(
            f"{mean}: rate over FasterTransformer, static batches",
            31.5,
            gain(curves, SHAREGPT, MLFQ, STATIC),
            WHY_BATCHES,
            factor=1.5,
        ),
        *claim(f"{mean}: rate over vLLM", 31.4, over_fcfs, WHY_ABSTRACT, PAPER, factor=1.5),
        *claim(
            f"{LARGE}, mean of 0.25 s a token: rate over first come, first served",
            1.29,
            gain(curves, LARGE, MLFQ, FCFS),
            WHY_LARGE,
        ),
    ]


def answer(curves: Curves) -> list[str]:
    gains = {name: gain(curves, name, MLFQ, FCFS) for name, policy in curves if policy == MLFQ}
    sentences = [
        "At the same mean latency skip-join queues serve "
        + ", ".join(f"{load.multiple(factor)} the rate ({name})" for name, factor in gains.items())
        + " of first come, first served."
    ]
    oracle = gain(curves, ALPACA, ORACLE, FCFS)
    if oracle is not None:
        sentences.append(
            f"Shortest remaining first, which knows all lengths, serves {oracle.middle:.1f} times "
            f"({ALPACA})."
        )
    return [
        *sentences,
        "The gain is in the mean over requests of seconds a token, in which a short request counts "
        "as much as a long one; requests of a run that is longer than the artifact's (400 requests) "
        "would wait longer, because these rates are above what the engine sustains.",
        f"The abstract's 31.4 is not the gain over first come, first served: {WHY_ABSTRACT}.",
    ]


def figure(curves: Curves) -> str:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for (name, policy), latencies in curves.items():
        points = zip(latencies.rates, latencies.mean, strict=True)
        panels.setdefault(name, {})[policy] = [
            (rate, statistics.fmean(seeds)) for rate, seeds in points
        ]
    for name, lines in panels.items():
        ends = [rate for points in lines.values() for rate, _ in points]
        lines["target"] = [(rate, SETTINGS[name].target) for rate in (min(ends), max(ends))]
    labels = "requests a second", "seconds a token, mean"
    return figures.curves(panels, *labels, log_x=2, log_y=10, dashed=("target",))


def table(curves: Curves, rates: Rates) -> str:
    rows = []
    for key in curves:
        tail = highest(curves, *key, TAIL)
        best = rates.get(key)
        cells = [rounded(interval(r).middle) if r else "beyond the rates" for r in (best, tail)]
        rows.append((*key, *cells))
    return markdown(("load", "order", "requests/s at the mean", "requests/s at the P95"), rows)
