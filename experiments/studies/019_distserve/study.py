"""019: the load of engines for prompts and others for decodes, after DistServe (Zhong et al. 2024,
arXiv 2401.09670).

Its repository (https://github.com/LLMServe/DistServe, commit 82831f1, Apache-2.0) has a simulator
with fitted times of steps, which are used here (simulation/profiles.py), the result of an example
(simdistserve/README.md), and a notebook with printed results of measurements on A100s
(evaluation/2-benchmark-serving/plot.ipynb): DistServe's rate over those of vLLM and DeepSpeed-MII,
and the shares of vLLM's and DeepSpeed-MII's requests within the targets, by rate. vLLM has 90 % at
0.5 requests/s, so DistServe's rate is 4.6 times that; DeepSpeed-MII's factor of 7.36 gives the same
rate.

The data set (conversations of ShareGPT) is not used: nothing we may use has its lengths. Two kinds
of lengths stand for it. *First turns* are those of the PagedAttention paper. The prompts of
DistServe contain earlier turns too, so they are longer
(evaluation/2-benchmark-serving/0-prepare-dataset.py). *Conversations* are exponential prompts of
which a tenth is so long that one GPU with vLLM's coefficients needs more than 250 ms for it alone:
the notebook's vLLM misses its targets for a tenth of the requests even at 0.25 requests/s, where
nothing waits. That is an estimate from two published facts, and not from a number that is compared.
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
from experiments.studies.findings import (
    Claim,
    Findings,
    Interval,
    Summary,
    dig,
    interval,
    markdown,
    rounded,
    simulated,
)

QUESTION = (
    "What load do engines for prompts and others for decodes serve within targets for "
    "both, and with what throughput?"
)
EXAMPLE = "DistServe, simdistserve/README.md"
NOTEBOOK = "DistServe, plot.ipynb"
VLLM = "vLLM documentation, disaggregated prefilling"
# tokens that the cache of an engine holds, by its GPUs; from max_num_tokens.csv of the repository
CACHE = {1: 66144, 2: 163008}
# (GPUs of the engine for prompts, GPUs of the engine for decodes); the example has the first pair
PLACEMENTS = (
    (2, 1),
    (1, 1),
    (1, 2),
    (2, 2),
)
# requests/s of a GPU: the highest rate of a search, which is the example's, and the difference
# between the last two rates at which a search ends
HIGHEST = 5.0
WITHIN = 0.05
# The example ends its search at this difference. It gives the last rate that met the targets.
EXAMPLES_WITHIN = 0.25
# as the notebook prints it: DistServe's rate with 90 % in time, over the rates of these engines
FACTORS = {"vLLM": 4.6, "DeepSpeed-MII": 7.36}
# as the notebook prints it: % of vLLM's requests within the targets, by requests/s
VLLM_SHARES = {
    0.25: 90,
    0.5: 90,
    1.0: 85,
    1.5: 81,
    2.0: 71,
    2.25: 70,
    2.5: 68,
    3.0: 55,
}
MEASURED = FACTORS["vLLM"] * 0.5  # requests/s of a GPU
SHARES = (0.9, 0.8)
SPLITS = ((1, 3), (2, 2), (3, 1))  # of four engines of one GPU
WHY_DATA = "the data set is not used, and exponential lengths are an estimate of it"
WHY_REAL = (
    "the published one was measured, here each step has the simulator's overhead of 2 or 3 ms; "
    + WHY_DATA
)
WHY_SHARE = "not known: the published one was measured; " + WHY_DATA
WHY_NOISE = "so few seeds do not decide: the published number is within our interval"
WHY_SPEED = (
    "the engines for prompts and for decodes each have one kind of step, and fewer of them wait"
)
NAMES = {
    "pools": "2 + 1 GPUs",
    "vLLM": "1 GPU with vLLM, prompts first",
    "chunked": "1 GPU with chunked prefill",
}

Met = Callable[[Summary], bool]


def each_in_time(summary: Summary) -> bool:
    """The example's criterion: the 90th percentiles of TTFT and TPOT are within 200 and 100 ms."""
    return dig(summary, "ttft_s.p90") < 0.2 and dig(summary, "tpot_s.p90") < 0.1


def both_in_time(share: float) -> Met:
    """The notebook's criterion: a share of the requests is within 250 ms and 100 ms.

    The runs need the option `SLO`.
    """
    return lambda summary: dig(summary, "goodput.share") >= share


