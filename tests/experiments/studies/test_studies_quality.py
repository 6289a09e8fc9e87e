"""Study 025: its policy by example, its loads, and the load at which a QoE is kept."""

from __future__ import annotations

import importlib

import pytest

from experiments import reproduce
from experiments.core import config
from experiments.core.distributions import Changing
from experiments.core.workloads import Synthetic
from pagedjax.host import scheduler
from pagedjax.host.types import Request
from tests.host.scheduler_steps import WORD, start
from tests.refusals import refused

FOLDER = reproduce.STUDIES / "025_quality_of_experience"
quality = importlib.import_module("experiments.studies.025_quality_of_experience.study")
ahead = importlib.import_module("experiments.studies.025_quality_of_experience.ahead").ahead
POLICY = ahead(targets=(("chat", 1.0, 1.0),), horizon_s=2.0, ahead_s=3.0)


def ask(name: str, prompt: int = 4, tokens: int = 20) -> Request:
    return Request(name, prompt, tokens, service_class="chat")


def step(state, now: float):
    state, plan = scheduler.schedule(state, POLICY, now=now)
    state, _ = scheduler.commit(state, plan, [WORD] * len(plan.seqs))
    scheduler.check(state)
    return state, plan


def test_a_request_whose_reader_has_enough_makes_way():
    state = start(ask("a"), seqs=1)
    for number in range(4):  # a token in each 0.1 s
        state, plan = step(state, 0.1 * number)
    assert state.memory.readers["a"].until == pytest.approx(1.0 + 3.0), "its reader began at 1 s"
    state = scheduler.submit(state, ask("b"))
    state, plan = step(state, 0.4)
    assert not plan.preempted, "b was not offered yet"
    state, plan = step(state, 0.5)
    assert plan.preempted == ("a",)
    assert plan.admitted == ("b",)
    while state.ids:
        now = 0.1 * state.step
        state, plan = step(state, now)
        for name in plan.preempted:
            assert state.memory.readers[name].until - now >= 3.0


def test_a_request_whose_reader_waits_stays():
    state = start(ask("a"), seqs=1)
    for number in range(6):  # a token in each second, as it is read
        state, plan = step(state, float(number))
    state = scheduler.submit(state, ask("b"))
    for number in range(6, 9):
        state, plan = step(state, float(number))
        assert not plan.preempted


def test_a_new_request_comes_before_a_late_one_and_a_short_one_before_a_long_one():
    state = start(ask("a", tokens=12), seqs=1)
    state, _ = step(state, 0.0)
    state = scheduler.submit(state, ask("late"))
    for number in range(1, 11):
        state, _ = step(state, float(number))
    state = scheduler.submit(state, ask("long", prompt=8, tokens=1))
    state = scheduler.submit(state, ask("new", tokens=1))
    order: list[str] = []
    while state.ids:
        state, plan = step(state, float(state.step))
        order += [name for name in plan.admitted if name not in order]
    assert order == ["new", "long", "late"]


def test_a_lead_that_is_shorter_than_the_horizon_is_refused():
    with refused("ahead has ahead_s 3.0; it must be above horizon_s 4.0"):
        ahead(targets=(), horizon_s=4.0, ahead_s=3.0)


def test_a_burst_has_the_mean_rate():
    count, arrivals = quality.burst(2.0, 1.5, 100.0)
    (point,) = config.load(FOLDER / "config.yaml", (count, arrivals))
    workload = point.experiment.workload
    assert isinstance(workload, Synthetic)
    assert workload.count == 200
    assert isinstance(workload.arrivals, Changing)
    (_, high), (end, low) = workload.arrivals.rates
    assert high == 3.0
    assert high * end + low * (100.0 - end) == pytest.approx(200.0)


def test_the_load_that_keeps_a_quality_lies_between_the_loads_around_it():
    points = [(1.0, 1.0), (1.2, 0.9), (1.4, 0.5)]
    assert quality.sustained_load(points, 0.95) == pytest.approx(1.1)
    assert quality.sustained_load(points, 0.7) == pytest.approx(1.3)
    assert quality.sustained_load(points, 0.4) is None
    assert quality.sustained_load(points[1:], 0.95) is None
