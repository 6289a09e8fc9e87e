"""002: the token budget and the composition of steps, after Sarathi-Serve (Agrawal et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
ABLATION = "Sarathi-Serve, table 4"
# (TTFT p50, ITL p99) in seconds, of the first three NAMES
PUBLISHED = ((0.53, 0.68), (1.04, 0.17), (0.76, 0.14))
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


def chunked_prefill(step: Roofline, prompt: int, chunk: int) -> float:
    """Seconds to compute a prompt alone in chunks of `chunk` tokens."""
    total = 0.0
    for start in range(0, prompt, chunk):
        end = min(start + chunk, prompt)
        count = end - start
        total += step(
            Work(count, 1, int(end == prompt), end, count * start + count * (count + 1) // 2)
        )
    return total


def run(folder: Path, quick: bool) -> Findings:
    workload = (f"workload.count={64 if quick else 256}",)
    repeats = 2 if quick else None
    points = simulated(folder / "config.yaml", *workload, repeats=repeats)
    runs: dict[str, Sequence[Summary]] = dict(
        zip(NAMES, (summaries for _, summaries in points), strict=True)
    )
    claims = []
    for i in (1, 2):
        for k, (metric, quantity) in enumerate(
            ((TTFT, "first token, p50"), (GAP, "between tokens, p99"))
        ):
            published = PUBLISHED[i][k] / PUBLISHED[0][k]
            ratio = ratios(runs[NAMES[i]], runs[NAMES[0]], metric)
            assert ratio is not None, "no latency is zero"
            claims.append(
                Claim(
                    ABLATION,
                    f"{quantity}: {NAMES[i]}, over {NAMES[0]}",
                    published,
                    ratio,
                    1.5,
                    "x",
                    LOAD,
                )
            )
    yi = Roofline(SHAPES["yi-34b"], CHIPS["a100-80g"], 2, 0.8, 0.6)
    cost = {
        chunk: 100 * (chunked_prefill(yi, 8192, chunk) / chunked_prefill(yi, 8192, 8192) - 1)
        for chunk in BUDGETS
    }
    alone = "Sarathi-Serve, cost of chunks"
    claims.append(
        Claim(alone, "prefill time more with chunks of 512", (0, 25), exactly(cost[512]), 1.0, "%")
    )
    claims.append(
        Claim(
            alone, "prefill time more with chunks of 2,048", (0, 3), exactly(cost[2048]), 1.0, "%"
        )
    )
    mistral = Roofline(SHAPES["mistral-7b"], CHIPS["a100-80g"])
    at, past = (mistral(Work(n, 1, 1, n, n * n // 2)) for n in (256, 257))
    increase = exactly(100 * (past / at - 1))
    claims.append(
        Claim(
            "Sarathi-Serve, tiles",
            "a step of 257 tokens over one of 256",
            (32, 32),
            increase,
            1.25,
            "%",
            TILES,
        )
    )

    decodes = Work(32, 32, 32, 32 * 4096, 32 * 4096)
    joined = Work(32 + 4096, 33, 33, 33 * 4096, 32 * 4096 + 4096 * 4097 // 2)
    stall = exactly(mistral(joined) / mistral(decodes))
    quantity = "a prompt of 4,096 tokens beside 32 decodes of that context, over the decodes alone"
    claims.append(Claim("Sarathi-Serve, stalls", quantity, (1, 28.3), stall, 1.0, "x", STALL))

    rows = [
        (name, *(over(summaries, path).middle for path in (TTFT, GAP, "itl_s.max")))
        for name, summaries in runs.items()
    ]
    curve: dict[str, list[tuple[float, float]]] = {
        "first token, p50": [],
        "between tokens, p99": [],
    }
    for budget in BUDGETS[::3] if quick else BUDGETS:
        ((_, summaries),) = simulated(
            folder / "config.yaml",
            "sweep=null",
            f"engine.max_num_batched_tokens={budget}",
            *workload,
            repeats=repeats,
        )
        curve["first token, p50"].append((budget, over(summaries, TTFT).middle))
        curve["between tokens, p99"].append((budget, over(summaries, GAP).middle))
    hybrid = rows[0]
    mixed = rows[2]
    answer = [
        f"Whole prompts beside decodes give the first token after {hybrid[1]:.2f} s and a 99th "
        "percentile of gaps of "
        f"{hybrid[2]:.2f} s; chunks of 1,024 beside decodes {mixed[1]:.2f} and {mixed[2]:.2f} s.",
        "The budget decides between the two: it limits a step and so the gap, and it is the size "
        "of a prompt's chunks.",
    ]
    figure = figures.curves(
        {"Yi-34B, two A100": curve}, "tokens a step", "seconds", log_x=2, log_y=10
    )
    head = ("a step has", "first token, p50, s", "between tokens, p99, s", "longest gap, s")
    costs = markdown(
        ("tokens a chunk", "prefill of 8,192 tokens takes longer by, %"), list(cost.items())
    )
    return Findings(claims, answer, {"budget.svg": figure}, [markdown(head, rows), costs])
