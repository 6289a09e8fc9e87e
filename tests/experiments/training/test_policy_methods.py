"""The policy gradient: probabilities of decisions, and derivatives of their logarithms."""

from __future__ import annotations

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

from experiments.training import policy_methods
from experiments.training.policy_methods import (
    Problem,
    choice_gradient,
    drawn_episode,
    log_gradient,
)
from experiments.twin import network
from experiments.twin.cost import Cost
from experiments.twin.environment import Environment, Params
from experiments.twin.network import Scorer
from experiments.twin.policies import all_offered
from experiments.twin.scheduler import RUNNING, WAITING, Sizes
from experiments.twin.workloads import given, of_arrays

pytestmark = pytest.mark.few_optimisations

COUNT = 8
SIZES = Sizes(block_size=4, num_blocks=14, budget=64, max_running=4)
DRAWS = 2048
TEMPERATURE = 2.0
PATIENCE = 8


def log_probability(logits: Any, among: list[int], drawn: list[int]) -> Any:
    """Of draws without replacement: each time in proportion to exp(logit)."""
    total = 0.0
    candidates = list(among)
    for place in drawn:
        total += logits[place] - jnp.log(sum(jnp.exp(logits[i]) for i in candidates))
        candidates.remove(place)
    return total


def test_the_derivative_of_draws_is_that_of_their_probability():
    logits = jnp.asarray([0.3, -1.2, 2.0, 0.7, -0.4])
    among = [0, 2, 3, 4]
    for drawn in ([], [3], [4, 0], [2, 3, 4, 0]):
        places = np.zeros(5, np.int32)
        places[drawn] = np.arange(len(drawn))
        masks = [np.isin(np.arange(5), group) for group in (among, drawn)]
        result = jax.jit(choice_gradient)(logits, *masks, places)
        expected = jax.grad(log_probability)(logits, among, drawn) if drawn else jnp.zeros(5)
        chex.assert_trees_all_close(result, expected, atol=1e-5)


def small_problem() -> tuple[Problem, jax.Array]:
    """A problem of a small pool, and parameters: sequences are preempted, and some wait for blocks."""
    prompts = [3, 30, 28, 5, 26, 4, 3, 27]
    outputs = [12, 4, 9, 15, 6, 11, 5, 8]
    requests = of_arrays(
        np.linspace(0, 3e-4, COUNT), prompts, outputs, 16, predicted=outputs[::-1], sizes=SIZES
    )
    graphdef, first = nnx.split(Scorer(8, rngs=nnx.Rngs(0)))
    first["output"]["bias"] = jax.tree.map(
        lambda bias: bias + PATIENCE / 2, first["output"]["bias"]
    )
    vector, unravel = ravel_pytree(first)
    problem = Problem(
        Environment(COUNT, given),
        Params(SIZES, Cost.of(lambda work: 1e-4 + 1e-6 * work.tokens, SIZES), requests),
        scorer=lambda changed: nnx.merge(graphdef, unravel(changed)),
        weights=lambda changed: network.integers(nnx.merge(graphdef, unravel(changed)), PATIENCE),
        episodes=lambda step, count: jax.random.split(jax.random.key(0), count),
        patience=PATIENCE,
    )
    noise = 0.2 * jax.random.normal(jax.random.key(1), vector.shape)
    return problem, vector + noise


def drawn_by(state: Any, scores: np.ndarray) -> tuple[list[int], list[int]]:
    """Who is drawn to enter, the one that is refused included, and who is preempted, in their
    orders: the rules of the scheduler in plain Python.
    """
    phase = np.asarray(state.phase)
    length = np.asarray(state.length)
    blocks = np.asarray(state.blocks)
    runs = [i for i in range(COUNT) if phase[i] == RUNNING]
    full = [i for i in runs if state.computed[i] == blocks[i] * SIZES.block_size]
    free = int(state.free_blocks)
    victims: list[int] = []
    for i in sorted(runs, key=lambda i: (-scores[i], -i)):
        stay = [j for j in runs if j not in victims]
        missing = sum(j in full for j in stay) - free
        if missing > 0:
            victims.append(i)
            free += blocks[i]
    if victims:
        return [], victims
    free -= len(full)
    rows = SIZES.max_running - len(runs)
    tokens = SIZES.budget - sum(int(length[i] - state.computed[i]) for i in runs)
    drawn = []
    for i in sorted(range(COUNT), key=lambda i: (scores[i], i)):
        if phase[i] != WAITING or rows == 0 or tokens <= 0:
            continue
        drawn.append(i)
        need = -(-length[i] // SIZES.block_size)
        if need > free:
            break
        rows -= 1
        free -= need
        tokens -= min(length[i], tokens)
    return drawn, []


def test_the_derivative_of_a_step_is_that_of_whom_it_asked_and_preempted():
    """By the rules of the scheduler in plain Python, over an episode with random keys."""
    problem, _ = small_problem()
    rng = np.random.default_rng(0)
    step = jax.jit(problem.world.step_env)
    derivative = jax.jit(log_gradient)
    key = jax.random.key(0)
    _, state = jax.jit(problem.world.reset)(key, problem.params)
    refused = preempted = 0
    done = False
    while not done:
        keys = rng.normal(size=COUNT).astype(np.float32)
        scores = rng.permutation(COUNT).astype(np.int32)
        before = state.scheduler
        phase = np.asarray(before.phase)
        drawn, victims = drawn_by(before, scores)
        _, state, _, done, info = step(key, state, all_offered(scores), problem.params)
        plan = info["plan"]
        assert set(victims) == set(np.flatnonzero(plan.preempted))
        refused += len(drawn) > plan.admitted.sum()
        preempted += len(victims) > 0
        waits = [i for i in range(COUNT) if phase[i] == WAITING]
        runs = [i for i in range(COUNT) if phase[i] == RUNNING]

        def logarithm(
            keys: Any, waits: Any = waits, runs: Any = runs, drawn: Any = drawn, out: Any = victims
        ) -> Any:
            entries = log_probability(-keys / TEMPERATURE, waits, drawn)
            return entries + log_probability(keys / TEMPERATURE, runs, out)

        expected = jax.grad(logarithm)(keys) if drawn or victims else np.zeros(COUNT)
        result = derivative(before, plan, SIZES, keys, scores, TEMPERATURE)
        chex.assert_trees_all_close(result, jnp.asarray(expected, jnp.float32), atol=1e-5)
    assert refused > 3
    assert preempted > 2


def test_the_derivative_of_a_logarithm_of_a_probability_has_no_mean():
    """So the derivatives are those of the decisions that were drawn: who was drawn, refused or
    preempted. A decision that was left out would move the mean.
    """
    problem, vector = small_problem()
    noise = jax.random.split(jax.random.key(4), DRAWS)

    @jax.jit
    def directions(noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        def episode(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            return drawn_episode(problem, TEMPERATURE, vector, key, key)

        return jax.vmap(episode)(noise)

    results, gradients = map(np.asarray, directions(noise))
    chex.assert_shape(gradients, (DRAWS, vector.size))
    assert np.std(results) > 0, "decisions matter"
    moving = gradients.std(axis=0) > 1e-3
    assert moving.sum() > 8
    errors = gradients.std(axis=0)[moving] / math.sqrt(DRAWS)
    assert np.abs(gradients.mean(axis=0)[moving] / errors).max() < 4.5


def test_the_methods_are_those_of_the_option():
    assert tuple(policy_methods.METHODS) == ("evolution", "gradient")
