"""The scheduler as an environment of reinforcement learning, with the functions of gymnax (Lange
2022): `reset(key, params)` and `step(key, state, action, params)`, pure and made to be mapped.

A step is a step of the engine. The action is a score for each request: the lowest score is admitted
first, the highest is preempted first (`scheduler.Order`). A request that has not arrived or has
ended has a score that nobody reads. Time passes as the cost says; if nothing is unfinished, until
the next arrival. An episode ends with its last request.

    environment = Environment()
    params = environment.default_params
    observation, state = environment.reset(key, params)
    action = environment.action_space(params).sample(action_key)
    observation, state, reward, done, info = environment.step(key, state, action, params)

`step` begins the next episode by itself when one ends, as gymnax does; `step_env` does not. Names
and arguments are those of gymnax's base class, and the spaces have its attributes (spaces.py). The
workload, the reward and the observation are functions: give yours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.simulation.cost import CHIPS, SHAPES, Roofline
from experiments.twin import cost as costs
from experiments.twin import scheduler, workloads
from experiments.twin.cost import Cost
from experiments.twin.policies import all_offered
from experiments.twin.scheduler import (
    COMING,
    ENDED,
    LARGEST_SCORE,
    RUNNING,
    WAITING,
    Order,
    Requests,
    Sizes,
)
from experiments.twin.spaces import Box, Dict, space_like
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
Observe = Callable[[State, Params], Any]


def observe(state: State, params: Params) -> Observation:
    """The observation of a state: what a policy sees."""
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
    gap = (after.end - after.first_token) / further
    met = (first <= params.first_s * costs.MICROSECONDS) & (
        gap <= params.token_s * costs.MICROSECONDS
    )
    return jnp.sum(ended & met) / _present(requests)


def fairness(before: State, after: State, params: Params) -> jax.Array:
    """By how much Jain's index of the users' tokens grew (Jain et al. 1984). A user's tokens are
    the computed tokens of prompts and the generated tokens, so far. Users without a request do not
    count. The sum over an episode is the index at its end.
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
    """A world as a value. Two are equal if their functions are.

    count: requests of an episode, N.
    own_draw: the workload of an episode (workloads.py); None: `workloads.poisson(count)`.
    reward: a value of REWARDS, or your own (before, after, params) -> float32 [].
    observe: `observe`, or your own (state, params) -> arrays.
    """

    count: int = 64
    own_draw: Draw | None = None
    reward: Reward = latency
    observe: Observe = observe

    @property
    def name(self) -> str:
        """The environment's name."""
        return "PagedScheduler"

    @property
    def draw(self) -> Draw:
        """The workload of an episode."""
        return self.own_draw or workloads.poisson(self.count)

    @property
    def num_actions(self) -> int:
        """How many numbers an action has."""
        return self.count

    @property
    def default_params(self) -> Params:
        """A small engine of Llama-3-8B on an H200, with chats, summaries and essays.

        Raises:
            ValueError: the workload is one's own. Its parameters are not known here.
        """
        if self.own_draw is not None:
            raise ValueError(
                f"own_draw is {self.own_draw!r:.80}, and the default parameters are those of the "
                "default workload; give Params with the parameters of yours"
            )
        return _default_params()

    def action_space(self, params: Params | None = None) -> Box:
        """A score for each request, int32 [N]."""
        return Box(-LARGEST_SCORE, LARGEST_SCORE, (self.count,), jnp.int32)

    def observation_space(self, params: Params | None = None) -> Box | Dict:
        """The space of what `observe` returns: a named tuple has a space for each field."""
        params = self._given(params)
        key = jax.eval_shape(lambda: jax.random.key(0))
        observation, _ = jax.eval_shape(self.reset, key, params)
        return space_like(observation)

    def is_terminal(self, state: State, params: Params) -> jax.Array:
        """Whether all requests have ended: bool []."""
        return jnp.all(state.scheduler.phase == ENDED)

    def discount(self, state: State, params: Params) -> jax.Array:
        """0 at the end of an episode, else 1: float32 []."""
        return jnp.where(self.is_terminal(state, params), 0.0, 1.0)

    def get_obs(
        self, state: State, params: Params | None = None, key: jax.Array | None = None
    ) -> Any:
        """The observation of a state. key: not used."""
        return self.observe(state, self._given(params))

    def _given(self, params: Params | None) -> Params:
        return self.default_params if params is None else params

    def reset(self, key: jax.Array, params: Params | None = None) -> tuple[Any, State]:
        """A new episode, at its first arrival."""
        params = self._given(params)
        requests = self.draw(key, params.workload)
        never = jnp.full_like(requests.arrival, NOT_YET)
        first = scheduler.init(params.sizes, requests)
        state = _arrived(State(first, requests, jnp.int32(0), never, never))
        return self.observe(state, params), state

    reset_env = reset

    def step_env(
        self,
        key: jax.Array,
        state: State,
        action: jax.Array | Order,
        params: Params | None = None,
    ) -> tuple[Any, State, jax.Array, jax.Array, dict[str, Any]]:
        """One step of the engine -> (observation, state, reward, done, info).

        Args:
            key: not used; all that is random is drawn by `reset`.
            action: int32 [N], within `scheduler.LARGEST_SCORE`; or an `Order`.

        `info` has the step's `Plan`.

        Raises:
            ValueError: the reward is not one number.
        """
        params = self._given(params)
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
        done = self.is_terminal(after, params)
        return self.observe(after, params), after, reward, done, {"plan": plan}

    def step(
        self,
        key: jax.Array,
        state: State,
        action: jax.Array | Order,
        params: Params | None = None,
    ) -> tuple[Any, State, jax.Array, jax.Array, dict[str, Any]]:
        """`step_env`; after the last step of an episode, observation and state are those of the
        next one.
        """
        observation, after, reward, done, info = self.step_env(key, state, action, params)
        fresh = self.reset(key, params)
        next_observation, next_state = jax.tree.map(
            lambda new, old: jnp.where(done, new, old), fresh, (observation, after)
        )
        return next_observation, next_state, reward, done, info


@cache
def _default_params() -> Params:
    sizes = Sizes(block_size=16, num_blocks=320, budget=256, max_running=8)
    roofline = Roofline(SHAPES["llama-3-8b"], CHIPS["h200"])
    with jax.ensure_compile_time_eval():  # a caller may be traced
        cost = Cost.of(roofline, sizes)
    return Params(sizes, cost, workloads.mixed(rate=24.0, spread=0.7))


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
