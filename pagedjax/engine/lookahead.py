"""Looking ahead: the next step is sent to the device before the tokens of this one are known.

The scheduler is pure, so a guess is made with its own transitions: commit tokens that stop nobody, schedule again, and
send that plan, which takes the new tokens where they are, on the device. When they arrive on the host, the real
transitions are made as ever. A guess that has every row of the real plan, with the same blocks, has computed it: rows
of sequences that ended meanwhile are left out. Any other guess is dropped, and the real plan is sent after it. So
plans, events and tokens are those of an engine that never guesses; only when things run is different.

Several steps in one dispatch (`steps_per_dispatch`) are a plan and guesses of what follows it, or guesses alone: their
program takes each step's new tokens from the step before. What is true of one guess is true of each of them.

A guess may be wrong, so it must do no harm. It writes keys and values of the sequences it has, which the real plan
writes again, and into blocks that are empty; it is not made when that would move blocks or cost the content of one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pagedjax.device.step import StepOutput
from pagedjax.engine.requests import SequenceData
from pagedjax.host import scheduler
from pagedjax.host.policies import Policy
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import Plan

NO_TOKEN = -1  # stops nobody


class SentStep(NamedTuple):
    """A plan on the device."""

    plan: Plan
    output: StepOutput
    sent: float  # seconds of time.perf_counter

    @property
    def ready(self) -> bool:
        tokens: Any = self.output.sampled.tokens
        return tokens.is_ready()


# (plans, the flight before them) -> flights of all of them in one dispatch, or of as many as one can be, from the first
Send = Callable[[Sequence[Plan], SentStep | None], tuple[SentStep, ...]]


class Lookahead(NamedTuple):
    """What is on the device beyond the step that is waited for, and where the next guess starts from."""

    flights: tuple[SentStep, ...] = ()
    last: tuple[SchedulerState, Plan] | None = None  # after the last of them; None: guess on when they are used up


def take(ahead: Lookahead, plan: Plan) -> tuple[Lookahead, SentStep | None, tuple[int, ...]]:
    """The flight that has computed a plan, if there is one, and which of its rows are the plan's.

    Returns:
        (what is left ahead, the flight, its rows in the plan's order); of a wrong guess nothing is left.
    """
    if not ahead.flights:
        return Lookahead(), None, ()
    flight, *rest = ahead.flights
    rows = covered(plan, flight.plan)
    if rows is None:
        return Lookahead(), None, ()
    exact = len(rows) == len(flight.plan.seqs)  # else what follows has rows too many, and is used up first
    return Lookahead(tuple(rest), ahead.last if exact and rest else None), flight, rows


def covered(plan: Plan, guess: Plan) -> tuple[int, ...] | None:
    """The rows of a guess that are a plan's, in its order; None when it did not compute all of them."""
    if plan.copies or plan.swap_in or plan.swap_out:
        return None
    rows, j = [], 0
    for i, seq in enumerate(plan.seqs):
        while j < len(guess.seqs) and guess.seqs[j].arrival != seq.arrival:
            j += 1
        if j == len(guess.seqs):
            return None
        work = (guess.starts[j], guess.counts[j], guess.lengths[j], guess.seqs[j].blocks)
        if work != (plan.starts[i], plan.counts[i], plan.lengths[i], seq.blocks):
            return None
        rows.append(j)
    return tuple(rows)


def launch(
    state: SchedulerState, plan: Plan, policy: Policy, sources: Mapping[str, SequenceData], steps: int, send: Send
) -> tuple[Lookahead, SentStep]:
    """Send a plan that no guess has computed, with up to `steps` - 1 guesses of what follows in the same dispatch."""
    guesses = foresee((state, plan), policy, sources, steps - 1, certain=True)
    flight, *more = send([plan, *(guess for _, guess in guesses)], None)
    return Lookahead(tuple(more), guesses[len(more) - 1] if more else None), flight


def extend(
    ahead: Lookahead,
    flight: SentStep,
    state: SchedulerState,
    plan: Plan,
    policy: Policy,
    sources: Mapping[str, SequenceData],
    depth: int,
    steps: int,
    send: Send,
) -> Lookahead:
    """Send guesses of what comes after a plan until `depth` of them are on the device, up to `steps` a dispatch.

    Args:
        flight: has the plan among its rows. state: after `schedule` gave the plan.
    """
    flights, last = ahead
    if flights and last is None:
        return ahead  # these have rows of sequences that have ended
    last = last or (state, plan)
    while len(flights) < depth:
        guesses = foresee(last, policy, sources, steps, certain=not flights)
        if not guesses:
            break
        sent = send([guess for _, guess in guesses], flights[-1] if flights else flight)
        flights, last = (*flights, *sent), guesses[len(sent) - 1]
    return Lookahead(flights, last if flights else None)


def foresee(
    last: tuple[SchedulerState, Plan], policy: Policy, sources: Mapping[str, SequenceData], count: int, *, certain: bool
) -> list[tuple[SchedulerState, Plan]]:
    """What follows `last`, one guess after the other, `count` of them at most; arguments as in `predict`."""
    guesses: list[tuple[SchedulerState, Plan]] = []
    while len(guesses) < count:
        guess = predict(*last, policy, sources, certain=certain and not guesses)
        if guess is None:
            break
        guesses.append(last := guess)
    return guesses


def predict(
    state: SchedulerState, plan: Plan, policy: Policy, sources: Mapping[str, SequenceData], *, certain: bool
) -> tuple[SchedulerState, Plan] | None:
    """The state and plan after this one if nothing unforeseen happens; None when a guess would do harm or be in vain.

    Args:
        state: after `schedule` gave `plan`.
        sources: by request id, of all that run or wait.
        certain: the plan is real; else it is a guess itself.
    """
    if state.waiting and any(_may_stop(sources[seq.request_id]) for seq in plan.seqs):
        return None  # whoever waits takes the place of one that stops: another plan
    hashes = _stand_ins(plan, sources, state.config.block_size)
    after, _ = scheduler.commit(state, plan, [NO_TOKEN] * len(plan.seqs), hashes)
    if not certain and len(after.ids) < len(state.ids):
        return None  # a plan sent instead of a wrong guess would still read the blocks of those that end
    guessed, following = scheduler.schedule(after, policy)
    if not following.seqs or following.preempted or following.copies or following.swap_in or following.swap_out:
        return None
    if len(guessed.pool.contents) < len(after.pool.contents):
        return None  # content of a block would be lost
    mine = [sources[seq.request_id] for seq in following.seqs]
    known = all(source.length == length for source, length in zip(mine, following.lengths, strict=True))
    if not (known or state.config.mixed_steps) and not _fed(following, plan, mine):
        return None
    if not known and any(source.penalised for source in mine):
        return None  # penalties go by every token so far
    return guessed, following


def _stand_ins(plan: Plan, sources: Mapping[str, SequenceData], size: int) -> dict[str, tuple[str, ...]]:
    """Names for the blocks of generated tokens that a plan fills, in place of hashes that their tokens will decide.

    Without a name such a block would be empty, in the guess, once its sequence has ended, and be written.
    """
    found = {}
    for seq, start, count in zip(plan.seqs, plan.starts, plan.counts, strict=True):
        full, named = (start + count) // size, len(seq.hashes)
        if full > max(named, start // size) and sources[seq.request_id].root is not None:
            found[seq.request_id] = tuple(f"? {seq.arrival} {block}" for block in range(named, full))
    return found


def _fed(following: Plan, plan: Plan, sources: Sequence[SequenceData]) -> bool:
    """Whether the step just before samples every token that nobody knows yet; that of a decode that waited is older."""
    before = {seq.arrival for seq in plan.seqs}
    rows = zip(following.seqs, following.lengths, sources, strict=True)
    return all(seq.arrival in before for seq, length, source in rows if source.length != length)


def _may_stop(source: SequenceData) -> bool:
    return bool(source.stop_ids or source.params.stop)


def advanced(plan: Plan, sources: Mapping[str, SequenceData]) -> dict[str, SequenceData]:
    """The sources of a guessed plan's rows, as long as they will be; what their new tokens are, nobody knows."""
    found = {}
    for seq, length in zip(plan.seqs, plan.lengths, strict=True):
        source = sources[seq.request_id]
        if source.length != length:
            source.block_ids(seq.blocks)  # made once, and not by each copy again
            source = copy.copy(source)
            source.length = length
        found[seq.request_id] = source
    return found


def fed_rows(plan: Plan, before: Plan, sources: Mapping[str, SequenceData], t: int) -> np.ndarray:
    """[t] int32: of each token of a guessed plan, the row of the plan before it that samples it; -1 if it is known."""
    rows = np.full(t, -1, np.int32)
    sampling = {seq.arrival: i for i, seq in enumerate(before.seqs)}
    at = 0
    for seq, length, count in zip(plan.seqs, plan.lengths, plan.counts, strict=True):
        at += count
        if sources[seq.request_id].length != length:  # its last token, and only that
            rows[at - 1] = sampling[seq.arrival]
    return rows
