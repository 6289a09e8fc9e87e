"""Simulated replicas that join, leave or fail during a run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import strategies as st

from experiments.core.config import expand
from experiments.core.replica_options import Change
from experiments.core.replicas import ReplicaCount, drive_replicas
from experiments.core.workloads import WorkItem
from pagedjax.routing import LEAST_LOADED, ROUND_ROBIN, ROUTERS
from tests import drawn
from tests.experiments.core.summaries import BASE, GREEDY, changed_workload, simulated_run
from tests.experiments.core.test_replicas import Times, engines

ARRIVALS = {"process": "poisson", "rate": 100.0}
RAW = {
    **BASE,
    "engine": {**BASE["engine"], "max_num_seqs": 4},
    "cache_tokens": 512,
    "workload": changed_workload(count=30, shared_prefix=32, prefixes=4, arrivals=ARRIVALS),
    "simulate": {"step_s": 0.01, "model": "llama-3-8b"},
    "replicas": {"count": 2, "router": "least_loaded"},
}


def run_with(**changes):
    return simulated_run({**RAW, **changes})


def by_hand(work: list[WorkItem], count: int, *changes: Change, router=ROUND_ROBIN):
    """Run steps of one second. Returns the replica of each request, when each replica's steps
    began, and the requests that were computed anew.
    """
    ever = count + sum(change.join for change in changes)
    anew: list[str] = []
    times = Times(ever)
    assigned = drive_replicas(
        engines(ever),
        router,
        32,
        work,
        GREEDY,
        times,
        None,
        ReplicaCount(count, changes, anew.append),
    )
    return assigned, [[started for started, *_ in steps] for steps in times.steps], anew


def items(*rows: tuple[str, float, int]) -> list[WorkItem]:
    return [WorkItem(name, arrival, (20,) * 5, output) for name, arrival, output in rows]


def test_a_replica_gets_requests_from_when_it_joins():
    work = items(("a", 0.0, 9), ("b", 1.5, 1), ("c", 2.0, 2), ("d", 2.5, 1))
    assigned, begins, anew = by_hand(work, 1, Change(2.0, join=1), router=LEAST_LOADED)
    assert assigned == {"a": 0, "b": 0, "c": 1, "d": 1}, (
        "a change comes before an arrival at one time"
    )
    assert begins[1] == [2.0, 3.0]
    assert anew == []


def test_a_replica_that_leaves_ends_what_it_has():
    work = items(("a", 0.0, 2), ("b", 0.0, 6), ("c", 1.5, 2), ("d", 3.0, 1))
    assigned, begins, anew = by_hand(work, 2, Change(1.0, leave=1))
    assert assigned == {"a": 0, "b": 1, "c": 0, "d": 0}
    assert begins[1] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert anew == []


def test_requests_of_a_replica_that_fails_are_computed_anew():
    """It fails in its step from 1 to 2 s, which is its last; b has 2 of its 4 tokens then, and
    begins again.
    """
    work = items(("a", 0.0, 3), ("b", 0.0, 4))
    assigned, begins, anew = by_hand(work, 2, Change(1.5, fail=1))
    assert (assigned, anew) == ({"a": 0, "b": 0}, ["b"])
    assert begins == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 1.0]]


def test_a_request_that_ended_in_the_last_step_is_not_computed_again():
    assigned, begins, anew = by_hand(items(("a", 0.0, 1), ("b", 0.0, 2)), 2, Change(1.5, fail=1))
    assert (assigned, anew) == ({"a": 0, "b": 1}, [])
    assert begins == [[0.0], [0.0, 1.0]]


def test_changes_after_the_end_change_nothing():
    late = {"changes": [{"at": 1e6, "join": 3}, {"at": 2e6, "fail": 4}]}
    plain = run_with()
    changed = run_with(replicas={**RAW["replicas"], **late})
    assert (changed.requests, changed.steps) == (plain.requests, plain.steps)
    assert changed.summary == plain.summary, (
        "replicas that would join after the end were never there"
    )


def test_replicas_that_joined_before_the_end_are_counted():
    """One request of 3 steps of 0.25 s ends at 0.75 s; a replica that joins then is too late."""
    workload = {
        "kind": "synthetic",
        "count": 1,
        "prompt": {"dist": "fixed", "value": 5},
        "output": {"dist": "fixed", "value": 3},
    }
    changes = [{"at": 0.0, "join": 1}, {"at": 0.625, "join": 1}, {"at": 0.75, "join": 4}]
    slow = {"step_s": 0.25, "model": "llama-3-8b"}
    summary = run_with(
        replicas={"count": 1, "changes": changes}, workload=workload, simulate=slow
    ).summary
    assert summary["duration_s"] == 0.75
    assert summary["replicas"]["count"] == 3
    assert summary["replicas"]["busy_share"]["mean"] == pytest.approx(1 / 3)
    assert summary["between_steps_s"] == 2 * 0.75, "of two that had no work"


def test_what_a_failed_replica_lost_is_in_no_rate_of_output():
    """Ten requests of 9 tokens, one after the other on each replica; one fails after 8 of its steps
    of 10 ms.
    """
    workload = {
        "kind": "synthetic",
        "count": 10,
        "prompt": {"dist": "fixed", "value": 5},
        "output": {"dist": "fixed", "value": 9},
        "arrivals": {"process": "at_once"},
    }
    engine = {**RAW["engine"], "max_num_seqs": 1}
    failing = {"count": 2, "router": "round_robin", "changes": [{"at": 0.075, "fail": 1}]}
    result = run_with(replicas=failing, workload=workload, engine=engine)
    sampled = sum(step.sampled for step in result.steps)
    assert (result.summary["output_tokens"], sampled) == (90, 90 + 8)
    steady = result.summary["steady_output_tokens_per_s"]
    assert steady == pytest.approx(100), (
        "one replica makes a token every 10 ms, and what the other one made is lost"
    )
    busiest = result.summary["replicas"]["requests"]["most"]
    idlest = result.summary["replicas"]["requests"]["least"]
    assert (busiest, idlest) == (10, 0), "a request counts where it ended"


def drawn_changes(present: int, rows: list[tuple[float, str, int]]) -> list[dict]:
    """Changes in order that leave at least one replica."""
    changes = []
    for at, kind, count in sorted(rows):
        count = count if kind == "join" else min(count, present - 1)
        if count:
            changes.append({"at": at, kind: count})
            present += count if kind == "join" else -count
    return changes


@drawn.given(
    15,
    60,
    count=st.integers(1, 3),
    rows=st.lists(
        st.tuples(
            st.floats(0.0, 0.6), st.sampled_from(["join", "leave", "fail"]), st.integers(1, 2)
        ),
        max_size=5,
    ),
    router=st.sampled_from(sorted(ROUTERS)),
    branches=st.integers(1, 2),
    clients=st.one_of(st.none(), st.integers(1, 8)),
)
def test_laws_of_changes(count: int, rows: list, router: str, branches: int, clients: int | None):
    arrivals = (
        RAW["workload"]["arrivals"]
        if clients is None
        else {"process": "closed_loop", "clients": clients}
    )
    changes = drawn_changes(count, rows)
    result = run_with(
        replicas={"count": count, "router": router, "changes": changes},
        workload={**RAW["workload"], "arrivals": arrivals},
        sampling={"temperature": 0.8, "ignore_eos": True, "n": branches},
    )
    assert result.failed is None
    for request in result.requests:
        for branch in request.branches:
            assert len(branch.token_ids) == request.max_tokens, "each token is there once"
            assert all(a < b for a, b in pairwise(branch.token_times))
            assert request.first_scheduled is not None
            assert request.arrival <= request.first_scheduled < branch.token_times[0]
    # by the rules of `Change`: when each replica begins, gets no more requests, and makes no more
    # steps
    begin = dict.fromkeys(range(count), 0.0)
    refuses = {}
    stops = {}
    present = list(range(count))
    joined = count
    for change in changes:
        for _ in range(change.get("join", 0)):
            begin[joined] = change["at"]
            present.append(joined)
            joined += 1
        for _ in range(change.get("leave", 0)):
            refuses[present.pop()] = change["at"]
        for _ in range(change.get("fail", 0)):
            departed = present.pop()
            refuses[departed] = stops[departed] = change["at"]
    for step in result.steps:
        assert begin[step.replica] <= step.started + 1e-9
        assert step.started <= stops.get(step.replica, float("inf")) + 1e-9
    for request in result.requests:
        assert request.arrival < refuses.get(request.replica, float("inf"))
    absent = [replica for replica in stops if stops[replica] == 0.0]
    assert not {request.replica for request in result.requests} & set(absent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [{"at": 1.0}],
            r"join, leave and fail are \(0, 0, 0\); one of them must be above 0, and the others 0",
        ),
        ([{"at": -1.0, "join": 1}], r"at is -1.0; it must be at least 0 seconds, and finite"),
        (
            [{"at": 2.0, "join": 1}, {"at": 1.0, "join": 1}],
            r"replicas.changes are at \[2.0, 1.0\] seconds; list them",
        ),
        (
            [{"at": 1.0, "leave": 1}, {"at": 2.5, "fail": 1}],
            "replicas.changes leave 0 replicas at 2.5 s; at least 1",
        ),
    ],
)
def test_wrong_changes_are_reported(changes: list, message: str):
    with pytest.raises(ValueError, match=message):
        expand({**RAW, "replicas": {"count": 2, "changes": changes}}, folder=Path())
