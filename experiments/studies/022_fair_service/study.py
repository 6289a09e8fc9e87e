"""022: the bound of the virtual token counter, and orders that have none (Sheng et al. 2024)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.analysis import figures
from experiments.core import service
from experiments.core.config import Point
from experiments.core.drive import Measured
from experiments.core.records import RequestRecord
from experiments.studies.findings import (
    Claim,
    Findings,
    Interval,
    interval,
    markdown,
    simulated,
    span,
)

QUESTION = "By how much does the service of two users differ who both have requests waiting?"
POOL = 10_000  # tokens: M of the theorem, since each running request has its place to its end
NAMES = {"fcfs": "first come, first served", "round_robin": "round robin", "vtc": "VTC"}
FCFS, ROUND_ROBIN, VTC = NAMES
PAPER = "VTC, theorem (arXiv 2401.00588)"
ARTIFACT = "VTC's artifact, recording"
WHY_WAVES = (
    "the recording shows waves of requests of one user, which end together (the artifact lets "
    "requests in at every tenth step); here one enters as soon as another ends"
)
WHY_SEED = "the recording is one draw of Poisson arrivals"
WHY_WAIT = (
    "with VTC the light user waits for the end of a wave in the artifact, 4 s, and here for the "
    "next request that ends"
)
WHY_END = "at the end of a run one user alone is left, and kernels decide what that costs"


class Load(NamedTuple):
    """What users send. See users.py."""

    rates: tuple[float, ...]
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float = 100.0
    starts: tuple[float, ...] = ()
    even: bool = True
    exponential: bool = False

    @property
    def bound(self) -> float:
        """2 max(w_p L_input, w_q M), in weighted tokens."""
        longest = max(self.prompts) * (4 if self.exponential else 1)
        return 2 * max(service.PROMPT_WEIGHT * longest, service.OUTPUT_WEIGHT * POOL)

    @property
    def max_running(self) -> int:
        """The most requests that the pool can hold. With a limit, a full engine asks no policy."""
        shortest = min(p + o for p, o in zip(self.prompts, self.outputs, strict=True))
        return 1000 if self.exponential else POOL // shortest


# The first three are the artifact's `overload`, `poisson_short_long` and `proportional`. In the
# fourth each user sends all requests at once, one a second later, with short prompts: then VTC
# counts least when it lets a request in, and most while it runs. In the fifth lengths are random.
OVERLOAD, SHORT_LONG, LIGHT, WAVES, RANDOM = LOADS = {
    "two rates": Load((1.5, 3.0), (256, 256), (256, 256)),
    "short and long": Load((8.0, 1.5), (64, 256), (64, 256), even=False),
    "light and heavy": Load((0.25, 0.5, 1.5), (256,) * 3, (256,) * 3, seconds=200.0),
    "all at once": Load((1e4, 1e4), (16, 16), (496, 496), seconds=0.008, starts=(0.0, 1.0)),
    "random lengths": Load((6.0, 2.0), (50, 300), (100, 250), 60.0, even=False, exponential=True),
}


class Outcome(NamedTuple):
    """What a run gave.

    difference: the largest difference of service, in weighted tokens.
    ratio: the service of the last user over that of the first, while both wait; None if they never
        do.
    first_token_s: the first user's mean seconds until the first token.
    rate: requests/s until the last one has ended.
    """

    difference: float
    ratio: float | None
    first_token_s: float
    rate: float


Outcomes = Mapping[tuple[str, str], Sequence[Outcome]]  # by load and policy, one for each seed


def ratio_of(requests: Sequence[RequestRecord]) -> float | None:
    """See `Outcome`: over the longest time in which both wait."""
    users = list(service.groups_of(requests, lambda request: request.user).values())
    waits = [
        max(service.backlog_of(user), key=lambda time: time[1] - time[0], default=(0.0, 0.0))
        for user in (users[0], users[-1])
    ]
    start = max(begin for begin, _ in waits)
    end = min(until for _, until in waits)
    if start >= end:
        return None
    first, last = [
        float(curve.before(end) - curve.before(start))
        for curve in map(service.service_over_time, (users[0], users[-1]))
    ]
    return last / first


def outcomes(folder: Path, repeats: int | None, length: float) -> Outcomes:
    """The outcomes of all loads.

    Args:
        length: of the time in which requests arrive, as a share of `Load.seconds`.
    """
    results: dict[tuple[str, str], list[Outcome]] = {}
    for name, load in LOADS.items():

        def on_run(point: Point, measured: Measured, name: str = name) -> None:
            summary: dict[str, Any] = measured.summary
            policy = str(point.experiment.engine.policy).rpartition(":")[2].lower()
            outcome = Outcome(
                summary["service_difference"],
                ratio_of(measured.requests),
                summary["users"]["u0"]["ttft_s"]["mean"],
                summary["requests_per_s"],
            )
            results.setdefault((name, policy), []).append(outcome)

        parameters = load._replace(seconds=load.seconds * length)._asdict()
        kind = json.dumps({"name": "users.py:users", **parameters})
        options = (f"workload.kind={kind}", f"engine.max_num_seqs={load.max_running}")
        simulated(folder / "config.yaml", *options, repeats=repeats, on_run=on_run)
    return results


def shares(results: Outcomes, load: str, policy: str) -> list[float]:
    """The largest differences over the bound."""
    return [outcome.difference / LOADS[load].bound for outcome in results[load, policy]]


def ratios(results: Outcomes, load: str, policy: str) -> Interval:
    return interval([outcome.ratio or 0.0 for outcome in results[load, policy]])


def over(results: Outcomes, load: str, above: str, below: str, number: str) -> Interval:
    """A number of one policy over that of another, seed by seed."""
    pairs = zip(results[load, above], results[load, below], strict=True)
    return interval([getattr(a, number) / getattr(b, number) for a, b in pairs])


def run(folder: Path, quick: bool) -> Findings:
    results = outcomes(folder, 1 if quick else None, 0.1 if quick else 1.0)
    shares_of_vtc = [share for load in LOADS for share in shares(results, load, VTC)]
    differences = {
        load: interval([outcome.difference for outcome in results[load, VTC]])
        for load in (OVERLOAD, SHORT_LONG)
    }
    waiting = "service of the second over the first user while both wait"
    claims = [
        Claim(
            PAPER,
            "VTC: largest difference over the bound, all loads",
            (0, 1),
            span(shares_of_vtc),
            1.0,
        ),
        Claim(
            ARTIFACT,
            "two rates, first come: largest difference over the bound",
            (1.0, 1000.0),
            interval(shares(results, OVERLOAD, FCFS)),
            1.0,
            why="the difference grows with time, and these are too few seconds",
        ),
        Claim(
            ARTIFACT,
            f"two rates, first come: {waiting}",
            2.0,
            ratios(results, OVERLOAD, FCFS),
            1.05,
            "x",
        ),
        Claim(
            ARTIFACT, f"two rates, VTC: {waiting}", 0.98, ratios(results, OVERLOAD, VTC), 1.05, "x"
        ),
        Claim(
            ARTIFACT,
            f"short and long, first come: {waiting}",
            0.722,
            ratios(results, SHORT_LONG, FCFS),
            1.1,
            "x",
            WHY_SEED,
        ),
        Claim(
            ARTIFACT,
            f"short and long, VTC: {waiting}",
            0.997,
            ratios(results, SHORT_LONG, VTC),
            1.05,
            "x",
        ),
        Claim(
            ARTIFACT,
            "two rates, VTC: largest difference, weighted tokens",
            14_340,
            differences[OVERLOAD],
            1.5,
            why=WHY_WAVES,
        ),
        Claim(
            ARTIFACT,
            "short and long, VTC: largest difference, weighted tokens",
            10_420,
            differences[SHORT_LONG],
            1.5,
            why=WHY_WAVES,
        ),
        Claim(
            ARTIFACT,
            "short and long: requests/s with VTC over first come",
            0.979,
            over(results, SHORT_LONG, VTC, FCFS, "rate"),
            1.05,
            "x",
            WHY_END,
        ),
        Claim(
            ARTIFACT,
            "light and heavy: the light user's first token, first come over VTC, mean",
            7.06,
            over(results, LIGHT, FCFS, VTC, "first_token_s"),
            1.5,
            "x",
            WHY_WAIT,
        ),
    ]
    return Findings(claims, answer(results), {"service.svg": figure(results)}, [table(results)])


def answer(results: Outcomes) -> list[str]:
    largest = {
        policy: {load: max(shares(results, load, policy)) for load in LOADS} for policy in NAMES
    }
    loads_above_bound = {
        policy: [load for load, share in shares_by_load.items() if share > 1]
        for policy, shares_by_load in largest.items()
    }
    worst = max(largest[VTC], key=lambda load: largest[VTC][load])
    return [
        f"VTC {'breaks' if loads_above_bound[VTC] else 'keeps'} its bound of "
        "2 max(w_p L_input, w_q M) in "
        f"{' and '.join(loads_above_bound[VTC]) or f'all {len(LOADS)} loads'}: the largest "
        f"difference is {max(largest[VTC].values()):.2f} of it, "
        f'with the load "{worst}".',
        *(
            f"{NAMES[policy].capitalize()} breaks it with "
            f"{' and '.join(f'{load} ({largest[policy][load]:.1f} times)' for load in loads)}."
            if loads
            else f"{NAMES[policy].capitalize()} stays within it here."
            for policy, loads in loads_above_bound.items()
            if policy != VTC
        ),
        "Under first come, first served the difference grows as long as both users wait, and under "
        "round robin as long as their requests differ in length, so both pass any bound; the "
        "numbers are those of this time of arrivals.",
        "The artifact's numbers are computed from its recordings (one run each, an A10G), over the "
        "whole time in which both users wait, and the last over its first 200 s; a prompt counts "
        "at its first token, and outputs evenly until the end.",
    ]


def figure(results: Outcomes) -> str:
    lines = {
        name: [
            (i, statistics.fmean(shares(results, load, policy)))
            for i, load in enumerate(LOADS, start=1)
        ]
        for policy, name in NAMES.items()
    }
    lines["bound"] = [(1, 1.0), (len(LOADS), 1.0)]
    loads = ", ".join(f"{i}: {name}" for i, name in enumerate(LOADS, start=1))
    return figures.curves(
        {"Llama 7B, A10G": lines}, loads, "largest difference / bound", log_y=10, dashed=("bound",)
    )


def table(results: Outcomes) -> str:
    rows = []
    for (load, policy), runs in results.items():
        rows.append(
            (
                load,
                NAMES[policy],
                statistics.fmean(shares(results, load, policy)),
                statistics.fmean([run.ratio for run in runs if run.ratio is not None] or [0.0]),
                statistics.fmean([run.first_token_s for run in runs]),
                statistics.fmean([run.rate for run in runs]),
            )
        )
    head = (
        "load",
        "order",
        "largest difference over the bound",
        "service, last user over first",
        "first token of the first user, s",
        "requests/s",
    )
    return markdown(head, rows)
