"""Users with skews and classes of requests: draws, what engines get, and what policies need."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from hypothesis import strategies as st

import experiments
from experiments.core import policy_fields, workloads
from experiments.core.config import expand
from experiments.core.distributions import (
    EvenUsers,
    Fixed,
    OneHeavyUser,
    Predicted,
    ServiceClass,
    Uniform,
    ZipfUsers,
    shares_of_users,
)
from experiments.core.workloads import Own, Sessions, Synthetic
from tests import drawn
from tests.experiments.core.summaries import BASE, changed_workload, run_files, simulated_run
from tests.experiments.core.test_workloads import make

PLAIN = Synthetic("synthetic", 4000, Fixed("fixed", 2), Uniform("uniform", 2, 9))
CHAT = ServiceClass("chat", 3.0, ttft=0.5, itl=0.1, priority=-1)
BATCH = ServiceClass("batch", 1.0, e2e=60.0)
SKEWS = st.one_of(
    st.builds(EvenUsers, st.just("uniform"), st.integers(1, 9)),
    st.builds(ZipfUsers, st.just("zipf"), st.integers(1, 9), st.floats(0.0, 3.0)),
    st.builds(OneHeavyUser, st.just("one_heavy"), st.integers(2, 9), st.floats(0.05, 0.95)),
)


@drawn.given(4, 30, users=SKEWS, seed=st.integers(0, 2**32))
def test_users_have_the_shares_of_their_skew(users, seed):
    load = make(replace(PLAIN, users=users), seed=seed)
    shares = shares_of_users(users)
    assert shares.sum() == pytest.approx(1.0)
    assert (np.diff(shares[1:]) <= 0).all(), "the first users have most"
    counts = Counter(item.user for item in load.items)
    drawn_shares = [counts[f"u{i}"] / 4000 for i in range(users.count)]
    # five standard deviations of a share of 4,000 draws
    chex.assert_trees_all_close(np.array(drawn_shares), shares, atol=5 * 0.5 / 4000**0.5)
    first_seven = make(replace(PLAIN, users=users, count=7), seed=seed)
    assert [item.user for item in first_seven.items] == [item.user for item in load.items[:7]]


def test_shares_by_hand():
    chex.assert_trees_all_close(
        shares_of_users(ZipfUsers("zipf", 3)), np.array([6, 3, 2]) / 11, atol=1e-12
    )
    chex.assert_trees_all_close(
        shares_of_users(OneHeavyUser("one_heavy", 5, 0.6)), np.array([0.6, *[0.1] * 4]), atol=1e-12
    )


@drawn.given(6, 20, seed=st.integers(0, 2**32), users=SKEWS)
def test_users_and_classes_change_nothing_else(seed, users):
    spec = replace(PLAIN, count=50, predicted=Predicted(0.5), max_tokens=20)
    plain = make(spec, seed=seed)
    load = make(replace(spec, users=users, classes=(CHAT, BATCH)), seed=seed)
    cleared = {"user": "", "priority": 0, "service_class": "", "deadline": None}
    assert [item._replace(**cleared) for item in load.items] == list(plain.items)
    other_users = make(replace(spec, users=3, classes=(CHAT, BATCH)), seed=seed)
    assert [i.service_class for i in other_users.items] == [i.service_class for i in load.items]
    one_class = make(replace(spec, users=users, classes=(CHAT,)), seed=seed)
    assert [item.user for item in one_class.items] == [item.user for item in load.items]


def test_items_have_the_values_of_their_class():
    load = make(replace(PLAIN, classes=(CHAT, BATCH)))
    values = {(item.service_class, item.priority, item.deadline) for item in load.items}
    assert values == {("chat", -1, None), ("batch", 0, 60.0)}
    chats = sum(item.service_class == "chat" for item in load.items)
    assert chats / 4000 == pytest.approx(0.75, abs=0.04)


def test_a_session_has_one_user_and_one_class():
    spec = Sessions(
        "sessions",
        300,
        Uniform("uniform", 1, 4),
        Fixed("fixed", 2),
        Fixed("fixed", 2),
        users=OneHeavyUser("one_heavy", 3, 0.5),
        classes=(CHAT, BATCH),
    )
    load = make(spec)
    values = {(item.session, item.user, item.service_class) for item in load.items}
    assert len(values) == 300
    assert Counter(user for _, user, _ in values)["u0"] == pytest.approx(150, abs=40)


def test_a_function_gives_priorities_and_classes(tmp_path):
    source = (
        "def load(rng):\n"
        "    yield {'prompt': 5, 'output': 2, 'priority': 7}\n"
        "    yield {'prompt': 5, 'output': 2, 'service_class': 'batch'}\n"
    )
    path = tmp_path / "mine.py"
    path.write_text(source, encoding="utf-8")
    spec = Own(f"{path}:load")
    items = make(spec).items
    assert [(item.priority, item.service_class) for item in items] == [(7, ""), (0, "batch")]
    items = make(replace(spec, classes=(replace(CHAT, share=1e9), BATCH))).items
    assert [(item.priority, item.service_class) for item in items] == [(7, "chat"), (0, "batch")]
    with pytest.raises(
        ValueError, match=r"classes has chat, and r00001 has the class 'batch'; add"
    ):
        make(replace(spec, classes=(CHAT,)))
    for wrong, message in (("'priority': 'x'", "an integer"), ("'service_class': 3", "a text")):
        path.write_text(
            f"def load(rng):\n    yield {{'prompt': 5, 'output': 2, {wrong}}}\n", encoding="utf-8"
        )
        with pytest.raises(ValueError, match=f"request 0 has .* it must be {message}"):
            make(Own(f"{path}:load"))


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"users": {"skew": "zipf", "count": 0}}, r"users\.count is 0; it must be at least 1 user"),
        ({"users": {"skew": "zipf", "count": 2, "exponent": 11}}, r"exponent is 11\.0; it must be"),
        ({"users": {"skew": "one_heavy", "count": 1}}, r"count is 1; it must be at least 2"),
        ({"users": {"skew": "one_heavy", "count": 2, "share": 1}}, r"share is 1\.0; it must be ab"),
        ({"users": {"skew": "zpif", "count": 2}}, r"users\.skew is 'zpif'.*did you mean 'zipf'"),
        ({"classes": []}, r"classes is empty; give a class, such as {name: chat}, or null"),
        ({"classes": [{"name": "a.b"}]}, r"name is 'a\.b'; it must have letters, digits"),
        ({"classes": [{"name": "a"}, {"name": "a"}]}, "classes has two classes named 'a'"),
        ({"classes": [{"name": "a", "ttft": 0}]}, r"ttft is 0\.0; it must be above 0 seconds"),
        ({"classes": [{"name": "a", "share": 0}]}, r"share is 0\.0; it must be above 0"),
    ],
)
def test_users_and_classes_that_cannot_be_are_refused(workload, message):
    with pytest.raises(ValueError, match=message):
        expand({**BASE, "workload": changed_workload(**workload)}, folder=Path())


CLASSES = [
    {"name": "chat", "ttft": 0.5, "priority": 0},
    {"name": "batch", "e2e": 60, "priority": 1},
]


def test_columns_of_requests_and_lines_of_recordings(tmp_path):
    workload = changed_workload(users={"skew": "uniform", "count": 2}, classes=CLASSES, count=12)
    folder = run_files(tmp_path, {**BASE, "workload": workload, "record": True})
    requests = experiments.load_requests(folder)
    assert set(requests.user) == {"u0", "u1"}
    assert set(requests.service_class) == {"chat", "batch"}
    assert requests.deadline.dropna().unique().tolist() == [60.0]
    (file,) = folder.rglob("recording.jsonl")
    submits = [
        entry["submit"]
        for entry in map(json.loads, file.read_text(encoding="utf-8").splitlines())
        if "submit" in entry
    ]
    by_id = {request["request_id"]: request for request in submits}
    rows: Any = requests.itertuples()
    for row in rows:
        request = by_id[row.request_id]
        assert (request["user"], request["service_class"]) == (row.user, row.service_class)
        assert request["priority"] == (row.service_class == "batch")
        assert request.get("deadline") == (60.0 if row.service_class == "batch" else None)


POLICIES = [
    ("fair", {}, {"users": 3}, "which reads the user of requests, .* ''.* set workload.users"),
    ("fair", {"users": 1}, {"users": 2}, "have 'u0' there, so that it decides nothing; set"),
    (
        "pagedjax.policies:vtc(output_weight=3.0)",
        {},
        {"users": 2},
        "which reads the user of requests",
    ),
    ("srtf", {}, {"predicted": {"error": 0.5}}, "which reads the predicted of requests"),
    ("deadline", {"users": 2}, {"classes": CLASSES}, "reads the service_class and the deadline"),
    ("priority", {"users": 3}, {"classes": CLASSES}, "reads the priority of .* have 0 there"),
    (
        "priority",
        {"classes": CLASSES[:1]},
        {"classes": CLASSES},
        "set workload.classes to two classes of different priority, or name another policy",
    ),
]


@pytest.mark.parametrize(("policy", "bad", "good", "message"), POLICIES)
def test_a_policy_that_would_decide_nothing_is_refused(policy, bad, good, message):
    sweep = {"grid": {"engine.policy": ["fcfs", policy]}}
    start = re.escape(f"engine.policy is {policy!r}, ")
    with pytest.raises(ValueError, match=f"{start}.*{message}"):
        expand({**BASE, "workload": changed_workload(**bad), "sweep": sweep}, folder=Path())
    _, point = expand({**BASE, "workload": changed_workload(**good), "sweep": sweep}, folder=Path())
    assert point.experiment.engine.policy == policy
    fcfs = {**BASE["engine"], "policy": "fcfs"}
    expand({**BASE, "engine": fcfs, "workload": changed_workload(**bad)}, folder=Path())


def test_priorities_of_classes_decide():
    """The urgent class waits less under `priority` than under `fcfs`."""
    waits = {}
    for policy in ("fcfs", "priority"):
        engine = {**BASE["engine"], "max_num_seqs": 1, "policy": policy}
        workload = changed_workload(classes=CLASSES, arrivals={"process": "at_once"})
        requests = simulated_run({**BASE, "engine": engine, "workload": workload}).requests
        waits[policy] = max(r.queue or 0.0 for r in requests if r.service_class == "chat")
    assert waits["priority"] < waits["fcfs"]


def test_the_workload_of_several_policies_is_built_once(monkeypatch):
    builds = []
    build = workloads.build
    monkeypatch.setattr(workloads, "build", lambda *args: builds.append(1) or build(*args))
    policy_fields._only_values.cache_clear()
    sweep = {"grid": {"engine.policy": ["fair"], "engine.max_num_seqs": [2, 4, 8]}}
    expand({**BASE, "workload": changed_workload(users=3), "sweep": sweep}, folder=Path())
    assert len(builds) == 1
