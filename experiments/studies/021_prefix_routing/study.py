"""021: when prefix routing pays: eight replicas, and prefixes that fit or do not fit into a cache.
The replicas are simulated.

Source: A. Golubev, "How llm-d Prefix-Cache Routing Made Qwen 7B on EKS 2.3x Faster" (26 June 2026),
andygolubev.com, also on dev.to. It gives the load in full (`vllm bench serve`, data set
prefix_repetition), but of the engine's options only the block size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.analysis import figures
from experiments.core.config import Point
from experiments.core.drive import Measured
from experiments.studies.findings import Claim, Findings, markdown, rounded, simulated, span

QUESTION = "When does it pay to send a request to the replica that has its prefix?"
SOURCE = "Golubev 2026 (blog), llm-d, 8 x A10G, Qwen2.5-7B, 512 clients"
SETTING = "150 prefixes of 2,048 tokens"
# as in config.yaml
REPLICAS = 8
CACHE = 110_592  # tokens of a replica
PREFIX = 2048
# Tokens of a replica. The source does not give the size of its cache. Weights and cache together
# take about 85, 90 and 95 % of the memory.
CACHES = (90_112, CACHE, 131_072)
ROUTERS = ("round_robin", "least_loaded", "prefix")
PLAIN, LOADED, AWARE = ROUTERS
PREFIXES = (8, 32, 64, 150, 300, 432, 864)
CLIENTS = (8, 64)  # the other runs have 512
SOURCE_PREFIXES = 150
SOURCE_CLIENTS = 512
TURNS = 12  # requests of each prefix, on average
LEAST = 3000  # requests of a run at least
MEASURED = 6423 / 2742  # output tokens/s of prefix routing over round robin
WITHIN = 1.25

WHY_SHARE = (
    "kernels reach less than the data sheet's bandwidth and arithmetic, and here a step costs the "
    "host 0.2 ms in all; the source's server, router and network take time too"
)
WHY_FOUND = (
    "not explained: the source's cache may be smaller than all of ours; sequences that enter again "
    "after a preemption find their own blocks, which is a small part of the difference"
)
WHY_FIRST = (
    "a mean has the first prompts in it, which no cache has; by a roofline they are computed "
    "faster, and their queue is shorter"
)
WHY_QUEUE = (
    "with round robin ours finds more tokens in the cache, and computes the others "
    "faster: its queue is shorter"
)


class Run(NamedTuple):
    """The numbers of a run that are compared. Counts are over all replicas together."""

    rate: float  # output tokens/s
    first: float  # mean seconds to the first token
    token: float  # mean seconds of a token after the first
    hits: float  # share of admitted tokens that were found in a cache
    used: float  # share of the blocks that running requests hold
    waiting: float  # requests that wait, mean over time
    uneven: float  # requests of the busiest replica over the mean


Runs = Mapping[str, Run]  # by router


def run_of(measured: Measured) -> Run:
    """The numbers of a run that are compared."""
    summary = measured.summary
    waiting = sum(step.waiting * step.seconds for step in measured.steps) / summary["duration_s"]
    requests = summary["replicas"]["requests"]
    return Run(
        rate=summary["output_tokens_per_s"],
        first=summary["ttft_s"]["mean"],
        token=summary["tpot_s"]["mean"],
        hits=summary["prefix_hit_share"],
        used=summary["blocks_used"]["mean"] / summary["blocks_total"],
        waiting=waiting,
        uneven=requests["most"] / requests["mean"],
    )


def runs(folder: Path, *overrides: str) -> Runs:
    """Make a run for each router of the config."""
    run_by_router: dict[str, Run] = {}

    def on_run(point: Point, measured: Measured) -> None:
        run_by_router[point.swept["replicas.router"]] = run_of(measured)

    simulated(folder / "config.yaml", *overrides, on_run=on_run)
    return run_by_router


def gain(runs: Runs, router: str = AWARE, over: str = PLAIN) -> float:
    """Output tokens/s of a router over those of another one."""
    return runs[router].rate / runs[over].rate


def sooner(runs: Runs, router: str = AWARE) -> float:
    """How many times as soon the first token comes with `router` as with PLAIN, on average."""
    return runs[PLAIN].first / runs[router].first


def caches_of(prefixes: int) -> float:
    """The tokens of all prefixes, in units of one replica's cache."""
    return prefixes * PREFIX / CACHE


