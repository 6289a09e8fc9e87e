"""How fair a run was to its users: numbers of a report, if requests name users."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.core import store
from experiments.core.records import RequestRecord


def with_fairness(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs. If the requests of a run name users, the numbers of `fairness` are among its
    metrics. Reads the files of requests.
    """
    return [_with_fairness(run) for run in runs]


def _with_fairness(run: dict[str, Any]) -> dict[str, Any]:
    path = Path(run["run"]) / "requests.jsonl"
    if run["failed"] or not path.is_file():
        return run
    with path.open(encoding="utf-8") as lines:
        if "user" not in json.loads(next(lines, "{}")):  # a column of all requests or of none
            return run
    numbers = fairness(store.read_requests(path.parent))
    return {**run, "metrics": {**run["metrics"], "fairness": numbers}} if numbers else run


def fairness(requests: Iterable[RequestRecord]) -> dict[str, float] | None:
    """Numbers over the users of some requests; None for less than two users.

    jain: Jain's index of the speeds of users (Jain, Chiu and Hawe, DEC-TR-301, 1984): 1 if all are
        equal, 1 / users if one has all. A speed is the output tokens of a user's finished requests
        over the seconds from their arrivals to their ends.
    worst_ttft: the largest 99th percentile of the time to first token of a user, over that of the
        median user.
    """
    by_user: dict[str, list[RequestRecord]] = {}
    for request in requests:
        if request.user:
            by_user.setdefault(request.user, []).append(request)
    if len(by_user) < 2:
        return None
    speeds = np.array(list(map(_speed, by_user.values())))
    ttfts_of_users = [
        [request.ttft for request in members if request.ttft is not None]
        for members in by_user.values()
    ]
    waits = [float(np.percentile(ttfts, 99)) for ttfts in ttfts_of_users if ttfts]
    numbers = {}
    if speeds.any():
        numbers["jain"] = float(speeds.sum() ** 2 / (len(speeds) * (speeds**2).sum()))
    if waits and np.median(waits) > 0:
        numbers["worst_ttft"] = max(waits) / float(np.median(waits))
    return numbers


def _speed(requests: Sequence[RequestRecord]) -> float:
    """Output tokens over seconds from arrival to end, of the requests that ended."""
    finished = [(request, request.e2e) for request in requests if request.e2e is not None]
    seconds = sum(e2e for _, e2e in finished)
    tokens = sum(branch.num_tokens for request, _ in finished for branch in request.branches)
    return tokens / seconds if seconds else 0.0
