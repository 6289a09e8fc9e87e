"""004: static batches against batching by iterations, after Orca (Yu et al. 2022, Fig. 10)."""

from __future__ import annotations

import statistics
from pathlib import Path

from experiments.analysis import figures
from experiments.studies import load
from experiments.studies.findings import Claim, Findings

QUESTION = (
    "How much more load does an engine serve at the same latency when requests join and "
    "leave at any step?"
)
TARGET = 2.0  # times the latency of a single request; the paper says "the same level of latency"
ALONE = 0.05  # requests a second
RATES = (ALONE, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 11.0, 15.0, 20.0, 27.0, 36.0)
WHOLE, STATIC, ORCA, PAGED = NAMES = (
    "static, answered whole",
    "static, answered one by one",
    "iterations, reserved (Orca)",
    "iterations, paged, chunked",
)
PAPER = "Orca, Fig. 10"
WHY = (
    "it compares two engines, FasterTransformer and Orca, on pipelines of GPUs that static batches "
    "leave idle; here only the batching differs"
)


def run(folder: Path, quick: bool) -> Findings:
    rates = load.fewer(RATES) if quick else RATES
    count = f"workload.count={150 if quick else 600}"
    curves = load.by_rate(folder / "config.yaml", NAMES, rates, count, repeats=1 if quick else None)
    target = TARGET * statistics.fmean(curves[ORCA][0])
    gain = load.gain(curves, rates, target, ORCA, WHOLE)
    gain_over_static = load.gain(curves, rates, target, ORCA, STATIC)
    paged_gain = load.gain(curves, rates, target, PAGED, WHOLE)
    quantity = "rate of iterations over static batches, same latency"
    claims = [Claim(PAPER, quantity, 36.9, gain, 1.5, "x", WHY)] if gain is not None else []
    lines = load.lines(curves, rates) | {"target": [(rates[0], target), (rates[-1], target)]}
    answer = [
        f"At twice the latency of a single request ({1e3 * target:.0f} ms a token), batching by "
        f"iterations serves {load.multiple(gain)} the rate of static batches with the same "
        f"reservations, and {load.multiple(paged_gain)} with paging and chunks.",
        "If each member of a static batch were answered at its end, without further cost, "
        f"iterations would serve {load.multiple(gain_over_static)} their rate.",
        f"The published factor is 36.9: {WHY}.",
    ]
    labels = "requests a second", "seconds a token, median"
    figure = figures.curves(
        {"175 B on 16 A100": lines}, *labels, log_x=2, log_y=10, dashed=("target",)
    )
    return Findings(claims, answer, {"latency.svg": figure})
