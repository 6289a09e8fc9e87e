"""The scheduler's transitions (pagedjax/host/scheduler.py) on arrays of one size, so that they can
be compiled, mapped over many worlds and scanned over many steps.

    submit -> schedule -> commit, as there: State in, State out

A world has N requests, in order of arrival, from its beginning to its end. The sets that the
scheduler lists are masks here, and its loops over sequences in an order are sums over those before
each: `sums_before` compares each pair, which costs N * N comparisons and no sort.

Rules of the scheduler (the numbers of its docstring) and how they are sums:

1, 2. Of the running sequences at most one is no decode: a prompt that was cut because the budget
      was used up, and nothing enters before it is computed. It gets what the decodes leave.
3.    Those that enter are the longest beginning of the policy's order for which rows, tokens and
      blocks suffice. All three sums grow along the order, so each sequence can be asked alone.
5.    Running sequences leave, the last of the policy's order first, until the free blocks suffice:
      one leaves if they would not suffice after those before it have left.
7.    By recomputation: nothing computed, nothing kept.

What is left out, and refused by name (`Sizes.of`): swapping, groups of layers, steps of one kind,
whole prompts, contiguous reservations. `Requests` have no place for prefix caching, branches, beams
and drafts. Block ids do not exist here: blocks are counted. Nothing is rejected: a request that is
larger than the pool never ends (`workloads.of_arrays` refuses it, `rollout.played` returns NaN).

tests/experiments/twin/test_array_scheduler.py compares plans with the scheduler's, step by step.
"""

from __future__ import annotations

from operator import add
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

LARGEST_SCORE = 2**30  # of either sign


class Sizes(NamedTuple):
    """Sizes of a scheduler: int32 []. They are values and no shapes, so worlds may differ in them."""

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
    """

    score: Ints
    offered: Flags


class Plan(NamedTuple):
    """The work of a step: [N], and int32 [] for `blocks_used`.

    counts: int32, tokens to compute of each sequence; 0: it has no row.
    starts: int32, tokens of each that are in the cache before the step.
    lengths: int32, known tokens of each before the step.
    places: int32, the place of a sequence among those that the step admitted, or among those that
        it preempted (no step does both).
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


def sums_before(score: Ints, *columns: Ints) -> tuple[Ints, ...]:
    """Of each column, int32 [N]: for each item, the sum over the items before it. Those are the items
    with a lower score, and the earlier ones with the same score.

    One reduction gives all sums. On a CPU it takes a fortieth of the time of a `jnp.sum` for each
    column, for which XLA writes the comparisons to memory; with one column alone it is not so fast.
    """
    places = jnp.arange(score.shape[0], dtype=jnp.int32)
    earlier = (places[None, :] < places[:, None]).astype(jnp.int32)
    before = score[None, :] < score[:, None] + earlier
    counted = [jnp.where(before, column[None, :], 0) for column in columns]
    zeros = [jnp.int32(0)] * len(columns)
    return tuple(jax.lax.reduce(tuple(counted), tuple(zeros), _added, (1,)))


def _added(sums: tuple[Ints, ...], values: tuple[Ints, ...]) -> tuple[Ints, ...]:
    return tuple(map(add, sums, values))


def blocks_for(tokens: Ints, sizes: Sizes) -> Ints:
    """The number of blocks for a number of tokens."""
    return (tokens + sizes.block_size - 1) // sizes.block_size


def schedule(state: State, sizes: Sizes, order: Order) -> tuple[State, Plan]:
    """What the next step computes. A plan without rows has counts of 0 alone."""
    state, preempted, exits = _make_room(state, sizes, order.score)

    running = state.phase == RUNNING
    to_compute = state.length - state.computed
    decodes = running & (to_compute == 1)
    of_prompt = jnp.where(running & ~decodes, to_compute, 0)  # of one sequence at most
    waiting = (state.phase == WAITING) & order.offered & ~jnp.any(preempted)
    of_waiting = jnp.where(waiting, state.length, 0)
    need = jnp.where(waiting, blocks_for(state.length, sizes), 0)
    waiting_before, blocks_before, place = sums_before(
        order.score, of_waiting, need, waiting.astype(jnp.int32)
    )
    budget = sizes.budget - jnp.sum(decodes)
    counts = decodes + jnp.minimum(budget, of_prompt)
    budget -= jnp.sum(jnp.minimum(budget, of_prompt))

    admitted = (
        waiting
        & (place < sizes.max_running - jnp.sum(running))
        & (waiting_before < budget)
        & (blocks_before + need <= state.free_blocks)
    )
    counts += jnp.where(admitted, jnp.minimum(state.length, budget - waiting_before), 0)
    first_decodes = decodes & (state.decodes_since == NO_STEP)
    decodes_since = jnp.where(first_decodes, state.step, state.decodes_since)
    state = state._replace(
        phase=jnp.where(admitted, RUNNING, state.phase),
        blocks=jnp.where(admitted, need, state.blocks),
        entered=jnp.where(admitted, state.admissions + place, state.entered),
        decodes_since=jnp.where(admitted, NO_STEP, decodes_since),
        free_blocks=state.free_blocks - jnp.sum(jnp.where(admitted, need, 0)),
        admissions=state.admissions + jnp.sum(admitted),
    )
    used = sizes.num_blocks - state.free_blocks
    places = jnp.where(preempted, exits, place)
    plan = Plan(counts, state.computed, state.length, admitted, preempted, places, used)
    return state, plan


def _make_room(state: State, sizes: Sizes, score: Ints) -> tuple[State, Flags, Ints]:
    """A block for each decode whose last block is full; sequences leave until the free blocks
    suffice -> (state, who was preempted, in which place).
    """
    running = state.phase == RUNNING
    full = running & (state.computed == state.blocks * sizes.block_size)
    spared = jnp.where(running, state.blocks + full, 0)  # blocks, if the sequence leaves
    rows = running.astype(jnp.int32)
    spared_by_earlier, earlier_rows = sums_before(score, spared, rows)
    # the last leaves first
    spared_before = jnp.sum(spared) - spared - spared_by_earlier
    place = jnp.sum(rows) - rows - earlier_rows
    missing = jnp.sum(full) - state.free_blocks
    preempted = running & (missing > spared_before)
    grows = full & ~preempted
    returned = jnp.sum(jnp.where(preempted, state.blocks, 0))
    state = state._replace(
        phase=jnp.where(preempted, WAITING, state.phase),
        computed=jnp.where(preempted, 0, state.computed),
        blocks=jnp.where(preempted, 0, state.blocks + grows),
        free_blocks=state.free_blocks + returned - jnp.sum(grows),
    )
    return state, preempted, place


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
        step=state.step + 1,
    )
    return state, ended
