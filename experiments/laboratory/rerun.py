"""A scheduler on a recorded past: `run(past, Change(...))`.

The run follows the recording as long as it decides the same: the same inputs come between the same
steps, which take the recorded times. From the first other decision on, inputs come at their
recorded times, and the time of a step is that of a model. Without a change, the run is the
recording.

Tokens are those of the recording, whatever is decided: they depend on the request's seed and their
position alone. A request that the recording saw cut off (by a client, or by the end of the
recording) goes on with tokens of no meaning, up to its limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from experiments.laboratory.past import Input, Past, PastStep, decision
from pagedjax.host import scheduler
from pagedjax.host.event_log import (
    Adopt,
    Cancel,
    Commit,
    Entry,
    Forget,
    Release,
    Restart,
    Schedule,
    Submit,
    Update,
)
from pagedjax.host.policies import Policy
from pagedjax.host.prefix_sharing import rows_that_fill
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Choice, Plan, Running, Seq

NO_MEANING = -1  # the token of a sequence beyond its recorded ones; no stop token

StepTime = Callable[[Plan], float]


def one(plan: Plan) -> float:
    """The time of a step where steps are counted."""
    return 1.0


class Change(NamedTuple):
    """What differs from the recorded run.

    config, policy: those of the scheduler.
    seconds: of a step that the recording does not have.
    without: arrivals of the requests that do not come.
    """

    config: SchedulerConfig
    policy: Policy
    seconds: StepTime = one
    without: frozenset[int] = frozenset()


class Made(NamedTuple):
    """A transition of the run.

    at: its time; of a schedule, when the step began, of its commit, when it ended.
    follows: whether the run had decided as the recording until then.
    """

    entry: Entry
    at: float
    follows: bool


class Refused(ValueError):
    """A past that a changed run cannot have. The message says what is in the way."""


def run(past: Past, change: Change) -> Iterator[Made]:
    """Runs a scheduler on a past -> each transition.

    Raises:
        Refused: after the runs differ, sequences come from another engine or go to one, or the
            weights change.
        Rejected: a request could never run under the changed configuration.
    """
    again = Again(past, change)
    items = deque(past.items)
    while items and again.follows:
        item = items[0]
        if isinstance(item, PastStep):
            yield from again.follow(item)
            if again.follows:
                items.popleft()
        else:
            items.popleft()
            yield from again.take(item)
    inputs = deque([item for item in items if isinstance(item, Input)])
    while True:
        while inputs and (inputs[0].at <= again.now or not again.has_work):
            again.now = max(again.now, inputs[0].at)
            yield from again.take(inputs.popleft())
        if not again.has_work:
            return
        made = again.step(past.timed)
        if made is None: ...
        yield from made
