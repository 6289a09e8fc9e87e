"""002: the token budget and the composition of steps, after Sarathi-Serve (Agrawal et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.analysis import figures
from experiments.simulation.cost import CHIPS, SHAPES, Roofline, Work
from experiments.studies.findings import (
    Claim,
    Findings,
    Summary,
    exactly,
    markdown,
    over,
    ratios,
    simulated,
)

QUESTION = (
    "What do the token budget and the way a step is composed do to first tokens and to "
    "gaps between tokens?"
)
NAMES = (
    "whole prompts beside decodes",
    "chunks and decodes by turns",
    "chunks beside decodes",
    "whole prompts first",
)
TTFT = "ttft_s.p50"
GAP = "itl_s.p99"
LATENCIES = {TTFT: "first token, p50", GAP: "between tokens, p99"}
ABLATION = "Sarathi-Serve, table 4"
# seconds, of the first three NAMES
PUBLISHED = (
    {TTFT: 0.53, GAP: 0.68},
    {TTFT: 1.04, GAP: 0.17},
    {TTFT: 0.76, GAP: 0.14},
)
LOAD = (
    "in a roofline, chunks cost almost nothing, but kernels lose up to a quarter; here waiting "
    "prompts are computed "
    "together, so each waits for all; the paper does not print the rate of that experiment"
)
STALL = "it grows with the length of the joining prompt, which the paper does not state"
TILES = (
    "a product of 257 tokens has 1.5 times the tiles of one of 256; on a GPU, other tiles of the "
    "same wave hide a part of this"
)
BUDGETS = (128, 256, 512, 1024, 2048, 4096)


def seconds_in_chunks(step: Roofline, prompt: int, chunk: int) -> float:
    """Seconds to compute a prompt alone in chunks of `chunk` tokens."""
    total = 0.0
    for start in range(0, prompt, chunk):
        end = min(start + chunk, prompt)
        count = end - start
        total += step(
            Work(
                tokens=count,
                sequences=1,
                sampled=int(end == prompt),
                context=end,
                pairs=count * start + count * (count + 1) // 2,
            )
        )
    return total


def ablation_claims(runs: Mapping[str, Sequence[Summary]]) -> list[Claim]:
    """The latencies of two ways of composing steps, over those of the first way."""
    claims = []
    base = NAMES[0]
    for name, published in zip(NAMES[1:3], PUBLISHED[1:], strict=True):
        for metric, latency in LATENCIES.items():
            ratio = ratios(runs[name], runs[base], metric)
            assert ratio is not None, "no latency is zero"
            quantity = f"{latency}: {name}, over {base}"
            published_ratio = published[metric] / PUBLISHED[0][metric]
            claims.append(Claim(ABLATION, quantity, published_ratio, ratio, 1.5, "x", LOAD))
    return claims


def chunk_costs() -> dict[int, float]:
    """How many per cent longer a prompt of 8,192 tokens takes in chunks, by tokens of a chunk."""
    yi = Roofline(SHAPES["yi-34b"], CHIPS["a100-80g"], chips=2, bandwidth_share=0.8, rate_share=0.6)
    in_one_chunk = seconds_in_chunks(yi, 8192, 8192)
    return {
        chunk: 100 * (seconds_in_chunks(yi, 8192, chunk) / in_one_chunk - 1) for chunk in BUDGETS
    }


def chunk_claims(costs: Mapping[int, float]) -> list[Claim]:
    source = "Sarathi-Serve, cost of chunks"
    quantity = "prefill time more with chunks of {:,}"
    return [
        Claim(source, quantity.format(chunk), (0, limit), exactly(costs[chunk]), 1.0, "%")
        for chunk, limit in ((512, 25), (2048, 3))
    ]


def step_claims() -> list[Claim]:
    """Two steps of Mistral-7B: one token more than a tile, and a prompt that joins decodes."""
    mistral = Roofline(SHAPES["mistral-7b"], CHIPS["a100-80g"])

    def prompt_seconds(n: int) -> float:
        return mistral(Work(tokens=n, sequences=1, sampled=1, context=n, pairs=n * n // 2))

    past_tile = prompt_seconds(257) / prompt_seconds(256)
    decodes = Work(tokens=32, sequences=32, sampled=32, context=32 * 4096, pairs=32 * 4096)
    joined = Work(
        tokens=32 + 4096,
        sequences=33,
        sampled=33,
        context=33 * 4096,
        pairs=32 * 4096 + 4096 * 4097 // 2,
    )
    return [
        Claim(
            "Sarathi-Serve, tiles",
            "a step of 257 tokens over one of 256",
            (32, 32),
            exactly(100 * (past_tile - 1)),
            1.25,
            "%",
            TILES,
        ),
        Claim(
            "Sarathi-Serve, stalls",
            "a prompt of 4,096 tokens beside 32 decodes of that context, over the decodes alone",
            (1, 28.3),
            exactly(mistral(joined) / mistral(decodes)),
            1.0,
            "x",
            STALL,
        ),
    ]


Curves = dict[str, list[tuple[float, float]]]


def budget_curves(folder: Path, budgets: Sequence[int], *overrides: str, **options: Any) -> Curves:
    """Latency -> its seconds by token budget."""
    curves: Curves = {latency: [] for latency in LATENCIES.values()}
    for budget in budgets:
        budget_overrides = ("sweep=null", f"engine.max_num_batched_tokens={budget}", *overrides)
        ((_, summaries),) = simulated(folder / "config.yaml", *budget_overrides, **options)
        for metric, latency in LATENCIES.items():
            curves[latency].append((budget, over(summaries, metric).middle))
    return curves


def answer(rows: Sequence[tuple[Any, ...]]) -> list[str]:
    hybrid = rows[0]
    mixed = rows[2]
    return [
        f"Whole prompts beside decodes give the first token after {hybrid[1]:.2f} s and a 99th "
        f"percentile of gaps of {hybrid[2]:.2f} s; chunks of 1,024 beside decodes {mixed[1]:.2f} "
        f"and {mixed[2]:.2f} s.",
        "The budget decides between the two: it limits a step and so the gap, and it is the size "
        "of a prompt's chunks.",
    ]


def run(folder: Path, quick: bool) -> Findings:
    workload = f"workload.count={64 if quick else 256}"
    repeats = 2 if quick else None
    points = simulated(folder / "config.yaml", workload, repeats=repeats)
    runs: dict[str, list[Summary]] = dict(
        zip(NAMES, (summaries for _, summaries in points), strict=True)
    )
    costs = chunk_costs()
    claims = [*ablation_claims(runs), *chunk_claims(costs), *step_claims()]
    rows = [
        (name, *(over(summaries, path).middle for path in (TTFT, GAP, "itl_s.max")))
        for name, summaries in runs.items()
    ]
    curves = budget_curves(folder, BUDGETS[::3] if quick else BUDGETS, workload, repeats=repeats)
    figure = figures.curves(
        {"Yi-34B, two A100": curves}, "tokens a step", "seconds", log_x=2, log_y=10
    )
    head = ("a step has", "first token, p50, s", "between tokens, p99, s", "longest gap, s")
    cost_head = ("tokens a chunk", "prefill of 8,192 tokens takes longer by, %")
    tables = [markdown(head, rows), markdown(cost_head, list(costs.items()))]
    return Findings(claims, answer(rows), {"budget.svg": figure}, tables)
