"""The shipped policies on arrays, by name. Those without memory are functions here, (state, requests)
-> `Order`, and decide as those of pagedjax/host/policies/policy.py do; those with memory are in
with_memory.py. REFUSED says why the others are not on arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from experiments.twin import with_memory
from experiments.twin.scheduler import (
    RUNNING,
    WAITING,
    Ints,
    Order,
    Requests,
    State,
    arrivals,
)
from experiments.twin.with_memory import WithMemory
from pagedjax.host.policies import RATE, WINDOW

Function = Callable[[State, Requests], Order]
ArrayPolicy = Function | WithMemory
# (a policy's own parameters, state, requests) -> the order of a step; or one with a memory
Decide = Callable[[Any, State, Requests], Order] | WithMemory


def all_offered(score: Ints) -> Order:
    """The order by a score, in which each waiting sequence may enter."""
    return Order(score, jnp.ones_like(score, bool))


def fcfs(state: State, requests: Requests) -> Order:
    """First come, first served."""
    return all_offered(jnp.zeros_like(state.phase))


def priority(state: State, requests: Requests) -> Order:
    """The lower number first, up to a limit of age."""
    return all_offered(arrivals(state) + WINDOW * requests.priority)


def shortest(state: State, requests: Requests) -> Order:
    """The shorter prompt first, up to a limit of age."""
    return all_offered(RATE * arrivals(state) + requests.prompt_len)


def fair(state: State, requests: Requests) -> Order:
    """The user with the fewest tokens first: a sequence's score is the sum of the lengths of its
    user's running sequences, if it waits, and of its user's older sequences in the same phase.
    """
    running = state.phase == RUNNING
    waiting = state.phase == WAITING
    same_user = requests.user[:, None] == requests.user[None, :]
    older = arrivals(state)[None, :] < arrivals(state)[:, None]
    counts_for_waiting = running[None, :] | (waiting[None, :] & older)
    counts_for_running = running[None, :] & older
    counts = jnp.where(running[:, None], counts_for_running, counts_for_waiting) & same_user
    return all_offered(jnp.sum(jnp.where(counts, state.length[None, :], 0), axis=1))


def static(state: State, requests: Requests) -> Order:
    """A batch enters when the one before it has ended."""
    score = jnp.zeros_like(state.phase)
    none_runs = ~jnp.any(state.phase == RUNNING)
    return Order(score, jnp.broadcast_to(none_runs, score.shape))


POLICIES: dict[str, ArrayPolicy] = {
    **{function.__name__: function for function in (fcfs, priority, shortest, fair, static)},
    "vtc": with_memory.vtc(),
    "mlfq": with_memory.mlfq(),
    "srtf": with_memory.srtf(),
}
# shipped policies that are not on arrays -> why
REFUSED = {
    "longest_prefix": "there is no prefix cache, so it would be fcfs",
    "deadline": "requests have neither a deadline nor a service class, so all would have one target",
    "early_rejection": "nothing is rejected there",
}


def find(name: str) -> ArrayPolicy:
    """The policy of that name, with its default parameters.

    Raises:
        ValueError: it is not here; says why.
    """
    if name not in POLICIES:
        reason = f": {REFUSED[name]}" if name in REFUSED else ""
        raise ValueError(
            f"the policy {name!r} is not on arrays{reason}; use one of {', '.join(POLICIES)}, a "
            "policy of your own (state, requests) -> Order or a WithMemory, or the simulator"
        )
    return POLICIES[name]


def remembering(decide: Decide, parameters: Any) -> WithMemory:
    """The policy with its parameters, as one with a memory, which is empty if it needs none."""
    if isinstance(decide, WithMemory):
        return decide
    return WithMemory(
        init=lambda requests: (),
        observe=lambda memory, step, requests: memory,
        order=lambda memory, state, requests: decide(parameters, state, requests),
    )


def without_parameters(policy: ArrayPolicy) -> Decide:
    """The policy as one that is given parameters, and needs none."""
    if isinstance(policy, WithMemory):
        return policy
    return lambda parameters, state, requests: policy(state, requests)
