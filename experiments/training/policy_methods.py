"""How the parameters of a scheduling policy move: evolution strategies, and a policy gradient.

Both play `2 * pairs * worlds` episodes a step, and return an estimate of the gradient of the loss,
which is minus the mean return.

- `evolution` (Salimans et al. 2017, arXiv 1703.03864): candidates lie around the parameters in
  pairs, all of them play the same episodes as the integers that would be exported, and their ranks
  weigh the directions.
- `policy_gradient` (REINFORCE: Williams 1992). Each decision is drawn: who enters, and who is
  preempted, one after the other, with a probability that falls exponentially with the key (Plackett
  1975, Luce 1959). Each episode is played by several copies that draw differently, and the baseline
  of a copy is the mean return of the others (Kool et al. 2019). The scores are floats here, so what
  is exported is the rounded policy without the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.training.policy_setup import Setup
from experiments.twin import environment, network, scheduler
from experiments.twin.environment import Environment, Params
from experiments.twin.learned import FRACTION
from experiments.twin.network import Integers, Scorer
from experiments.twin.policies import all_offered
from experiments.twin.rollout import cached, returns
from experiments.twin.scheduler import ENDED, RUNNING, WAITING, Plan, Sizes, arrivals

Vector = jax.Array  # float32 [parameters]
Episodes = Callable[[jax.Array, int], jax.Array]  # (step, count) -> keys


class Problem(NamedTuple):
    """What is trained, and where.

    scorer: of the parameters.
    weights: the integers of the parameters.
    episodes: the keys of a step's episodes.
    patience: in arrivals.
    """

    world: Environment
    params: Params
    scorer: Callable[[Vector], Scorer]
    weights: Callable[[Vector], Integers]
    episodes: Episodes
    patience: int


class Estimate(NamedTuple):
    """gradient: of the loss, float32 [parameters]. loss: float32 []."""

    gradient: jax.Array
    loss: jax.Array


# (problem, setup, parameters, step, a key of this step) -> the estimate
Method = Callable[[Problem, Setup, Vector, jax.Array, jax.Array], Estimate]


# --- evolution strategies -------------------------------------------------------------------------


def evolution(
    problem: Problem, setup: Setup, vector: Vector, step: jax.Array, key: jax.Array
) -> Estimate:
    """The directions of the candidates, weighed by their ranks."""
    directions = jax.random.normal(key, (setup.pairs, vector.size))
    offsets = setup.sigma * jnp.concatenate([directions, -directions])
    keys = problem.episodes(step, setup.worlds)

    def score(candidate: Vector) -> jax.Array:
        weights = problem.weights(candidate)
        results = returns(
            problem.world, network.order, weights, problem.params, keys, together=cached()
        )
        return results.mean()

    scores = by_cache(score, vector + offsets)
    ranks = jnp.argsort(jnp.argsort(scores)) / (2 * setup.pairs - 1) - 0.5
    ascent = (ranks[: setup.pairs] - ranks[setup.pairs :]) @ directions
    return Estimate(-ascent / (setup.pairs * setup.sigma), -scores.mean())


def by_cache(function: Callable[..., Any], *rows: Any) -> Any:
    """The function of each row: one after the other on a CPU, else all together."""
    if cached() is None:
        return jax.vmap(function)(*rows)
    return jax.lax.map(lambda row: function(*row), rows)


# --- the policy gradient --------------------------------------------------------------------------


def policy_gradient(
    problem: Problem, setup: Setup, vector: Vector, step: jax.Array, key: jax.Array
) -> Estimate:
    """REINFORCE with the other copies of an episode as its baseline."""
    copies = 2 * setup.pairs
    keys = problem.episodes(step, setup.worlds)
    noise = jax.random.split(key, (copies, setup.worlds))

    def copy(noise_keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        def episode(episode_key: jax.Array, noise_key: jax.Array) -> tuple[jax.Array, jax.Array]:
            return drawn_episode(problem, setup.temperature, vector, episode_key, noise_key)

        return jax.vmap(episode)(keys, noise_keys)

    results, directions = by_cache(copy, noise)  # [copies, worlds], [copies, worlds, parameters]
    baselines = (results.sum(axis=0) - results) / (copies - 1)
    advantages = results - baselines
    ascent = jnp.einsum("cw,cwp->p", advantages, directions) / results.size
    return Estimate(-ascent, -results.mean())


def drawn_episode(
    problem: Problem, temperature: float, vector: Vector, key: jax.Array, noise_key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """An episode with drawn decisions -> (its return, the gradient of the logarithm of the
    probability of its decisions). The return is NaN if the episode cannot end.
    """

    def advance(carry: tuple[Any, jax.Array, Vector]) -> tuple[Any, jax.Array, Vector]:
        state, total, direction = carry
        step_key = jax.random.fold_in(noise_key, state.scheduler.step)
        step = drawn_step(problem, temperature, vector, state, step_key)
        return step.state, total + step.reward, direction + step.direction

    def unfinished(carry: tuple[Any, jax.Array, Vector]) -> jax.Array:
        state, total, _ = carry
        return jnp.any(state.scheduler.phase != ENDED) & ~jnp.isnan(total)

    state = problem.world.reset(key, problem.params)[1]
    first = (state, jnp.float32(0), jnp.zeros_like(vector))
    _, total, direction = jax.lax.while_loop(unfinished, advance, first)
    return total, direction


class DrawnStep(NamedTuple):
    """A step with drawn decisions.

    state: after the step.
    reward: float32 []; NaN if the step computed nothing.
    direction: float32 [parameters], the gradient of the logarithm of the probability of its
        decisions.
    """

    state: environment.State
    reward: jax.Array
    direction: Vector


def drawn_step(
    problem: Problem,
    temperature: float,
    vector: Vector,
    state: environment.State,
    key: jax.Array,
) -> DrawnStep:
    """One step: Gumbel noise on the keys draws who enters and who is preempted."""
    keys, pull_back = jax.vjp(lambda v: float_keys(problem, v, state), vector)
    noise = temperature * jax.random.gumbel(key, keys.shape)
    runs = state.scheduler.phase == RUNNING
    noisy_keys = keys + jnp.where(runs, noise, -noise)
    scores = jnp.round(noisy_keys * 2**FRACTION).astype(jnp.int32)
    params = problem.params
    _observation, after, reward, _done, info = problem.world.step_env(
        key, state, all_offered(scores), params
    )
    plan = info["plan"]
    reward = jnp.where(jnp.any(plan.counts > 0), reward, jnp.nan)
    by_key = log_gradient(state.scheduler, plan, params.sizes, keys, scores, temperature)
    (direction,) = pull_back(by_key)
    return DrawnStep(after, reward, direction)


def float_keys(problem: Problem, vector: Vector, state: environment.State) -> jax.Array:
    """float32 [N]: the keys of a learnt policy in arrivals, not rounded."""
    columns = network.features(state.scheduler, state.requests)
    inputs = jnp.stack(columns, axis=-1).astype(jnp.float32) / 2**FRACTION
    score = problem.scorer(vector)(inputs)
    return arrivals(state.scheduler) + jnp.clip(score, 0, problem.patience)


def log_gradient(
    state: scheduler.State,
    plan: Plan,
    sizes: Sizes,
    keys: jax.Array,
    scores: jax.Array,
    temperature: float,
) -> jax.Array:
    """float32 [N]: the derivative by the keys of the logarithm of the probability of a step's
    decisions.

    A decision draws the sequence that enters next, or the one that is preempted next. If rows and
    tokens are left at the end, one more sequence was drawn: its blocks were not free, so it was
    refused.

    Args:
        state: before the step.
        scores: by which the step was planned.
    """
    waits = state.phase == WAITING
    runs = state.phase == RUNNING
    none_left = ~jnp.any(plan.preempted)
    stays = runs & ~plan.preempted
    rows = sizes.max_running - jnp.sum(stays) - jnp.sum(plan.admitted)
    tokens = sizes.budget - jnp.sum(plan.counts)
    still_waits = waits & ~plan.admitted
    refused = scheduler.first_of(scores, still_waits) & (rows > 0) & (tokens > 0) & none_left
    drawn = plan.admitted | refused
    places = jnp.where(refused, jnp.sum(plan.admitted), plan.places)
    entries = choice_gradient(-keys / temperature, waits, drawn, places)
    exits = choice_gradient(keys / temperature, runs, plan.preempted, plan.places)
    return (exits - entries) / temperature


def choice_gradient(
    logits: jax.Array, among: jax.Array, chosen: jax.Array, places: jax.Array
) -> jax.Array:
    """float32 [N]: the derivative by the logits of the logarithm of the probability of draws
    without replacement.

    Args:
        among: bool [N], who could be drawn.
        chosen: bool [N], who was drawn.
        places: int32 [N], the place of each that was drawn: 0, 1, 2 ...
    """

    def draw(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, gradient = carry
        candidates = among & ~(chosen & (places < number))
        shares = jax.nn.softmax(jnp.where(candidates, logits, -jnp.inf))
        return number + 1, gradient + (chosen & (places == number)) - shares

    def draws(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return carry[0] < jnp.sum(chosen)

    return jax.lax.while_loop(draws, draw, (jnp.int32(0), jnp.zeros_like(logits)))[1]


METHODS: dict[str, Method] = {"evolution": evolution, "gradient": policy_gradient}
