"""003: memory that contiguous reservations waste, after Fig. 2 and 13 of PagedAttention (Kwon et
al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.analysis import figures
from experiments.studies import lengths
from experiments.studies.findings import (
    Claim,
    Findings,
    Interval,
    interval,
    markdown,
    results_of,
)
from pagedjax.host import reservation
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import StepResult

QUESTION = (
    "How much of the KV cache holds tokens, and how many requests run together, reserved or paged?"
)
PAPER = "PagedAttention, Fig. 2"
PARTS = ("tokens", "reserved", "internal", "external")
# Per cent of the cache: token states, slots that requests fill later, slots that they never fill,
# free pieces.
SHARES = {
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
    "none": (96.3, None, None, None),
}
BATCHED = {  # Fig. 13: requests that run together
    "ShareGPT": {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "none": 30.42},
    "Alpaca": {"max": 7.00, "pow2": 43.24, "oracle": 72.75, "none": 132.44},
}
NAMES = {"max": "Orca (Max)", "pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "none": "paged"}
RATE = (
    "the paper's requests arrived at a rate that the paged engine could serve, so not all of "
    "its capacity was needed"
)


def shares(results: Sequence[StepResult], limits: SchedulerConfig) -> dict[str, float]:
    """Per cent of all slots after each step, mean over the steps with waiting requests."""
    total = dict.fromkeys(PARTS, 0.0)
    plans = [result.plan for result in results if result.plan.num_waiting]
    for plan in plans:
        slots = plan.num_blocks * limits.block_size
        filled = needed = reserved = 0
        for seq, start, count in zip(plan.seqs, plan.starts, plan.counts, strict=True):
            room = len(seq.blocks) * limits.block_size
            reserved_by_rule = room
            if limits.reservation != "none":
                reserved_by_rule = reservation.tokens(limits, seq)
            needed_by_seq = min(seq.limit, room)
            filled += start + count
            needed += needed_by_seq
            reserved += max(reserved_by_rule, needed_by_seq)
        parts = filled, needed - filled, reserved - needed, slots - reserved
        for name, part in zip(PARTS, parts, strict=True):
            total[name] += 100 * part / slots
    return {name: value / len(plans) for name, value in total.items()}


def together(results: Sequence[StepResult]) -> float:
    """Mean number of sequences in a step with waiting requests."""
    sizes = [len(result.plan.seqs) for result in results if result.plan.num_waiting]
    return sum(sizes) / len(sizes)


def claims_of(data: str, kind: str, parts: Mapping[str, Interval], places: Interval) -> list[Claim]:
    """The claims of one kind of reservation: per cent of the cache, and requests together."""
    claims = []
    if data == "ShareGPT":
        claims = [
            Claim(
                PAPER,
                f"{NAMES[kind]}: {part}",
                published,
                parts[part],
                1.25,
                "%",
                lengths.MEANS_ALONE,
            )
            for part, published in zip(PARTS, SHARES[kind], strict=True)
            if published
        ]
    why = RATE if kind == "none" else lengths.MEANS_ALONE
    quantity = f"{data}, {NAMES[kind]}: requests together"
    published = BATCHED[data][kind]
    return [
        *claims,
        Claim("PagedAttention, Fig. 13", quantity, published, places, 1.25, "", why),
    ]


def answer(shares_by_name: Mapping[str, Mapping[str, float]]) -> list[str]:
    paged = shares_by_name["paged"]["tokens"]
    longest = shares_by_name["Orca (Max)"]["tokens"]
    return [
        f"Of the cache {paged:.0f} % holds tokens when it is paged and {longest:.0f} % when each "
        "request reserves its longest possible length.",
        "Reservations lose three kinds of slots: those that a request fills later, those that it "
        "never fills, and free pieces into which no power of two fits.",
    ]


def table(rows: Sequence[tuple[Any, ...]]) -> str:
    head = ("lengths like", "cache", *(f"{part}, %" for part in PARTS), "requests together")
    return markdown(head, rows)


def run(folder: Path, quick: bool) -> Findings:
    claims = []
    bars = {}
    rows = []
    for data in lengths.DATA:
        count = lengths.count_of(data, 200 if quick else 600)
        bars[data] = {}
        for point, runs in results_of(
            folder / "config.yaml",
            *lengths.overrides(data),
            f"workload.count={count}",
            repeats=2 if quick else None,
        ):
            kind = point.experiment.engine.reservation
            repeats = [shares(results, limits) for limits, results in runs]
            parts = {part: interval([repeat[part] for repeat in repeats]) for part in PARTS}
            places = interval([together(results) for _, results in runs])
            claims += claims_of(data, kind, parts, places)
            bars[data][NAMES[kind]] = {part: share.middle for part, share in parts.items()}
            rows.append((data, NAMES[kind], *bars[data][NAMES[kind]].values(), places.middle))
    figure = figures.stacks(bars, "% of the cache's slots")
    return Findings(claims, answer(bars["ShareGPT"]), {"memory.svg": figure}, [table(rows)])
