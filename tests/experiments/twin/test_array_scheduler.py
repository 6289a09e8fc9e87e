"""The scheduler on arrays makes the plans of the scheduler, step by step.

Random worlds: sizes, lengths, users, priorities and the steps in which requests arrive; small pools,
so that most worlds preempt. Both sides run until a world is empty, or for STEPS steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.twin import policies, scheduler, with_memory
from experiments.twin.scheduler import Plan, Requests, Sizes, State
from experiments.twin.with_memory import Memory, Step
from pagedjax.host import scheduler as host
from pagedjax.host.policies import POLICIES, Policy, mlfq, shipped, srtf, vtc
from pagedjax.host.types import Request, SchedulerConfig, Seq
from tests import drawn
from tests.experiments.twin.any_policy import any_of
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations

REQUESTS = 12
WORLDS = 16
STEPS = 80
NEVER = STEPS + 1  # an arrival
STOP = 7  # a token
SHIPPED = [(policy, shipped(name)) for name, policy in policies.POLICIES.items()]
# with parameters that matter within STEPS steps of short requests
QUEUES: dict[str, Any] = {"levels": 3, "quantum": 2, "ratio": 2, "prompt_work": 0.25, "patience": 9}
WITH_PARAMETERS: list[tuple[policies.ArrayPolicy, Policy]] = [
    (with_memory.vtc(input_weight=3, output_weight=1), vtc(input_weight=3.0, output_weight=1.0)),
    (with_memory.srtf(patience=9, margin=2), srtf(patience=9, margin=2)),
    (with_memory.mlfq(**QUEUES), mlfq(**QUEUES)),
]
CASES = SHIPPED + WITH_PARAMETERS


class World(NamedTuple):
    """What both schedulers are given: numpy arrays. submitted: the step of each request's arrival.
    policy: an index of CASES.
    """

    sizes: Sizes
    requests: Requests
    submitted: Any
    policy: Any


class Columns(NamedTuple):
    """What a step leaves beside its plan, of the scheduler on arrays."""

    state: State
    free_blocks: jax.Array
    ended: jax.Array


def draw_world(rng: np.random.Generator) -> tuple[World, SchedulerConfig]:
    block_size = int(rng.choice([1, 2, 4, 16]))
    prompt = rng.integers(1, rng.choice([1, 3, 12, 40]) + 1, REQUESTS)
    if rng.random() < 0.2:
        prompt[:] = block_size  # all need a second block in the same step
    max_tokens = rng.integers(1, rng.choice([2, 9, 30]) + 1, REQUESTS)
    limit = prompt + max_tokens
    final = prompt + rng.integers(1, max_tokens + 1)
    largest = -(-int(limit.max()) // block_size)
    config = SchedulerConfig(
        block_size,
        num_blocks=largest + int(rng.integers(0, rng.choice([1, 3, 8, 60]))),
        max_num_batched_tokens=int(rng.choice([1, 3, 8, 16, 64])),
        max_num_seqs=int(rng.choice([1, 4, REQUESTS])),
        max_model_len=int(limit.max()),
    )
    present = np.arange(REQUESTS) < rng.integers(1, REQUESTS + 1)
    submitted = np.sort(rng.integers(0, rng.choice([1, 10, 40]) + 1, REQUESTS))
    requests = Requests(
        arrival=np.zeros(REQUESTS, int),
        prompt_len=np.where(present, prompt, 0),
        final_len=final,
        limit=limit,
        predicted=rng.integers(0, 40, REQUESTS),
        priority=rng.integers(-2, 3, REQUESTS),
        user=rng.integers(0, 4, REQUESTS),
    )
    requests = Requests(*[column.astype(np.int32) for column in requests])
    sizes = Sizes(*np.asarray(Sizes.of(config), np.int32))
    policy = np.int32(rng.integers(len(CASES)))
    return World(sizes, requests, submitted.astype(np.int32), policy), config


def run_shipped(world: World) -> tuple[Plan, Columns]:
    """All steps of a world under its shipped policy, stacked."""
    return run_on_arrays(world, any_of(world.policy, [policy for policy, _ in CASES]))


def run_on_arrays(world: World, decide: policies.Decide) -> tuple[Plan, Columns]:
    """All steps of a world under a policy that needs no parameters, stacked."""
    policy = policies.remembering(decide, None)

    def step(
        carry: tuple[State, Memory], number: jax.Array
    ) -> tuple[tuple[State, Memory], tuple[Plan, Columns]]:
        state, memory = carry
        order = policy.order(memory, state, world.requests)
        planned, plan = scheduler.schedule(state, world.sizes, order)
        committed, ended = scheduler.commit(planned, plan, world.requests)
        after = scheduler.submit(committed, world.submitted <= number + 1)
        memory = policy.observe(memory, Step(state, plan, after), world.requests)
        return (after, memory), (plan, Columns(planned, committed.free_blocks, ended))

    state = scheduler.submit(scheduler.init(world.sizes, world.requests), world.submitted <= 0)
    first = (state, policy.first(state, world.requests))
    return jax.lax.scan(step, first, jnp.arange(STEPS, dtype=jnp.int32))[1]


run_worlds = jax.jit(jax.vmap(chex.assert_max_traces(run_shipped, 1)))


def at(tree: Any, index: int) -> Any:
    """The tree of the items with this first index."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def draw_worlds(seed: int) -> tuple[World, list[tuple[World, SchedulerConfig]]]:
    """WORLDS worlds, stacked; and each of them."""
    rng = np.random.default_rng(seed)
    pairs = [draw_world(rng) for _ in range(WORLDS)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *[world for world, _ in pairs])
    return stacked, pairs


