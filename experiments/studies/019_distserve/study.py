"""019: the load of engines for prompts and others for decodes, after DistServe (Zhong et al. 2024, arXiv 2401.09670).

Its repository (https://github.com/LLMServe/DistServe, commit 82831f1, Apache-2.0) has a simulator with fitted times of
steps, which are used here (simulation/profiles.py), the result of an example (simdistserve/README.md), and a notebook
with printed results of measurements on A100s (evaluation/2-benchmark-serving/plot.ipynb). The notebook prints factors,
and the shares of the curve of vLLM, which meets 90 % at 0.5 requests/s: `MEASURED`.

The data set (conversations of ShareGPT) is not used: nothing we may use has its lengths. Two kinds of lengths stand for
it. *First turns* are those of the PagedAttention paper. The prompts of DistServe contain earlier turns too, so they are
longer (evaluation/2-benchmark-serving/0-prepare-dataset.py). *Conversations* are exponential prompts of which a tenth
is so long that one GPU with vLLM's coefficients needs more than 250 ms for it alone: the notebook's vLLM misses 250 ms
for a tenth of the requests even at 0.25 requests/s, where nothing waits. That is an estimate from two published facts,
and not from a number that is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.analysis import figures
from experiments.simulation.cost import Work
from experiments.simulation.profiles import PROFILES
from experiments.studies import lengths
from experiments.studies.findings import Claim, Findings, Interval, Summary, dig, interval, markdown, rounded, simulated

QUESTION = (
    "What load do engines for prompts and others for decodes serve within targets for both, and with what throughput?"
)
EXAMPLE = "DistServe, simdistserve/README.md"
NOTEBOOK = "DistServe, plot.ipynb"
BLOG = "DistServe, blog of March 2024"
VLLM = "vLLM documentation, disaggregated prefilling"
CACHE = {1: 66144, 2: 163008}  # tokens by GPUs of an engine: max_num_tokens.csv
PLACEMENTS = (
    (2, 1),
    (1, 1),
    (1, 2),
    (2, 2),
)  # GPUs of an engine for prompts and of one for decodes; the first is theirs
HIGHEST, WITHIN = 10.0, 0.05  # requests/s of a GPU: the first upper end, and how close two probes come
MEASURED = {"factor": 4.6, "vllm": 0.5, "pools": 2.3}  # requests/s of a GPU; 4.6 is printed, 2.3 is 4.6 times 0.5
SPLITS = ((1, 3), (2, 2), (3, 1))  # of four engines of one GPU
WHY_FIRST = "DistServe's prompts contain earlier turns of a conversation; these are first turns alone"
WHY_DATA = "the data set is not used, and exponential prompts are an estimate of it"
WHY_REAL = "the published one was measured, with a time for moving pages and for Ray; " + WHY_DATA
WHY_VLLM = "the data set is not used; with first turns, prompts of vLLM meet 250 ms far more often"

NAMES = {"pools": "2 + 1 GPUs", "vLLM": "1 GPU with vLLM, prompts first", "chunked": "1 GPU with chunked prefill"}

Met = Callable[[Summary], bool]


def each_in_time(summary: Summary) -> bool:
    """The example's: the 90th percentiles of TTFT and TPOT are within 200 ms and 100 ms."""
    return dig(summary, "ttft_s.p90") < 0.2 and dig(summary, "tpot_s.p90") < 0.1


def both_in_time(summary: Summary) -> bool:
    """The notebook's: 90 % of the requests are within 250 ms and 100 ms. Needs `SLO`."""
    return dig(summary, "goodput.share") >= 0.9


SLO = ("slo={ttft: 0.25, itl: 0.1}",)