def claims_of(by_cache: Sequence[Runs]) -> list[Claim]:
    """Published numbers, and ours over the caches of `by_cache`."""

    def claim(quantity: str, published: Any, values: Sequence[float], unit: str, why: str) -> Claim:
        return Claim(SOURCE, f"{SETTING}: {quantity}", published, span(values), WITHIN, unit, why)

    def each(router: str, name: str, factor: float = 1.0) -> list[float]:
        """A number of Run, times a factor, with each cache."""
        return [factor * getattr(runs[router], name) for runs in by_cache]

    return [
        claim(
            "tokens/s of prefix routing over round robin",
            MEASURED,
            [*map(gain, by_cache)],
            "x",
            WHY_SHARE,
        ),
        claim(
            "mean first token, round robin over prefix",
            19.029 / 0.863,
            [*map(sooner, by_cache)],
            "x",
            WHY_QUEUE,
        ),
        claim("output tokens/s, round robin", 2742.0, each(PLAIN, "rate"), "tokens/s", WHY_SHARE),
        claim("output tokens/s, prefix", 6423.0, each(AWARE, "rate"), "tokens/s", WHY_SHARE),
        claim("mean first token, round robin", 19.029, each(PLAIN, "first"), "s", WHY_QUEUE),
        claim("mean first token, prefix", 0.863, each(AWARE, "first"), "s", WHY_FIRST),
        claim(
            "mean time of a token, round robin", 109.2, each(PLAIN, "token", 1e3), "ms", WHY_SHARE
        ),
        claim("mean time of a token, prefix", 75.3, each(AWARE, "token", 1e3), "ms", WHY_SHARE),
        claim(
            "tokens found in the cache, round robin",
            11.0,
            each(PLAIN, "hits", 100),
            "%",
            WHY_FOUND,
        ),
        claim("tokens found in the cache, prefix", 93.0, each(AWARE, "hits", 100), "%", WHY_FOUND),
        claim("blocks in use, round robin", (98.0, 99.0), each(PLAIN, "used", 100), "%", WHY_FOUND),
        claim("blocks in use, prefix", (64.0, 71.0), each(AWARE, "used", 100), "%", WHY_SHARE),
        claim("requests that wait, round robin", 180.0, each(PLAIN, "waiting"), "", WHY_QUEUE),
    ]


def run(folder: Path, quick: bool) -> Findings:
    if quick:
        caches, prefixes, clients = (CACHE,), (8, SOURCE_PREFIXES), (64,)
    else:
        caches, prefixes, clients = CACHES, PREFIXES, CLIENTS
    overrides = (
        f"workload.count={600 if quick else 9000}",
        f"sweep.grid.replicas.router=[{PLAIN}, {AWARE}]",
    )
    by_cache = [runs(folder, *overrides, f"cache_tokens={cache}") for cache in caches]

    def requests_of(count: int) -> str:
        """The option of the number of requests, for `count` prefixes."""
        return f"workload.count={600 if quick else max(LEAST, TURNS * count)}"

    sweep = {
        count: runs(folder, requests_of(count), f"workload.prefixes={count}") for count in prefixes
    }
    load = {
        count: runs(folder, requests_of(SOURCE_PREFIXES), f"workload.arrivals.clients={count}")
        for count in clients
    }
    load[SOURCE_CLIENTS] = sweep[SOURCE_PREFIXES]
    panels = {"throughput": lines(sweep, gain), "first token": lines(sweep, sooner)}
    figure = figures.curves(
        panels,
        "all prefixes, in caches of one replica",
        ("tokens/s over round robin", "times as soon as round robin"),
        log_x=2,
        lowest=0,
    )
    tables = [sweep_table(sweep), load_table(load)]
    return Findings(
        claims_of(by_cache), answer(by_cache, sweep, load), {"pays.svg": figure}, tables
    )


