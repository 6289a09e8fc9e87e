"""Closed loops: a client sends its next request when its last one has ended; one engine and several
replicas.
"""

from __future__ import annotations

import math
from typing import Any

import chex
import pytest
from hypothesis import strategies as st

from experiments.core.drive import drive
from experiments.core.records import RequestRecord
from experiments.core.submit import Sender
from experiments.core.workloads import WorkItem
from pagedjax.routing import ROUTERS
from tests import drawn
from tests.experiments.core.summaries import BASE, GREEDY, changed_workload, simulated_run
from tests.experiments.core.test_replicas import engines

OUTPUT = {"dist": "uniform", "low": 1, "high": 12}


def workload(clients: int) -> dict[str, Any]:
    arrivals = {"process": "closed_loop", "clients": clients}
    return changed_workload(count=24, output=OUTPUT, arrivals=arrivals)


def run_with(**changes):
    return simulated_run({**BASE, **changes})


def ends(requests: list[RequestRecord]) -> list[float]:
    """The end of each request, in seconds from the start of the run."""
    return [max(branch.token_times[-1] for branch in request.branches) for request in requests]


def unfinished_at(requests: list[RequestRecord], time: float) -> int:
    """Requests that were sent at or before `time` and end later."""
    return sum(
        request.arrival <= time < end for request, end in zip(requests, ends(requests), strict=True)
    )


def test_times_by_hand():
    """Steps of 1 s, a token each, two clients: both are busy until 2 s and 3 s; the next ones begin
    there.
    """
    (engine,) = engines(1)
    added: list[tuple[str, float]] = []
    add = engine.add
    engine.add = lambda name, *arguments, **options: (
        added.append((name, engine.now)),
        add(name, *arguments, **options),
    )[1]
    work = [
        WorkItem(name, 0.0, (20,) * 5, output)
        for name, output in (("a", 2), ("b", 3), ("c", 1), ("d", 1))
    ]
    start, results = drive(engine, work, GREEDY, engine.clock, engine.sleep, clients=2)
    assert added == [("a", 0.0), ("b", 0.0), ("c", 2.0), ("d", 3.0)]
    assert (start, len(results)) == (0.0, 4)


@drawn.given(
    8,
    25,
    clients=st.sampled_from([*range(1, 13), 24, 100]),
    count=st.integers(1, 5),
    router=st.sampled_from(sorted(ROUTERS)),
    branches=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_laws_of_a_closed_loop(clients: int, count: int, router: str, branches: int, seed: int):
    """Replicas have clocks of their own, so steps end in another order than they begin."""
    result = run_with(
        workload=workload(clients),
        sampling={"temperature": 0.8, "ignore_eos": True, "n": branches},
        replicas={"count": count, "router": router},
        seed=seed,
    )
    requests = result.requests
    assert result.failed is None
    *before, last = sorted({request.arrival for request in requests})
    assert {unfinished_at(requests, time) for time in before} <= {clients}
    assert unfinished_at(requests, last) <= clients, (
        "the last requests may be fewer than the free clients"
    )
    chex.assert_trees_all_equal(
        [request.arrival for request in requests],
        ([0.0] * clients + sorted(ends(requests)))[: len(requests)],
    )
    assert result.workload.describe()["last_arrival_s"] == last
    assert all(request.queue is not None and request.queue >= 0 for request in requests), (
        "nothing is computed before it is sent"
    )


def test_sender_waits_for_the_client_that_is_free_first():
    """Replica steps end in any order; 5 s is known before 2 s."""
    work = [WorkItem(name, 0.0, (20,), 1) for name in "abc"]
    sender = Sender(work, GREEDY, clients=2)
    (engine,) = engines(1)
    results = {}
    for name in "ab":
        assert sender.next() == 0.0
        item, params = sender.take_next()
        engine.add(item.request_id, item.prompt_token_ids, params)
        results[name] = engine.step()
    assert sender.next() == math.inf, "both clients are busy"
    assert sender.end_branches(results["a"], 5.0) == ["a"]
    assert sender.end_branches(results["b"], 2.0) == ["b"]
    assert sender.next() == 2.0
    sender.take_next()
    assert (sender.next(), sender.has_unsent) == (math.inf, False)


def test_no_clients_are_refused():
    with pytest.raises(ValueError, match=r"workload.arrivals.clients is 0; it must be at least 1"):
        run_with(workload=workload(0))
