"""001: the block size, after Fig. 18 of the PagedAttention paper (Kwon et al. 2023)."""

from __future__ import annotations

from pathlib import Path

from experiments.analysis import figures
from experiments.studies import lengths
from experiments.studies.findings import Claim, Findings, interval, markdown, over, simulated

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


def run(folder: Path, quick: bool) -> Findings:
    claims = []
    used = {}
    rates = {}
    rows = []
    for data in lengths.DATA:
        count = (150 if quick else 600) * (1 if data == "ShareGPT" else 4)
        sizes = "[1, 16, 128, 256]" if quick else str(list(SIZES))
        points = simulated(
            folder / "config.yaml",
            *lengths.overrides(data),
            f"workload.count={count}",
            f"sweep.grid.engine.block_size={sizes}",
            repeats=2 if quick else None,
        )
        used[data] = []
        rates[data] = []
        for point, runs in points:
            size = point.experiment.engine.block_size
            full = interval([100 * (1 - run["fragmentation_share"]) for run in runs])
            rate = over(runs, "steady_output_tokens_per_s")
            ttft = over(runs, "ttft_s.p50")
            used[data].append((size, full.middle))
            rates[data].append((size, rate.middle))
            rows.append((data, size, full.middle, rate.middle, ttft.middle))
            if data == "Alpaca":
                published = UTILISATION[size]
                claims.append(
                    Claim(
                        PAPER,
                        f"slots that hold tokens, blocks of {size}",
                        published,
                        full,
                        1.1,
                        "%",
                    )
                )
        top = max(rate for _, rate in rates[data])
        good = [float(size) for size, rate in rates[data] if rate > 0.97 * top]
        quantity = f"{data}: largest block within 3 % of the best throughput"
        largest = interval(good[-1:])
        claims.append(
            Claim("PagedAttention, Fig. 18", quantity, BEST[data], largest, 1.0, "tokens", KERNEL)
        )
    used["published, Alpaca"] = [(size, UTILISATION[size]) for size in SIZES]
    alpaca = dict(rates["Alpaca"])
    sharegpt = dict(rates["ShareGPT"])
    answer = [
        f"With Alpaca's short requests, blocks of 256 make {alpaca[256] / alpaca[16]:.2f} times "
        "the throughput of "
        f"blocks of 16; with ShareGPT's longer ones {sharegpt[256] / sharegpt[16]:.2f} times.",
        "The cause is the empty slots of last blocks: they use memory that waiting requests need.",
    ]
    head = ("lengths like", "block", "full slots, %", "output tokens/s", "first token, p50, s")
    plots = {
        "slots.svg": figures.curves(
            {"slots of used blocks that hold tokens": used},
            "tokens a block",
            "%",
            log_x=2,
            lowest=0,
        ),
        "throughput.svg": figures.curves(
            {name: {name: curve} for name, curve in rates.items()},
            "tokens a block",
            "output tokens/s",
            log_x=2,
            lowest=0,
        ),
    }
    return Findings(claims, answer, plots, [markdown(head, rows)])
