"""025: how well users read what is streamed to them, if requests that are ahead of their readers
make way for others (Andes; Liu et al. 2024, arXiv 2404.16283).

The paper has two versions. The first one (its page, https://llm-qoe.github.io) has OPT models and
ShareGPT: up to 3.2 times the average QoE under a high request rate, or up to 1.6 times the rate
with a QoE of 0.9. The second one has up to 4.7 times the QoE under bursts, and up to 2.6 times as
hard bursts with a QoE of 0.95, which it calls 61 % of the GPUs. Its bursts: in one cycle of 20
minutes, 35 % of the time has `intensity` times the mean rate, and the mean rate is the throughput
(request_dispatcher.py of https://github.com/AmberLJC/vllm-0.6.1). All of these are the best of
several models and data sets, so our one setting should have a gain, and none that is larger.

QoE is that of experiments/core/service.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from experiments.analysis import figures
from experiments.studies.findings import (
    Claim,
    Findings,
    Summary,
    dig,
    exactly,
    markdown,
    over,
    simulated,
    span,
)

QUESTION = (
    "How much better do users read what is streamed to them when requests that are ahead of their "
    "readers make way?"
)
FIRST = "Andes, version 1 (page of the project)"
SECOND = "Andes, version 2, section 6.3"
CYCLE = 1200.0  # seconds of a trace with a burst
DURATION = 0.35  # part of the cycle that is the burst
STEADY = 400.0  # seconds of a trace without one
INTENSITIES = (1.5, 2.0, 2.5)
LOADS = (0.8, 1.0, 1.2, 1.5)  # requests, in units of the throughput
TARGETS = "[[reads, 1.0, 0.2083], [listens, 1.0, 0.303]]"  # as in config.yaml
# seconds until the mean answer is read, by class
DUE = "[[reads, 71.4], [listens, 103.4]]"
FCFS = "fcfs"
DEADLINE = "deadline"
AHEAD = "ahead"
WHY_LENGTHS = (
    "the paper's lengths are not known, and ours are exponential; a trace of another length is "
    "another load"
)

Runs = Mapping[tuple[str, float], Sequence[Summary]]  # by policy, and by load or intensity


def quality(summary: Summary) -> float:
    """The mean QoE of all requests."""
    groups = summary["classes"].values()
    return sum([group["qoe"] * group["requests"] for group in groups]) / summary["requests"]


def policies(folder: Path) -> dict[str, str]:
    return {
        FCFS: "fcfs",
        DEADLINE: f"{{name: deadline, targets: {DUE}}}",
        AHEAD: f"{{name: {folder.resolve() / 'ahead.py'}:ahead, targets: {TARGETS}}}",
    }


def throughput(folder: Path, count: int) -> float:
    """Requests/s of an engine with requests that all arrive at once."""
    options = (f"workload.count={count}", "workload.arrivals={process: at_once}")
    ((_, (summary,)),) = simulated(folder / "config.yaml", *options)
    return dig(summary, "requests_per_s")


def burst(mean: float, intensity: float, seconds: float) -> tuple[str, ...]:
    """One cycle of `seconds` with a burst at its beginning, and the mean rate `mean`."""
    high = mean * intensity
    low = (mean - high * DURATION) / (1 - DURATION)
    rates = f"[[0, {high}], [{DURATION * seconds}, {low}]]"
    return (
        f"workload.count={round(mean * seconds)}",
        f"workload.arrivals={{process: changing, rates: {rates}}}",
    )


def steady(mean: float, load: float, seconds: float) -> tuple[str, ...]:
    rate = mean * load
    return (f"workload.count={round(rate * seconds)}", f"workload.arrivals.rate={rate}")


def runs_of(
    folder: Path,
    names: Sequence[str],
    values: Sequence[float],
    options: Callable[[float], Sequence[str]],
    seeds: int,
) -> Runs:
    """The runs of some policies at some loads. options: of a load."""
    runs = {}
    for name in names:
        policy = f"engine.policy={policies(folder)[name]}"
        for value in values:
            ((_, summaries),) = simulated(
                folder / "config.yaml", policy, *options(value), repeats=seeds
            )
            runs[name, value] = summaries
    return runs


def curve(runs: Runs, name: str) -> list[tuple[float, float]]:
    """The mean QoE of a policy by load, ascending."""
    points = [
        (value, span([*map(quality, summaries)]).middle)
        for (policy, value), summaries in runs.items()
        if policy == name
    ]
    return sorted(points)


def sustained_load(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """The load at which the QoE falls to `target`, on a line between the loads around it.

    None if no load has more, or all have: the tried loads do not tell it.
    """
    for (load, qoe), (next_load, next_qoe) in pairwise(points):
        if qoe >= target > next_qoe:
            return load + (next_load - load) * (qoe - target) / (qoe - next_qoe)
    return None


def gains(runs: Runs) -> dict[float, list[float]]:
    """The QoE of AHEAD over that of FCFS, for each seed, by load."""
    return {
        value: [
            quality(above) / quality(below)
            for above, below in zip(runs[AHEAD, value], runs[FCFS, value], strict=True)
        ]
        for policy, value in runs
        if policy == FCFS
    }


def claims_of(
    runs: Runs,
    source: str,
    load_name: str,
    published_qoe_gain: float,
    target: float,
    published_load_gain: float,
) -> list[Claim]:
    """The largest gain of the QoE, and the gain of the load that has a QoE of `target`.

    Args:
        load_name: what a load is, in words.
        published_qoe_gain, published_load_gain: the largest published gains.
    """
    best_gains = max(gains(runs).values(), key=sum)
    quantity = f"{load_name}: QoE over {FCFS}, largest"
    claims = [Claim(source, quantity, (1.0, published_qoe_gain), span(best_gains), unit="x")]
    load = sustained_load(curve(runs, AHEAD), target)
    load_of_fcfs = sustained_load(curve(runs, FCFS), target)
    if load is not None and load_of_fcfs is not None:
        quantity = f"{load_name} with a QoE of {target:g}: over {FCFS}"
        gain = exactly(load / load_of_fcfs)
        claims.append(Claim(source, quantity, (1.0, published_load_gain), gain, unit="x"))
    return [claim._replace(why=WHY_LENGTHS) for claim in claims]


def run(folder: Path, quick: bool) -> Findings:
    seeds = 1 if quick else 2
    length = 0.05 if quick else 1.0  # of a cycle and of a trace, as a share of the full ones
    intensities = INTENSITIES[1:2] if quick else INTENSITIES
    loads = LOADS[1:3] if quick else LOADS
    mean = throughput(folder, 100 if quick else 300)
    steady_runs = runs_of(
        folder,
        (FCFS, DEADLINE, AHEAD),
        loads,
        lambda load: steady(mean, load, STEADY * length),
        seeds,
    )
    bursts = runs_of(
        folder,
        (FCFS, AHEAD),
        intensities,
        lambda intensity: burst(mean, intensity, CYCLE * length),
        seeds,
    )
    claims = [
        *claims_of(steady_runs, FIRST, "Poisson, request rate", 3.2, 0.9, 1.6),
        *claims_of(bursts, SECOND, "bursts of 7 minutes, intensity", 4.7, 0.95, 2.6),
    ]
    panels = {
        "steady": {name: curve(steady_runs, name) for name in (FCFS, DEADLINE, AHEAD)},
        "a burst of 7 minutes": {name: curve(bursts, name) for name in (FCFS, AHEAD)},
    }
    figure = figures.curves(panels, "load, in units of the throughput", "mean QoE", lowest=0)
    tables = [table(steady_runs, "load"), table(bursts, "intensity")]
    return Findings(claims, answer(mean, steady_runs, bursts), {"qoe.svg": figure}, tables)


def answer(mean: float, steady_runs: Runs, bursts: Runs) -> list[str]:
    def loads_of(runs: Runs, target: float) -> str:
        texts = []
        for name in (FCFS, AHEAD):
            points = curve(runs, name)
            load = sustained_load(points, target)
            text = f"{load:.2f}" if load is not None else f"more than {points[-1][0]:g}"
            if load is None and points[0][1] < target:
                text = f"less than {points[0][0]:g}"
            texts.append(f"{name} {text}")
        return ", ".join(texts)

    def best(runs: Runs) -> tuple[float, float]:
        value, ratios = max(gains(runs).items(), key=lambda item: sum(item[1]))
        return span(ratios).middle, value

    gain, load = best(steady_runs)
    gain_in_burst, intensity = best(bursts)
    highest_load = max(value for _, value in steady_runs)
    qualities = {
        policy: dict(curve(steady_runs, policy))[highest_load] for policy in (FCFS, DEADLINE, AHEAD)
    }
    return [
        f"The mean QoE of `ahead` is up to {gain:.2f} times that of `fcfs` under a steady load (of "
        f"{load:g} times the throughput), and up to {gain_in_burst:.2f} times with a burst of 7 "
        f"minutes (of {intensity:g} times the throughput).",
        f"A QoE of 0.9 is kept up to these loads, in units of the throughput ({mean:.2f} "
        f"requests/s): {loads_of(steady_runs, 0.9)}. A QoE of 0.95 is kept up to these intensities "
        f"of a burst: {loads_of(bursts, 0.95)}.",
        f"At {highest_load:g} times the throughput `deadline`, which knows when each answer should "
        f"have been read but stops none that runs, has {qualities[DEADLINE]:.2f}, "
        f"`fcfs` {qualities[FCFS]:.2f} and `ahead` {qualities[AHEAD]:.2f}.",
        "Why it works: the engine makes several times as many tokens a second of a request as its "
        "reader reads. Above its throughput it lives on the tokens that readers are behind or "
        "ahead, so the length of a trace is a part of the load: a steady one has "
        f"{STEADY:.0f} s here, a cycle with a burst {CYCLE:.0f} s as in the paper.",
        "Different from the paper: lengths are exponential with the means of ShareGPT and not its "
        "turns; half of the users read and half listen, each at one speed; times are those of a "
        "roofline; evicted requests are computed again and never swapped. `ahead` has the paper's "
        "gain of QoE over memory, with a constant for the cost of an eviction (ahead.py). The "
        "paper's numbers are the largest of many settings, so our claims are that there is a gain "
        "and that it is no larger.",
    ]


def table(runs: Runs, name: str) -> str:
    rows = [
        (
            value,
            policy,
            span([*map(quality, summaries)]).middle,
            over(summaries, "ttft_s.mean").middle,
            over(summaries, "ttft_s.p99").middle,
            over(summaries, "preemptions").middle / over(summaries, "requests").middle,
        )
        for (policy, value), summaries in sorted(runs.items(), key=lambda item: item[0][1])
    ]
    head = (name, "policy", "mean QoE", "first token, s", "p99, s", "preemptions of a request")
    return markdown(head, rows)
