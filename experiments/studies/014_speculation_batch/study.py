"""014: up to how many sequences drafts pay. Simulated; study 016 measures it."""

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
ROOFLINE, FITTED = "roofline", "fitted to vLLM"
COSTS = (ROOFLINE, FITTED)
DRAFTS = 3
DRAFT_S = 2.4e-4  # see config.yaml; the fitted times have a drafter's own
ACCEPTANCES = (0.5, 0.7, 0.9)
LIKELY = (0.6, 0.7, 0.8)  # of claims, whose sources do not give it
BATCHES = (1, 4, 16, 32, 64, 128, 256, 512)
FIXED, ADAPTIVE = f"{DRAFTS} drafts", "adaptive"
SOURCES = {
    64: (EAGLE_3, 1.38, "SGLang, H100"),
    256: (ISSUE, 0.79, "Gemma-4-31B in FP8, H100, context 400"),
}
WITHIN = 1.25
WHY = {
    ROOFLINE: "kernels reach less than the data sheet's arithmetic, and sampling four times as many rows takes time "
    "that a roofline does not have",
    FITTED: "the fit is of batches up to 64 and of another model, and is linear: it knows no point from which "
    "arithmetic binds",
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
    found = (f"engine.max_num_seqs={setting.batch}", f"workload.count={rounds * setting.batch}")
    if setting.cost == FITTED:
        found += (f"simulate.host_s={OVERHEAD_S}",)
    if setting.acceptance is None:
        return found
    drafts = (
        f"engine.speculative={{num_tokens: {DRAFTS}, adaptive: {str(setting.adaptive).lower()}}}"
    )
    found += (drafts, f"simulate.acceptance={setting.acceptance}")
    return (*found, f"simulate.draft_s={DRAFT_S}") if setting.cost == ROOFLINE else found


def rate(folder: Path, setting: Setting, rounds: int) -> float:
    """Output tokens/s while the batch is full: a request that ends makes place for the next one."""
    (point,) = config.load(folder / "config.yaml", overrides(setting, rounds))
    experiment, simulate = point.experiment, point.experiment.simulate
    assert simulate is not None, "the config has it"
    llm = SimulatedLLM(simulate, experiment.engine_config, experiment.model)
    if setting.cost == FITTED:
        step_time, vocabulary = partial(seconds, method=EAGLE), llm.tokenizer.vocab_size
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


def faster(folder: Path, wanted: Sequence[Setting], rounds: int) -> Faster:
    """Each setting's output tokens/s over that of plain decoding."""
    plain = {
        one: rate(folder, one, rounds)
        for one in dict.fromkeys(Setting(s.cost, s.batch) for s in wanted)
    }
    return {one: rate(folder, one, rounds) / plain[Setting(one.cost, one.batch)] for one in wanted}


def crossing(line: Sequence[tuple[float, float]]) -> float | None:
    """The batch from which drafts lose: where the line last falls below 1, interpolated in logarithms of the batch.

    None if it is still above 1 at the largest batch.
    """
    if line[-1][1] >= 1:
        return None
    for (small, high), (large, low) in reversed(list(pairwise(line))):
        if high >= 1 > low:
            share = (high - 1) / (high - low)
            return math.exp(math.log(small) + share * math.log(large / small))
    return line[0][0]


def line(found: Faster, cost: str, acceptance: float, adaptive: bool) -> list[tuple[float, float]]:
    """Times as fast, by batch."""
    return sorted(
        (s.batch, x) for s, x in found.items() if s[:1] + s[2:] == (cost, acceptance, adaptive)
    )


def run(folder: Path, quick: bool) -> Findings:
    batches, rounds = ((1, 256), 1) if quick else (BATCHES, 4)
    wanted = settings(batches, ACCEPTANCES)
    likely = [
        Setting(cost, batch, acceptance)
        for cost in COSTS
        for batch in SOURCES
        for acceptance in LIKELY
    ]
    found = faster(folder, list(dict.fromkeys([*wanted, *likely])), rounds)
    drawn = {one: found[one] for one in wanted}
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
    return Findings(claimed(found), answer(drawn), {"faster.svg": figure}, [table(drawn, batches)])


def claimed(found: Faster) -> list[Claim]:
    """Published factors, and ours over the likely acceptances."""
    claims = []
    for batch, (source, published, where) in SOURCES.items():
        for cost in COSTS:
            ours = span([found[Setting(cost, batch, acceptance)] for acceptance in LIKELY])
            what = (
                f"{where}: {batch} at once, times as fast as without drafts; ours by times {cost}"
            )
            claims.append(Claim(source, what, published, ours, WITHIN, "x", WHY[cost]))
    return claims


def where(batch: float | None) -> str:
    return (
        f"up to {rounded(batch, 2)} sequences"
        if batch is not None
        else f"at every batch up to {BATCHES[-1]}"
    )


def answer(drawn: Faster) -> list[str]:
    sentences = []
    for cost in COSTS:
        pays = (
            f"{where(crossing(line(drawn, cost, a, False)))} with acceptance {a:g}"
            for a in ACCEPTANCES
        )
        least = min(x for setting, x in drawn.items() if setting.cost == cost and setting.adaptive)
        sentences.append(
            f"By times {cost}, {FIXED} pay {', '.join(pays)}. With `adaptive` the engine is never less than "
            f"{rounded(least)} times as fast as without drafts."
        )
    share, worst = min(
        (x / drawn[one._replace(adaptive=False)], one) for one, x in drawn.items() if one.adaptive
    )
    return [
        *sentences,
        f"Against {FIXED}, `adaptive` is worst with times {worst.cost}, batch {worst.batch} and acceptance "
        f"{worst.acceptance:g}: {rounded(share)} times as fast. Where a step verifies few drafts, its running average "
        "of acceptance may fall below what pays, and then it is corrected by one draft in 32 steps.",
        f"The acceptance is not known for the sources of the claims, and the number of drafts is not for {ISSUE}; ours "
        f"has {DRAFTS} drafts, and the range is over acceptances from {LIKELY[0]:g} to {LIKELY[-1]:g}.",
    ]


def table(drawn: Faster, batches: Sequence[int]) -> str:
    rows = []
    for cost in COSTS:
        for a in ACCEPTANCES:
            for adaptive in (False, True):
                several = line(drawn, cost, a, adaptive)
                rows.append((cost, a, ADAPTIVE if adaptive else FIXED, *(x for _, x in several)))
    return markdown(
        ("times", "acceptance", "drafts", *(f"batch {batch}" for batch in batches)), rows
    )
