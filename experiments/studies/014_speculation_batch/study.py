"""014: up to how many sequences drafts pay. The engine is simulated; study 016 measures one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from experiments.analysis import figures
from experiments.core import config
from experiments.core.drive import measure
from experiments.simulation.simulate import SimulatedEngine, SimulatedLLM
from experiments.studies.findings import Claim, Findings, markdown, rounded, span
from experiments.studies.fitted_h100 import EAGLE, OVERHEAD_S, seconds

QUESTION = "Up to how many sequences do drafts pay?"
EAGLE_3 = "EAGLE-3 (arXiv 2503.01840), abstract"
ISSUE = "vllm#48944"
ROOFLINE = "roofline"
FITTED = "fitted to vLLM"
COSTS = (ROOFLINE, FITTED)
DRAFTS = 3
# seconds of a draft token (see config.yaml); the fitted times contain the time of their drafter
DRAFT_S = 2.4e-4
ACCEPTANCES = (0.5, 0.7, 0.9)
LIKELY = (0.6, 0.7, 0.8)  # acceptances for claims whose sources do not give one
BATCHES = (1, 4, 16, 32, 64, 128, 256, 512)
FIXED = f"{DRAFTS} drafts"
ADAPTIVE = "adaptive"
# by batch: source, times as fast as without drafts, system
SOURCES = {
    64: (EAGLE_3, 1.38, "SGLang, H100"),
    256: (ISSUE, 0.79, "Gemma-4-31B in FP8, H100, context 400"),
}
WITHIN = 1.25
WHY = {
    ROOFLINE: "kernels reach less than the data sheet's arithmetic, and sampling four times as "
    "many rows takes time that a roofline does not have",
    FITTED: "the fit is of batches up to 64 and of another model, and is linear: it knows no "
    "point from which arithmetic binds",
}


class Setting(NamedTuple):
    """acceptance: None is plain decoding."""

    cost: str
    batch: int
    acceptance: float | None = None
    adaptive: bool = False


Faster = Mapping[Setting, float]


def overrides(setting: Setting, rounds: int) -> tuple[str, ...]:
    """The keys of the config that a setting changes. `rounds`: full batches of requests."""
    keys = (f"engine.max_num_seqs={setting.batch}", f"workload.count={rounds * setting.batch}")
    if setting.cost == FITTED:
        keys += (f"simulate.host_s={OVERHEAD_S}",)
    if setting.acceptance is None:
        return keys
    drafts = (
        f"engine.speculative={{num_tokens: {DRAFTS}, adaptive: {str(setting.adaptive).lower()}}}"
    )
    keys += (drafts, f"simulate.acceptance={setting.acceptance}")
    if setting.cost == ROOFLINE:
        keys += (f"simulate.draft_s={DRAFT_S}",)
    return keys


def rate(folder: Path, setting: Setting, rounds: int) -> float:
    """Output tokens/s while the batch is full: a request that ends makes place for the next one."""
    (point,) = config.load(folder / "config.yaml", overrides(setting, rounds))
    experiment = point.experiment
    simulate = point.experiment.simulate
    assert simulate is not None, "the config has it"
    llm = SimulatedLLM(simulate, experiment.engine_config, experiment.model)
    if setting.cost == FITTED:
        step_time = partial(seconds, method=EAGLE)
        vocabulary = llm.tokenizer.vocab_size
        llm.engine = SimulatedEngine(
            llm.engine.config, step_time, vocab_size=vocabulary, simulate=simulate
        )
    return measure(llm, point, 0).summary["steady_output_tokens_per_s"]


def settings(batches: Sequence[int], acceptances: Sequence[float]) -> list[Setting]:
    return [
        Setting(cost, batch, acceptance, adaptive)
        for cost in COSTS
        for acceptance in acceptances
        for adaptive in (False, True)
        for batch in batches
    ]


def faster(folder: Path, chosen: Sequence[Setting], rounds: int) -> Faster:
    """Each setting's output tokens/s over that of plain decoding."""
    plain_settings = dict.fromkeys(Setting(setting.cost, setting.batch) for setting in chosen)
    plain = {setting: rate(folder, setting, rounds) for setting in plain_settings}
    return {
        setting: rate(folder, setting, rounds) / plain[Setting(setting.cost, setting.batch)]
        for setting in chosen
    }


