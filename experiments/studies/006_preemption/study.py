"""006: swapping against recomputation, after Fig. 19 of the PagedAttention paper (Kwon et al.
2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.analysis import figures
from experiments.simulation.cost import CHIPS, SHAPES, Roofline, Work
from experiments.studies.findings import Claim, Findings, exactly, markdown, over, simulated

QUESTION = (
    "Is it cheaper to move a preempted request's blocks to the host and back, or to "
    "compute them again?"
)
PAPER = "PagedAttention, Fig. 19"
TOKENS = 1024  # tokens of the single sequence that is moved or computed again
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WAYS = ("computed again", "moved block by block", "moved in one copy")
COPIES = "how long a copy of a few kilobytes takes to start is our guess (5 us)"


def alone(size: int) -> tuple[float, float, float]:
    """Milliseconds of one sequence of TOKENS by each of WAYS: computed again, or moved out and
    back.
    """
    roofline = Roofline(SHAPES["opt-13b"], CHIPS["a100-40g"], block_size=size)
    one_by_one = roofline._replace(batched_moves=False)
    at_once = roofline._replace(batched_moves=True)
    blocks = -(-TOKENS // size)
    work = Work(
        tokens=TOKENS,
        sequences=1,
        sampled=1,
        context=TOKENS,
        pairs=TOKENS * (TOKENS + 1) // 2,
    )
    seconds = roofline(work) - roofline.chip.launch
    # 2e3: out and back
    return 1e3 * seconds, 2e3 * one_by_one.move(blocks), 2e3 * at_once.move(blocks)


def alone_claims(cost: Mapping[int, Sequence[float]]) -> list[Claim]:
    """The claims about one sequence: its blocks moved one by one, over computing it again.

    cost: the result of `alone`, by size of a block.
    """
    # the paper has curves; we read "much more" as at least three times, and "comparable" as
    # within 1.5 times
    # size of a block -> words, published range, factor of agreement
    ranges = {1: ("much more", (3, 1e3), 1.0)}
    ranges |= dict.fromkeys((16, 32, 64), ("comparable", (0.67, 1.5), 1.1))
    return [
        Claim(
            PAPER,
            f"swapping over recomputing, blocks of {size}: {words}",
            published,
            exactly(cost[size][1] / cost[size][0]),
            factor,
            "x",
            COPIES,
        )
        for size, (words, published, factor) in ranges.items()
    ]


def measure(folder: Path, quick: bool) -> list[tuple[int, str, float, float]]:
    """Whole runs: (block size, way, preemptions, output tokens/s)."""
    rows = []
    points = simulated(
        folder / "config.yaml",
        f"workload.count={80 if quick else 300}",
        *(("sweep.grid.engine.block_size=[4, 64]",) if quick else ()),
        repeats=1 if quick else None,
    )
    for point, summaries in points:
        engine = point.experiment.engine
        simulate = point.experiment.simulate
        assert simulate is not None
        if engine.preemption == "recompute":
            way = WAYS[0]
        else:
            way = WAYS[2] if simulate.batched_moves else WAYS[1]
        preemptions = over(summaries, "preemptions").middle
        rate = over(summaries, "output_tokens_per_s").middle
        rows.append((engine.block_size, way, preemptions, rate))
    return rows


def run(folder: Path, quick: bool) -> Findings:
    cost = {size: alone(size) for size in SIZES}
    lines = {way: [(size, cost[size][i]) for size in SIZES] for i, way in enumerate(WAYS)}
    rows = measure(folder, quick)
    smallest = min(size for size, way, *_ in rows if way == WAYS[0])
    rates = {way: rate for size, way, _, rate in rows if size == smallest}
    recomputed, one_by_one, at_once = [rates[way] for way in WAYS]
    answer = [
        f"Alone, a sequence of {TOKENS:,} tokens takes {cost[16][0]:.0f} ms to compute again, "
        f"whatever the block size; moved out and back block by block {cost[1][1]:.0f} ms with "
        f"blocks of 1 and {cost[16][1]:.0f} with blocks of 16, in one copy {cost[16][2]:.0f}.",
        f"In a whole run with blocks of {smallest}, block by block makes "
        f"{one_by_one / recomputed:.2f} times the output of "
        f"recomputing, and one copy {at_once / recomputed:.2f} times.",
    ]
    figure = figures.curves(
        {f"{TOKENS:,} tokens, OPT-13B, A100": lines}, "tokens a block", "ms", log_x=2, log_y=10
    )
    head = ("block", "preempted requests are", "preemptions", "output tokens/s")
    return Findings(alone_claims(cost), answer, {"cost.svg": figure}, [markdown(head, rows)])