def lines(
    sweep: Mapping[int, Runs], value: Callable[[Runs, str], float]
) -> dict[str, list[tuple[float, float]]]:
    """A curve for each router but round robin."""
    return {
        router: [(caches_of(n), value(runs, router)) for n, runs in sweep.items()]
        for router in (LOADED, AWARE)
    }


def answer(
    by_cache: Sequence[Runs], sweep: Mapping[int, Runs], load: Mapping[int, Runs]
) -> list[str]:
    gains = {count: gain(runs) for count, runs in sweep.items()}
    best = max(gains, key=lambda count: gains[count])
    fewest = min(gains)
    most_prefixes = max(gains)
    source = span([*map(gain, by_cache)]).middle
    quiet = min(load)
    return [
        f"It pays most where the prefixes that are in use fit into the caches of all {REPLICAS} "
        f"replicas together and not into one. With prefixes of {caches_of(best):.1f} caches it "
        f"makes {rounded(gains[best])} times the tokens/s of round robin, and the first token comes "
        f"{rounded(sooner(sweep[best]))} times as soon.",
        f"With prefixes of {caches_of(fewest):.2f} caches, every replica soon has all of them: it "
        f"makes {rounded(gains[fewest])} times the tokens/s, and the first token comes "
        f"{sooner(sweep[fewest]):.1f} times as soon. With {caches_of(most_prefixes):.0f} caches, "
        f"{caches_of(most_prefixes) / REPLICAS:.1f} times what all replicas hold, it makes "
        f"{rounded(gains[most_prefixes])} times.",
        f"On the source's load prefix routing makes {rounded(source)} times the tokens/s of round "
        "robin, and the "
        f"source measured {MEASURED:.2f}. With as many prefixes, `least_loaded` makes "
        f"{rounded(gain(sweep[SOURCE_PREFIXES], LOADED))} times: what pays is the prefix, and not "
        "the balance.",
        f"With {quiet} clients instead of {SOURCE_CLIENTS}, it makes "
        f"{rounded(gain(load[quiet]))} times the tokens/s, and the first token comes "
        f"{rounded(sooner(load[quiet]))} times as soon.",
        "The source does not give the memory of the cache, the tokens of a step, its sequences and "
        "the version of vLLM. Ours are vLLM's defaults, and ranges are over caches of "
        f"{', '.join(f'{cache:,}' for cache in CACHES)} tokens. Each of the source's prefixes has "
        "60 requests; ours draws them. Routing takes no time here. llm-d follows the evictions of "
        "each replica, while `prefix` remembers what it sent. Times are those of a roofline, so "
        "tokens/s and seconds are bounds, and their ratios are what to compare.",
        "Anyscale (blog of 15 September 2025) has a first token 60 % sooner and 40 % more "
        "throughput with a model of 32 billion parameters. It is no claim here: we could not "
        "verify its GPUs, prefixes, clients and lengths, and its baseline is the lighter of two "
        "random replicas.",
    ]


def sweep_table(sweep: Mapping[int, Runs]) -> str:
    rows = []
    for count, runs in sweep.items():
        for router in ROUTERS:
            rows.append(
                (
                    count,
                    f"{caches_of(count):.2f}",
                    router,
                    runs[router].rate,
                    gain(runs, router),
                    runs[router].first,
                    100 * runs[router].hits,
                    runs[router].uneven,
                )
            )
    head = (
        "prefixes",
        "in caches of one replica",
        "router",
        "tokens/s",
        "over round robin",
        "first token, s",
        "found, %",
        "busiest replica / mean",
    )
    return markdown(head, rows)


def load_table(load: Mapping[int, Runs]) -> str:
    rows = [
        (
            count,
            router,
            runs[router].rate,
            gain(runs, router),
            runs[router].first,
            1e3 * runs[router].token,
        )
        for count, runs in sorted(load.items())
        for router in ROUTERS
    ]
    head = ("clients", "router", "tokens/s", "over round robin", "first token, s", "a token, ms")
    return f"{SOURCE_PREFIXES} prefixes, by clients:\n\n{markdown(head, rows)}"
