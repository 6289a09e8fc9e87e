"""A learnt policy has the same keys in plain Python and on arrays, so that an engine makes the plans
of the worlds in which it was trained.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.twin import learned, network, workloads
from experiments.twin.learned import FEATURES, FRACTION, LARGEST_WEIGHT, Network
from experiments.twin.network import Integers
from pagedjax.host.checker import check as checker
from pagedjax.host.policies import Policy
from pagedjax.options.own_values import own_value
from tests import drawn
from tests.experiments.twin.test_array_scheduler import (
    World,
    at,
    check_world,
    draw_worlds,
    run_on_arrays,
)
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations

UNITS = 5


def draw_weights(rng: np.random.Generator) -> Integers:
    """Weights of any size, so that values are cut off at both ends."""
    largest = int(rng.choice([40, 300, LARGEST_WEIGHT]))

    def draw(*shape: int) -> np.ndarray:
        return rng.integers(-largest, largest + 1, shape, np.int32)

    patience = np.int32(rng.choice([0, 3, 200]))
    bias = draw(UNITS) << FRACTION
    return Integers(draw(UNITS, len(FEATURES)), bias, draw(UNITS), draw()[()] << FRACTION, patience)


def run_learned(world: World, weights: Integers):
    return run_on_arrays(world, lambda _, state, requests: network.order(weights, state, requests))


run_worlds = jax.jit(jax.vmap(run_learned))


@drawn.given(4, 40, seed=st.integers(0, 2**32 - 1))
def test_plans_are_those_of_the_scheduler_under_the_exported_policy(seed):
    rng = np.random.default_rng(seed)
    stacked, pairs = draw_worlds(seed)
    weights = [draw_weights(rng) for _ in pairs]
    together = jax.tree.map(lambda *leaves: np.stack(leaves), *weights)
    plans, columns = jax.device_get(run_worlds(stacked, together))
    for index, (world, config) in enumerate(pairs):
        policy = learned.policy("drawn", network.network_of(weights[index]))
        check_world(world, config, at(plans, index), at(columns, index), policy)


def test_logarithms_are_those_of_floats_rounded_down_at_powers_of_two():
    around_powers = [2**k + d for k in range(9, 27) for d in (-2, -1, 0, 1)]
    counts = np.unique([*range(300), *around_powers, workloads.MOST_PREDICTED])
    on_arrays = np.asarray(network.log2(jnp.asarray(counts, jnp.int32)))
    np.testing.assert_array_equal(on_arrays, [learned.log2(int(count)) for count in counts])
    exact = np.log2(counts + 1.0)
    assert np.all(on_arrays / 16 <= exact)
    assert np.all(on_arrays / 16 > exact - 0.09 - 1 / 16), "a chord lies 0.086 below the curve"
    powers = np.log2(counts + 1.0) % 1 == 0
    np.testing.assert_array_equal(on_arrays[powers] / 16, exact[powers])


def test_the_file_of_a_policy_has_its_network(tmp_path):
    weights = network.network_of(draw_weights(np.random.default_rng(0)))
    file = tmp_path / "learned.py"
    file.write_text(learned.source("mine", weights, "A policy of a test."), encoding="utf-8")
    policy = own_value("policy", f"{file}:POLICY", Policy, {})
    assert (policy.name, policy.bound) == ("mine", weights.patience)
    assert own_value("policy", f"{file}:NETWORK", Network, {}) == weights


@pytest.mark.default_cases("3-0", "64-1")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("patience", [3, 64])
def test_no_policy_of_a_network_breaks_its_promise(patience, seed):
    """Scores change with the output, so distances of arrivals matter up to the bound."""
    weights = draw_weights(np.random.default_rng(seed))._replace(patience=np.int32(patience))
    policy = learned.policy("drawn", network.network_of(weights))
    report = checker.check(policy, requests=2, num_blocks=4)
    assert report.counterexample is None


def test_networks_of_other_shapes_are_refused():
    network_of_one = Network(((0,) * len(FEATURES),), (0,), (0,), 0, 4)
    with refused("'p' has 2 units, 1 biases and rows of .6. weights; it needs a bias and 6"):
        learned.policy("p", network_of_one._replace(output=(0, 0)))
    with refused("'p' has the weight 5000; the largest is 2047, which is 32.0: scale"):
        learned.policy("p", network_of_one._replace(output=(-5000,)))
