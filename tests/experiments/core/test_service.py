"""What classes and users got: against definitions by brute force, in summaries, reports and
capacities.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from experiments import capacity
from experiments.core import service
from experiments.core.config import Slo, load
from experiments.core.distributions import ServiceClass
from experiments.core.records import REJECTED, BranchRecord, RequestRecord
from experiments.core.service import OUTPUT_WEIGHT, PROMPT_WEIGHT
from tests import drawn
from tests.experiments.core.summaries import (
    BASE,
    changed_workload,
    simulated_run,
    simulated_run_at,
)

CHAT = ServiceClass("chat", ttft=1.0, itl=0.5)
CLASSES = [
    {"name": "chat", "share": 0.6, "ttft": 0.02, "itl": 0.01, "priority": 0},
    {"name": "batch", "share": 0.4, "e2e": 30.0, "priority": 1},
]


def request(
    arrival: float,
    first_step: float | None,
    times: tuple[float, ...],
    *,
    user: str = "",
    prompt: int = 4,
    reason: str | None = "length",
    **fields,
) -> RequestRecord:
    branch = BranchRecord("r", times, tuple(range(len(times))), 0, reason)
    return RequestRecord(
        "r", arrival, prompt, max(1, len(times)), first_step, (branch,), user=user, **fields
    )


def difference_by_force(requests: list[RequestRecord]) -> float:
    """The definition, over all pairs of times at which something happens."""
    tokens: dict[str, list[tuple[float, float]]] = {}
    waits: dict[str, list[tuple[float, float]]] = {}
    for item in requests:
        if item.first_scheduled is not None:
            prompt = PROMPT_WEIGHT * item.prompt_tokens
            tokens.setdefault(item.user, []).append((item.first_scheduled, prompt))
        for time in item.branches[0].token_times:
            tokens.setdefault(item.user, []).append((time, OUTPUT_WEIGHT))
        first_step = 1e9 if item.first_scheduled is None else item.first_scheduled
        waits.setdefault(item.user, []).append((item.arrival, first_step))
    times = sorted(
        {time for events in tokens.values() for time, _ in events}
        | {time for pairs in waits.values() for pair in pairs for time in pair}
    )

    def is_backlogged(user: str, start: float, end: float) -> bool:
        moments = [time for time in times if start <= time < end]
        return all(any(a <= moment < b for a, b in waits[user]) for moment in moments)

    def got(user: str, start: float, end: float) -> float:
        return sum(weight for time, weight in tokens.get(user, ()) if start <= time < end)

    largest = 0.0
    for f, g in combinations(sorted(waits), 2):
        for start, end in combinations(times, 2):
            if is_backlogged(f, start, end) and is_backlogged(g, start, end):
                largest = max(largest, abs(got(f, start, end) - got(g, start, end)))
    return largest


TIMES = st.integers(0, 8).map(float)


@st.composite
def records(draw) -> RequestRecord:
    arrival = draw(TIMES)
    user = draw(st.sampled_from("abc"))
    prompt = draw(st.integers(1, 9))
    if draw(st.integers(0, 4)) == 0:
        return request(arrival, None, (), user=user, prompt=prompt, reason=None)
    first_step = arrival + draw(TIMES)
    gaps = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    times = tuple(float(time) for time in first_step + np.cumsum(gaps))
    return request(arrival, first_step, times, user=user, prompt=prompt)


@drawn.given(60, 250, requests=st.lists(records(), min_size=1, max_size=7))
def test_the_largest_difference_is_that_of_the_definition(requests):
    assert service.largest_difference(requests) == pytest.approx(difference_by_force(requests))


def test_a_difference_by_hand():
    """Both wait until 4 s; b gets 10 tokens of a prompt at 2 s, a nothing."""
    requests = [
        request(0.0, 4.0, (5.0,), user="a"),
        request(0.0, 2.0, (3.0,), user="b", prompt=10),
        request(0.0, 4.0, (5.0,), user="b"),
    ]
    assert service.largest_difference(requests) == 10 * PROMPT_WEIGHT + OUTPUT_WEIGHT
    assert service.largest_difference(requests[1:]) == 0.0, "one user"
    assert service.backlog_of(requests) == [(0.0, 4.0)]
    rejected = request(1.0, None, (), user="a", reason=REJECTED, rejected_at=3.0)
    assert service.backlog_of([rejected]) == [(1.0, 3.0)]


def quality_by_force(times: list[float], ttft: float, itl: float) -> float:
    """The integrals of the definition, by a reader who is watched in small steps."""
    step = itl / 400
    reads: list[float] = []  # tokens that were read until each moment
    read = 0.0
    moment = 0.0
    while read < len(times) - 1e-9:
        num_tokens = sum(time <= moment + 1e-12 for time in times)
        due = max(0.0, (moment - ttft) / itl)
        read = max(read, min(num_tokens, due, read + step / itl))
        reads.append(read)
        moment += step
    moments = step * np.arange(1, len(reads) + 1)
    expected = np.clip((moments - ttft) / itl, 0, len(times))
    return 1.0 if not expected.sum() else sum(reads) / expected.sum()


@drawn.given(
    30,
    300,
    first=st.floats(0.05, 4.0),
    gaps=st.lists(st.floats(0.0, 2.0), max_size=6),
    ttft=st.floats(0.1, 2.0),
    itl=st.floats(0.1, 1.0),
)
def test_qoe_is_that_of_the_definition(first, gaps, ttft, itl):
    times = [float(time) for time in np.cumsum([first, *gaps])]
    targets = ServiceClass("chat", ttft=ttft, itl=itl)
    arrived = request(7.0, 7.0, tuple(7.0 + time for time in times))
    assert service.qoe(arrived, targets) == pytest.approx(
        quality_by_force(times, ttft, itl), abs=0.02
    )


def test_qoe_by_hand():
    """One token, of which the user expects to have read all at 1.5 s, is read from 2 to 2.5 s."""
    late = request(0.0, 0.0, (2.0,))
    assert service.qoe(late, CHAT) == pytest.approx(0.25 / (0.25 + 1.0))
    in_time = request(0.0, 0.0, (1.0, 1.5, 2.0))
    early = request(0.0, 0.0, (0.1, 0.1, 0.1))
    assert [service.qoe(request, CHAT) for request in (in_time, early)] == [1.0, 1.0]
    stopped = request(0.0, 0.0, (0.1, 3.0))  # an early token makes up for no late one
    assert service.qoe(stopped, CHAT) == pytest.approx(1 - (3.0 - 1.5) / 4.0)
    assert service.qoe(request(0.0, None, (), reason=REJECTED), CHAT) == 0.0
    assert service.qoe(late, Slo(ttft=1.0)) is None
    counted = late._replace(branches=(late.branches[0]._replace(counted=1),))
    assert service.qoe(counted, CHAT) is None, "the times of tokens were not kept"


def test_targets_are_those_of_the_class_or_else_of_all():
    classes = {"chat": CHAT, "free": ServiceClass("free"), "late": ServiceClass("late", e2e=3.0)}
    slo = Slo(ttft=0.1)
    times = (0.9, 1.3)
    met = {
        name: service.meets(record, service.targets_of(record, slo, classes))
        for name in ("chat", "free", "late", "")
        for record in [request(0.0, 0.0, times, service_class=name)]
    }
    assert met == {"chat": True, "free": False, "late": True, "": False}
    too_late = request(0.0, 0.0, (0.9, 3.1), service_class="late")
    assert not service.meets(too_late, classes["late"])
    rejected = request(0.0, None, (), reason=REJECTED)
    assert not service.meets(rejected, Slo())


def test_summaries_have_groups_only_where_requests_have_them():
    plain = simulated_run(BASE).summary
    assert not {"classes", "users", "service_difference"} & plain.keys()
    assert simulated_run({**BASE, "slo": {"ttft": 0.1}}).summary["goodput"].keys() == {
        "requests_per_s",
        "share",
    }
    one_user = simulated_run({**BASE, "workload": changed_workload(users=1)}).summary
    assert one_user == plain
    measured = simulated_run({**BASE, "workload": changed_workload(users=3, classes=CLASSES)})
    summary = measured.summary
    by_class = summary["classes"]
    assert {name: group["requests"] for name, group in by_class.items()} == {
        name: sum(r.service_class == name for r in measured.requests) for name in ("batch", "chat")
    }
    weighted = PROMPT_WEIGHT * summary["prompt_tokens"] + OUTPUT_WEIGHT * summary["output_tokens"]
    for section in ("classes", "users"):
        assert sum(group["service"] for group in summary[section].values()) == weighted
    assert by_class["batch"]["qoe"] is None, "it has no targets of tokens"
    assert 0 < by_class["chat"]["qoe"] <= 1
    shares = [group["goodput"]["share"] for group in by_class.values()]
    assert summary["goodput"]["least_class_share"] == min(shares)
    met = sum(group["requests"] * group["goodput"]["share"] for group in by_class.values())
    assert summary["goodput"]["share"] == pytest.approx(met / 40)
    sums = {**BASE, "workload": changed_workload(users=3, classes=CLASSES), "records": "sums"}
    of_sums = simulated_run(sums).summary
    assert of_sums["service_difference"] is None
    assert of_sums["classes"]["chat"]["qoe"] is None
    assert of_sums["users"]["u0"]["service"] == summary["users"]["u0"]["service"]


CAPACITY = {
    **BASE,
    "workload": changed_workload(
        count=80, classes=[{**service_class, "share": 1.0} for service_class in CLASSES]
    ),
    "sweep": None,
}


def test_a_capacity_by_classes(tmp_path, capsys):
    """Of the chat requests, a half of all, fewer are enough for all than for each class."""
    (tmp_path / "c.yaml").write_text(json.dumps(CAPACITY), encoding="utf-8")
    rates = {}
    for options in ([], ["--each-class"]):
        words = [str(tmp_path / "c.yaml"), "--share", "0.7", "--tolerance", "0.1", "--quiet"]
        words += ["--out", str(tmp_path / "runs"), "--json", str(tmp_path / "a.json"), *options]
        assert capacity.main(words) == 0
        text = capsys.readouterr().out
        whose = "requests of each class" if options else "requests"
        assert f"70% of {whose}: the targets of their class" in text
        answer = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
        rates[bool(options)] = answer["cells"][0]["capacity"]
    assert rates[True] < rates[False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"each_class": True, "slo": Slo(ttft=1.0)},
            "--each-class is given, and the workload has no",
        ),
        (
            {"each_class": True, "classes": (CHAT,), "percentile": 99, "slo": Slo(ttft=1.0)},
            "--each-class and --percentile are both given",
        ),
        ({"classes": (CHAT,), "percentile": 99, "slo": Slo()}, "slo has no target to meet"),
        ({"classes": (ServiceClass("free"),), "slo": Slo()}, "slo has no target to meet"),
    ],
)
def test_criteria_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        capacity.Criterion(**options)


def test_the_config_of_tenants_is_run_with_users_classes_and_sessions():
    """One short repeat of the config that users see first."""
    points = load(Path("configs/tenants.yaml"), ("workload.limit=30", "workload.rounds=1"))
    assert [str(point.experiment.engine.policy) for point in points[:3]] == [
        "fcfs",
        "fair",
        "priority",
    ]
    for point in points[:2]:
        measured = simulated_run_at(point)
        assert measured.failed is None
        assert measured.workload.describe()["sessions"] < 30
        assert measured.summary["classes"].keys() == {"chat", "batch"}
        assert measured.summary["users"].keys() == {"u0", "u1", "u2"}