SLO = ("slo={ttft: 0.25, itl: 0.1}",)


def slow_prompt(seconds: float) -> int:
    """Tokens of the longest prompt that one GPU with vLLM's coefficients computes alone within a
    time.
    """
    profile = PROFILES["vllm/opt-13b/tp1"]
    tokens = 1
    while True:
        work = Work(
            tokens=tokens,
            sequences=1,
            sampled=1,
            context=tokens,
            pairs=tokens * (tokens + 1) // 2,
        )
        if profile(work) > seconds:
            return tokens - 1
        tokens += 1


def mean_prompt() -> float:
    """The mean of the prompts of conversations, in tokens, before they are cut."""
    # a tenth of exponential lengths is above mean * log(10)
    return slow_prompt(0.25) / math.log(10)


def conversations() -> tuple[str, ...]:
    """The lengths of conversations. A prompt and its output fit into 2,048 tokens, as in the data
    set.
    """
    return (
        f"workload.prompt={{dist: exponential, mean: {mean_prompt():.1f}, max: 1536}}",
        "workload.output={dist: exponential, mean: 337.99, max: 511}",
    )


def kinds() -> dict[str, tuple[str, ...]]:
    return {"first turns": lengths.overrides("ShareGPT"), "conversations": conversations()}


def profile(engine: str, gpus: int) -> str:
    return f"{{profile: {engine}/opt-13b/tp{gpus}, padded: false, model: opt-13b}}"


def pool_options(prefill: int, decode: int) -> tuple[str, ...]:
    """One engine for prompts and one for decodes, by their GPUs."""

    def pool(gpus: int) -> str:
        return f"{{simulate: {profile('distserve', gpus)}, cache_tokens: {CACHE[gpus]}}}"

    return (f"pools={{prefill: {pool(prefill)}, decode: {pool(decode)}}}",)


def alone(engine: str, gpus: int) -> tuple[str, ...]:
    """One engine for prompts and decodes, whole prompts first."""
    return ("pools=null", f"simulate={profile(engine, gpus)}", f"cache_tokens={CACHE[gpus]}")


# one engine for prompts and decodes, with chunks of prompts beside decodes
CHUNKED = (
    *alone("distserve", 1),
    "engine.mixed_steps=true",
    "engine.chunked_prefill=true",
    "engine.max_num_batched_tokens=512",
)


# GPUs, overrides
ENGINES = {
    "pools": (3, pool_options(2, 1)),
    "vLLM": (1, alone("vllm", 1)),
    "chunked": (1, CHUNKED),
}


class Size(NamedTuple):
    """How much the study runs.

    seeds: of the example's placement. fewer_seeds: of the other ones, and of engines.
    turn_seeds: of conversations that are cut to their first turns.
    requests: of a run of a search, a GPU where the notebook's targets are searched.
    share_requests: of a run for the share within targets, a GPU.
    speed_requests: of a run for tokens/s.
    """

    seeds: int
    fewer_seeds: int
    turn_seeds: int
    requests: int
    share_requests: int
    speed_requests: int


FULL = Size(5, 3, 2, requests=300, share_requests=100, speed_requests=500)  # 300 as the example
QUICK = Size(2, 1, 1, requests=60, share_requests=30, speed_requests=150)


class Highest(NamedTuple):
    """The highest rates at which targets are met.

    rates: requests/s of a GPU, a number for each seed.
    bound: every rate of the searches met the targets, so the numbers are only lower bounds.
    """

    rates: tuple[float, ...]
    bound: bool

    @property
    def interval(self) -> Interval:
        return interval(self.rates)


def highest(
    folder: Path,
    gpus: int,
    met: Met,
    seeds: int,
    count: int,
    *overrides: str,
    within: float = WITHIN,
) -> Highest:
    """The highest rate of a GPU that met a criterion, by halves from 0 to HIGHEST, as the example
    searches it.

    Args:
        within: requests/s of a GPU between that rate and the lowest one that did not meet it.
    """
    rates = []
    for seed in range(seeds):
        low = 0.0
        high = HIGHEST
        while high - low > within:
            rate = (low + high) / 2
            options = (
                f"workload.arrivals.rate={rate * gpus}",
                f"workload.count={count}",
                f"seed={seed}",
            )
            ((_, (summary,)),) = simulated(folder / "config.yaml", *options, *overrides)
            if met(summary):
                low = rate
            else:
                high = rate
        rates.append(low)
    return Highest(tuple(rates), min(rates) >= HIGHEST - within)


