"""001: the block size, after Fig. 18 of the PagedAttention paper (Kwon et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.analysis import figures
from experiments.studies import lengths
from experiments.studies.findings import (
    Claim,
    Findings,
    Interval,
    interval,
    markdown,
    over,
    simulated,
)

QUESTION = "What does the block size do to the use of memory, to throughput and to latency?"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Per cent of the slots of used blocks that hold tokens, Alpaca's lengths.
UTILISATION: dict[int, float] = dict(
    zip(SIZES, (100.0, 99.4, 98.1, 95.7, 91.3, 83.4, 70.5, 51.4, 30.0), strict=True)
)
PAPER = "PagedAttention, block sizes, Alpaca"
BEST = {"ShareGPT": (16, 128), "Alpaca": (16, 32)}
KERNEL = (
    "the paper's best size weighs fragmentation against a kernel that reads small blocks slowly; a "
    "roofline has no such kernel, so here the smallest block is never worse"
)


def measure(folder: Path, data: str, quick: bool) -> list[tuple[int, Interval, float, float]]:
    """The points of a data set: (block size, per cent of full slots, output tokens/s, seconds to
    the first token).
    """
    count = lengths.count_of(data, 150 if quick else 600)
    points = simulated(
        folder / "config.yaml",
        *lengths.overrides(data),
        f"workload.count={count}",
        f"sweep.grid.engine.block_size={[1, 16, 128, 256] if quick else list(SIZES)}",
        repeats=2 if quick else None,
    )
    return [
        (
            point.experiment.engine.block_size,
            interval([100 * (1 - run["fragmentation_share"]) for run in runs]),
            over(runs, "steady_output_tokens_per_s").middle,
            over(runs, "ttft_s.p50").middle,
        )
        for point, runs in points
    ]


def best_claim(data: str, rates: Sequence[tuple[int, float]]) -> Claim:
    """The claim about the largest block whose throughput is near the best throughput."""
    top = max(rate for _, rate in rates)
    near_best = [float(size) for size, rate in rates if rate > 0.97 * top]
    quantity = f"{data}: largest block within 3 % of the best throughput"
    largest = interval(near_best[-1:])
    return Claim("PagedAttention, Fig. 18", quantity, BEST[data], largest, 1.0, "tokens", KERNEL)


def answer(rates: Mapping[str, Sequence[tuple[int, float]]]) -> list[str]:
    alpaca = dict(rates["Alpaca"])
    sharegpt = dict(rates["ShareGPT"])
    return [
        f"With Alpaca's short requests, blocks of 256 make {alpaca[256] / alpaca[16]:.2f} times "
        "the throughput of blocks of 16; with ShareGPT's longer ones "
        f"{sharegpt[256] / sharegpt[16]:.2f} times.",
        "The cause is the empty slots of last blocks: they use memory that waiting requests need.",
    ]


def run(folder: Path, quick: bool) -> Findings:
    claims = []
    used_shares = {}
    rates = {}
    rows = []
    for data in lengths.DATA:
        points = measure(folder, data, quick)
        used_shares[data] = [(size, full.middle) for size, full, *_ in points]
        rates[data] = [(size, rate) for size, _, rate, _ in points]
        rows += [(data, size, full.middle, *columns) for size, full, *columns in points]
        if data == "Alpaca":
            claims += [
                Claim(
                    PAPER,
                    f"slots that hold tokens, blocks of {size}",
                    UTILISATION[size],
                    full,
                    1.1,
                    "%",
                )
                for size, full, *_ in points
            ]
        claims.append(best_claim(data, rates[data]))
    used_shares["published, Alpaca"] = [(size, UTILISATION[size]) for size in SIZES]
    head = ("lengths like", "block", "full slots, %", "output tokens/s", "first token, p50, s")
    axes = {"log_x": 2, "lowest": 0}
    plots = {
        "slots.svg": figures.curves(
            {"slots of used blocks that hold tokens": used_shares}, "tokens a block", "%", **axes
        ),
        "throughput.svg": figures.curves(
            {name: {name: curve} for name, curve in rates.items()},
            "tokens a block",
            "output tokens/s",
            **axes,
        ),
    }
    return Findings(claims, answer(rates), plots, [markdown(head, rows)])
