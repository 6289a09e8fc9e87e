"""A learnt policy decides the same on arrays, in the simulator and in an engine, and its recordings
replay byte for byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.core.drive import drive
from experiments.core.submit import in_order, submit
from experiments.twin import learned, measured, network, policies, recorded, simulated, workloads
from experiments.twin.learned import FEATURES, WEIGHT_FRACTION
from experiments.twin.network import Integers
from experiments.twin.rollout import difference
from pagedjax.host import replay
from pagedjax.options.config import EngineConfig
from tests.engine.runs import small_llm
from tests.experiments.twin.test_worlds import COUNT, ENGINE, PARAMS, SIZES, WORLD, step_time

pytestmark = pytest.mark.few_optimisations

STEPS = 150  # of an episode, and more
ONE = 2**WEIGHT_FRACTION  # a weight


@pytest.fixture(scope="module")
def weights() -> Integers:
    """Of a network of one unit: two arrivals for each doubling of the predicted length."""
    hidden = np.zeros((1, len(FEATURES)), np.int32)
    hidden[0, FEATURES.index("predicted")] = ONE
    zero = np.int32(0)
    return Integers(hidden, np.zeros(1, np.int32), np.full(1, 2 * ONE, np.int32), zero, np.int32(9))


@pytest.fixture(scope="module")
def policy(weights, tmp_path_factory) -> str:
    """The name of the exported policy."""
    file = tmp_path_factory.mktemp("policy") / "learned.py"
    text = learned.source("learned_here", network.network_of(weights), "A policy of a test.")
    file.write_text(text, encoding="utf-8")
    return f"{file}:POLICY"


@pytest.fixture(scope="module")
def llm(one_layer, policy):
    """Of the sizes of the worlds: a pool so small that sequences are preempted."""
    return small_llm(one_layer, **ENGINE, policy=policy, enable_prefix_caching=False)


def drawn() -> Any:
    """The requests of a world. Arrivals are never at the end of a step."""
    requests = jax.device_get(jax.jit(WORLD.draw)(jax.random.key(21), PARAMS.workload))
    return requests._replace(arrival=requests.arrival // 10 * 10 + 5)


def on_arrays_by_the_clock(requests: Any, weights: Integers) -> recorded.Decisions:
    """An episode of the environment, which decides when requests arrive."""
    world = WORLD._replace(own_draw=workloads.given)
    params = PARAMS._replace(workload=requests)
    key = jax.random.key(0)

    @jax.jit
    def episode(weights: Integers) -> Any:
        def step(state: Any, _: Any) -> tuple[Any, Any]:
            arrived = state.scheduler.phase > 0
            order = network.order(weights, state.scheduler, state.requests)
            _, state, _reward, done, info = world.step_env(key, state, order, params)
            return state, (info["plan"], arrived, done)

        return jax.lax.scan(step, world.reset(key, params)[1], None, length=STEPS)[1]

    plans, arrived, done = jax.device_get(episode(weights))
    assert done[-1]
    number = int(done.argmax()) + 1
    decisions = [
        recorded.decision_of(jax.tree.map(lambda leaf, i=i: leaf[i], plans)) for i in range(number)
    ]
    return recorded.Decisions(arrived.argmax(axis=0).astype(np.int32), decisions)


def decisions_of(path: Path, policy: str) -> recorded.Decisions:
    by_name = replay.with_own([policy])
    assert replay.verify(path, by_name).identical
    return recorded.of_recording(path, COUNT, by_name)


def test_the_same_decisions_on_arrays_in_the_simulator_and_in_an_engine(
    llm, weights, policy, tmp_path
):
    requests = drawn()
    expected = on_arrays_by_the_clock(requests, weights)
    assert sum(len(step.preempted) for step in expected.steps) > 0
    order = [number for step in expected.steps for number in step.admitted]
    assert order != sorted(order), "it is not first come, first served"

    options = {"enable_prefix_caching": False, "token_buckets": (SIZES.budget,)}
    config = EngineConfig(**ENGINE, policy=policy, **options)
    virtual = simulated.engine_of(config, step_time)
    virtual.record(tmp_path / "simulated.jsonl")
    items = simulated.items_of(requests)
    drive(virtual, items, simulated.SAMPLING, virtual.clock, virtual.sleep)
    virtual.record(None)
    in_simulator = decisions_of(tmp_path / "simulated.jsonl", policy)
    np.testing.assert_array_equal(in_simulator.submitted, expected.submitted)
    assert recorded.first_difference(in_simulator.steps, expected.steps) is None

    engine = llm.engine
    engine.record(tmp_path / "engine.jsonl")
    ends = {item.request_id: item.longest_output for item in items}
    step_by_step(engine, items, expected.submitted, ends)
    engine.record(None)
    in_engine = decisions_of(tmp_path / "engine.jsonl", policy)
    assert recorded.first_difference(in_engine.steps, expected.steps) is None


def step_by_step(engine: Any, items: Any, submitted: np.ndarray, ends: dict[str, int]) -> None:
    """Run an engine whose requests arrive before given steps. Each ends at its drawn length."""
    pairs = list(in_order(items, simulated.SAMPLING))
    number = 0
    sampled: dict[str, int] = {}
    while len(sampled) < len(items) or engine.has_work:
        for item, params in [pairs[i] for i in np.flatnonzero(submitted == number)]:
            submit(engine, item._replace(ends_at=None), params)
            sampled[item.request_id] = 0
        result = engine.step()
        number += 1
        plan = result.plan
        for seq, length, start, count in zip(
            plan.seqs, plan.lengths, plan.starts, plan.counts, strict=True
        ):
            if start + count == length:
                sampled[seq.request_id] += 1
                if sampled[seq.request_id] == ends[seq.request_id] < seq.request.max_tokens:
                    engine.cancel(seq.request_id, "stop")


def test_an_engine_in_time_decides_as_the_scheduler_on_arrays(llm, weights, policy, tmp_path):
    """Whenever requests arrive by the clock of this machine; so soon that some wait on a fast one."""
    requests = drawn()
    requests = requests._replace(arrival=requests.arrival // 100)
    engine = llm.engine
    engine.record(tmp_path / "run.jsonl", times=True)
    drive(engine, simulated.items_of(requests), simulated.SAMPLING)
    engine.record(None)
    decisions = decisions_of(tmp_path / "run.jsonl", policy)
    on_arrays = recorded.on_arrays(
        requests, SIZES, network.order, weights, decisions.submitted, len(decisions.steps)
    )
    assert recorded.first_difference(on_arrays, decisions.steps) is None
    with_zeros = recorded.on_arrays(
        requests,
        SIZES,
        network.order,
        jax.tree.map(np.zeros_like, weights),
        decisions.submitted,
        len(decisions.steps),
    )
    assert recorded.first_difference(with_zeros, decisions.steps) is not None, "else all orders do"


def test_policies_take_turns_at_the_worlds_multiple_of_an_engines_capacity(
    llm, one_layer, weights, policy, tmp_path
):
    fcfs = small_llm(one_layer, **ENGINE, policy="fcfs", enable_prefix_caching=False)
    engines = {"learned": llm.engine, "fcfs": fcfs.engine}
    first = drawn()
    later = first._replace(arrival=first.arrival + 1000)
    options = {"enable_prefix_caching": False, "token_buckets": (SIZES.budget,)}
    config = EngineConfig(**ENGINE, policy="fcfs", **options)
    speed = measured.speed_of(fcfs.engine, config, step_time, [first, later])
    at_once = first._replace(arrival=np.zeros_like(first.arrival))
    seconds_of_worlds = simulated.run(at_once, config, step_time).end.max()
    np.testing.assert_allclose(COUNT / speed.capacity, speed.stretch * seconds_of_worlds)
    assert set(speed.step_seconds) <= set(fcfs.engine.config.token_buckets)
    assert min(speed.step_seconds.values()) > 0

    episodes = [measured.stretched(requests, speed.stretch) for requests in (first, later)]
    rate = measured.load(episodes, speed.capacity)
    rate_of_worlds = measured.load([first], COUNT / seconds_of_worlds)
    np.testing.assert_allclose(rate, rate_of_worlds, rtol=1e-2)

    too_late = measured.mean_latencies(engines, episodes, tmp_path, -1.0)
    assert [len(values) for values in too_late.values()] == [0, 0]
    means = measured.mean_latencies(engines, episodes, tmp_path, 600.0)
    assert all(np.all(values > 0) for values in means.values())
    by_name = replay.with_own([policy])
    decides = {
        "learned": (network.order, weights),
        "fcfs": (policies.without_parameters(policies.fcfs), None),
    }

    def written_at(name: str, number: int) -> int:
        return measured.recording(tmp_path, name, number).stat().st_mtime_ns

    turns = [("learned", 0), ("fcfs", 0), ("fcfs", 1), ("learned", 1)]
    times = [written_at(*turn) for turn in turns]
    assert times == sorted(times), "each begins in its turn"
    for name, decide in decides.items():
        equal = [
            measured.equal_steps(
                measured.recording(tmp_path, name, number), by_name, requests, SIZES, *decide
            )
            for number, requests in enumerate(episodes)
        ]
        assert min(equal) > 0

    path = tmp_path / "at-once.jsonl"
    measured.run(llm.engine, at_once, path)
    assert measured.equal_steps(path, by_name, at_once, SIZES, *decides["learned"]) > 0
    assert measured.equal_steps(path, by_name, at_once, SIZES, *decides["fcfs"]) == 0


def test_so_many_episodes_are_needed_that_chance_has_little_part():
    """Of gains whose spread is as large as their mean, 16: then the lower end of the interval is
    above 0 in 19 of 20 comparisons.
    """
    rng = np.random.default_rng(0)
    gains = rng.normal(1.0, 1.0, (4000, 100))
    gains = 1.0 + (gains - gains.mean()) / gains.std()
    count = measured.episodes_needed(gains.ravel())
    assert count == 16
    lows = [difference(row[:count], np.zeros(count)).low for row in gains]
    assert abs(np.mean(np.asarray(lows) > 0) - measured.POWER) < 0.02
    assert measured.episodes_needed(-gains.ravel()) is None