def reason(why: str, interval_of_ours: Interval, published: float) -> str:
    """Why ours may differ; no cause is given for what chance explains."""
    return WHY_NOISE if interval_of_ours.low <= published <= interval_of_ours.high else why


class Throughput(NamedTuple):
    """Tokens/s of prompts and answers on four GPUs if all requests come at once. A number for each
    seed.
    """

    pools: Mapping[tuple[int, int], Sequence[float]]  # by SPLITS
    chunked: Sequence[float]  # four engines that do both, with chunks of prompts beside decodes
    whole_prompts: Sequence[float]  # four engines that do both, whole prompts first


def throughput(folder: Path, seeds: int, count: int, kind: tuple[str, ...]) -> Throughput:
    engine = f"simulate: {profile('distserve', 1)}, cache_tokens: {CACHE[1]}"

    def rates_of(*overrides: str) -> list[float]:
        options = (
            "workload.arrivals={process: at_once}",
            f"workload.count={count}",
            "reseed=true",
            *kind,
        )
        ((_, runs),) = simulated(folder / "config.yaml", *options, *overrides, repeats=seeds)
        return [dig(run, "total_tokens_per_s") for run in runs]

    four_engines = "replicas={count: 4, router: least_loaded}"
    return Throughput(
        pools={
            (a, b): rates_of(
                f"pools={{prefill: {{count: {a}, {engine}}}, decode: {{count: {b}, {engine}}}}}"
            )
            for a, b in SPLITS
        },
        chunked=rates_of(*CHUNKED, four_engines),
        whole_prompts=rates_of(*alone("distserve", 1), four_engines),
    )


def best(speeds: Throughput) -> tuple[int, int]:
    """The division of four GPUs into pools with most tokens/s."""
    return max(speeds.pools, key=lambda split: sum(speeds.pools[split]))


def over(speeds: Throughput, below: Sequence[float]) -> Interval:
    """The tokens/s of the best pools over those of engines that do both, seed by seed."""
    return interval([a / b for a, b in zip(speeds.pools[best(speeds)], below, strict=True)])


def run(folder: Path, quick: bool) -> Findings:
    size = QUICK if quick else FULL
    long_prompts = conversations()
    seeds_by_placement = (size.seeds, size.fewer_seeds, size.fewer_seeds, size.fewer_seeds)
    served = placement_rates(folder, seeds_by_placement, size.requests, long_prompts)
    turns = highest(
        folder,
        3,
        each_in_time,
        size.turn_seeds,
        size.requests,
        *pool_options(2, 1),
        *kinds()["first turns"],
        within=EXAMPLES_WITHIN,
    )
    in_time = engine_rates(folder, size.fewer_seeds, size.requests, long_prompts)
    attained = {
        name: shares(folder, size.fewer_seeds, size.share_requests, name, long_prompts)
        for name in ENGINES
    }
    speeds = {
        kind: throughput(folder, size.fewer_seeds, size.speed_requests, overrides)
        for kind, overrides in kinds().items()
    }
    claims = [
        *example_claims(served),
        *notebook_claims(in_time, attained),
        *throughput_claims(speeds),
    ]
    tables = [rate_table(served, turns, in_time), speed_table(speeds)]
    figures_by_name = {"attainment.svg": figure(attained)}
    return Findings(claims, answer(served, turns, in_time, speeds), figures_by_name, tables)


Attained = Sequence[tuple[float, Interval]]  # % of requests by rate of a GPU


def points(attained: Attained) -> list[tuple[float, float]]:
    return [(rate, share.middle) for rate, share in attained]


def figure(attained: Mapping[str, Attained]) -> str:
    lines = {NAMES[name]: points(shares_by_rate) for name, shares_by_rate in attained.items()}
    lines["vLLM, measured"] = list(VLLM_SHARES.items())
    panels = {"conversations": lines}
    return figures.curves(panels, "requests/s of a GPU", "% within both targets", lowest=0)


Served = Mapping[tuple[int, int], Highest]
Both = Mapping[tuple[float, str], Highest]  # by share of the requests, and by name of ENGINES


