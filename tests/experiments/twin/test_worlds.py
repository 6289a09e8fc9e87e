"""The environment: an episode has the times of the simulator's run, rewards add up to what a table
of results says, and the interface is that of gymnax.
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.simulation.cost import CHIPS, SHAPES, Roofline, Work
from experiments.twin import environment, policies, simulated, workloads
from experiments.twin.cost import Cost
from experiments.twin.environment import NOT_YET, SEQUENCE, TOTALS, Environment, Params
from experiments.twin.scheduler import Sizes
from experiments.twin.spaces import Box, space_like
from experiments.twin.with_memory import Memory, Step
from experiments.twin.workloads import Lengths, Poisson
from pagedjax.host.types import SchedulerConfig
from pagedjax.options.config import EngineConfig
from tests.experiments.twin.any_policy import any_of
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations

COUNT = 10
STEPS = 400
ENGINE: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 24,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 80,
}
SIZES = Sizes.of(SchedulerConfig(**ENGINE))


def step_time(work: Work) -> float:
    """A whole number of tens of microseconds, so that sums of floats are exact to a microsecond."""
    attention = max(2 * work.context, work.pairs)
    return 1e-5 * (40 + 3 * work.tokens + 5 * work.sampled + attention)


WORKLOAD = Poisson(
    rate=150.0,
    kinds=np.asarray([0.5, 0.5], np.float32),
    prompt=Lengths(np.asarray([4, 20], np.float32), 0.5, 1, 40),
    output=Lengths(np.asarray([12, 3], np.float32), 0.7, 1, 40),
    max_tokens=40,
)
PARAMS = Params(SIZES, Cost.of(step_time, SIZES), WORKLOAD, first_s=0.006, token_s=0.004)
WORLD = Environment(COUNT, workloads.poisson(COUNT))
draw_requests = jax.jit(WORLD.draw)


def episode(
    world: Environment, names: tuple[str, ...], key: jax.Array, params: Params, policy: jax.Array
) -> tuple[environment.State, Any]:
    """The last state of an episode under one of the policies, and (reward, done) of each step."""
    decider = any_of(policy, [policies.POLICIES[name] for name in names])

    def step(carry: tuple[environment.State, Memory], _: None) -> tuple[Any, Any]:
        state, memory = carry
        requests = state.requests
        order = decider.order(memory, state.scheduler, requests)
        _observation, after, reward, done, info = world.step_env(key, state, order, params)
        plan = info["plan"]
        memory = decider.observe(memory, Step(state.scheduler, plan, after.scheduler), requests)
        return (after, memory), (reward, done, jnp.any(plan.counts > 0))

    state = world.reset(key, params)[1]
    first = (state, decider.first(state.scheduler, state.requests))
    (state, _), steps = jax.lax.scan(step, first, None, length=STEPS)
    return state, steps


# one for each reward, and one for an observation
run_episode = jax.jit(chex.assert_max_traces(episode, 4), static_argnums=(0, 1))


def run_fcfs(world: Environment, key: jax.Array) -> tuple[environment.State, Any]:
    """For what does not depend on the policy: a program with one is small."""
    return run_episode(world, ("fcfs",), key, PARAMS, jnp.int32(0))


@pytest.mark.parametrize("name", policies.POLICIES)
def test_an_episode_has_the_times_of_a_simulated_run(name):
    key = jax.random.key(list(policies.POLICIES).index(name))
    # arrivals are never at the end of a step
    requests = draw_requests(key, WORKLOAD)
    requests = requests._replace(arrival=requests.arrival // 10 * 10 + 5)
    world = WORLD._replace(own_draw=workloads.given)
    params = PARAMS._replace(workload=requests)
    names = tuple(policies.POLICIES)
    policy = jnp.int32(names.index(name))
    state, (rewards, done, computed) = jax.device_get(
        run_episode(world, names, key, params, policy)
    )
    config = EngineConfig(**ENGINE, policy=name, enable_prefix_caching=False, token_buckets=(16,))
    run = simulated.run(jax.device_get(requests), config, step_time)
    np.testing.assert_array_equal(state.end, np.round(1e6 * run.end))
    np.testing.assert_array_equal(state.first_token, np.round(1e6 * run.first_token))
    assert run.steps == computed.sum()
    latencies = (state.end - state.requests.arrival) / 1e6
    np.testing.assert_allclose(rewards.sum(), -latencies.mean(), rtol=1e-5)
    chex.assert_shape([rewards, done], (STEPS,))
    assert done[-1]
    assert not computed[done.argmax() + 1 :].any(), "nothing is computed after the end"


def test_rewards_add_up():
    """To the share of requests within both targets, and to Jain's index of the users' tokens."""
    key = jax.random.key(1)
    for reward, expected in ((environment.goodput, within), (environment.fairness, jain)):
        world = WORLD._replace(reward=reward)
        state, (rewards, _, _) = jax.device_get(run_fcfs(world, key))
        np.testing.assert_allclose(rewards.sum(), expected(state), rtol=1e-5)
    assert 0 < within(state) < 1, "else the targets are of no use"


def within(state: Any) -> float:
    met = 0
    for i in range(COUNT):
        output = state.requests.final_len[i] - state.requests.prompt_len[i]
        first = (state.first_token[i] - state.requests.arrival[i]) / 1e6
        gap = (state.end[i] - state.first_token[i]) / 1e6 / max(1, output - 1)
        met += first <= PARAMS.first_s and gap <= PARAMS.token_s
    return met / COUNT


def jain(state: Any) -> float:
    tokens = np.bincount(state.requests.user, state.requests.final_len)
    tokens = tokens[tokens > 0].astype(float)
    return float(tokens.sum() ** 2 / (len(tokens) * (tokens**2).sum()))


@pytest.mark.default_cases("jit")
@pytest.mark.parametrize("variant", [jax.jit, lambda function: function], ids=["jit", "eager"])
def test_reset_and_step(variant):
    """What gymnax asks of an environment, as its own tests do."""
    key = jax.random.key(3)
    observation, state = variant(WORLD.reset)(key, PARAMS)
    chex.assert_shape(observation.sequences, (COUNT, len(SEQUENCE)))
    chex.assert_shape(observation.totals, (len(TOTALS),))
    space = WORLD.observation_space(PARAMS)
    actions = WORLD.action_space(PARAMS)
    action = variant(actions.sample)(key)
    chex.assert_shape(action, (WORLD.num_actions,))
    chex.assert_type(action, jnp.int32)
    assert actions.contains(action)
    assert space.contains(observation)
    results = variant(WORLD.step)(key, state, action, PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(results[:2], (observation, state))
    next_observation, after, reward, done, _ = results
    assert space.contains(next_observation)
    chex.assert_trees_all_equal(next_observation, WORLD.get_obs(after, PARAMS))
    chex.assert_shape([reward, done], ())
    chex.assert_type([reward, done], [jnp.float32, bool])
    chex.assert_tree_all_finite(reward)
    assert WORLD.discount(after, PARAMS) == 1 - WORLD.is_terminal(after, PARAMS)


def test_worlds_of_one_program_are_those_of_single_runs():
    keys = jax.random.split(jax.random.key(4), 3)
    together = jax.jit(jax.vmap(WORLD.reset, (0, None)))(keys, PARAMS)
    reset = jax.jit(WORLD.reset)
    for i, key in enumerate(keys):
        alone = reset(key, PARAMS)
        chex.assert_trees_all_equal(jax.tree.map(lambda leaf, i=i: leaf[i], together), alone)


def test_an_environment_has_default_parameters():
    world = Environment(4)
    assert (world.name, world.num_actions) == ("PagedScheduler", 4)
    step = jax.jit(world.step)
    key = jax.random.key(0)
    observation, state = jax.jit(world.reset)(key)
    for action_key in jax.random.split(key, 5):
        action = world.action_space().sample(action_key)
        observation, state, reward, _, _ = step(action_key, state, action)
        assert world.observation_space().contains(observation)
        assert reward <= 0
    with refused(
        "own_draw is .*the default parameters are those of the default workload; give Params"
    ):
        _ = WORLD.default_params


def test_a_space_has_what_its_sample_has():
    """Of each dtype that an observation may have; and not what lies outside."""
    members = {
        "counts": jnp.zeros((2, 3), jnp.int32),
        "flags": jnp.zeros((3,), bool),
        "shares": jnp.zeros((), jnp.float32),
    }
    space: Any = space_like(members)
    sample = space.sample(jax.random.key(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(dict(sample), members)
    assert space.num_spaces == 3
    assert space.contains(sample)
    assert not space.contains({**members, "flags": jnp.zeros((4,), bool)})
    low = Box(0, 5, (2,), jnp.int32)
    assert not low.contains(jnp.int32([6, 0]))
    assert low.contains(jnp.int32([5, 0]))
    with refused("an observation has a list; return arrays, or a named tuple or a dictionary"):
        space_like([members])


def test_a_reward_and_an_observation_of_ones_own_are_a_function_each():
    def served(before: Any, after: Any, params: Params) -> jax.Array:
        ends = (after.end != NOT_YET) & (before.end == NOT_YET)
        return jnp.sum(ends).astype(jnp.float32)

    def shares(state: Any, params: Params) -> dict[str, jax.Array]:
        return {"free": state.scheduler.free_blocks / params.sizes.num_blocks}

    world = WORLD._replace(reward=served, observe=shares)
    key = jax.random.key(6)
    observation, state = jax.jit(world.reset)(key, PARAMS)
    assert observation == {"free": 1.0}
    space: Any = world.observation_space(PARAMS)
    assert space.spaces["free"].dtype == jnp.float32
    _, (rewards, done, _) = run_fcfs(world, key)
    assert done[-1]
    assert rewards.sum() == COUNT
    observation, *_ = jax.jit(world.step)(key, state, jnp.zeros((COUNT,), jnp.int32), PARAMS)
    assert 0 < observation["free"] < 1


def test_the_next_episode_begins_by_itself():
    key = jax.random.key(5)
    step = jax.jit(WORLD.step)
    _, state = jax.jit(WORLD.reset)(key, PARAMS)
    ends = 0
    for _ in range(STEPS):
        key, action_key = jax.random.split(key)
        _, state, _, done, _ = step(action_key, state, jnp.zeros((COUNT,), jnp.int32), PARAMS)
        if done:
            ends += 1
            assert state.scheduler.step == 0
            assert np.all(state.end == NOT_YET)
    assert ends > 1


def test_an_observation_has_the_counts_of_each_request():
    requests = workloads.of_arrays(
        [0.0, 0.0, 5.0], [7, 12, 3], [2, 2, 2], max_tokens=4, predicted=[3, 4, 5], user=[1, 0, 1]
    )
    world = Environment(3, workloads.given)
    params = PARAMS._replace(workload=requests)
    key = jax.random.key(0)
    observation, state = jax.jit(world.reset)(key, params)
    columns = dict(zip(SEQUENCE, observation.sequences.T.tolist(), strict=True))
    assert columns["waiting"] == [1, 1, 0], "the last one has not arrived"
    assert columns["prompt_len"] == [7, 12, 0]
    assert columns["left"] == [4, 4, 0]
    assert columns["older"] == [0, 1, 0]
    assert columns["predicted"] == [3, 4, 0]
    observation, *_ = jax.jit(world.step)(key, state, jnp.int32([5, 1, 0]), params)
    columns = dict(zip(SEQUENCE, observation.sequences.T.tolist(), strict=True))
    assert columns["running"] == [1, 1, 0]
    assert columns["output"] == [0, 1, 0], "the lower score has the budget first"
    assert columns["to_compute"] == [3, 1, 0]
    assert observation.totals.tolist()[:3] == [0, 2, 24 - 2 - 3]


# --- costs and workloads --------------------------------------------------------------------------


def test_a_roofline_costs_as_in_the_simulator():
    sizes = SIZES._replace(budget=64, max_running=8)
    roofline = Roofline(SHAPES["llama-3-8b"], CHIPS["h200"])
    cost = Cost.of(roofline, sizes)
    rng = np.random.default_rng(2)
    for _ in range(50):
        tokens = int(rng.integers(1, 65))
        sampled = int(rng.integers(0, 9))
        context = int(rng.integers(tokens, 100_000))
        pairs = int(rng.integers(context, 10**8))
        expected = 1e6 * roofline(Work(tokens, sampled, sampled, context, pairs))
        result = cost.microseconds(tokens, sampled, context, pairs)
        np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_a_step_time_of_another_form_is_refused():
    def curved(work: Work) -> float:
        return 1e-3 + 1e-9 * work.context**1.5

    with refused("a curve takes .* us for a step of .* tokens.*use a roofline of a dense model"):
        Cost.of(curved, SIZES, "a curve")


def test_drawn_requests_have_the_shares_and_medians_of_their_kinds():
    requests = jax.jit(workloads.poisson(20_000))(jax.random.key(0), WORKLOAD)
    chex.assert_type(list(requests), jnp.int32)
    requests = jax.device_get(requests)  # numpy compiles nothing
    first = requests.user == 0
    assert abs(first.mean() - 0.5) < 0.02
    assert np.median(requests.prompt_len[first]) == 4
    assert np.median(requests.prompt_len[~first]) == 20
    seconds = requests.arrival[-1] / 1e6
    assert abs(20_000 / seconds / 150 - 1) < 0.03
    assert np.all(requests.final_len > requests.prompt_len)
    assert np.all(requests.final_len <= requests.limit)
    oracle = jax.jit(workloads.poisson(50))(jax.random.key(0), WORKLOAD._replace(spread=0.0))
    oracle = jax.device_get(oracle)
    chex.assert_trees_all_equal(oracle.predicted, oracle.final_len - oracle.prompt_len)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_len": [1, 2]}, r"prompt_len has the shape \(2,\) and seconds \(3,\)"),
        ({"seconds": [0.0, 2.0, 1.0]}, "seconds must ascend from 0; sort the requests"),
        ({"seconds": [0.0, 2.0, 3000.0]}, "after 3000 seconds; at most 1074 fit: cut the trace"),
        ({"output_len": [1, 0, 2]}, "from 1 to max_tokens .4. tokens of output"),
    ],
)
def test_wrong_columns_are_refused(change, message):
    columns = {"seconds": [0.0, 1.0, 2.0], "prompt_len": [1, 2, 3], "output_len": [1, 2, 3]}
    with refused(message):
        workloads.of_arrays(**columns | change, max_tokens=4)