def slot(name: str) -> int:
    return int(name.removeprefix("r"))


def request_of(requests: Requests, i: int) -> Request:
    return Request(
        f"r{i}",
        prompt_len=int(requests.prompt_len[i]),
        max_tokens=int(requests.limit[i] - requests.prompt_len[i]),
        stop_token_ids=frozenset({STOP}),
        priority=int(requests.priority[i]),
        user=f"user {requests.user[i]}",
        predicted=int(requests.predicted[i]),
    )


def sampled_token(requests: Requests, seq: Seq, length: int) -> int:
    """The stop token, if it is the last one."""
    return STOP if length + 1 >= requests.final_len[slot(seq.request_id)] else 0


def check_world(
    world: World,
    config: SchedulerConfig,
    plans: Plan,
    columns: Columns,
    policy: Policy | str,
) -> None:
    """Compares all steps of a world with those of the scheduler."""
    state = host.init(config)
    for number in range(STEPS):
        for i in np.flatnonzero(world.submitted == number):
            if world.requests.prompt_len[i]:
                state = host.submit(state, request_of(world.requests, int(i)))
        state, expected = host.schedule(state, policy)
        plan = at(plans, number)
        planned = at(columns.state, number)
        compare_plans(plan, planned, expected)
        tokens = [
            sampled_token(world.requests, seq, length)
            for seq, length in zip(expected.seqs, expected.lengths, strict=True)
        ]
        state, events = host.commit(state, expected, tokens)
        host.check(state)
        ends = {event.request_id for event in events if isinstance(event, host.Finished)}
        assert {f"r{i}" for i in np.flatnonzero(columns.ended[number])} == ends
        assert columns.free_blocks[number] == state.pool.num_free


def compare_plans(plan: Plan, planned: State, expected: Any) -> None:
    """A plan of arrays is that of the scheduler: rows in their order, who entered and who left in
    their orders, and blocks.

    planned: the state that `schedule` returned.
    """
    places = rows_in_order(plan, planned)
    rows = [
        (f"r{i}", int(plan.lengths[i]), int(plan.starts[i]), int(plan.counts[i])) for i in places
    ]
    ids = [seq.request_id for seq in expected.seqs]
    assert rows == list(zip(ids, expected.lengths, expected.starts, expected.counts, strict=True))
    assert in_places(plan, plan.admitted) == list(expected.admitted)
    assert in_places(plan, plan.preempted) == list(expected.preempted)
    assert plan.blocks_used == expected.blocks_used
    assert np.sum(planned.phase == scheduler.WAITING) == expected.num_waiting