def placement_rates(
    folder: Path, seeds: Sequence[int], count: int, kind: tuple[str, ...]
) -> Served:
    """The rates of PLACEMENTS within the example's targets. seeds: how many, by placement."""
    return {
        place: highest(
            folder,
            sum(place),
            each_in_time,
            n,
            count,
            *pool_options(*place),
            *kind,
            within=EXAMPLES_WITHIN,
        )
        for place, n in zip(PLACEMENTS, seeds, strict=True)
    }


def engine_rates(folder: Path, seeds: int, count: int, kind: tuple[str, ...]) -> Both:
    """The rates of ENGINES within the notebook's targets, by share of the requests.

    vLLM with 90 % is left out: the lengths were estimated from that number.
    """
    rates = {}
    for share in SHARES:
        for name, (gpus, engine) in ENGINES.items():
            if (share, name) == (0.9, "vLLM"):
                continue
            rates[share, name] = highest(
                folder, gpus, both_in_time(share), seeds, count, *SLO, *engine, *kind
            )
    return rates


def example_claims(served: Served) -> list[Claim]:
    quantity = (
        "OPT-13B, conversations, 2 + 1 GPUs for prompts and decodes, P90 within 200 and 100 "
        "ms: requests/s of a GPU"
    )
    example_rates = served[PLACEMENTS[0]].rates
    other_rates = [served[place].rates for place in PLACEMENTS[1:]]
    seeds = min(map(len, other_rates))  # the ratios are of equal seeds
    best_rate = max(interval(rates).middle for rates in other_rates)
    ratio = interval([rate / best_rate for rate in example_rates[:seeds]])
    return [
        Claim(EXAMPLE, quantity, 1.56, interval(example_rates), 1.1, "requests/s", WHY_DATA),
        Claim(
            EXAMPLE,
            "OPT-13B, conversations: 2 + 1 GPUs over the best of 1 + 1, 1 + 2, 2 + 2: "
            "requests/s of a GPU",
            (1.0, 1000.0),
            ratio,
            1.0,
            "x",
            reason(WHY_DATA, ratio, 1.0),
        ),
    ]


def notebook_claims(in_time: Both, attained: Mapping[str, Attained]) -> list[Claim]:
    """No claim at 0.25 and 0.5 requests/s of vLLM: lengths were estimated from these."""
    setting = "OPT-13B, conversations, 250 and 100 ms"
    rates = (1.0, 2.0, 3.0)
    by_rate = dict(attained["vLLM"])
    return [
        Claim(
            NOTEBOOK,
            f"{setting}: requests/s of a GPU with 90 % within both, 2 + 1 GPUs",
            MEASURED,
            in_time[0.9, "pools"].interval,
            1.1,
            "requests/s",
            WHY_REAL,
        ),
        *(
            Claim(
                NOTEBOOK,
                f"{setting}: requests within both, vLLM at {rate:g} requests/s",
                VLLM_SHARES[rate],
                by_rate[rate],
                1.1,
                "%",
                reason(WHY_SHARE, by_rate[rate], VLLM_SHARES[rate]),
            )
            for rate in rates
        ),
    ]


def throughput_claims(speeds: Mapping[str, Throughput]) -> list[Claim]:
    quantity = "tokens/s of the best pools of 4 GPUs over 4 engines"
    return [
        Claim(
            VLLM,
            f"OPT-13B, {kind}, saturated: {quantity} {how}",
            (0.0, 1.0),
            over(throughputs, below),
            1.05,
            "x",
            WHY_SPEED,
        )
        for kind, throughputs in speeds.items()
        for how, below in (
            ("with chunked prefill", throughputs.chunked),
            ("with whole prompts first", throughputs.whole_prompts),
        )
    ]


def shares(
    folder: Path, seeds: int, count: int, name: str, kind: tuple[str, ...]
) -> list[tuple[float, Interval]]:
    """% of requests within 250 and 100 ms by rate, of `count` requests a GPU, as measured."""
    gpus, engine = ENGINES[name]
    shares_by_rate = []
    for rate in VLLM_SHARES:
        options = (
            f"workload.arrivals.rate={rate * gpus}",
            f"workload.count={count * gpus}",
            "reseed=true",
        )
        ((_, runs),) = simulated(
            folder / "config.yaml", *options, *SLO, *engine, *kind, repeats=seeds
        )
        share = interval([100 * dig(run, "goodput.share") for run in runs])
        # Student's t knows no largest share
        shares_by_rate.append((rate, share._replace(high=min(share.high, 100.0))))
    return shares_by_rate


