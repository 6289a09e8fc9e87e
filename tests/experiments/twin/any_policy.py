"""Shipped policies on arrays as one, so that tests compile one program for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from experiments.twin import policies
from experiments.twin.scheduler import STAYS, Order, Requests, State
from experiments.twin.with_memory import Memory, Step, WithMemory


def any_of(index: jax.Array, choices: Sequence[policies.ArrayPolicy]) -> WithMemory:
    """The policy with this index. It remembers what each would, and its order has the form of those
    that evict.
    """
    parts = [policies.remembering(policies.without_parameters(policy), None) for policy in choices]

    def init(requests: Requests) -> tuple[Memory, ...]:
        return tuple([part.init(requests) for part in parts])

    def observe(memories: tuple[Memory, ...], step: Step, requests: Requests) -> tuple[Memory, ...]:
        pairs = zip(parts, memories, strict=True)
        return tuple([part.observe(memory, step, requests) for part, memory in pairs])

    def order(memories: tuple[Memory, ...], state: State, requests: Requests) -> Order:
        pairs = zip(parts, memories, strict=True)
        branches = [partial(_evicting, part, memory) for part, memory in pairs]
        return jax.lax.switch(index, branches, state, requests)

    return WithMemory(init, observe, order)


def _evicting(policy: WithMemory, memory: Memory, state: State, requests: Requests) -> Order:
    """The order of a policy, in the form of those that evict."""
    order = policy.order(memory, state, requests)
    if order.evicted is None:
        return order._replace(evicted=jnp.full_like(order.score, STAYS))
    return order
