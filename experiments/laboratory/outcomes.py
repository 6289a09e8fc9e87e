"""What each sequence got in a run: `outcomes(run)`. Sequences have their arrivals in the past, so
those of two runs of one past are compared by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from experiments.laboratory.rerun import Run, Transition
from pagedjax.host.event_log import Adopt, Cancel, Commit, Schedule, Submit
from pagedjax.host.types import (
    Beamed,
    Event,
    Finished,
    FinishReason,
    Preempted,
    Request,
    Sampled,
)


@dataclass
class Outcome:
    """What a sequence got.

    first: arrival of the first sequence of its request.
    submitted: when its request came.
    admitted: when the first step that admitted it began; None: none did.
    admitted_step: the number of that step.
    token_times: when its tokens came, one time for each.
    ended, reason: when and how it ended; None: it did not.
    """

    request: Request
    first: int
    submitted: float
    admitted: float | None = None
    admitted_step: int | None = None
    token_times: list[float] = field(default_factory=list)
    preemptions: int = 0
    ended: float | None = None
    reason: FinishReason | None = None

    @property
    def first_token(self) -> float | None:
        """From its submission to its first token; None: it has none."""
        return self.token_times[0] - self.submitted if self.token_times else None

    @property
    def seconds(self) -> float | None:
        """From its submission to its end; None: it did not end."""
        return None if self.ended is None else self.ended - self.submitted


def outcomes(run: Run) -> dict[int, Outcome]:
    """Goes through a run -> what each sequence got, by its arrival in the past."""
    reader = Reader(run)
    for transition in run:
        reader.add(transition)
    return reader.outcomes


def by_request(outcomes: Mapping[int, Outcome]) -> dict[int, list[Outcome]]:
    """The outcomes of each request's sequences, by the arrival of its first sequence."""
    groups: dict[int, list[Outcome]] = {}
    for outcome in outcomes.values():
        groups.setdefault(outcome.first, []).append(outcome)
    return groups


def steps_of_waits(run: Run, arrivals: Iterable[int]) -> dict[int, int]:
    """Goes through a run -> by the arrivals of some sequences, the number of the first step in the
    longest wait of each: for its admission, for its first token, or between two tokens.
    """
    reader = Reader(run)
    steps: list[tuple[float, int]] = []
    for transition in run:
        reader.add(transition)
        if isinstance(transition.entry, Schedule):
            steps.append((transition.at, transition.entry.plan.step))
    result: dict[int, int] = {}
    for arrival in arrivals:
        outcome = reader.outcomes[arrival]
        times = [outcome.submitted, outcome.admitted, *outcome.token_times, outcome.ended]
        waits = pairwise([at for at in times if at is not None])
        started, _ = max(waits, key=lambda wait: wait[1] - wait[0], default=(outcome.submitted, 0))
        result[arrival] = next((step for at, step in steps if at >= started), 0)
    return result


class Reader:
    """Collects the outcomes of a run, transition by transition."""

    def __init__(self, run: Run) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._run = run
        self._by_name: dict[str, Outcome] = {}  # of the sequence that had the id last

    def add(self, transition: Transition) -> None:
        """Adds a transition, before the run makes the next one."""
        entry = transition.entry
        if isinstance(entry, Submit):
            self._begin(entry.request, transition.at)
        elif isinstance(entry, Adopt):
            self._begin(entry.released.request, transition.at)
        elif isinstance(entry, Schedule):
            for name in entry.plan.admitted:
                self._admit(name, transition.at, entry.plan.step)
            for name in entry.plan.rejected:
                self._end(name, transition.at, "rejected")
        elif isinstance(entry, Cancel | Commit):
            for event in entry.events:
                self._add_event(event, transition.at)

    def _begin(self, request: Request, at: float) -> None:
        names = request.names
        arrivals = self._run.past_arrivals[-len(names) :]
        for name, arrival in zip(names, arrivals, strict=True):
            outcome = Outcome(request, arrivals[0], at)
            self.outcomes[arrival] = self._by_name[name] = outcome

    def _admit(self, name: str, at: float, step: int) -> None:
        outcome = self._by_name[name]
        if outcome.admitted is None:
            outcome.admitted = at
            outcome.admitted_step = step

    def _add_event(self, event: Event, at: float) -> None:
        if isinstance(event, Sampled | Beamed):
            for name in event.request_ids:
                self._by_name[name].token_times.append(at)
        elif isinstance(event, Preempted):
            self._by_name[event.request_id].preemptions += 1
        elif isinstance(event, Finished) and event.reason != "rejected":
            self._end(event.request_id, at, event.reason)

    def _end(self, name: str, at: float, reason: FinishReason) -> None:
        outcome = self._by_name[name]
        outcome.ended = at
        outcome.reason = reason
