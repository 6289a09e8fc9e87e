"""013: tokens of a step with drafts of a known acceptance, after Leviathan et al. 2023 (arXiv
2211.17192).

The numbers are counted in runs of the engine's scheduler. The paper's formulas are only what they
are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from experiments.analysis import figures
from experiments.core.config import Point
from experiments.core.drive import Measured
from experiments.studies.findings import (
    Claim,
    Findings,
    Interval,
    exactly,
    interval,
    rounded,
    simulated,
)

QUESTION = "How much faster is an engine with drafts of a known acceptance?"
PAPER = "Speculative decoding (Leviathan et al. 2023)"
WITHIN = 1.01


class Setting(NamedTuple):
    """The paper's alpha, gamma and c."""

    acceptance: float
    drafts: int
    cost: float = 0.0  # time of a draft token, in steps without drafts

    @property
    def text(self) -> str:
        return f"a = {self.acceptance:g}, g = {self.drafts}, c = {self.cost:g}"


class Run(NamedTuple):
    """What a setting gives.

    faster: times as fast as plain decoding.
    operations: tokens computed for each token kept.
    """

    faster: Interval
    operations: float


TABLE_1 = {  # faster, operations; the paper's table has c = 0
    Setting(0.6, 2): (1.96, 1.53),
    Setting(0.7, 3): (2.53, 1.58),
    Setting(0.8, 2): (2.44, 1.23),
    Setting(0.8, 5): (3.69, 1.63),
    Setting(0.9, 2): (2.71, 1.11),
    Setting(0.9, 10): (6.86, 1.60),
}
COSTLY = (
    Setting(0.75, 7, 0.02),
    Setting(0.8, 7, 0.04),
    Setting(0.8, 5, 0.1),
    Setting(0.6, 5, 0.2),
    Setting(0.5, 5, 0.3),
)
CURVES = {"acceptances": (0.5, 0.7, 0.8, 0.9), "drafts": (1, 2, 3, 5, 7, 10), "costs": (0.0, 0.1)}


def tokens_a_step(setting: Setting) -> float:
    """Equation 1: expected tokens of a step."""
    acceptance = setting.acceptance
    return (1 - acceptance ** (setting.drafts + 1)) / (1 - acceptance)


def factor(setting: Setting) -> float:
    """Theorem 3.8: expected factor in time."""
    return tokens_a_step(setting) / (setting.drafts * setting.cost + 1)


def run_requests(folder: Path, setting: Setting | None, count: int) -> Run:
    """Run `count` requests of the config, one at a time. `faster` is their rates in tokens/s here.

    setting: None is plain decoding.
    """
    overrides = [f"workload.count={count}"]
    if setting is not None:
        overrides += [
            f"engine.speculative={{num_tokens: {setting.drafts}, adaptive: false}}",
            f"simulate.acceptance={setting.acceptance}",
            f"simulate.draft_s={setting.cost}",
        ]
    rates: list[float] = []

    def on_run(_: Point, measured: Measured) -> None:
        rates.extend(rates_of(measured))

    ((_, (summary,)),) = simulated(folder / "config.yaml", *overrides, on_run=on_run)
    return Run(interval(rates), summary["tokens_computed"] / summary["output_tokens"])


def rates_of(measured: Measured) -> list[float]:
    """Output tokens/s of each request from its first step on."""
    return [
        request.max_tokens / (request.arrival + request.e2e - request.first_scheduled)
        for request in measured.requests
        if request.e2e is not None and request.first_scheduled is not None
    ]


def run(folder: Path, quick: bool) -> Findings:
    count, curve_count = (2, 1) if quick else (32, 2)
    plain = run_requests(folder, None, 1).faster.middle  # tokens/s; every request has the same
    runs = {
        setting: over(run_requests(folder, setting, count), plain)
        for setting in (*TABLE_1, *COSTLY)
    }

    def point(setting: Setting) -> tuple[int, float]:
        """The drafts, and times as fast as plain decoding."""
        measured = over(run_requests(folder, setting, curve_count), plain)
        return setting.drafts, measured.faster.middle

    drawn = {
        cost: {
            a: [point(Setting(a, drafts, cost)) for drafts in CURVES["drafts"]]
            for a in CURVES["acceptances"]
        }
        for cost in CURVES["costs"]
    }
    claims = [*table_claims(runs), *theorem_claims(runs)]
    return Findings(claims, answer(runs), {"factor.svg": figure(drawn)})


def over(run: Run, plain: float) -> Run:
    """The run with its rates divided by `plain`, the rate of plain decoding."""
    low, middle, high, kind, n = run.faster
    return run._replace(faster=Interval(low / plain, middle / plain, high / plain, kind, n))


def table_claims(runs: Mapping[Setting, Run]) -> list[Claim]:
    claims = []
    for setting, (faster, operations) in TABLE_1.items():
        run = runs[setting]
        claims += [
            Claim(
                f"{PAPER}, table 1",
                f"{setting.text}: times as fast",
                faster,
                run.faster,
                WITHIN,
                "x",
            ),
            Claim(
                f"{PAPER}, table 1",
                f"{setting.text}: tokens computed for each token kept",
                operations,
                exactly(run.operations),
                WITHIN,
                "x",
            ),
        ]
    return claims


def theorem_claims(runs: Mapping[Setting, Run]) -> list[Claim]:
    source = f"{PAPER}, theorem 3.8"
    return [
        Claim(
            source,
            f"{setting.text}: times as fast",
            factor(setting),
            runs[setting].faster,
            WITHIN,
            "x",
        )
        for setting in COSTLY
    ]


def answer(runs: Mapping[Setting, Run]) -> list[str]:
    cheap_gain = runs[Setting(0.8, 5)].faster.middle
    costly_gain = runs[Setting(0.8, 5, 0.1)].faster.middle
    costliest_gain = runs[COSTLY[-1]].faster.middle
    largest_error = max(
        abs(run.faster.middle / factor(setting) - 1) for setting, run in runs.items()
    )
    return [
        "With 5 drafts that are accepted with probability 0.8, the scheduler gives "
        f"{rounded(cheap_gain)} tokens a step; if a draft token costs a tenth of a step, it is "
        f"{rounded(costly_gain)} times as fast. With {COSTLY[-1].text} drafts do not pay: "
        f"{rounded(costliest_gain)} times as fast. Over {len(runs)} settings, the largest "
        f"difference from the paper's formulas is {100 * largest_error:.2f} %.",
        "Each request has 8,000 tokens: its first token, which has no drafts, and its last steps, "
        "which have fewer, are counted and are less than 0.5 % of its steps.",
    ]


def figure(drawn: Mapping[float, Mapping[float, list[tuple[int, float]]]]) -> str:
    """Curves over the number of drafts: a panel for each cost, a line for each acceptance."""
    panels = {
        f"a draft token costs {cost:g} steps": {
            f"a = {a:g}": line for a, line in line_by_acceptance.items()
        }
        for cost, line_by_acceptance in drawn.items()
    }
    return figures.curves(panels, "drafts of a step", "times as fast as plain decoding", lowest=0)
