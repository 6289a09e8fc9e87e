"""Late stops: the plan of step n + 1 is made before the tokens of step n are known.

With `late_stops`, two plans may be in flight: the device computes one, and the next one waits
behind it. A sequence that stops in step n still has a row in step n + 1, and the token of that row
is dropped. So a device never waits for the scheduler, even if requests wait for the place of a
sequence that may stop. vLLM (async scheduling), SGLang (overlap scheduler) and TensorRT-LLM work
so. The plans are other ones than without the option, and as certain: they depend on the recorded
inputs alone.

    schedule -> (p)         schedule_late -> (p, q)        commit p -> (q)        schedule_late ...

`advanced` is the state from which q is planned: each row of p has its token, of unknown value. What
does not depend on the value is known: a sequence that reaches its limit leaves. It keeps its blocks
until p is committed, because their hashes come with that.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedjax.host.state import SchedulerState
from pagedjax.host.types import Plan, Running, Seq, current_seqs


def advanced(state: SchedulerState) -> SchedulerState | None:
    """The state in which the plan in flight is computed, but its tokens have no value yet. None if
    the next plan depends on these values: with drafts, with beams, and where branches fork.
    """
    if len(state.in_flight) != 1:
        return None
    (plan,) = state.in_flight
    if plan.drafts or not all([seq.request.advances_alone for seq in plan.seqs]):
        return None
    row_of = {seq.arrival: i for i, seq in enumerate(plan.seqs)}
    seqs, lengths, computed = state.running
    new_lengths = list(lengths)
    new_computed = list(computed)
    leaving: set[int] = set()
    for i, seq in enumerate(seqs):
        row = row_of.get(seq.arrival)
        if row is None:
            continue
        new_computed[i] += plan.counts[row]
        if new_computed[i] < new_lengths[i]:
            continue
        if new_lengths[i] + 1 >= seq.limit:
            leaving.add(i)
        new_lengths[i] += 1
    active = Running(seqs, tuple(new_lengths), tuple(new_computed))
    leaving_seqs: tuple[Seq, ...] = ()
    if leaving:
        leaving_seqs = current_seqs(*state.running.pick(sorted(leaving)))
        active = active.pick([i for i in range(len(seqs)) if i not in leaving])
    return state._replace(running=active, leaving=leaving_seqs, step=state.step + 1)


def unknown_tokens(state: SchedulerState, seq: Seq) -> int:
    """How many of the last tokens of an unfinished sequence have no value yet."""
    if len(state.in_flight) < 2 or seq in state.leaving:
        return 0
    older = state.in_flight[0]
    arrivals = [planned.arrival for planned in older.seqs]
    if seq.arrival not in arrivals:
        return 0
    row = arrivals.index(seq.arrival)
    return int(older.starts[row] + older.counts[row] >= older.lengths[row])


def check_known(state: SchedulerState) -> None:
    """Raises ValueError if two plans are in flight, so that running sequences have a token of
    unknown value.
    """
    if len(state.in_flight) > 1:
        raise ValueError(
            f"steps {[plan.step for plan in state.in_flight]} are in flight, and the tokens of the "
            "first one are unknown; commit it before a restart, an update or a handover"
        )


def is_certain(plan: Plan) -> bool:
    """Whether a plan may go behind one whose tokens are unknown: it computes something, and moves no
    blocks. A preemption might turn out to be needless.
    """
    moves = plan.preempted or plan.copies or plan.swap_in or plan.swap_out
    return bool(plan.seqs) and not moves


def records_of(state: SchedulerState, plan: Plan) -> list[Seq | None]:
    """Of each row of the older plan in flight, the present record of its sequence; None if it was
    cancelled.
    """
    records = {seq.arrival: seq for seq in (*state.leaving, *state.running.seqs)}
    return [records.get(seq.arrival) for seq in plan.seqs]


def settled(active: Running, seqs: Sequence[Seq], ended: set[int]) -> Running:
    """The running sequences when the older plan in flight is committed.

    Args:
        seqs: the records of the plan's sequences, some of which have new hashes.
        ended: arrivals of those that have ended.
    """
    records = {seq.arrival: seq for seq in seqs}
    if ended:
        active = active.pick([i for i, seq in enumerate(active.seqs) if seq.arrival not in ended])
    return active._replace(seqs=tuple([records.get(seq.arrival, seq) for seq in active.seqs]))
