"""Studies 022 to 024, of orders of the queue: loads, numbers and searches, against counts by hand."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest

from experiments import reproduce
from experiments.core import config
from experiments.core.records import BranchRecord, RequestRecord
from experiments.simulation.cost import CHIPS, SHAPES
from pagedjax.host.types import Admitted, Finished, Request, Running, Seq, Submitted

fair = importlib.import_module("experiments.studies.022_fair_service.study")
users = importlib.import_module("experiments.studies.022_fair_service.users")
ranks = importlib.import_module("experiments.studies.023_learning_to_rank.study")
queues = importlib.import_module("experiments.studies.024_skip_join_mlfq.study")


def test_users_send_their_own_lengths_at_their_own_rates():
    rates = {"rates": (1.0, 4.0), "prompts": (10, 20), "outputs": (30, 40)}
    requests = list(users.users(np.random.default_rng(0), seconds=100.0, starts=(0, 50), **rates))
    first, second = [[r for r in requests if r[3] == name] for name in ("u0", "u1")]
    assert (len(first), len(second)) == (100, 400)
    assert {request[:2] for request in first} == {(10, 30)}
    assert min(request[2] for request in second) >= 50
    assert np.diff([request[2] for request in second]) == pytest.approx(0.25)
    random = list(
        users.users(np.random.default_rng(0), seconds=400.0, even=False, exponential=True, **rates)
    )
    assert len(random) == pytest.approx(2000, rel=0.1)
    prompts = [request[0] for request in random if request[3] == "u1"]
    assert (max(prompts), np.mean(prompts)) == (80, pytest.approx(20, rel=0.1))


def waiting(name: str, user: str, arrival: int) -> Seq:
    return Seq(Request(name, 4, 4, user=user), arrival=arrival, limit=8, length=4)


def test_round_robin_takes_one_request_of_each_user_in_turn():
    policy = users.ROUND_ROBIN
    seqs = [waiting(name, name[0], i) for i, name in enumerate(("a1", "a2", "b1", "a3", "c1"))]
    memory = policy.observe(policy.init(), [Submitted(0, seq) for seq in seqs], None)

    def names(memory: Any, queue: list[Seq]) -> list[str]:
        return [seq.request_id for seq in policy.order(memory, queue, Running(()), lambda seq: 0)]

    assert names(memory, seqs) == ["a1", "b1", "c1", "a2", "a3"]
    memory = policy.observe(memory, [Admitted(1, "a1", 4, 0)], None)
    assert names(memory, seqs[1:]) == ["b1", "c1", "a2", "a3"], "a was admitted last"
    memory = policy.observe(memory, [Finished(2, "a1", "stop", 4)], None)
    assert "a1" not in memory[0]


def record(user: str, arrival: float, start: float, times: tuple[float, ...]) -> RequestRecord:
    branch = BranchRecord(f"{user}{arrival}", times, (0,) * len(times), 0, "stop")
    return RequestRecord(f"{user}{arrival}", arrival, 10, len(times), start, (branch,), user=user)


def test_service_is_compared_while_both_users_wait():
    requests = [
        record("u0", 0.0, 1.0, (2.0, 3.0)),
        record("u0", 0.0, 5.0, (6.0, 7.0)),  # u0 waits until 5
        record("u1", 2.0, 2.5, (3.0, 3.5, 4.0)),
        record("u1", 2.0, 8.0, (9.0,)),  # u1 waits from 2 on
    ]
    assert fair.ratio_of(requests) == (10 + 3 * 2) / (2 * 2)  # from 2 to 5
    assert fair.ratio_of(requests[:3]) == 0, "until 2.5, when the third one starts"
    assert fair.ratio_of([requests[0], record("u1", 4.0, 5.0, (6.0,))]) is None


def test_the_bound_is_the_theorem_s():
    assert fair.Load((1.0,), (256,), (256,)).bound == 2 * 2 * fair.POOL
    assert fair.Load((1.0,), (30_000,), (1,)).bound == 2 * 30_000
    points = config.load(reproduce.STUDIES / "022_fair_service/config.yaml")
    for experiment in [point.experiment for point in points]:
        assert experiment.cache_tokens == fair.POOL
        assert experiment.engine.reservation == "oracle", "M: the pool holds all to their ends"


def test_the_example_of_the_authors_is_exact():
    latencies = ranks.example(reproduce.STUDIES / "023_learning_to_rank")
    assert latencies["fcfs"] == pytest.approx((1 + 6 + 13) / 3)
    assert latencies["srtf"] == pytest.approx((1.3 + 1.5 + 1) / 3)


def order(name: str, tau: float, latency: float) -> Any:
    return ranks.Order(name, 1.0, [tau, tau], [latency, 2 * latency], [1.0, 1.0])


def test_gain_is_interpolated_over_tau_for_each_seed():
    first = order(ranks.FCFS, 0.0, 8.0)
    levels = [first, order("good", 1.0, 2.0), order("fair", 0.5, 4.0)]
    gain = ranks.gain_at(levels, first, 0.75)
    assert (gain.low, gain.middle, gain.high, gain.n) == (*[pytest.approx(8 / 3)] * 3, 2)
    assert ranks.ordered_pairs(levels) == 100.0
    assert ranks.ordered_pairs([*levels, order("worse", 0.9, 5.0)]) == pytest.approx(100 * 5 / 6)


def test_rate_at_the_target_is_unknown_if_the_tried_rates_do_not_include_it():
    target = queues.SETTINGS[queues.ALPACA].target
    slow = queues.Latencies([10.0, 20.0], [[target / 2], [target * 2]], [[0.1], [0.2]])
    fast = queues.Latencies([20.0, 40.0], [[target / 2], [target * 2]], [[0.1], [0.2]])
    curves = {(queues.ALPACA, queues.FCFS): slow, (queues.ALPACA, queues.MLFQ): fast}
    assert queues.gain(curves, queues.ALPACA, queues.MLFQ, queues.FCFS).middle == pytest.approx(2)
    assert queues.highest(curves, queues.ALPACA, queues.FCFS, queues.MEAN) == [
        pytest.approx(10 * math.sqrt(2))
    ]
    assert queues.gain(curves, queues.ALPACA, queues.MLFQ, queues.FCFS, queues.TAIL) is None
    assert queues.claim("", 1.0, None, "") == []


def test_counts_and_cache_are_those_of_the_artifact():
    setting = queues.SETTINGS[queues.SHAREGPT]
    assert [setting.count(rate) for rate in (0.05, 0.2, 1.75, 2.5, 8.0)] == [20, 50, 300, 400, 400]
    shape = SHAPES["opt-13b"]
    (point,) = config.load(reproduce.STUDIES / "024_skip_join_mlfq/config.yaml")
    assert point.experiment.cache_tokens is not None
    cache = point.experiment.cache_tokens * shape.token_bytes + shape.total_bytes
    assert cache == pytest.approx(0.9 * CHIPS["a100-80g"].memory, rel=0.01)
