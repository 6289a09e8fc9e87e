"""The scheduler's transitions (pagedjax/host/scheduler.py) on arrays of one size, so that they can
be compiled, mapped over many worlds and scanned over many steps.

    submit -> schedule -> commit, as there: State in, State out

A world has N requests, in order of arrival, from its beginning to its end. The sets that the
scheduler lists are masks here. Nothing is sorted: each turn of a loop takes the next sequence of
the order, by two reductions. In most steps the loop takes no sequence, or one.

Rules of the scheduler (the numbers of its docstring) and what they are here:

1, 2. Of the running sequences at most one is no decode: a prompt that was cut because the budget
      was used up, and nothing enters before it is computed. It gets what the decodes leave.
3.    Waiting sequences enter in the policy's order, until rows, tokens or blocks are used up.
5.    Running sequences leave, the last of the policy's order first, until the free blocks suffice.
7.    By recomputation: nothing computed, nothing kept.
11.   Evictions of a policy with memory (with_memory.py) come before 1 to 5.

What is left out, and refused by name (`Sizes.of`): swapping, groups of layers, steps of one kind,
whole prompts, contiguous reservations. `Requests` have no place for prefix caching, branches, beams
and drafts. Block ids do not exist here: blocks are counted. Nothing is rejected: a request that is
larger than the pool never ends (`workloads.of_arrays` refuses it, `rollout.played` returns NaN).

tests/experiments/twin/test_array_scheduler.py compares plans with the scheduler's, step by step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pagedjax.host.types import SchedulerConfig

# arrays of JAX or, outside a program, of numpy
Ints = Any  # int32
Flags = Any  # bool

# phases of a request
COMING = 0  # not submitted yet
WAITING = 1
RUNNING = 2
ENDED = 3

NO_STEP = -1
STAYS = -1  # instead of the place of a sequence that is evicted

LARGEST_SCORE = 2**30  # of either sign


class Sizes(NamedTuple):
    """Sizes of a scheduler: int32 []. They are values, not shapes, so worlds may differ in them."""

    block_size: Any
    num_blocks: Any
    budget: Any  # max_num_batched_tokens
    max_running: Any  # rows: at most max_num_seqs, and a token of the budget for each

    @staticmethod
    def of(config: SchedulerConfig) -> Sizes:
        """The sizes of a scheduler's configuration.

        Raises:
            ValueError: the configuration has something that is not here; names it.
        """
        refused = {
            "host_blocks": (0, "preemption='recompute'"),
            "chunked_prefill": (True, "chunked_prefill=True"),
            "mixed_steps": (True, "mixed_steps=True"),
            "late_stops": (False, "late_stops=False"),
            "reservation": ("none", "reservation='none'"),
            "views": ((), "a model without windows and states, and no kv_policy"),
        }
        for field, (only, remedy) in refused.items():
            value = getattr(config, field)
            if value != only:
                raise ValueError(
                    f"{field} is {value!r:.80}, which the scheduler on arrays does not have; "
                    f"use {remedy}, or the simulator"
                )
        return Sizes(
            config.block_size,
            config.num_blocks,
            config.max_num_batched_tokens,
            config.max_running,
        )


class Requests(NamedTuple):
    """The requests of a world, in order of arrival: int32 [N].

    Requests of 0 prompt tokens do not exist: they fill the end of a world with fewer requests.
    """

    arrival: Ints  # microseconds
    prompt_len: Ints
    final_len: Ints  # tokens with which it ends: the prompt, and at least one token of output
    limit: Ints  # tokens at its longest, as a policy knows it
    predicted: Ints  # output tokens that the caller predicts
    priority: Ints
    user: Ints  # 0 to N - 1


class State(NamedTuple):
    """A scheduler: int32 [N], and int32 [] from `free_blocks` on.

    `decodes_since` and `entered` decide nothing. They are the order of the plan's rows: decodes
    first, by the first and then by the second, then the others by the second.
    """

    phase: Ints
    length: Ints  # known tokens: the prompt, and those generated
    computed: Ints  # of these, how many are in the cache
    blocks: Ints  # blocks that it owns
    entered: Ints  # the number of its admission, counted from 0
    decodes_since: Ints  # the step in which it was a decode first, or NO_STEP
    free_blocks: Ints
    step: Ints
    admissions: Ints  # so far


class Order(NamedTuple):
    """What a policy decides about a step.

    score: int32 [N], within LARGEST_SCORE. Waiting sequences are offered admission by the lowest
        score, running ones are preempted by the highest; ties go to the earlier arrival.
    offered: bool [N]: which waiting sequences may enter.
    evicted: int32 [N]: the places of running sequences that are sent back to the queue before the
        step, 0, 1 ...; STAYS of the others. None: nobody is, as under policies without memory.
    """

    score: Ints
    offered: Flags
    evicted: Ints | None = None


class Plan(NamedTuple):
    """The work of a step: [N], and int32 [] for `blocks_used`.

    counts: int32, tokens to compute of each sequence; 0: it has no row.
    starts: int32, tokens of each that are in the cache before the step.
    lengths: int32, known tokens of each before the step.
    preempted: bool, who was evicted by the policy, and then who was preempted for its blocks.
    places: int32, the place of a sequence among those that the step admitted, or among those that
        it preempted.
    """

    counts: Ints
    starts: Ints
    lengths: Ints
    admitted: Flags
    preempted: Flags
    places: Ints
    blocks_used: Ints

    @property
    def samples(self) -> Flags:
        """Whether the row reaches the end of its known tokens, so that a token is sampled."""
        return (self.counts > 0) & (self.starts + self.counts == self.lengths)


def init(sizes: Sizes, requests: Requests) -> State:
    """The state in which no request was submitted."""
    zeros = jnp.zeros_like(requests.prompt_len)
    return State(
        phase=jnp.where(requests.prompt_len > 0, COMING, ENDED).astype(jnp.int32),
        length=requests.prompt_len,
        computed=zeros,
        blocks=zeros,
        entered=zeros,
        decodes_since=zeros + NO_STEP,
        free_blocks=jnp.asarray(sizes.num_blocks, jnp.int32),
        step=jnp.int32(0),
        admissions=jnp.int32(0),
    )


def submit(state: State, arrived: Flags) -> State:
    """Requests join the queue. arrived: bool [N]; those that were submitted before stay as they
    are.
    """
    phase = jnp.where(arrived & (state.phase == COMING), WAITING, state.phase)
    return state._replace(phase=phase)


def blocks_for(tokens: Ints, sizes: Sizes) -> Ints:
    """The blocks that hold so many tokens."""
    return (tokens + sizes.block_size - 1) // sizes.block_size


def schedule(state: State, sizes: Sizes, order: Order) -> tuple[State, Plan]:
    """What the next step computes. A plan without rows has counts of 0 alone."""
    evicted = None
    if order.evicted is not None:
        evicted = order.evicted != STAYS
        state = _sent_back(state, evicted)
    state, preempted, exits = _make_room(state, sizes, order.score)

    running = state.phase == RUNNING
    to_compute = state.length - state.computed
    decodes = running & (to_compute == 1)
    budget = sizes.budget - jnp.sum(decodes)
    of_prompts = jnp.where(running & ~decodes, jnp.minimum(budget, to_compute), 0)  # of one at most
    first_decodes = decodes & (state.decodes_since == NO_STEP)
    counts = decodes + of_prompts
    state = state._replace(decodes_since=jnp.where(first_decodes, state.step, state.decodes_since))
    room = Room(
        rows=jnp.where(jnp.any(preempted), 0, sizes.max_running - jnp.sum(running)),
        tokens=budget - jnp.sum(of_prompts),
        blocks=state.free_blocks,
    )
    if evicted is not None and order.evicted is not None:
        exits = jnp.where(evicted, order.evicted, exits + jnp.sum(evicted))
        order = order._replace(offered=order.offered & ~evicted)
        preempted = preempted | evicted
    entry = _admit(state, sizes, order, room)
    admitted = entry.counts > 0
    state = state._replace(
        phase=jnp.where(admitted, RUNNING, state.phase),
        blocks=jnp.where(admitted, entry.blocks, state.blocks),
        entered=jnp.where(admitted, state.admissions + entry.places, state.entered),
        decodes_since=jnp.where(admitted, NO_STEP, state.decodes_since),
        free_blocks=entry.room.blocks,
        admissions=state.admissions + entry.number,
    )
    plan = Plan(
        counts + entry.counts,
        state.computed,
        state.length,
        admitted,
        preempted,
        jnp.where(preempted, exits, entry.places),
        sizes.num_blocks - state.free_blocks,
    )
    return state, plan


class Room(NamedTuple):
    """What a step has left for sequences that wait: int32 []."""

    rows: Ints
    tokens: Ints
    blocks: Ints


class Entry(NamedTuple):
    """The admission of a step, while it goes on.

    waits: bool [N], who is still to be asked.
    counts, blocks, places: int32 [N], of those that enter; 0 of the others.
    number: int32 [], how many enter.
    """

    waits: Flags
    counts: Ints
    blocks: Ints
    places: Ints
    number: Ints
    room: Room


def _admit(state: State, sizes: Sizes, order: Order, room: Room) -> Entry:
    """Waiting sequences enter, the first of the order first, until rows or tokens are used up, or
    the next one's blocks are not there.
    """

    def goes_on(entry: Entry) -> Flags:
        return (entry.room.rows > 0) & (entry.room.tokens > 0) & jnp.any(entry.waits)

    def ask_next(entry: Entry) -> Entry:
        next_one = first_of(order.score, entry.waits)
        length = item_of(state.length, next_one)
        need = blocks_for(length, sizes)
        fits = need <= entry.room.blocks
        enters = next_one & fits
        count = jnp.minimum(length, entry.room.tokens)
        return Entry(
            waits=entry.waits & ~next_one & fits,
            counts=jnp.where(enters, count, entry.counts),
            blocks=jnp.where(enters, need, entry.blocks),
            places=jnp.where(enters, entry.number, entry.places),
            number=entry.number + fits,
            room=Room(
                entry.room.rows - fits,
                entry.room.tokens - jnp.where(fits, count, 0),
                entry.room.blocks - jnp.where(fits, need, 0),
            ),
        )

    none = jnp.zeros_like(state.length)
    waits = (state.phase == WAITING) & order.offered
    return jax.lax.while_loop(goes_on, ask_next, Entry(waits, none, none, none, jnp.int32(0), room))


def _make_room(state: State, sizes: Sizes, score: Ints) -> tuple[State, Flags, Ints]:
    """Gives a block to each decode whose last block is full. Sequences leave, the last of the order
    first, until the free blocks suffice -> (state, who was preempted, in which place).
    """
    running = state.phase == RUNNING
    full = running & (state.computed == state.blocks * sizes.block_size)
    spared = state.blocks + full  # blocks, if the sequence leaves

    def are_missing(carry: tuple[Flags, Ints, Ints, Ints]) -> Flags:
        *_, missing = carry
        return missing > 0

    def leave(carry: tuple[Flags, Ints, Ints, Ints]) -> tuple[Flags, Ints, Ints, Ints]:
        stays, places, number, missing = carry
        last = last_of(score, stays)
        places = jnp.where(last, number, places)
        return stays & ~last, places, number + 1, missing - item_of(spared, last)

    missing = jnp.sum(full) - state.free_blocks
    stays, places, _, _ = jax.lax.while_loop(
        are_missing, leave, (running, jnp.zeros_like(score), jnp.int32(0), missing)
    )
    preempted = running & ~stays
    grows = full & stays
    state = _sent_back(state, preempted)
    state = state._replace(
        blocks=state.blocks + grows, free_blocks=state.free_blocks - jnp.sum(grows)
    )
    return state, preempted, places


def _sent_back(state: State, chosen: Flags) -> State:
    """The state in which these running sequences wait, with nothing computed."""
    returned = jnp.sum(jnp.where(chosen, state.blocks, 0))
    return state._replace(
        phase=jnp.where(chosen, WAITING, state.phase),
        computed=jnp.where(chosen, 0, state.computed),
        blocks=jnp.where(chosen, 0, state.blocks),
        free_blocks=state.free_blocks + returned,
    )


def first_of(score: Ints, among: Flags) -> Flags:
    """bool [N]: the one of these with the lowest score; the earliest of equals."""
    places = jnp.arange(score.shape[0], dtype=jnp.int32)
    lowest = jnp.min(jnp.where(among, score, LARGEST_SCORE + 1))
    equals = among & (score == lowest)
    return places == jnp.min(jnp.where(equals, places, score.shape[0]))


def last_of(score: Ints, among: Flags) -> Flags:
    """bool [N]: the one of these with the highest score; the latest of equals."""
    places = jnp.arange(score.shape[0], dtype=jnp.int32)
    highest = jnp.max(jnp.where(among, score, -LARGEST_SCORE - 1))
    equals = among & (score == highest)
    return places == jnp.max(jnp.where(equals, places, -1))


def arrivals(state: State) -> Ints:
    """int32 [N]: 0, 1, 2 ... in the order of submission."""
    return jnp.arange(state.phase.shape[0], dtype=jnp.int32)


def item_of(column: Ints, chosen: Flags) -> Ints:
    """int32 []: the item of the column that is chosen; 0 if none is."""
    return jnp.sum(jnp.where(chosen, column, 0))


def commit(state: State, plan: Plan, requests: Requests) -> tuple[State, Flags]:
    """The state after a step -> (state, which requests ended in it)."""
    computed = state.computed + plan.counts
    length = state.length + plan.samples
    ended = plan.samples & (length >= requests.final_len)
    state = state._replace(
        phase=jnp.where(ended, ENDED, state.phase),
        length=length,
        computed=computed,
        blocks=jnp.where(ended, 0, state.blocks),
        free_blocks=state.free_blocks + jnp.sum(jnp.where(ended, state.blocks, 0)),
        step=state.step + jnp.any(plan.counts > 0),
    )
    return state, ended
