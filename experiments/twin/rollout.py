"""Whole episodes of many worlds in one compiled loop, and what is compared of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from experiments.twin import scheduler
from experiments.twin.environment import Environment, Params, State
from experiments.twin.policies import Decide, all_offered, remembering
from experiments.twin.scheduler import ENDED, Order, Requests
from experiments.twin.with_memory import Memory, Step


def returns(
    world: Environment,
    decide: Decide,
    policy: Any,
    params: Params,
    keys: jax.Array,
    together: int | None = None,
) -> jax.Array:
    """float32 [worlds]: the sum of the rewards of an episode from each key.

    A world that has ended earns nothing more. The sum is NaN for a world that cannot end: a step
    computes nothing while requests wait, because one of them is larger than the pool or the policy
    offers none. It is also NaN if the time of a world is beyond int32.

    Args:
        policy: what `decide` gets first, the same for all worlds; not used by one with memory.
        keys: [worlds].
        together: how many worlds one loop plays; it ends when the last of them has ended. Loops
            follow each other. None: one loop plays all. `cached()` is the best number on this
            device.
    """
    return played(world, decide, policy, params, keys, together)[1]


def played(
    world: Environment,
    decide: Decide,
    policy: Any,
    params: Params,
    keys: jax.Array,
    together: int | None = None,
) -> tuple[State, jax.Array]:
    """As `returns` -> (the last state of each world, sums of rewards)."""

    decider = remembering(decide, policy)

    def episode(key: jax.Array) -> tuple[State, jax.Array]:
        def step(carry: tuple[State, Memory, jax.Array]) -> tuple[State, Memory, jax.Array]:
            state, memory, total = carry
            requests = state.requests
            order = decider.order(memory, state.scheduler, requests)
            _observation, after, reward, done, info = world.step_env(key, state, order, params)
            plan = info["plan"]
            memory = decider.observe(memory, Step(state.scheduler, plan, after.scheduler), requests)
            computes = jnp.any(plan.counts > 0) & (after.now >= state.now)
            return after, memory, total + jnp.where(done | computes, reward, jnp.nan)

        def unfinished(carry: tuple[State, Memory, jax.Array]) -> jax.Array:
            state, _, total = carry
            return jnp.any(state.scheduler.phase != ENDED) & ~jnp.isnan(total)

        state = world.reset(key, params)[1]
        memory = decider.first(state.scheduler, state.requests)
        state, _, total = jax.lax.while_loop(unfinished, step, (state, memory, jnp.float32(0)))
        return state, total

    return jax.lax.map(episode, keys, batch_size=together or len(keys))


def cached() -> int | None:
    """How many worlds of some 64 requests to play together: on a CPU, as many as its cache holds;
    None: all.
    """
    return 32 if jax.default_backend() == "cpu" else None


def shortest_left(policy: None, state: scheduler.State, requests: Requests) -> Order:
    """The oracle, which knows all lengths: first the request with the fewest tokens of output left
    (Schrage 1968).
    """
    return all_offered(requests.final_len - state.length)


class Difference(NamedTuple):
    """The mean of paired differences, and its 95 % interval."""

    mean: float
    low: float
    high: float


def difference(results: np.ndarray, base: np.ndarray) -> Difference:
    """The interval of Student's t of `results - base`, [worlds] each, of the same worlds."""
    differences = np.asarray(results, float) - np.asarray(base, float)
    mean = float(differences.mean())
    error = float(differences.std(ddof=1)) / len(differences) ** 0.5
    half = float(stats.t.ppf(0.975, len(differences) - 1)) * error
    return Difference(mean, mean - half, mean + half)
