"""027: requests that are split at a token between two engines (DynaServe; Ruan et al. 2025, arXiv
2504.09285, second version).

The abstract: 1.15 to 3.07 times the serving capacity of engines that do both (with chunked prefill)
and of engines for prompts and others that decode, with the 99th percentile of the time between
tokens within 100 ms. Its global scheduler chooses the token for each request, by the load of equal
engines that compute first and second parts. Here it is a rule of pools (`pools.split`): one engine
computes the first parts of all requests, and the other one the rest; the best of a few shares
counts, as the best division of GPUs in study 019.

The paper does not say in its abstract what else a served load must meet, and its lengths are not
here. So a load is served if tokens are in time as in the paper and first tokens within TTFT; and
lengths are those of three data sets that others published.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from experiments.analysis import figures
from experiments.studies import lengths
from experiments.studies.findings import (
    Claim,
    Findings,
    Summary,
    dig,
    exactly,
    markdown,
    rounded,
    simulated,
)

QUESTION = "What load do two engines serve that split each request at a token?"
SOURCE = "DynaServe, abstract"
PUBLISHED = (1.15, 3.07)
ITL = 0.1  # seconds between tokens, 99th percentile
TTFT = 5.0  # seconds to the first token, 99th percentile
SHARES = (0.25, 0.5, 0.75, 0.9)
HALVINGS = 5  # of the range of a search
BOTH = "2 that do both"
POOLS = "prompts + decodes"
WHY = (
    "one share for all requests and one kind of part for each engine, where DynaServe chooses for "
    "each request; the paper's lengths and what a served load must meet are not known"
)
# lognormal lengths, fitted to the traces of Azure (2023; configs/synthetic_conv.yaml)
WORKLOADS = {
    "code": (
        "workload.prompt={dist: lognormal, mu: 7.0, sigma: 1.36, max: 8192}",
        "workload.output={dist: lognormal, mu: 2.79, sigma: 0.85, max: 1024}",
    ),
    "conversations": (
        "workload.prompt={dist: lognormal, mu: 6.63, sigma: 0.99, max: 8192}",
        "workload.output={dist: lognormal, mu: 5.02, sigma: 0.86, max: 1024}",
    ),
    "first turns": lengths.overrides("ShareGPT"),
}


class Served(NamedTuple):
    """The highest rates that two GPUs serve, in requests/s.

    limit: the highest rate of the search. A way that serves it may serve more.
    unsplit: two engines that both compute whole requests.
    pools: one engine for prompts, one that decodes.
    splits: by the share of a request's tokens that the first engine computes.
    """

    limit: float
    unsplit: float
    pools: float
    splits: Mapping[float, float]

    @property
    def best_share(self) -> float:
        """The share that serves most."""
        return max(self.splits, key=lambda share: self.splits[share])

    def text(self, rate: float) -> str:
        return f"at least {rounded(rate)}" if self.is_bound(rate) else rounded(rate)

    def is_bound(self, rate: float) -> bool:
        """Whether a rate is only a lower bound."""
        return rate > 0.999 * self.limit


def engines() -> dict[str, tuple[str, ...]]:
    """Two GPUs in each way, as options."""
    ways = {
        BOTH: ("pools=null", "replicas={count: 2, router: least_loaded}"),
        POOLS: ("pools.prefill.max_num_batched_tokens=2048",),
    }
    return ways | {f"split at {share:g}": (f"pools.split={share}",) for share in SHARES}


def is_served(summary: Summary) -> bool:
    return dig(summary, "itl_s.p99") <= ITL and dig(summary, "ttft_s.p99") <= TTFT


def throughput(folder: Path, *options: str) -> float:
    """Requests/s of two engines that do both, with requests that all arrive at once."""
    arrivals = "workload.arrivals={process: at_once}"
    ((_, (summary,)),) = simulated(folder / "config.yaml", arrivals, *engines()[BOTH], *options)
    return dig(summary, "requests_per_s")


def highest(folder: Path, limit: float, halvings: int, *options: str) -> float:
    """The highest rate that is served, by halves from 0 to `limit`."""
    low = 0.0
    high = limit
    for _ in range(halvings):
        rate = (low + high) / 2
        arrivals = f"workload.arrivals.rate={rate}"
        ((_, (summary,)),) = simulated(folder / "config.yaml", arrivals, *options)
        if is_served(summary):
            low = rate
        else:
            high = rate
    return low


def served_rates(folder: Path, quick: bool, *options: str) -> Served:
    """The rates of one data set. options: its lengths and the number of requests."""
    limit = 2 * throughput(folder, *options)
    halvings = 2 if quick else HALVINGS
    rates = {
        name: highest(folder, limit, halvings, *way, *options)
        for name, way in engines().items()
        if not quick or name in (BOTH, POOLS, "split at 0.5")
    }
    splits = {
        share: rates[f"split at {share:g}"] for share in SHARES if f"split at {share:g}" in rates
    }
    return Served(limit * (1 - 0.5**halvings), rates[BOTH], rates[POOLS], splits)


def run(folder: Path, quick: bool) -> Findings:
    count = f"workload.count={30 if quick else 300}"
    names = ("conversations",) if quick else tuple(WORKLOADS)
    rates = {name: served_rates(folder, quick, count, *WORKLOADS[name]) for name in names}
    claims = [
        Claim(
            SOURCE,
            f"Qwen2.5-14B, 2 GPUs, {name}: capacity of a split over {way}",
            PUBLISHED,
            exactly(row.splits[row.best_share] / below),
            unit="x",
            why=WHY,
        )
        for name, row in rates.items()
        for way, below in ((BOTH, row.unsplit), (POOLS, row.pools))
        if below and not row.is_bound(row.splits[row.best_share])
    ]
    panels = {
        name: {
            "split": sorted(row.splits.items()),
            BOTH: [(SHARES[0], row.unsplit), (SHARES[-1], row.unsplit)],
            POOLS: [(SHARES[0], row.pools), (SHARES[-1], row.pools)],
        }
        for name, row in rates.items()
    }
    figure = figures.curves(
        panels,
        "share of tokens in the first engine",
        "requests/s served",
        lowest=0,
        dashed=(BOTH, POOLS),
    )
    return Findings(claims, answer(rates), {"capacity.svg": figure}, [table(rates)])


def answer(rates: Mapping[str, Served]) -> list[str]:
    parts = [
        f"{name}: {row.text(row.splits[row.best_share])} requests/s with {row.best_share:g} of the "
        f"tokens in the first engine, {row.text(row.unsplit)} with two engines that do both, "
        f"{row.text(row.pools)} with one for prompts and one that decodes"
        for name, row in rates.items()
    ]
    return [
        f"Served by two GPUs: {'; '.join(parts)}.",
        f"A load is served if the 99th percentiles of the time between tokens and of the first "
        f"token are within {1000 * ITL:.0f} ms and {TTFT:g} s. The second one is ours. Rates are "
        f"searched by halves, so they are exact within {100 * 2 / 2**HALVINGS:.0f} % of what two "
        "engines make. Where a way serves the highest rate that was tried, its requests are too few "
        "for a queue, and there is no claim.",
        "Different from the paper: requests have one share, and an engine has first parts or "
        "second parts; there each request has a token of its own, chosen by the load of the "
        "engines, which have both kinds. The sizes of steps are fixed, and pages move after the "
        "first part and not beside it. A limit of the output is known (`max_tokens`), as the paper "
        "predicts it. Lengths are those of Azure's traces (lognormal) and of ShareGPT "
        "(exponential).",
    ]


def table(rates: Mapping[str, Served]) -> str:
    rows = [
        (name, way, row.text(rate))
        for name, row in rates.items()
        for way, rate in (
            (BOTH, row.unsplit),
            (POOLS, row.pools),
            *((f"split at {share:g}", rate) for share, rate in row.splits.items()),
        )
    ]
    return markdown(("lengths", "engines", "requests/s served"), rows)
