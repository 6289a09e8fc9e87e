"""Policies with memory as functions of arrays, and the shipped ones that arrays can express.

    init -> memory      observe(memory, step) -> memory      order(memory, state) -> Order

They decide as those of pagedjax/host/policies do, which say why. A memory is a tree of arrays that
goes from step to step beside the scheduler's state. `observe` sees a step when it is over and the
next requests have arrived, so it knows what the events of that time say. Their order is fixed: who
was preempted, who was admitted, who sampled, who ended, who came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.twin.scheduler import (
    COMING,
    LARGEST_SCORE,
    RUNNING,
    STAYS,
    WAITING,
    Flags,
    Ints,
    Order,
    Plan,
    Requests,
    State,
    arrivals,
    first_of,
    item_of,
    last_of,
)

Memory = Any  # a tree of arrays
RUNS = -1  # instead of the step since which a sequence waits


class Step(NamedTuple):
    """What a policy with memory observes.

    before: with the requests that had arrived.
    after: with those that have arrived since.
    """

    before: State
    plan: Plan
    after: State

    @property
    def submitted(self) -> Flags:
        """bool [N]: who came to the queue."""
        return (self.before.phase == COMING) & (self.after.phase != COMING)


class WithMemory(NamedTuple):
    """A policy with memory.

    init: (requests) -> the memory before any request.
    observe: (memory, step, requests) -> the memory after the step.
    order: (memory, state, requests) -> what it decides about the next step.
    """

    init: Callable[[Requests], Memory]
    observe: Callable[[Memory, Step, Requests], Memory]
    order: Callable[[Memory, State, Requests], Order]

    def first(self, state: State, requests: Requests) -> Memory:
        """The memory when the first requests of a world have arrived."""
        phase = jnp.where(state.phase == WAITING, COMING, state.phase)
        none = jnp.zeros_like(state.length)
        nobody = none > 0
        plan = Plan(none, none, state.length, nobody, nobody, none, jnp.int32(0))
        arrivals = Step(state._replace(phase=phase), plan, state)
        return self.observe(self.init(requests), arrivals, requests)


# --- vtc ------------------------------------------------------------------------------------------


class Service(NamedTuple):
    """The memory of `vtc`.

    counters: int32 [N], the service of each user.
    served: bool [N], whether the prompt of a request counts already.
    last: int32 [], the counter of the user who left the queue last.
    """

    counters: Ints
    served: Flags
    last: Ints


def vtc(input_weight: int = 1, output_weight: int = 2) -> WithMemory:
    """The virtual token counter: the user with the least service first, and of a user the earliest
    request. The latest arrival is preempted.

    The host forgets a counter that a user would get anyway; here it stays, and nothing follows from
    it. The service of all users together must be below LARGEST_SCORE.

    Raises:
        ValueError: a weight is no whole number above 0.
    """
    for name, weight in (("input_weight", input_weight), ("output_weight", output_weight)):
        if not (isinstance(weight, int) and weight > 0):
            raise ValueError(
                f"vtc on arrays has {name} {weight!r}; it must be a whole number above 0, because "
                "counters are integers there"
            )

    def init(requests: Requests) -> Service:
        zeros = jnp.zeros_like(requests.user)
        return Service(zeros, zeros > 0, jnp.int32(0))

    def observe(memory: Service, step: Step, requests: Requests) -> Service:
        user = requests.user
        plan = step.plan
        queue = step.before.phase == WAITING
        counters = lifted(memory, queue, plan.preempted, plan.places, user)
        queue = (queue | plan.preempted) & ~plan.admitted
        prompts = jnp.where(plan.admitted & ~memory.served, requests.prompt_len, 0)
        counters = counters.at[user].add(input_weight * prompts)
        last_entry = last_of(plan.places, plan.admitted)
        last = jnp.where(jnp.any(plan.admitted), item_of(counters[user], last_entry), memory.last)
        counters = counters.at[user].add(output_weight * plan.samples)
        memory = Service(counters, memory.served | plan.admitted, last)
        places = arrivals(step.after)
        return memory._replace(counters=lifted(memory, queue, step.submitted, places, user))

    def order(memory: Service, state: State, requests: Requests) -> Order:
        """As if each sequence was admitted before the next one is chosen."""
        waits = state.phase == WAITING
        user = requests.user
        cost = jnp.where(waits & ~memory.served, input_weight * requests.prompt_len, 0)
        older = arrivals(state)[None, :] < arrivals(state)[:, None]
        before = older & (user[:, None] == user[None, :])
        score = memory.counters[user] + jnp.sum(jnp.where(before, cost[None, :], 0), axis=1)
        return Order(jnp.where(waits, score, 0), jnp.ones_like(waits))

    return WithMemory(init, observe, order)


def lifted(memory: Service, queue: Flags, joins: Flags, places: Ints, user: Ints) -> Ints:
    """int32 [N]: the counters when requests join the queue, in the order of `places`. A user gets
    the least counter there. Into an empty queue the first one comes with its own, or with that of
    the user who left last; then its counter is the least.

    Args:
        queue: bool [N], who waits already. Their users are not lifted, as they have the least
            counter or more.
    """
    of_request = memory.counters[user]
    least_counter = jnp.min(jnp.where(queue, of_request, LARGEST_SCORE))
    alone = jnp.maximum(item_of(of_request, first_of(places, joins)), memory.last)
    lift = jnp.where(jnp.any(queue), least_counter, alone)
    return memory.counters.at[user].max(jnp.where(joins, lift, 0))


# --- policies that evict --------------------------------------------------------------------------


def make_way(score: Ints, among: Flags, length: Ints, needed: Ints) -> Ints:
    """int32 [N]: the places in which sequences are sent back to the queue, the last of the order
    first, until they have `needed` tokens together; STAYS of the others.

    Args:
        among: bool [N], who may be sent back.
        length: int32 [N], known tokens.
    """

    def is_short(carry: tuple[Flags, Ints, Ints, Ints]) -> Flags:
        stays, _, _, missing = carry
        return (missing > 0) & jnp.any(stays)

    def leave(carry: tuple[Flags, Ints, Ints, Ints]) -> tuple[Flags, Ints, Ints, Ints]:
        stays, places, number, missing = carry
        last = last_of(score, stays)
        places = jnp.where(last, number, places)
        return stays & ~last, places, number + 1, missing - item_of(length, last)

    first = (among, jnp.full_like(score, STAYS), jnp.int32(0), needed)
    return jax.lax.while_loop(is_short, leave, first)[1]


class Waits(NamedTuple):
    """How long sequences have waited, in steps.

    step: int32 [], the number of the next step, from 1.
    since: int32 [N], the step in which the present wait began; RUNS where there is none.
    earlier: int32 [N], steps of the waits before that count.
    """

    step: Ints
    since: Ints
    earlier: Ints

    @property
    def steps(self) -> Ints:
        """int32 [N]: steps of all waits that count, without the next one."""
        return self.earlier + jnp.where(self.since == RUNS, 0, self.step - self.since)

    def was_offered(self, waiting: Flags) -> Flags:
        """Whether the one that waits was offered in a step already; False if none waits."""
        return jnp.any(waiting & (self.since != self.step))

    def after(self, step: Step, earlier: Ints) -> Waits:
        """The waits after a step. One that sends a sequence back counts as a step of waiting.

        Args:
            earlier: int32 [N], of which `earlier` each goes on.
        """
        number = self.step + 1
        plan = step.plan
        begins = jnp.logical_or(plan.preempted, step.submitted)
        since = jnp.where(plan.admitted, RUNS, jnp.where(begins, number, self.since))
        return Waits(number, since, earlier + plan.preempted)


def no_waits(requests: Requests) -> Waits:
    """The waits before any request."""
    zeros = jnp.zeros_like(requests.user)
    return Waits(jnp.int32(0), zeros + RUNS, zeros)


# --- srtf -----------------------------------------------------------------------------------------


class Urgency(NamedTuple):
    """The memory of `srtf`. urgent: bool [N], who has waited for `patience` steps."""

    waits: Waits
    urgent: Flags


def srtf(patience: int = 256, margin: int = 16) -> WithMemory:
    """The fewest predicted tokens left first, with evictions; who has waited for `patience` steps
    comes before all others, by arrival.
    """

    def remaining(state: State, requests: Requests) -> Ints:
        output = state.length - requests.prompt_len
        return jnp.maximum(requests.predicted - output, 0)

    def init(requests: Requests) -> Urgency:
        waits = no_waits(requests)
        return Urgency(waits, waits.earlier > 0)

    def observe(memory: Urgency, step: Step, requests: Requests) -> Urgency:
        counted = jnp.where(step.plan.admitted, memory.waits.steps, memory.waits.earlier)
        waits = memory.waits.after(step, counted)
        late = (waits.since != RUNS) & (waits.steps >= patience)
        return Urgency(waits, memory.urgent | late)

    def order(memory: Urgency, state: State, requests: Requests) -> Order:
        remaining_tokens = remaining(state, requests)
        urgent = memory.urgent
        score = jnp.where(urgent, -1, remaining_tokens)
        first = first_of(score, state.phase == WAITING)
        is_longer = remaining_tokens >= item_of(remaining_tokens, first) + margin
        evictable = ~urgent & (jnp.any(first & urgent) | is_longer)
        among = (state.phase == RUNNING) & evictable & memory.waits.was_offered(first)
        evicted = make_way(score, among, state.length, item_of(state.length, first))
        return Order(score, jnp.ones_like(urgent), evicted)

    return WithMemory(init, observe, order)


# --- mlfq -----------------------------------------------------------------------------------------

TOKEN = 16  # units of work


class Jobs(NamedTuple):
    """The memory of `mlfq`: int32 [N] beside `waits`.

    work: units of the quantum of its level that are used up.
    prompt: prompt tokens that do not count as work yet.
    """

    waits: Waits
    level: Ints
    work: Ints
    prompt: Ints


def mlfq(
    levels: int = 4,
    quantum: int = 16,
    ratio: int = 4,
    prompt_work: float = 0.0625,
    patience: int = 256,
) -> WithMemory:
    """A skip-join queue of several levels, with evictions.

    Raises:
        ValueError: `prompt_work` is negative, or no multiple of 1 / TOKEN.
    """
    units = prompt_work * TOKEN
    if not (units >= 0 and units == int(units)):
        raise ValueError(
            f"mlfq on arrays has prompt_work {prompt_work!r}; it must be a multiple of 1/{TOKEN} "
            "and not negative, because work is an integer there"
        )
    prompt_units = int(units)
    limited = [TOKEN * quantum * ratio**level for level in range(levels - 1)]
    quanta = np.minimum([*limited, LARGEST_SCORE], LARGEST_SCORE).astype(np.int32)

    def worked(memory: Jobs, units: Ints) -> Jobs:
        """The jobs after some work: at the next level if a quantum is used up."""
        work = memory.work + units
        used_up = (units > 0) & (work >= jnp.asarray(quanta)[memory.level])
        return memory._replace(level=memory.level + used_up, work=jnp.where(used_up, 0, work))

    def observe(memory: Jobs, step: Step, requests: Requests) -> Jobs:
        plan = step.plan
        waits = memory.waits
        is_new = plan.admitted & (memory.prompt > 0)
        counted = jnp.where(plan.admitted & ~is_new, waits.steps, waits.earlier)
        waits = waits.after(step, jnp.where(is_new | plan.samples, 0, counted))
        memory = worked(memory, jnp.where(is_new, prompt_units * memory.prompt, 0))
        memory = worked(memory, jnp.where(plan.samples, TOKEN, 0))
        needed = prompt_units * requests.prompt_len + TOKEN
        joined = jnp.sum(quanta[None, :] < needed[:, None], axis=1)
        level = jnp.where(step.submitted, joined, memory.level)
        promoted = (waits.since != RUNS) & (level > 0) & (waits.steps >= patience)
        return Jobs(
            waits,
            jnp.where(promoted, 0, level),
            jnp.where(promoted, 0, memory.work),
            jnp.where(plan.admitted, 0, memory.prompt),
        )

    return WithMemory(_first_jobs, observe, _order_of_levels)


def _first_jobs(requests: Requests) -> Jobs:
    zeros = jnp.zeros_like(requests.user)
    return Jobs(no_waits(requests), zeros, zeros, requests.prompt_len)


def _order_of_levels(memory: Jobs, state: State, requests: Requests) -> Order:
    level = memory.level
    first = first_of(level, state.phase == WAITING)
    is_higher = level > item_of(level, first)
    among = (state.phase == RUNNING) & is_higher & memory.waits.was_offered(first)
    evicted = make_way(level, among, state.length, item_of(state.length, first))
    return Order(level, jnp.ones_like(among), evicted)
