"""Predicted lengths of outputs: what a workload draws, what a policy reads, what results say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest

from experiments.core import what_ran
from experiments.core.config import expand
from experiments.core.distributions import Fixed, Predicted, Uniform
from experiments.core.workloads import Synthetic
from pagedjax.host import policies, purity, scheduler
from pagedjax.host.event_log import Commit, Recorder, Schedule, Submit
from pagedjax.host.replay import verify
from pagedjax.host.types import Request, Seq
from tests.experiments.core.summaries import BASE, MEASURED, changed_workload, simulated_run
from tests.experiments.core.test_workloads import make

PLAIN = Synthetic("synthetic", 4000, Fixed("fixed", 2), Uniform("uniform", 200, 900))
POLICY = """
from pagedjax.policies import by_key
SHORTEST = by_key("shortest_predicted", lambda seq: seq.predicted)
"""


def test_predictions_have_the_stated_error_and_are_paired():
    plain = make(PLAIN)
    exact, small, large = (
        make(replace(PLAIN, predicted=Predicted(error))) for error in (0.0, 0.25, 1.0)
    )
    lengths = [item.max_tokens for item in plain.items]
    assert [item.predicted for item in exact.items] == lengths
    logs = [
        np.log([item.predicted or 0 for item in workload.items]) - np.log(lengths)
        for workload in (small, large)
    ]
    for errors, sigma in zip(logs, (0.25, 1.0), strict=True):
        assert np.std(errors) == pytest.approx(sigma, rel=0.05)
        assert np.median(errors) == pytest.approx(0.0, abs=0.05)
    chex.assert_trees_all_close(4 * logs[0], logs[1], atol=0.2)  # rounded to tokens
    unpredicted = [item._replace(predicted=None) for item in large.items]
    assert unpredicted == list(plain.items), "nothing else changes"
    first_five = make(replace(PLAIN, count=5, predicted=Predicted(1.0)))
    assert first_five.items == large.items[:5]
    assert "predicted_error" not in plain.describe()
    assert large.describe()["predicted_error"] == 1.0


@pytest.mark.parametrize("error", [0.0, 2.0])
def test_a_policy_of_ones_own_reads_predictions(tmp_path, error):
    (tmp_path / "mine.py").write_text(POLICY, encoding="utf-8")
    raw: dict[str, Any] = {
        **BASE,
        "engine": {**BASE["engine"], "max_num_seqs": 1, "policy": "mine.py:SHORTEST"},
        "workload": changed_workload(
            arrivals={"process": "at_once"}, max_tokens=100, predicted={"error": error}
        ),
    }
    measured = simulated_run(raw, tmp_path)
    assert measured.workload.describe()["predicted_error"] == error
    predicted = {item.request_id: item.predicted for item in measured.workload.items}
    started = sorted(measured.requests, key=lambda request: request.first_scheduled or 0.0)
    order = [predicted[request.request_id] or 0 for request in started]
    assert order == sorted(order)
    facts = dict(what_ran.facts(expand(raw, folder=tmp_path)))
    assert facts["Predictions"] == (
        "mine.py:SHORTEST reads predicted lengths of outputs, which are the drawn lengths with a "
        f"log-normal error of sigma {error:g}"
    )
    assert ("Oracle" in facts) == (error == 0)
    del raw["workload"]["predicted"]
    with pytest.raises(ValueError, match=r"request 'r0.*' has no predicted length, and the policy"):
        simulated_run(raw, tmp_path)


def test_predictions_need_lengths_that_hold():
    workload = {**MEASURED["workload"], "predicted": {"error": 0.5}}
    with pytest.raises(
        ValueError, match=r"^workload\.predicted is given, and sampling\.ignore_eos"
    ):
        expand({**MEASURED, "workload": workload, "sampling": {}}, folder=Path())
    with pytest.raises(
        ValueError, match=r"^workload\.predicted\.error is -1\.0; it must be from 0"
    ):
        expand({**BASE, "workload": changed_workload(predicted={"error": -1})}, folder=Path())


def test_a_recording_with_predictions_replays(tmp_path):
    policy = policies.by_key("predicted", lambda seq: seq.predicted)
    assert purity.reads_predictions(policy)
    assert not purity.reads_predictions(policies.SHORTEST)
    purity.check(policy)
    path = tmp_path / "run.jsonl"
    state = scheduler.init(purity.CONFIG)
    recorder = Recorder(path, state.config, policy.name)
    for name, predicted in (("a", 9), ("b", 0), ("c", 4)):
        request = Request(name, 2, 3, predicted=predicted)
        state = scheduler.submit(state, request)
        recorder.write(Submit(request))
    state, plan = scheduler.schedule(state, policy)
    recorder.write(Schedule(plan))
    assert plan.admitted == ("b", "c", "a")
    state, events = scheduler.commit(state, plan, [1, 1, 1])
    recorder.write(Commit(plan, [1, 1, 1], {}, {}, events))
    recorder.close()
    assert '"beams":false,"predicted":0}}' in path.read_text()
    assert verify(path, {policy.name: policy}).identical


def test_a_sequence_without_a_prediction_says_so():
    with pytest.raises(ValueError, match=r"^request 'a' has no predicted length, .* Engine\.add"):
        _ = Seq(Request("a", 1, 1), 0, 2, 1).predicted
