"""The scheduler as an environment of reinforcement learning, with the functions of gymnax (Lange
2022): `reset(key, params)` and `step(key, state, action, params)`, pure and made to be mapped.

A step is a step of the engine. The action is a score for each request: the lowest score is admitted
first, the highest is preempted first (`scheduler.Order`). A request that has not arrived or has
ended has a score that nobody reads. Time passes as the cost says; if nothing is unfinished, until
the next arrival. An episode ends with its last request.

    environment = Environment(count=64, draw=workloads.poisson(64))
    params = Params(sizes, cost, workload)
    observation, state = environment.reset(key, params)
    observation, state, reward, done, info = environment.step(key, state, action, params)

`step` begins the next episode by itself when one ends, as gymnax does; `step_env` does not. There
are no default parameters and no spaces: `Order` and `Observation` say what actions and observations
are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.twin import cost as costs
from experiments.twin import scheduler
from experiments.twin.cost import Cost
from experiments.twin.policies import all_offered
from experiments.twin.scheduler import COMING, ENDED, RUNNING, WAITING, Order, Requests, Sizes
from experiments.twin.workloads import Draw

NOT_YET = -1  # a time


class Params(NamedTuple):
    """What worlds may differ in: all leaves are arrays or numbers.

    first_s, token_s: targets of a request, for the reward `goodput`: seconds to its first token,
        and seconds for each further token, on average.
    """

    sizes: Sizes
    cost: Cost
    workload: Any
    first_s: Any = 1.0
    token_s: Any = 0.1


class State(NamedTuple):
    """A world: its scheduler, and times in microseconds.

    now: int32 [].
    first_token, end: int32 [N]; NOT_YET before it.
    """

    scheduler: scheduler.State
    requests: Requests
    now: jax.Array
    first_token: jax.Array
    end: jax.Array


class Observation(NamedTuple):
    """What a policy may know, in counts.

    sequences: int32 [N, len(SEQUENCE)], of each request that has arrived and has not ended; 0 for
        the others.
    totals: int32 [len(TOTALS)].
    """

    sequences: jax.Array
    totals: jax.Array


SEQUENCE = (
    "waiting",
    "running",
    "prompt_len",
    "output",  # generated tokens
    "to_compute",  # known tokens that are not in the cache
    "left",  # tokens until its limit
    "predicted",
    "priority",
    "user",
    "older",  # unfinished requests that arrived before it
    "waited_ms",  # since its arrival
)
TOTALS = ("waiting", "running", "free_blocks", "now_ms")

Reward = Callable[[State, State, Params], jax.Array]


def observe(state: State) -> Observation:
    """The observation of a state."""
    requests = state.requests
    phase = state.scheduler.phase
    waiting = phase == WAITING
    running = phase == RUNNING
    present = waiting | running
    length = state.scheduler.length
    columns = (
        waiting,
        running,
        requests.prompt_len,
        length - requests.prompt_len,
        length - state.scheduler.computed,
        requests.limit - length,
        requests.predicted,
        requests.priority,
        requests.user,
        jnp.cumsum(present) - present,
        (state.now - requests.arrival) // 1000,
    )
    sequences = jnp.stack([jnp.where(present, column, 0) for column in columns], axis=-1)
    totals = (jnp.sum(waiting), jnp.sum(running), state.scheduler.free_blocks, state.now // 1000)
    return Observation(sequences.astype(jnp.int32), jnp.stack(totals).astype(jnp.int32))


# --- rewards --------------------------------------------------------------------------------------


def latency(before: State, after: State, params: Params) -> jax.Array:
    """Minus the seconds that requests spent from arrival to end, divided by N. The sum over an
    episode is minus the mean latency (Little's law).
    """
    from_then = jnp.maximum(before.now, after.requests.arrival)
    until = jnp.where(after.end == NOT_YET, after.now, after.end)
    spent = jnp.clip(until - from_then, 0, None).astype(jnp.float32)  # a sum may exceed int32
    return -jnp.sum(spent) / costs.MICROSECONDS / _present(after.requests)


def goodput(before: State, after: State, params: Params) -> jax.Array:
    """The share of requests that ended in this step and met both targets. The sum over an episode
    is the share of all requests that met them.
    """
    requests = after.requests
    ended = (after.end != NOT_YET) & (before.end == NOT_YET)
    first = after.first_token - requests.arrival
    further = jnp.maximum(requests.final_len - requests.prompt_len - 1, 1)
    each = (after.end - after.first_token) / further
    met = (first <= params.first_s * costs.MICROSECONDS) & (
        each <= params.token_s * costs.MICROSECONDS
    )
    return jnp.sum(ended & met) / _present(requests)


def fairness(before: State, after: State, params: Params) -> jax.Array:
    """By how much Jain's index of the users' tokens grew (Jain et al. 1984): prompt tokens that were
    computed and tokens that were generated, so far, over the users with a request. The sum over an
    episode is the index at its end.
    """
    return _jain(after) - _jain(before)


REWARDS: dict[str, Reward] = {"latency": latency, "goodput": goodput, "fairness": fairness}


def _present(requests: Requests) -> jax.Array:
    return jnp.sum(requests.prompt_len > 0)


def _jain(state: State) -> jax.Array:
    """The index, from 1 / users to 1; 0 before any token."""
    count = state.requests.user.shape[0]
    arrived = (state.scheduler.phase != COMING) & (state.requests.prompt_len > 0)
    served = jnp.where(state.first_token == NOT_YET, 0, state.scheduler.length)
    tokens = jnp.zeros((count,), jnp.float32).at[state.requests.user].add(served * arrived)
    users = jnp.zeros((count,), bool).at[state.requests.user].max(arrived)
    squares = jnp.sum(tokens * tokens) * jnp.sum(users)
    return jnp.where(squares > 0, jnp.sum(tokens) ** 2 / jnp.where(squares > 0, squares, 1), 0.0)


# --- the environment ------------------------------------------------------------------------------


class Environment(NamedTuple):
    """count: requests of an episode, N.
    draw: the workload of an episode (workloads.py).
    reward: a value of REWARDS, or your own (before, after, params) -> float32 [].
    """

    count: int
    draw: Draw
    reward: Reward = latency

    @property
    def name(self) -> str:
        return "PagedScheduler"

    def reset(self, key: jax.Array, params: Params) -> tuple[Observation, State]:
        """A new episode, at its first arrival."""
        requests = self.draw(key, params.workload)
        never = jnp.full_like(requests.arrival, NOT_YET)
        first = scheduler.init(params.sizes, requests)
        state = _arrived(State(first, requests, jnp.int32(0), never, never))
        return observe(state), state

    def step_env(
        self, key: jax.Array, state: State, action: jax.Array | Order, params: Params
    ) -> tuple[Observation, State, jax.Array, jax.Array, dict[str, Any]]:
        """One step of the engine -> (observation, state, reward, done, info).

        Args:
            key: not used; all that is random is drawn by `reset`.
            action: int32 [N], within `scheduler.LARGEST_SCORE`; or an `Order`.

        `info` has the step's `Plan`.

        Raises:
            ValueError: the reward is not one number.
        """
        order = action if isinstance(action, Order) else all_offered(action)
        planned, plan = scheduler.schedule(state.scheduler, params.sizes, order)
        committed, ended = scheduler.commit(planned, plan, state.requests)
        now = state.now + costs.microseconds(params.cost, plan)
        begins = plan.samples & (state.first_token == NOT_YET)
        after = State(
            committed,
            state.requests,
            now,
            first_token=jnp.where(begins, now, state.first_token),
            end=jnp.where(ended, now, state.end),
        )
        after = _arrived(after)
        reward = self.reward(state, after, params)
        if jnp.shape(reward) != ():
            raise ValueError(
                f"the reward of a step has the shape {jnp.shape(reward)}; return one number, such "
                "as a sum or a mean over the requests"
            )
        done = jnp.all(after.scheduler.phase == ENDED)
        return observe(after), after, reward, done, {"plan": plan}

    def step(
        self, key: jax.Array, state: State, action: jax.Array | Order, params: Params
    ) -> tuple[Observation, State, jax.Array, jax.Array, dict[str, Any]]:
        """`step_env`; after the last step of an episode, observation and state are those of the
        next one.
        """
        observation, after, reward, done, info = self.step_env(key, state, action, params)
        fresh = self.reset(key, params)
        next_observation, next_state = jax.tree.map(
            lambda new, old: jnp.where(done, new, old), fresh, (observation, after)
        )
        return next_observation, next_state, reward, done, info


def _arrived(state: State) -> State:
    """The state with the requests that have arrived by now; if nothing is unfinished, at the next
    arrival.
    """
    phase = state.scheduler.phase
    idle = ~jnp.any((phase == WAITING) | (phase == RUNNING))
    coming = phase == COMING
    next_arrival = jnp.min(jnp.where(coming, state.requests.arrival, jnp.iinfo(jnp.int32).max))
    jumps = idle & jnp.any(coming)
    now = jnp.where(jumps, jnp.maximum(state.now, next_arrival), state.now)
    submitted = scheduler.submit(state.scheduler, state.requests.arrival <= now)
    return state._replace(scheduler=submitted, now=now)
