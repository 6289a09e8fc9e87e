"""011: the load that a paged cache serves, after Fig. 12 of the PagedAttention paper (Kwon et al. 2023)."""

from __future__ import annotations

import statistics
from pathlib import Path

from experiments.studies import draw, lengths, load
from experiments.studies.findings import Claim, Findings, markdown

QUESTION = "How much more load does an engine serve at the same latency when its cache is paged?"
MAX, POW2, ORACLE, PAGED = NAMES = ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "paged")
PAPER = "PagedAttention, Fig. 12"
RATES = {
    "ShareGPT": (0.25, 0.4, 0.6, 0.85, 1.1, 1.4, 1.8, 2.3, 3.0),
    "Alpaca": (2.0, 4.0, 8.0, 12.0, 16.0, 20.0, 25.0, 32.0, 40.0),
}
TARGET = 0.1  # seconds a token, some five times what a request takes alone: where the paper's curves turn upwards
OTHERS = (0.05, 0.2)
PUBLISHED = {ORACLE: (1.7, 2.7), MAX: (2.7, 8.0)}  # ShareGPT, over models of 13 to 175 billion parameters


def run(folder: Path, quick: bool) -> Findings:
    panels, rows, claims, answer = {}, [], [], []
    for data, every in RATES.items():
        rates = every[::3] if quick else every
        few = f"workload.count={(150 if quick else 400) * (1 if data == 'ShareGPT' else 2)}"
        overrides = (*lengths.overrides(data), few)
        repeats = 1 if quick else None
        found = load.by_rate(
            folder / "config.yaml", NAMES, rates, *overrides, repeats=repeats, average=statistics.fmean
        )
        for target in (TARGET, *OTHERS):
            gains = {name: load.gain(found, rates, target, PAGED, name) for name in (ORACLE, POW2, MAX)}
            rows.append((data, 1e3 * target, *(gain.middle for gain in gains.values())))
            if target == TARGET and data == "ShareGPT":
                for name, published in PUBLISHED.items():
                    what = f"{data}: rate of paged over {name}, {1e3 * target:.0f} ms a token"
                    claims.append(Claim(PAPER, what, published, gains[name], 1.1, "x", lengths.MEANS_ALONE))
                answer.append(
                    f"With ShareGPT's lengths a paged cache serves {gains[ORACLE].middle:.1f} times the rate of "
                    f"reservations that know every length, and {gains[MAX].middle:.1f} times that of reservations for "
                    f"the longest there could be, at {1e3 * target:.0f} ms a token."
                )
        panels[f"OPT-13B, A100, lengths like {data}"] = load.lines(found, rates) | {
            "target": [(rates[0], TARGET), (rates[-1], TARGET)]
        }
    labels = "requests a second", "seconds a token, mean"
    figure = draw.curves(panels, *labels, log_x=2, log_y=10, dashed=("target",))
    head = ("lengths like", "at ms a token", *(f"paged over {name}" for name in (ORACLE, POW2, MAX)))
    return Findings(claims, answer, {"load.svg": figure}, [markdown(head, rows)])
