"""Fairness between users, against its definitions."""

from __future__ import annotations

import pytest

from experiments.analysis import fairness
from experiments.core.records import BranchRecord, RequestRecord


def request(user: str, ttft: float, tokens: int) -> RequestRecord:
    """Of one second, with `tokens` tokens."""
    times = (ttft, *[1.0] * (tokens - 1))
    branch = BranchRecord("r", times, tuple(range(tokens)), 0, "length")
    return RequestRecord("r", 0.0, 5, tokens, 0.0, (branch,), user=user)


def test_users_are_compared_by_their_speeds_and_waits():
    requests = [request("a", 0.1, 4), request("a", 0.1, 4), request("b", 0.1, 4)]
    assert fairness.fairness(requests) == {"jain": pytest.approx(1), "worst_ttft": pytest.approx(1)}
    requests = [request("a", 0.1, 9), request("b", 0.2, 3), request("c", 0.8, 3)]
    numbers = fairness.fairness(requests)
    assert numbers == {
        "jain": pytest.approx(15**2 / (3 * (81 + 9 + 9))),
        "worst_ttft": pytest.approx(0.8 / 0.2),
    }


def test_less_than_two_users_have_no_fairness():
    assert fairness.fairness([request("a", 0.1, 4), request("", 0.5, 4)]) is None
    assert fairness.fairness([request("", 0.5, 4)]) is None


def test_users_that_got_nothing_have_no_speed():
    branch = BranchRecord("r", (), (), 0, None)
    waiting = RequestRecord("r", 0.0, 5, 1, None, (branch,), user="b")
    numbers = fairness.fairness([request("a", 0.1, 4), waiting])
    assert numbers == {"jain": pytest.approx(0.5), "worst_ttft": pytest.approx(1)}
