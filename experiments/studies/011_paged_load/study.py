"""011: the load that a paged cache serves, after Fig. 12 of the PagedAttention paper (Kwon et al.
2023).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.analysis import figures
from experiments.studies import lengths, load
from experiments.studies.findings import Claim, Findings, Interval, markdown, times
from experiments.studies.lengths import MEANS_ALONE
from experiments.studies.load import Curves

QUESTION = "How much more load does an engine serve at the same latency when its cache is paged?"
MAX, POW2, ORACLE, PAGED = NAMES = ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "paged")
PAPER = "PagedAttention, Fig. 12"
RATES = {  # from rates at which every engine meets each target to rates at which none does
    "ShareGPT": (0.7, 0.9, 1.1, 1.4, 1.7, 2.0, 2.5, 3.5, 4.0, 5.0, 6.0),
    "Alpaca": (4.0, 5.0, 7.0, 20.0, 40.0, 50.0, 60.0, 70.0, 85.0, 100.0, 130.0),
}
REQUESTS = {"ShareGPT": 800, "Alpaca": 2400}  # with fewer requests, none waits long at any rate
# seconds a token, about five times those of a single request: the paper's curves turn upwards there
TARGET = 0.1
OTHERS = (0.05, 0.2)  # other seconds a token, for comparison
# ShareGPT, over models of 13 to 175 billion parameters
PUBLISHED = {
    ORACLE: (1.7, 2.7),
    MAX: (2.7, 8.0),
}
STEPS = (
    "Where it serves less, the cause is the steps and not the cache: the paged engine computes "
    "prompts in separate steps, as the paper's did, and decodes wait for them."
)

# latency in seconds a token -> another engine -> the rate of paged over the rate of that engine
Gains = Mapping[float, Mapping[str, Interval | None]]


def run(folder: Path, quick: bool) -> Findings:
    panels = {}
    rows = []
    claims = []
    answer = []
    for data, rates_of_paper in RATES.items():
        count = 150 if quick else REQUESTS[data]
        rates = load.fewer(rates_of_paper) if quick else rates_of_paper
        curves = load.by_rate(
            folder / "config.yaml",
            NAMES,
            rates,
            *lengths.overrides(data),
            f"workload.count={count}",
            repeats=1 if quick else None,
            average=statistics.fmean,
            until=max(TARGET, *OTHERS),
        )
        gains = gains_of(curves, rates)
        rows += rows_of(data, curves, rates, gains)
        if data == "ShareGPT":
            claims = claims_of(data, gains)
        answer.append(sentence(data, gains))
        panels[f"OPT-13B, A100, lengths like {data}"] = load.lines(curves, rates) | {
            "target": [(rates[0], TARGET), (rates[-1], TARGET)]
        }
    labels = "requests a second", "seconds a token, mean"
    figure = figures.curves(panels, *labels, log_x=2, log_y=10, dashed=("target",))
    head = (
        "lengths like",
        "at ms a token",
        *(f"{name}, requests/s" for name in NAMES),
        *(f"paged over {name}" for name in (ORACLE, POW2, MAX)),
    )
    return Findings(claims, answer, {"load.svg": figure}, [markdown(head, rows)])


def gains_of(curves: Curves, rates: Sequence[float]) -> Gains:
    return {
        target: {
            name: load.gain(curves, rates, target, PAGED, name) for name in (ORACLE, POW2, MAX)
        }
        for target in (TARGET, *OTHERS)
    }


def rows_of(
    data: str, curves: Curves, rates: Sequence[float], gains: Gains
) -> list[tuple[Any, ...]]:
    """The rows of the table for the lengths of a data set, one for each latency."""
    rows = []
    for target, by_name in gains.items():
        served = [load.rate_text(curves, rates, target, name) for name in NAMES]
        factors = [times(gain.middle if gain else None) for gain in by_name.values()]
        rows.append((data, 1e3 * target, *served, *factors))
    return rows


def claims_of(data: str, gains: Gains) -> list[Claim]:
    """The published factors for which both rates were found, and our factors at other latencies."""
    claims = []
    for name, published in PUBLISHED.items():
        gain = gains[TARGET][name]
        quantity = f"{data}: rate of paged over {name}, {1e3 * TARGET:.0f} ms a token"
        why = (
            "the paper does not print the latency of its factor (ours is "
            f"{elsewhere(gains, name)}); {MEANS_ALONE}"
        )
        if gain is not None:
            claims.append(Claim(PAPER, quantity, published, gain, 1.1, "x", why))
    return claims


def elsewhere(gains: Gains, name: str) -> str:
    """The factor at the other latencies."""
    pairs = ((target, gains[target][name]) for target in OTHERS)
    return " and ".join(
        f"{times(gain.middle if gain else None)} at {1e3 * target:.0f} ms" for target, gain in pairs
    )


def sentence(data: str, gains: Gains) -> str:
    multiples = {name: load.multiple(gain) for name, gain in gains[TARGET].items()}
    text = (
        f"With {data}'s lengths a paged cache serves {multiples[ORACLE]} the rate of "
        f"reservations that know every length ({elsewhere(gains, ORACLE)}), "
        f"{multiples[POW2]} that of reservations for the next power of two and "
        f"{multiples[MAX]} that of reservations for the longest possible length, at "
        f"{1e3 * TARGET:.0f} ms a token."
    )
    any_loss = any(
        gain is not None and gain.middle < 1
        for gains_by_name in gains.values()
        for gain in gains_by_name.values()
    )
    return f"{text} {STEPS}" if any_loss else text
