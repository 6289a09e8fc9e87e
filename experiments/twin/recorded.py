"""The decisions of a recorded run, and those of the scheduler on arrays for the same arrivals.

A recording (`engine.record`) of a simulated or a real engine says before which step each request
arrived. The scheduler on arrays is given these arrivals and no clock, so both must make the same
plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.twin import scheduler
from experiments.twin.policies import Decide, remembering
from experiments.twin.scheduler import Requests, Sizes
from experiments.twin.with_memory import Memory, Step
from pagedjax.host import replay
from pagedjax.host.policies import POLICIES, Policy

TOGETHER = 256  # numbers of steps are rounded up to a multiple, so that runs share a program


class Decision(NamedTuple):
    """A step's plan, of a world whose requests are "r0", "r1" ...

    rows: (request, known tokens, cached tokens, tokens to compute), in ascending order.
    admitted, preempted: requests in their order.
    """

    rows: tuple[tuple[int, int, int, int], ...]
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    blocks_used: int


class Decisions(NamedTuple):
    """submitted: int32 [N], how many steps came before each request."""

    submitted: np.ndarray
    steps: list[Decision]


def number_of(request_id: str) -> int:
    """The number of the request "r7"."""
    return int(request_id.removeprefix("r"))


def of_recording(
    path: str | PathLike[str], count: int, policies: Mapping[str, Policy] = POLICIES
) -> Decisions:
    """The decisions of a recorded run of `count` requests.

    Raises:
        ReplayError: see `replay.replay`.
    """
    submitted = np.zeros(count, np.int32)
    steps: list[Decision] = []
    for transition in replay.replay(path, policies):
        if transition.kind == "submit":
            newest = max(transition.state.waiting, key=lambda seq: seq.arrival)
            submitted[number_of(newest.request_id)] = len(steps)
        plan = transition.plan
        if transition.kind == "schedule" and plan is not None:
            numbers = [number_of(seq.request_id) for seq in plan.seqs]
            rows = zip(numbers, plan.lengths, plan.starts, plan.counts, strict=True)
            steps.append(
                Decision(
                    tuple(sorted(rows)),
                    tuple(map(number_of, plan.admitted)),
                    tuple(map(number_of, plan.preempted)),
                    plan.blocks_used,
                )
            )
    return Decisions(submitted, steps)


def on_arrays(
    requests: Requests,
    sizes: Sizes,
    decide: Decide,
    policy: Any,
    submitted: np.ndarray,
    num_steps: int,
) -> list[Decision]:
    """The decisions of the scheduler on arrays in its first steps, with these arrivals.

    policy: what `decide` gets first.
    """
    arrays = Requests(*map(jnp.asarray, requests))
    rounded = -(-num_steps // TOGETHER) * TOGETHER
    plans = jax.device_get(
        _plans(arrays, sizes, policy, jnp.asarray(submitted), decide=decide, num_steps=rounded)
    )
    return [decision_of(jax.tree.map(lambda leaf, i=i: leaf[i], plans)) for i in range(num_steps)]


@partial(jax.jit, static_argnames=("decide", "num_steps"))
def _plans(
    requests: Requests,
    sizes: Sizes,
    policy: Any,
    submitted: jax.Array,
    *,
    decide: Decide,
    num_steps: int,
) -> scheduler.Plan:
    """The plans of the first steps, stacked."""
    decider = remembering(decide, policy)

    def step(carry: tuple[scheduler.State, Memory], number: jax.Array) -> tuple[Any, Any]:
        state, memory = carry
        order = decider.order(memory, state, requests)
        planned, plan = scheduler.schedule(state, sizes, order)
        committed, _ = scheduler.commit(planned, plan, requests)
        after = scheduler.submit(committed, submitted <= number + 1)
        memory = decider.observe(memory, Step(state, plan, after), requests)
        return (after, memory), plan

    numbers = jnp.arange(num_steps, dtype=jnp.int32)
    state = scheduler.submit(scheduler.init(sizes, requests), submitted <= 0)
    return jax.lax.scan(step, (state, decider.first(state, requests)), numbers)[1]


def decision_of(plan: scheduler.Plan) -> Decision:
    """A plan of the scheduler on arrays, as numpy arrays, as a decision."""
    rows = np.flatnonzero(plan.counts)
    columns = (rows, plan.lengths[rows], plan.starts[rows], plan.counts[rows])
    return Decision(
        tuple(zip(*[column.tolist() for column in columns], strict=True)),
        _in_places(plan, plan.admitted),
        _in_places(plan, plan.preempted),
        int(plan.blocks_used),
    )


def _in_places(plan: scheduler.Plan, flags: np.ndarray) -> tuple[int, ...]:
    chosen = np.flatnonzero(flags)
    return tuple(chosen[np.argsort(plan.places[chosen])].tolist())


def first_difference(steps: Sequence[Decision], expected: Sequence[Decision]) -> int | None:
    """The number of the first step in which two runs differ; None: in no step."""
    for number, (decision, expected_decision) in enumerate(zip(steps, expected, strict=False)):
        if decision != expected_decision:
            return number
    return None if len(steps) == len(expected) else min(len(steps), len(expected))
