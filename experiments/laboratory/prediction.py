"""What a changed run gives, beside the recorded one: `reading(run)`, `predict(past, change)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from experiments.laboratory import loops, paired
from experiments.laboratory.clock import Clock, clock, drawn
from experiments.laboratory.differences import kind_of_difference
from experiments.laboratory.outcomes import Outcome, Reader
from experiments.laboratory.past import Past
from experiments.laboratory.replicas import Fleet
from experiments.laboratory.rerun import Change, Predecessor, Run, Transition, run, unchanged
from experiments.laboratory.times import StepTimes, fitted
from pagedjax.host.event_log import Schedule
from pagedjax.host.types import Plan
from pagedjax.routing import Router

LOOPS: Mapping[str, Callable[[Mapping[int, Outcome]], dict[int, Predecessor]]] = {
    "open": lambda outcomes: {},
    "closed": loops.closed,
    "sessions": loops.sessions,
}


@dataclass
class Reading:
    """What a run gave.

    parting: the number of the first step that the recording does not have, and its plan; None: the
        run decides as the recording.
    beyond: steps with more tokens than any recorded one.
    end: when the last transition was.
    """

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    rejected: int = 0
    beyond: int = 0
    end: float = 0.0
    parting: tuple[int, Plan | None] | None = None
    inexact: Counter[str] = field(default_factory=Counter)

    def add(self, transition: Transition, seconds: object) -> None:
        """Counts a transition of a run whose steps take `seconds`."""
        self.end = max(self.end, transition.at)
        if not isinstance(transition.entry, Schedule):
            return
        plan = transition.entry.plan
        if self.parting is None and not transition.follows:
            self.parting = (self.steps, plan)
        self.steps += 1
        self.preemptions += len(plan.preempted)
        self.cached_tokens += sum(plan.cached)
        self.rejected += len(plan.rejected)
        if isinstance(seconds, Clock) and not transition.follows:
            self.beyond += seconds.is_beyond(plan)


def reading(transitions: Run | Fleet) -> Reading:
    """Goes through a run."""
    result = Reading()
    runs = (transitions,) if isinstance(transitions, Run) else transitions.replicas
    readers = [Reader(replica) for replica in runs]
    seconds = transitions.change.seconds
    for number, transition in _numbered(transitions):
        readers[number].add(transition)
        result.add(transition, seconds)
    for reader, replica in zip(readers, runs, strict=True):
        result.outcomes |= reader.outcomes
        result.inexact += replica.inexact
    if result.parting is None and not all(replica.follows for replica in runs):
        result.parting = (result.steps, None)
    return result


def _numbered(transitions: Run | Fleet) -> Iterator[tuple[int, Transition]]:
    """The transitions of a run with the numbers of their replicas."""
    if isinstance(transitions, Fleet):
        yield from transitions
    else:
        for transition in transitions:
            yield 0, transition


class Prediction(NamedTuple):
    """A changed run beside the recorded one.

    change: with the clock, and the requests that follow others.
    times: the fit to the recorded steps; None: steps are counted.
    kind: of the first other decision (`differences.KINDS`); "": there is none.
    before, after: what each request got, by the arrival of its first sequence.
    """

    change: Change
    times: StepTimes | None
    recorded: Reading
    changed: Reading
    kind: str
    before: Mapping[int, paired.Times]
    after: Mapping[int, paired.Times]
    table: Sequence[paired.Row]

    @property
    def identical(self) -> bool:
        """Whether the changed run decides as the recorded one."""
        return self.changed.parting is None


def transitions_of(past: Past, change: Change, replicas: int, router: Router) -> Run | Fleet:
    """The run of one engine, or of several equal ones behind a router."""
    return run(past, change) if replicas == 1 else Fleet(past, change, replicas, router)


def predict(
    past: Past,
    change: Change,
    *,
    router: Router,
    replicas: int = 1,
    loop: str = "open",
    draws: int = 0,
    buckets: Sequence[int] | None = None,
) -> Prediction:
    """Runs the change.

    Args:
        loop: one of `LOOPS`.
        draws: clocks that are drawn for the intervals.
        buckets: token buckets of the recorded and of the changed engine; None: the default ones.

    Raises:
        Refused: the past cannot have this change.
        Rejected: a request can never run under it.
    """
    recorded = reading(run(past, unchanged(past)))
    predecessors = LOOPS[loop](recorded.outcomes)
    times = fitted(past, buckets) if past.timed else None
    of_run = None if times is None else clock(past, times, change.config, buckets)
    change = change._replace(predecessors=predecessors, seconds=of_run or change.seconds)
    before = paired.times_of(
        recorded.outcomes, paired.came(recorded.outcomes, recorded.outcomes, {})
    )
    groups = paired.groups_of(recorded.outcomes)

    def result_of(change: Change) -> tuple[Reading, Mapping[int, paired.Times]]:
        changed = reading(transitions_of(past, change, replicas, router))
        return changed, _times(recorded, changed, change)

    changed, after = result_of(change)
    tables: list[list[paired.Row]] = []
    if times is not None and of_run is not None and changed.parting is not None:
        for seed in range(draws):
            with_draw = change._replace(seconds=drawn(past, of_run, times, seed))
            tables.append(paired.rows(groups, before, result_of(with_draw)[1]))
    table = paired.with_intervals(paired.rows(groups, before, after), tables)
    kind = _kind(past, changed)
    return Prediction(change, times, recorded, changed, kind, before, after, table)


def _times(recorded: Reading, changed: Reading, change: Change) -> Mapping[int, paired.Times]:
    """What each request got in the changed run."""
    came = paired.came(recorded.outcomes, changed.outcomes, change.predecessors)
    return paired.times_of(changed.outcomes, came)


def _kind(past: Past, changed: Reading) -> str:
    """In what the first other step differs from the recorded one; "": there is none."""
    if changed.parting is None:
        return ""
    step, plan = changed.parting
    plans = [recorded.entry for recorded in past.entries if isinstance(recorded.entry, Schedule)]
    recorded_step = next(islice(plans, step, None), None)
    return kind_of_difference(recorded_step and recorded_step.plan, plan)
