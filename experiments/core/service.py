"""What users got of a run: targets that were met, service over time, and quality of experience; of
all requests, of each class and of each user. Pure functions of the records of requests.

Service is counted as VTC counts it (Sheng et al., "Fairness in Serving Large Language Models",
arXiv 2401.00588): PROMPT_WEIGHT for each token of a prompt, when a step first computes any of it,
and OUTPUT_WEIGHT for each output token, when it is made. A user is backlogged while a request of
theirs has arrived and no step has computed any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import numpy as np

from experiments.core.config import Slo
from experiments.core.distributions import ServiceClass
from experiments.core.records import REJECTED, RequestRecord
from pagedjax.server.load_client.summary import spread

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
MOST_USERS = 64  # of whom the largest difference of service is looked for: it takes all pairs
Targets = Slo | ServiceClass
Classes = Mapping[str, ServiceClass]  # by name
Member = TypeVar("Member")


class JudgedRequest(NamedTuple):
    """A request and what it gave its user.

    has_target: whether a target was set for it.
    met: see `meets`.
    qoe: see `qoe`.
    """

    request: RequestRecord
    has_target: bool
    met: bool
    qoe: float | None


def judge(requests: Sequence[RequestRecord], slo: Slo, classes: Classes) -> list[JudgedRequest]:
    """What each request gave its user, by the targets of its class, or by `slo`."""
    results = []
    for request in requests:
        targets = targets_of(request, slo, classes)
        results.append(
            JudgedRequest(
                request, has_target(targets), meets(request, targets), qoe(request, targets)
            )
        )
    return results


def summary(results: Sequence[JudgedRequest], duration: float) -> dict[str, Any]:
    """The numbers of groups, for a run whose requests name classes or two users; else nothing.

    classes, users: for each group the number of `requests`, `service` (weighted tokens),
        `service_per_s`, `ttft_s`, `goodput`, and the mean `qoe` of the requests that have one.
    service_difference: see `largest_difference`; None for more than MOST_USERS users, or if the
        times of tokens were not kept.

    Args:
        duration: of the run, in seconds.
    """
    sections: dict[str, Any] = {}
    by_class = groups_of(results, lambda result: result.request.service_class)
    by_user = groups_of(results, lambda result: result.request.user)
    if by_class:
        sections["classes"] = {
            name: _group(members, duration) for name, members in by_class.items()
        }
    if len(by_user) > 1:
        sections["users"] = {name: _group(members, duration) for name, members in by_user.items()}
        requests = [result.request for result in results]
        is_known = len(by_user) <= MOST_USERS and all(request.has_gaps for request in requests)
        sections["service_difference"] = largest_difference(requests) if is_known else None
    return sections


def groups_of(
    members: Sequence[Member], group_of: Callable[[Member], str]
) -> dict[str, list[Member]]:
    """The members of each group, by its name, in the order of names; those of the group "" are left
    out.
    """
    groups: dict[str, list[Member]] = {}
    for member in members:
        name = group_of(member)
        if name:
            groups.setdefault(name, []).append(member)
    return dict(sorted(groups.items()))


def _group(results: Sequence[JudgedRequest], duration: float) -> dict[str, Any]:
    service = sum([service_of(result.request) for result in results])
    qualities = [result.qoe for result in results if result.qoe is not None]
    return {
        "requests": len(results),
        "service": service,
        "service_per_s": service / duration,
        "ttft_s": spread(result.request.ttft for result in results),
        "goodput": _goodput(results, duration),
        "qoe": sum(qualities) / len(qualities) if qualities else None,
    }


# targets ------------------------------------------------------------------------------------------


def targets_of(request: RequestRecord, slo: Slo, classes: Classes) -> Targets:
    """The targets of a request: those of its class, if that has one; else `slo`."""
    service_class = classes.get(request.service_class)
    if service_class is None or not has_target(service_class):
        return slo
    return service_class


def has_target(targets: Targets) -> bool:
    """Whether a number of seconds is a target."""
    return (targets.ttft, targets.itl, _e2e(targets)) != (None, None, None)


def _e2e(targets: Targets) -> float | None:
    return targets.e2e if isinstance(targets, ServiceClass) else None


def goodput(results: Sequence[JudgedRequest], duration: float) -> dict[str, float] | None:
    """Finished requests that met every target, per second and as a share of all requests; None if
    no target is set. If requests have classes, also `least_class_share`, the share of the class
    with the least.
    """
    numbers = _goodput(results, duration)
    by_class = groups_of(results, lambda result: result.request.service_class)
    if numbers is None or not by_class:
        return numbers
    return {**numbers, "least_class_share": min(map(_share_met, by_class.values()))}


def _goodput(results: Sequence[JudgedRequest], duration: float) -> dict[str, float] | None:
    """See `goodput`."""
    if not any(result.has_target for result in results):
        return None
    num_met = sum(result.met for result in results)
    return {"requests_per_s": num_met / duration, "share": _share_met(results)}


def _share_met(results: Sequence[JudgedRequest]) -> float:
    return sum(result.met for result in results) / len(results)


def meets(request: RequestRecord, targets: Targets) -> bool:
    """Whether a request finished and met every target.

    Each branch must meet `itl`; a branch of one output token has no gap and meets it.
    """
    reasons = [branch.finish_reason for branch in request.branches]
    if {None, "abort", REJECTED}.intersection(reasons) or request.ttft is None:
        return False
    e2e = _e2e(targets)
    meets_ttft = targets.ttft is None or request.ttft <= targets.ttft
    tpots = [branch.tpot for branch in request.branches if branch.tpot is not None]
    meets_itl = targets.itl is None or all(tpot <= targets.itl for tpot in tpots)
    meets_end = e2e is None or (request.e2e is not None and request.e2e <= e2e)
    return meets_ttft and meets_itl and meets_end


def qoe(request: RequestRecord, targets: Targets) -> float | None:
    """The quality of experience of a request, from 0 to 1, after Andes (Liu et al., "Andes:
    Defining and Enhancing Quality-of-Experience in LLM-Based Text Streaming Services", arXiv
    2404.16283, second version).

        QoE = 1 - S_delay / S_whole
        ideal_i  = ttft + i itl
        actual_i = max(ready_i, ideal_i, actual_{i-1} + itl)

    Times count from the arrival. A user begins to read token i at actual_i, and reads one token in
    `itl` seconds: only tokens that are there, and none before it is due, so that an early token
    makes up for no late one. S_whole are the tokens that the user expects to have read,
    min((t - ttft) / itl, n), integrated until the last one is read, and S_delay is what was not
    read of that: the sum of actual_i - ideal_i. An answer that is ahead of the reader has the
    quality 1.

    The equation is that of the authors' code, vllm/core/andes_utils/qoe_tracker.py of
    https://github.com/AmberLJC/vllm-0.6.1 (commit 9513f62). That code takes the time of the token
    before where the time of a token is meant.

    It is that of the first branch; 0 for a request without a token; None if one of the targets ttft
    and itl is missing, or the times of tokens were not kept.
    """
    if targets.ttft is None or targets.itl is None or not request.has_gaps:
        return None
    times = request.branches[0].token_times
    if not times:
        return 0.0
    ideal = targets.ttft + targets.itl * np.arange(len(times))
    starts: list[float] = []  # when the user begins to read each token
    read_until = 0.0
    for time, due in zip(times, ideal, strict=True):
        starts.append(max(time - request.arrival, due, read_until))
        read_until = starts[-1] + targets.itl
    ideal_area = _area(ideal, targets.itl, read_until)
    return _area(np.array(starts), targets.itl, read_until) / ideal_area if ideal_area else 1.0


def _area(starts: np.ndarray, itl: float, end: float) -> float:
    """The integral from 0 to `end` of tokens that are read, each from its start on for `itl`
    seconds.
    """
    reading = np.clip(end - starts, 0.0, itl)
    read = np.maximum(end - starts - itl, 0.0)
    return float((reading**2 / (2 * itl) + read).sum())


# service ------------------------------------------------------------------------------------------


def service_of(request: RequestRecord) -> float:
    """The weighted tokens of a request."""
    prompt = 0 if request.first_scheduled is None else request.prompt_tokens
    outputs = sum(branch.num_tokens for branch in request.branches)
    return PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * outputs


class Service(NamedTuple):
    """The service of a user over time.

    times: float64 [events], ascending; seconds from the start of the run.
    totals: float64 [events], weighted tokens until each time.
    """

    times: np.ndarray
    totals: np.ndarray

    def until(self, times: Any) -> np.ndarray:
        """The service until these times; that which is given at a time counts."""
        return np.append(0.0, self.totals)[np.searchsorted(self.times, times, side="right")]

    def before(self, times: Any) -> np.ndarray:
        """The service before these times."""
        return np.append(0.0, self.totals)[np.searchsorted(self.times, times, side="left")]


def service_over_time(requests: Sequence[RequestRecord]) -> Service:
    """The service that some requests got. The times of all tokens must be there."""
    times: list[float] = []
    tokens: list[float] = []
    for request in requests:
        if request.first_scheduled is not None:
            times.append(request.first_scheduled)
            tokens.append(PROMPT_WEIGHT * request.prompt_tokens)
        for branch in request.branches:
            times += branch.token_times
            tokens += [OUTPUT_WEIGHT] * len(branch.token_times)
    order = np.argsort(times, kind="stable")
    return Service(np.array(times, float)[order], np.cumsum(np.array(tokens, float)[order]))


def backlog_of(requests: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    """The times [start, end) in which some of these requests waited for their first step, in order
    and apart from each other.
    """
    waits = sorted((request.arrival, _first_step(request)) for request in requests)
    backlog: list[tuple[float, float]] = []
    for start, end in waits:
        if end <= start:
            continue
        if backlog and start <= backlog[-1][1]:
            backlog[-1] = (backlog[-1][0], max(end, backlog[-1][1]))
        else:
            backlog.append((start, end))
    return backlog


def _first_step(request: RequestRecord) -> float:
    """When a request stops waiting: at its first step, or when it is rejected."""
    if request.first_scheduled is not None:
        return request.first_scheduled
    return np.inf if request.rejected_at is None else request.rejected_at


def largest_difference(requests: Sequence[RequestRecord]) -> float:
    """The largest difference of service of two users, in weighted tokens, over any time [t1, t2) in
    which both are backlogged without a break: max |W_f(t1, t2) - W_g(t1, t2)|, which VTC bounds.
    0 if no two users are backlogged at a time.
    """
    users = list(groups_of(requests, lambda request: request.user).values())
    curves = [service_over_time(members) for members in users]
    backlogs = [backlog_of(members) for members in users]
    largest = 0.0
    for f, g in combinations(range(len(users)), 2):
        times = np.union1d(curves[f].times, curves[g].times)
        differences = curves[f].until(times) - curves[g].until(times)
        for start, end in _common(backlogs[f], backlogs[g]):
            at_start = curves[f].before(start) - curves[g].before(start)
            first, last = np.searchsorted(times, [start, end], side="left")
            values = np.append(differences[first:last], at_start)
            largest = max(largest, float(values.max() - values.min()))
    return largest


def _common(
    first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """The times that are in both lists of times."""
    common = []
    i = 0
    j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return common
