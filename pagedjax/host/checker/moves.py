"""What can happen next in a small world. An event is applied by the scheduler's own transitions.

Requests are named by their rank: the unfinished request that arrived first has rank 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pagedjax.host import scheduler
from pagedjax.host.checker.worlds import STOP, WORD, World
from pagedjax.host.event_log import Cancel, Commit, Entry, Schedule, Submit
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import Plan, Request, Seq

TICKS = (1,)  # seconds by which the time of a timed policy advances
HORIZON = 3  # seconds at which its time stands still
PASSER = "p"  # the letter of requests that arrive and are cancelled at once


class Arrive(NamedTuple):
    """A request of a shape of the world joins the queue."""

    shape: int


class CancelRank(NamedTuple):
    """The request of this rank is cancelled."""

    rank: int


class Step(NamedTuple):
    """A step runs.

    stops: of each row of its plan, whether it samples a stop token.
    """

    stops: tuple[bool, ...]


class Tick(NamedTuple):
    """Time passes, for a policy that is timed."""

    seconds: int


Happening = Arrive | CancelRank | Step | Tick


class Node(NamedTuple):
    """A state of the scheduler, and what the properties need to remember beside it.

    waited_again: arrivals of the waiting requests that have run before.
    now: seconds since the scheduler began.
    """

    state: SchedulerState
    waited_again: frozenset[int] = frozenset()
    now: int = 0


class Effect(NamedTuple):
    """What an event does to the requests, by their ranks before it (after it, for an arrival).

    ended: the ranks that are unfinished no more.
    overtaken: of each rank, how many later requests entered for the first time while it waits.
    discarded: the ranks whose computed tokens were thrown away, while a later request that is not
        more urgent runs on.
    inversion: (rank that waits, rank of a later and less urgent request that was preferred).
    num_rows: rows of a step; None for another event.
    arrives: whether a request arrived.
    """

    ended: tuple[int, ...] = ()
    overtaken: tuple[int, ...] = ()
    discarded: tuple[int, ...] = ()
    inversion: tuple[int, int] | None = None
    num_rows: int | None = None
    arrives: bool = False


class Move(NamedTuple):
    """An event, the node after it, its effect, and the entries of a recording of it."""

    happening: Happening
    node: Node
    effect: Effect
    entries: tuple[Entry, ...]


def start(world: World) -> Node:
    """The node without requests."""
    return Node(scheduler.init(world.config))


def unfinished(state: SchedulerState) -> list[Seq]:
    """The unfinished requests by rank. Records of running ones may be some steps old."""
    return sorted((*state.waiting, *state.running.seqs), key=_arrival)


def _arrival(seq: Seq) -> int:
    return seq.arrival


def shape_of(seq: Seq) -> str:
    """The letter of the shape of a request of a world."""
    return seq.request.request_id[0]


def moves(world: World, node: Node) -> Iterator[Move]:
    """All that can happen next: arrivals, then steps, then cancellations."""
    ranked = unfinished(node.state)
    if len(ranked) < world.requests:
        for shape in range(len(world.shapes)):
            yield arrive(world, node, Arrive(shape), in_one_jump=True)
    if ranked:
        yield from _steps(world, node, ranked)
    if world.timed:
        for seconds in TICKS:
            if node.now + seconds <= HORIZON:
                yield _tick(node, Tick(seconds))
    if world.cancels:
        for rank in range(len(ranked)):
            yield _cancel(node, CancelRank(rank), ranked)


def apply(world: World, node: Node, happening: Happening) -> Move:
    """The move of an event that can happen at this node.

    Raises:
        LookupError: it cannot happen.
    """
    match happening:
        case Arrive():
            return arrive(world, node, happening)
        case CancelRank(rank):
            ranked = unfinished(node.state)
            if rank >= len(ranked):
                raise LookupError(f"there is no request of rank {rank}")
            return _cancel(node, happening, ranked)
        case Tick():
            return _tick(node, happening)
        case Step(stops):
            ranked = unfinished(node.state)
            for move in _steps(world, node, ranked):
                if move.happening == Step(stops):
                    return move
            raise LookupError(f"no step samples {stops}")


def arrive(world: World, node: Node, happening: Arrive, *, in_one_jump: bool = False) -> Move:
    """A request joins the queue. With a stride, others came before it and were cancelled.

    Args:
        in_one_jump: the state is the same, but these others are only counted: they are no entries.
    """
    state = node.state
    entries: list[Entry] = []
    template = world.shapes[happening.shape]
    num_passers = world.stride - 1 if state.ids else 0
    if in_one_jump and num_passers and state.memory is None:
        state = state._replace(arrivals=state.arrivals + num_passers)
        num_passers = 0
    for _ in range(num_passers):
        passer = _named(world.passer, f"{PASSER}{state.arrivals}")
        state = scheduler.submit(state, passer)
        entries.append(Submit(passer))
        state, events = scheduler.cancel(state, passer.request_id)
        entries.append(Cancel(passer.request_id, "abort", events))
    request = _named(template, f"{template.request_id}{state.arrivals}")
    state = scheduler.submit(state, request)
    entries.append(Submit(request))
    return Move(happening, node._replace(state=state), Effect(arrives=True), tuple(entries))


def _named(template: Request, name: str) -> Request:
    return template._replace(request_id=name)


def _cancel(node: Node, happening: CancelRank, ranked: Sequence[Seq]) -> Move:
    seq = ranked[happening.rank]
    state, events = scheduler.cancel(node.state, seq.request_id)
    next_node = Node(state, node.waited_again - {seq.arrival}, node.now)
    entry = Cancel(seq.request_id, "abort", events)
    return Move(happening, next_node, Effect(ended=(happening.rank,)), (entry,))


def _tick(node: Node, happening: Tick) -> Move:
    return Move(happening, node._replace(now=node.now + happening.seconds), Effect(), ())


def plan_step(world: World, state: SchedulerState, now: int) -> tuple[SchedulerState, Plan]:
    """What the policy's scheduler plans at a time."""
    return scheduler.schedule(state, world.policy, now=now if world.timed else None)


