"""The benchmark of worlds: all of its runs make the same steps."""

from __future__ import annotations

import jax
import pytest

from experiments.bench import worlds
from experiments.training.train_policy import Setup, world_of

pytestmark = pytest.mark.few_optimisations

SETUP = Setup(requests=6, rate=60.0)


def test_steps_are_those_that_compute_something():
    """A step at a time or together, the simulator makes as many; and so do the worlds, but for
    arrivals that fall into the step beside.
    """
    world, params = world_of(SETUP)
    keys = jax.random.split(jax.random.key(SETUP.seed), 2)
    drawn = [jax.device_get(world.draw(key, params.workload)) for key in keys]
    single = worlds.in_the_simulator(SETUP, drawn, spans=False)
    together = worlds.in_the_simulator(SETUP, drawn, spans=True)
    assert single.steps == together.steps
    with worlds.ThreadPoolExecutor(2) as pool:
        speed = worlds.on_arrays(world, params, keys, pool, threads=2)()
    assert speed.steps == pytest.approx(single.steps, abs=4)


def test_each_rate_is_beside_the_simulators():
    rows = worlds.measure(SETUP, [2], rounds=1, worlds=1)
    assert [row["run"] for row in rows] == [
        "2 worlds on arrays",
        "the simulator",
        "the simulator, decodes together",
    ]
    assert rows[1]["ratio"] == 1.0
    assert all(row["steps_per_second"] > 0 for row in rows)
