"""The shipped policies that need no memory, as functions of arrays: (state, requests) -> `Order`.

They decide as the policies of pagedjax/host/policies/policy.py do. "longest_prefix" is not here,
because there is no prefix cache: it would be "fcfs". Policies with memory (mlfq, srtf, vtc,
deadline, early_rejection) are not here: they evict, reject or read the time.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.twin.scheduler import RUNNING, WAITING, Ints, Order, Requests, State
from pagedjax.host.policies import RATE, WINDOW

ArrayPolicy = Callable[[State, Requests], Order]


def all_offered(score: Ints) -> Order:
    """The order by a score, in which each waiting sequence may enter."""
    return Order(score, jnp.ones_like(score, bool))


def arrivals(state: State) -> Ints:
    """int32 [N]: 0, 1, 2 ... in the order of submission."""
    return jnp.arange(state.phase.shape[0], dtype=jnp.int32)


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
    function.__name__: function for function in (fcfs, priority, shortest, fair, static)
}


def find(name: str) -> ArrayPolicy:
    """The policy of that name.

    Raises:
        ValueError: it is not here.
    """
    if name not in POLICIES:
        raise ValueError(
            f"the policy {name!r} is not on arrays; use one of {', '.join(POLICIES)}, a policy of "
            "your own (state, requests) -> Order, or the simulator"
        )
    return POLICIES[name]


def any_of(index: jax.Array, state: State, requests: Requests) -> Order:
    """The order of the policy with this index in `POLICIES`: one program for all of them."""
    return jax.lax.switch(index, list(POLICIES.values()), state, requests)


def without_parameters(policy: ArrayPolicy) -> Callable[[object, State, Requests], Order]:
    """The policy as one that is given parameters, and needs none."""
    return lambda parameters, state, requests: policy(state, requests)