def slow_prompt(seconds: float) -> int:
    """Tokens of the longest prompt that one GPU with vLLM's coefficients computes alone within a time."""
    profile = PROFILES["vllm/opt-13b/tp1"]
    tokens = 1
    while profile(Work(tokens, 1, 1, tokens, tokens * (tokens + 1) // 2)) <= seconds:
        tokens += 1
    return tokens - 1


def conversations() -> tuple[str, ...]:
    """Both together fit into 2,048 tokens, as in the data set."""
    mean = slow_prompt(0.25) / math.log(10)
    return (
        f"workload.prompt={{dist: exponential, mean: {mean:.1f}, max: 1536}}",
        "workload.output={dist: exponential, mean: 337.99, max: 511}",
    )


def kinds() -> dict[str, tuple[str, ...]]:
    return {"first turns": lengths.overrides("ShareGPT"), "conversations": conversations()}


def profile(engine: str, gpus: int) -> str:
    return f"{{profile: {engine}/opt-13b/tp{gpus}, padded: false, model: opt-13b}}"


def placed(prefill: int, decode: int) -> tuple[str, ...]:
    """One engine for prompts and one for decodes, by their GPUs."""
    pools = (f"{{simulate: {profile('distserve', n)}, cache_tokens: {CACHE[n]}}}" for n in (prefill, decode))
    return ("pools={prefill: %s, decode: %s}" % tuple(pools),)  # noqa: UP031 - braces of YAML


def alone(engine: str, gpus: int) -> tuple[str, ...]:
    """One engine that does both, whole prompts first."""
    return ("pools=null", f"simulate={profile(engine, gpus)}", f"cache_tokens={CACHE[gpus]}")


CHUNKED = (  # one engine that does both, with chunks of prompts beside decodes
    *alone("distserve", 1),
    *("engine.mixed_steps=true", "engine.chunked_prefill=true", "engine.max_num_batched_tokens=512"),
)


class Found(NamedTuple):
    """Requests/s of a GPU, one for each seed. bound: all probes met the targets."""

    rates: tuple[float, ...]
    bound: bool

    @property
    def interval(self) -> Interval:
        return interval(self.rates)


def highest(folder: Path, gpus: int, met: Met, seeds: int, count: int, *overrides: str) -> Found:
    """The rate of a GPU that meets a criterion, by halves from 0 to HIGHEST, as the example searches it."""
    rates = []
    for seed in range(seeds):
        low, high = 0.0, HIGHEST
        while high - low > WITHIN:
            rate = (low + high) / 2
            options = (f"workload.arrivals.rate={rate * gpus}", f"workload.count={count}", f"seed={seed}")
            ((_, (summary,)),) = simulated(folder / "config.yaml", *options, *overrides)
            low, high = (rate, high) if met(summary) else (low, rate)
        rates.append((low + high) / 2)
    return Found(tuple(rates), min(rates) > HIGHEST - WITHIN)


class Throughput(NamedTuple):
    """Tokens/s of prompts and answers on four GPUs, all requests at once, one number for each seed."""

    pools: Mapping[tuple[int, int], Sequence[float]]
    chunked: Sequence[float]  # four engines that do both, with chunks of prompts beside decodes
    whole: Sequence[float]  # whole prompts first


def throughput(folder: Path, seeds: int, count: int, kind: tuple[str, ...]) -> Throughput:
    one = f"simulate: {profile('distserve', 1)}, cache_tokens: {CACHE[1]}"

    def of(*overrides: str) -> list[float]:
        options = ("workload.arrivals={process: at_once}", f"workload.count={count}", "reseed=true", *kind)
        ((_, runs),) = simulated(folder / "config.yaml", *options, *overrides, repeats=seeds)
        return [dig(run, "total_tokens_per_s") for run in runs]

    four = "replicas={count: 4, router: least_loaded}"
    return Throughput(
        {(a, b): of(f"pools={{prefill: {{count: {a}, {one}}}, decode: {{count: {b}, {one}}}}}") for a, b in SPLITS},
        of(*CHUNKED, four),
        of(*alone("distserve", 1), four),
    )


def best(found: Throughput) -> tuple[int, int]:
    return max(found.pools, key=lambda split: sum(found.pools[split]))


def over(found: Throughput, below: Sequence[float]) -> Interval:
    """The best pools over engines that do both, seed by seed."""
    return interval([a / b for a, b in zip(found.pools[best(found)], below, strict=True)])


def run(folder: Path, quick: bool) -> Findings:
    seeds, few = (2, 1) if quick else (5, 3)
    count = 60 if quick else 300  # the example's
    served = {
        (kind, place): highest(
            folder, sum(place), each_in_time, seeds if place == PLACEMENTS[0] else few, count, *placed(*place), *of
        )
        for kind, of in kinds().items()
        for place in PLACEMENTS
        if kind == "conversations" or place == PLACEMENTS[0]
    }
    both = {
        (kind, name): highest(folder, gpus, both_in_time, few, count, *SLO, *place, *of)
        for kind, of in kinds().items()
        for name, gpus, place in (("pools", 3, placed(2, 1)), ("vLLM", 1, alone("vllm", 1)), ("chunked", 1, CHUNKED))
    }
    speeds = {kind: throughput(folder, few, 150 if quick else 800, of) for kind, of in kinds().items()}
    claims = [*example_claims(served), *notebook_claims(both), *throughput_claims(speeds)]
    figure = figures.curves(curves(folder, 2, count), "requests/s of a GPU", "% within both targets", lowest=0)
    tables = [rate_table(served, both), speed_table(speeds)]
    return Findings(claims, answer(served, both, speeds), {"attainment.svg": figure}, tables)


Served = Mapping[tuple[str, tuple[int, int]], Found]
Both = Mapping[tuple[str, str], Found]


def example_claims(served: Served) -> list[Claim]:
    what = "OPT-13B, 2 GPUs for prompts and 1 for decodes, P90 within 200 and 100 ms: requests/s of a GPU"
    claims: list[Claim] = []
    for kind, why in (("first turns", WHY_FIRST), ("conversations", WHY_DATA)):
        ours = served[kind, PLACEMENTS[0]].interval
        claims.append(Claim(EXAMPLE, f"{what}, {kind}", 1.56, ours, 1.1, "requests/s", why))
    theirs, others = (served["conversations", PLACEMENTS[0]], [served["conversations", one] for one in PLACEMENTS[1:]])
    ratio = theirs.interval.middle / max(one.interval.middle for one in others)
    what = "OPT-13B, conversations: 2 + 1 GPUs over the best of 1 + 1, 1 + 2 and 2 + 2, requests/s of a GPU"
    claims.append(Claim(EXAMPLE, what, (1.0, 1000.0), Interval(ratio, ratio, ratio), 1.0, "x", WHY_DATA))
    return claims


def notebook_claims(both: Both) -> list[Claim]:
    """vLLM with conversations is no claim: these were estimated from the requests that it misses."""
    what = "OPT-13B, {}, 90 % within 250 and 100 ms: requests/s of a GPU, {}"
    claims = [
        Claim(NOTEBOOK, what.format(kind, "2 + 1 GPUs"), MEASURED["pools"], found, 1.1, "requests/s", why)
        for kind, why in (("first turns", WHY_FIRST), ("conversations", WHY_REAL))
        for found in [both[kind, "pools"].interval]
    ]
    pools, vllm = both["first turns", "pools"], both["first turns", "vLLM"]
    ratio = interval([a / b for a, b in zip(pools.rates, vllm.rates, strict=True)])
    return [
        *claims,
        Claim(
            *(NOTEBOOK, what.format("first turns", "vLLM"), MEASURED["vllm"], vllm.interval, 1.1, "requests/s"),
            WHY_VLLM,
        ),
        Claim(
            NOTEBOOK, what.format("first turns", "2 + 1 GPUs over vLLM"), MEASURED["factor"], ratio, 1.1, "x", WHY_VLLM
        ),
        Claim(
            *(BLOG, "goodput over vLLM's: more, and up to 4.48 times (ours: OPT-13B, first turns)", (1.0, 4.48), ratio),
            *(1.0, "x", "the blog does not say which setting has this factor; " + WHY_VLLM),
        ),
    ]


def throughput_claims(speeds: Mapping[str, Throughput]) -> list[Claim]:
    why = "the engines for prompts and for decodes each have one kind of step, and fewer of them wait"
    what = "tokens/s of the best pools of 4 GPUs over 4 engines"
    return [
        Claim(VLLM, f"OPT-13B, {kind}, saturated: {what} {how}", (0.0, 1.0), over(found, below), 1.05, "x", why)
        for kind, found in speeds.items()
        for how, below in (("with chunked prefill", found.chunked), ("with whole prompts first", found.whole))
    ]


def curves(folder: Path, seeds: int, count: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """The share of requests within 250 and 100 ms by rate."""
    rates = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
    settings = {
        "2 + 1 GPUs, pools": (3, placed(2, 1)),
        "1 GPU, vLLM's coefficients": (1, alone("vllm", 1)),
        "1 GPU, DistServe's, chunked prefill": (1, CHUNKED),
    }
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for kind, of in kinds().items():
        for name, (gpus, place) in settings.items():
            points = []
            for rate in rates:
                options = (f"workload.arrivals.rate={rate * gpus}", f"workload.count={count}", "reseed=true")
                ((_, runs),) = simulated(folder / "config.yaml", *options, *SLO, *place, *of, repeats=seeds)
                points.append((rate, 100 * sum(dig(one, "goodput.share") for one in runs) / len(runs)))
            panels.setdefault(kind, {})[name] = points
    return panels


def said(found: Found) -> str:
    return f"at least {rounded(found.interval.low)}" if found.bound else rounded(found.interval.middle)


def answer(served: Served, both: Both, speeds: Mapping[str, Throughput]) -> list[str]:
    theirs = {kind: said(served[kind, PLACEMENTS[0]]) for kind in kinds()}
    talks = kinds()["conversations"][0].split("mean: ")[1].split(",")[0]
    parts = [
        f"{kind}: {rounded(over(one, one.chunked).middle)} times those of engines with chunked prefill, "
        f"{rounded(over(one, one.whole).middle)} times those of engines that compute whole prompts first"
        for kind, one in speeds.items()
    ]

    def gpu(kind: str) -> str:
        return ", ".join(f"{name} {said(both[kind, key])}" for key, name in NAMES.items())

    return [
        f"Two GPUs for prompts and one for decodes serve {theirs['conversations']} requests/s of a GPU with "
        f"conversations as they are estimated here, and {theirs['first turns']} with first turns alone; DistServe's "
        "simulator says 1.56. The lengths of prompts decide, and they are what is unknown.",
        *(f"Requests/s of a GPU with 90 % within 250 and 100 ms, {kind}: {gpu(kind)}." for kind in kinds()),
        f"Tokens/s of four saturated GPUs, split into the best pools: {'; '.join(parts)}. That agrees with vLLM's "
        "documentation: the gain is one of targets, and not of throughput.",
        "In that comparison all engines have the coefficients of DistServe's, and pages move in no time. Steps with "
        "chunks and decodes have an assumed time (profiles.py), the best case for them; whole prompts first need no "
        "assumption.",
        "The paper's factor of 7.4 is over DeepSpeed-MII (the notebook prints 7.36 for OPT-13B), for which no "
        "coefficients are published, so it is no claim here.",
        "Unknown: the lengths of ShareGPT's conversations and their order (conversations here are exponential with a "
        f"mean of {talks} tokens before they are cut at 1,536; see study.py for why), the seeds, and what moving pages "
        "cost in the measurements. A request of DistServe's simulator has one decode step more than here, and an "
        "engine there decodes contexts of at most 50,000 tokens at a time; here its cache decides.",
    ]


def rate_table(served: Served, both: Both) -> str:
    rows = [
        ("each P90 within 200 and 100 ms", f"{a} + {b} GPUs", kind, said(found))
        for (kind, (a, b)), found in served.items()
    ]
    rows += [("90 % within 250 and 100 ms", NAMES[name], kind, said(found)) for (kind, name), found in both.items()]
    return markdown(("targets", "engines", "lengths", "requests/s of a GPU"), rows)


def speed_table(speeds: Mapping[str, Throughput]) -> str:
    rows = []
    for kind, found in speeds.items():
        every = {f"pools, {a} + {b}": speed for (a, b), speed in found.pools.items()}
        every |= {"4 that do both, chunked prefill": found.chunked, "4 that do both, whole prompts": found.whole}
        rows += [(kind, name, rounded(interval(speed).middle)) for name, speed in every.items()]
    return markdown(("lengths", "engines of one GPU", "tokens/s, saturated"), rows)