def _steps(world: World, node: Node, ranked: Sequence[Seq]) -> Iterator[Move]:
    """A step, once for each set of rows that may sample a stop token."""
    planned, plan = plan_step(world, node.state, node.now)
    effect = _effect_of_plan(node, planned, plan, ranked)
    waited_again = node.waited_again
    if plan.preempted or plan.admitted:
        waited_again = _waited_again(node, planned, plan)
    ranks = {seq.arrival: rank for rank, seq in enumerate(ranked)}
    for stops in _outcomes(plan):
        tokens = [STOP if stop else WORD for stop in stops]
        state, events = scheduler.commit(planned, plan, tokens)
        unfinished_arrivals = {seq.arrival for seq in (*state.waiting, *state.running.seqs)}
        ended = tuple(
            [rank for arrival, rank in ranks.items() if arrival not in unfinished_arrivals]
        )
        entries = (Schedule(plan), Commit(plan, tokens, {}, {}, events))
        yield Move(
            Step(stops), Node(state, waited_again, node.now), effect._replace(ended=ended), entries
        )


def _outcomes(plan: Plan) -> Iterator[tuple[bool, ...]]:
    """Each way in which rows may sample stop tokens. A row whose request ends at its limit has one
    way: with a stop token it would end in the same step.
    """
    choices = []
    for seq, length, computed, count in zip(
        plan.seqs, plan.lengths, plan.starts, plan.counts, strict=True
    ):
        may_stop = computed + count >= length and length + 1 < seq.limit
        choices.append((False, True) if may_stop else (False,))
    return itertools.product(*choices)


def _waited_again(node: Node, planned: SchedulerState, plan: Plan) -> frozenset[int]:
    """The arrivals of the waiting requests that have run before, after a step was planned."""
    return frozenset(
        seq.arrival
        for seq in planned.waiting
        if seq.arrival in node.waited_again or seq.request_id in plan.preempted
    )


def _effect_of_plan(
    node: Node, planned: SchedulerState, plan: Plan, ranked: Sequence[Seq]
) -> Effect:
    """The effect of a step, without the requests that it ends."""
    num_rows = len(plan.seqs)
    if not (plan.admitted or plan.preempted):
        return Effect(num_rows=num_rows)
    still_waiting = {seq.arrival for seq in planned.waiting}
    entered = [rank for rank, seq in enumerate(ranked) if seq.request_id in plan.admitted]
    first_entered = [rank for rank in entered if ranked[rank].arrival not in node.waited_again]
    overtaken = tuple(
        [
            sum(entered_rank > rank for entered_rank in first_entered)
            if seq.arrival in still_waiting
            else 0
            for rank, seq in enumerate(ranked)
        ]
    )
    had_content = {
        seq.request_id
        for seq, computed in zip(node.state.running.seqs, node.state.running.computed, strict=True)
        if computed
    }
    lost_ids = (set(plan.preempted) - set(plan.swapped)) & had_content
    discarded = tuple(
        [
            rank
            for rank, seq in enumerate(ranked)
            if seq.request_id in lost_ids and _outlived(seq, planned.running.seqs)
        ]
    )
    inversion = _inversion(planned, plan, ranked, entered)
    return Effect((), overtaken, discarded, inversion, num_rows)


def _outlived(victim: Seq, active: Sequence[Seq]) -> bool:
    """Whether a later request that is not more urgent runs on."""
    priority = victim.request.priority
    return any(seq.arrival > victim.arrival and seq.request.priority >= priority for seq in active)


def _inversion(
    planned: SchedulerState, plan: Plan, ranked: Sequence[Seq], entered: Sequence[int]
) -> tuple[int, int] | None:
    """(a rank, a later and less urgent one): the later one entered while the other waits, or runs
    on after the other was preempted. None if there is no such pair.
    """
    waiting = {seq.arrival for seq in planned.waiting}
    active = {seq.arrival for seq in planned.running.seqs}
    for rank, seq in enumerate(ranked):
        if seq.arrival not in waiting:
            continue
        stopped = seq.request_id in plan.preempted
        for later in range(rank + 1, len(ranked)):
            preferred = later in entered or (stopped and ranked[later].arrival in active)
            if preferred and ranked[later].request.priority > seq.request.priority:
                return rank, later
    return None