def crossing(line: Sequence[tuple[float, float]]) -> float | None:
    """The batch from which drafts lose: where the line falls below 1 for the last time.

    Between two batches it is interpolated in the logarithm of the batch. None if the line is still
    at 1 or above at the largest batch.
    """
    if line[-1][1] >= 1:
        return None
    for (small, high), (large, low) in reversed(list(pairwise(line))):
        if high >= 1 > low:
            share = (high - 1) / (high - low)
            return math.exp(math.log(small) + share * math.log(large / small))
    return line[0][0]


def line(
    faster_by_setting: Faster, cost: str, acceptance: float, adaptive: bool
) -> list[tuple[float, float]]:
    """The points (batch, times as fast) of one curve."""
    return sorted(
        (setting.batch, ratio)
        for setting, ratio in faster_by_setting.items()
        if (setting.cost, setting.acceptance, setting.adaptive) == (cost, acceptance, adaptive)
    )


def run(folder: Path, quick: bool) -> Findings:
    batches, rounds = ((1, 256), 1) if quick else (BATCHES, 4)
    drawn_settings = settings(batches, ACCEPTANCES)
    likely = [
        Setting(cost, batch, acceptance)
        for cost in COSTS
        for batch in SOURCES
        for acceptance in LIKELY
    ]
    ratios = faster(folder, list(dict.fromkeys([*drawn_settings, *likely])), rounds)
    drawn = {setting: ratios[setting] for setting in drawn_settings}
    panels = {
        cost: {
            f"a = {a:g}, {ADAPTIVE if adaptive else FIXED}": line(drawn, cost, a, adaptive)
            for a in ACCEPTANCES
            for adaptive in (False, True)
        }
        for cost in COSTS
    }
    figure = figures.curves(
        panels, "sequences at once", "times as fast as without drafts", log_x=2, lowest=0
    )
    return Findings(
        claims_of(ratios), answer(drawn), {"faster.svg": figure}, [table(drawn, batches)]
    )


def claims_of(ratios: Faster) -> list[Claim]:
    """Published factors, and ours over the likely acceptances."""
    claims = []
    for batch, (source, published, system) in SOURCES.items():
        for cost in COSTS:
            range_of_ours = span(
                [ratios[Setting(cost, batch, acceptance)] for acceptance in LIKELY]
            )
            quantity = (
                f"{system}: {batch} at once, times as fast as without drafts; ours by times {cost}"
            )
            claims.append(Claim(source, quantity, published, range_of_ours, WITHIN, "x", WHY[cost]))
    return claims


def range_text(batch: float | None) -> str:
    """The batches in which drafts pay, in words. batch: the result of `crossing`."""
    if batch is None:
        return f"at every batch up to {BATCHES[-1]}"
    return f"up to {rounded(batch, 2)} sequences"


def answer(drawn: Faster) -> list[str]:
    sentences = []
    for cost in COSTS:
        pays = (
            f"{range_text(crossing(line(drawn, cost, a, False)))} with acceptance {a:g}"
            for a in ACCEPTANCES
        )
        lowest = min(
            ratio for setting, ratio in drawn.items() if setting.cost == cost and setting.adaptive
        )
        sentences.append(
            f"By times {cost}, {FIXED} pay {', '.join(pays)}. With `adaptive` the engine is never "
            f"less than {rounded(lowest)} times as fast as without drafts."
        )
    share, worst = min(
        (ratio / drawn[setting._replace(adaptive=False)], setting)
        for setting, ratio in drawn.items()
        if setting.adaptive
    )
    return [
        *sentences,
        f"Against {FIXED}, `adaptive` is worst with times {worst.cost}, batch {worst.batch} and "
        f"acceptance {worst.acceptance:g}: {rounded(share)} times as fast. Where a step verifies "
        "few drafts, its running average of acceptance may fall below what pays, and then it is "
        "corrected by one draft in 32 steps.",
        "The acceptance is not known for the sources of the claims, and the number of drafts is "
        f"not for {ISSUE}; ours has {DRAFTS} drafts, and the range is over acceptances from "
        f"{LIKELY[0]:g} to {LIKELY[-1]:g}.",
    ]


def table(drawn: Faster, batches: Sequence[int]) -> str:
    rows = []
    for cost in COSTS:
        for a in ACCEPTANCES:
            for adaptive in (False, True):
                points = line(drawn, cost, a, adaptive)
                rows.append((cost, a, ADAPTIVE if adaptive else FIXED, *(x for _, x in points)))
    return markdown(
        ("times", "acceptance", "drafts", *(f"batch {batch}" for batch in batches)), rows
    )