def in_places(plan: Plan, flags: np.ndarray) -> list[str]:
    """The ids of the sequences with a flag, by their places."""
    chosen = np.flatnonzero(flags)
    return [f"r{i}" for i in chosen[np.argsort(plan.places[chosen])]]


def rows_in_order(plan: Plan, planned: State) -> list[int]:
    """The sequences with a row: decodes by the step since which they are, then by admission."""
    rows = np.flatnonzero(plan.counts)
    since = planned.decodes_since[rows]
    order = np.lexsort((planned.entered[rows], np.where(since < 0, NEVER, since)))
    return rows[order].tolist()


@drawn.given(8, 120, seed=st.integers(0, 2**32 - 1))
def test_plans_are_those_of_the_scheduler(seed):
    stacked, pairs = draw_worlds(seed)
    plans, columns = jax.device_get(run_worlds(stacked))
    for index, (world, config) in enumerate(pairs):
        check_world(world, config, at(plans, index), at(columns, index), CASES[world.policy][1])


def test_the_worlds_reach_every_kind_of_step():
    """Else the test above would compare too little."""
    worlds = [draw_worlds(seed)[0] for seed in range(8)]
    steps = [jax.device_get(run_worlds(world)) for world in worlds]
    plans, columns = jax.tree.map(lambda *leaves: np.concatenate(leaves), *steps)
    shape = (8 * WORLDS, STEPS, REQUESTS)
    chex.assert_shape([plans.counts, plans.admitted, plans.preempted, columns.ended], shape)
    chex.assert_type([plans.counts, plans.places], np.int32)
    assert np.any(plans.preempted.sum(-1) > 1), "several are preempted in one step"
    assert np.any(plans.admitted.sum(-1) > 1), "several enter in one step"
    cut = (plans.counts > 0) & (plans.starts + plans.counts < plans.lengths)
    assert np.any(cut & (plans.starts > 0)), "a prompt is cut twice"
    assert np.any(columns.ended.sum(-1) > 1), "several end in one step"
    exchanged = plans.preempted.any(-1) & plans.admitted.any(-1)
    assert exchanged.sum() > 20, "others enter in a step that evicts"
    used = np.unique(np.concatenate([world.policy for world in worlds]))
    assert len(used) == len(CASES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host_blocks": 4}, "host_blocks is 4, .*use preemption='recompute'"),
        ({"chunked_prefill": False}, "chunked_prefill is False, .*use chunked_prefill=True"),
        ({"mixed_steps": False}, "mixed_steps is False"),
        ({"reservation": "max"}, "reservation is 'max'"),
        ({"late_stops": True}, "late_stops is True, .*use late_stops=False"),
    ],
)
def test_what_is_not_on_arrays_is_refused(change, message):
    config = SchedulerConfig(4, 10, 8, 4, 64)._replace(**change)
    with refused(message):
        Sizes.of(config)


def test_each_shipped_policy_is_on_arrays_or_refused_with_a_reason():
    assert set(policies.POLICIES) | set(policies.REFUSED) == set(POLICIES)
    for name, reason in policies.REFUSED.items():
        with refused(
            f"the policy '{name}' is not on arrays: {reason}; use one of fcfs, .*simulator"
        ):
            policies.find(name)
    with refused("the policy 'mine' is not on arrays; use one of fcfs"):
        policies.find("mine")


def test_parameters_that_integers_cannot_express_are_refused():
    with refused("vtc on arrays has input_weight 0.5; it must be a whole number above 0"):
        with_memory.vtc(input_weight=0.5)  # pyright: ignore[reportArgumentType]
    with refused("mlfq on arrays has prompt_work 0.3; it must be a multiple of 1/16"):
        with_memory.mlfq(prompt_work=0.3)