def rate_text(highest_rate: Highest) -> str:
    if highest_rate.bound:
        return f"at least {rounded(highest_rate.interval.low)}"
    return rounded(highest_rate.interval.middle)


def answer(
    served: Served, turns: Highest, in_time: Both, speeds: Mapping[str, Throughput]
) -> list[str]:
    parts = [
        f"{kind}: {rounded(over(speed, speed.chunked).middle)} times those of engines with chunked "
        f"prefill, {rounded(over(speed, speed.whole_prompts).middle)} times those of engines that "
        "compute whole prompts first"
        for kind, speed in speeds.items()
    ]
    slower = all(
        over(speed, below).middle < 1
        for speed in speeds.values()
        for below in (speed.chunked, speed.whole_prompts)
    )
    conclusion = " So pools give no throughput, as vLLM's documentation says." if slower else ""

    def rates_text(share: float) -> str:
        rates = [
            f"{name} {rate_text(in_time[share, key])}"
            for key, name in NAMES.items()
            if (share, key) in in_time
        ]
        return f"{100 * share:.0f} % within, {', '.join(rates)}"

    gpu = "; ".join(map(rates_text, SHARES))
    return [
        f"Two GPUs for prompts and one for decodes serve {rate_text(served[PLACEMENTS[0]])} "
        "requests/s of a GPU with conversations as they are estimated here; DistServe's simulator "
        f"says 1.56 with the real ones. With first turns alone it is {rate_text(turns)}, where the "
        "example's search ends: its 300 requests are too few for a queue there. So the lengths "
        "decide, and they are what is unknown.",
        f"Requests/s of a GPU at 250 and 100 ms: {gpu}. The longest prompts leave one GPU little "
        "or no time to wait, so the gain depends on the share that is asked for.",
        f"Tokens/s of four saturated GPUs, split into the best pools: {'; '.join(parts)}."
        f"{conclusion}",
        "In that comparison all engines have the coefficients of DistServe's, and pages move in no "
        "time. Steps with chunks and decodes have an assumed time (profiles.py), the best case for "
        "them; whole prompts first need no assumption.",
        "Not compared: DistServe's rate over vLLM's at 90 % (the notebook prints 4.6, the blog "
        "says up to 4.48 without a setting). A tenth of the prompts alone take vLLM 250 ms, so "
        "single requests decide at what rate it meets 90 %, and lengths were estimated from that. "
        "The paper's factor of 7.4 is over DeepSpeed-MII (the notebook: 7.36), for which no "
        "coefficients are published.",
        "Unknown: the lengths of ShareGPT's conversations and their order (prompts of "
        f"conversations here are exponential with a mean of {mean_prompt():.1f} tokens before they "
        "are cut at 1,536, and outputs have the mean of first turns before they are cut at 511), "
        "the seeds, and what moving pages cost in the measurements. A request of DistServe's "
        "simulator has one decode step more than here, and an engine there decodes contexts of at "
        "most 50,000 tokens at a time; here its cache decides.",
    ]


def rate_table(served: Served, turns: Highest, in_time: Both) -> str:
    target = "each P90 within 200 and 100 ms"
    rows = [
        (target, f"{a} + {b} GPUs", "conversations", rate_text(rate))
        for (a, b), rate in served.items()
    ]
    rows.append((target, "2 + 1 GPUs", "first turns", rate_text(turns)))
    rows += [
        (
            f"{100 * share:.0f} % within 250 and 100 ms",
            NAMES[name],
            "conversations",
            rate_text(rate),
        )
        for (share, name), rate in in_time.items()
    ]
    return markdown(("targets", "engines", "lengths", "requests/s of a GPU"), rows)


def speed_table(speeds: Mapping[str, Throughput]) -> str:
    rows = []
    for kind, throughput_of_kind in speeds.items():
        by_engines = {
            f"pools, {a} + {b}": speed for (a, b), speed in throughput_of_kind.pools.items()
        }
        by_engines |= {
            "4 that do both, chunked prefill": throughput_of_kind.chunked,
            "4 that do both, whole prompts": throughput_of_kind.whole_prompts,
        }
        rows += [
            (kind, name, rounded(interval(speed).middle)) for name, speed in by_engines.items()
        ]
    return markdown(("lengths", "engines of one GPU", "tokens/s, saturated"), rows)
