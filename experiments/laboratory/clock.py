"""The clock of a run that nobody made: `clock(past, times, config)`.

A step takes the seconds of the fit, with what a recorded step deviated from it. The step k of the
run gets the deviation of the recorded step k, so that a time in which the machine was slow is slow
in both runs. A run with more steps than the recording begins again with the first deviation. Its
further steps have no stalls (`STALL`).

The same with deviations that are drawn, and a fit to the drawn steps, says by how much the times of
a run may be wrong: a bootstrap of pairs, in blocks of consecutive steps, because slow steps come
together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from experiments.laboratory.past import Past
from experiments.laboratory.times import (
    StepTimes,
    fitted_to,
    steps_with_tokens,
)
from pagedjax.device.batch import token_buckets
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Plan

# a step that took more than this multiple of the fit had to wait for something else, for example
# for a compilation, whose time does not grow with the step
STALL = 3.0


class Deviation(NamedTuple):
    """How a recorded step differs from the fit: it took factor * fit + seconds."""

    factor: float
    seconds: float = 0.0


class Clock(NamedTuple):
    """Seconds of a step, by its plan.

    times: the fit, with the buckets of the changed configuration.
    deviations: of each recorded step.
    order: the recorded step whose deviation each step gets.
    """

    times: StepTimes
    deviations: Sequence[Deviation]
    order: Sequence[int]

    def __call__(self, plan: Plan) -> float:
        recorded = self.order[plan.step % len(self.order)]
        factor, seconds = self.deviations[recorded]
        stall = seconds if plan.step < len(self.order) else 0.0
        return factor * self.times(plan) + stall

    @property
    def stalls(self) -> list[float]:
        """Seconds beyond the fit of each step that stalled."""
        return [deviation.seconds for deviation in self.deviations if deviation.seconds]

    def is_beyond(self, plan: Plan) -> bool:
        """Whether a plan has more tokens than any recorded step."""
        return self.times.tokens(plan) > self.times.model.sizes[-1]


def clock(
    past: Past, times: StepTimes, config: SchedulerConfig, buckets: Sequence[int] | None = None
) -> Clock:
    """The clock of a run with this configuration.

    Args:
        times: the fit to the recorded steps.
        buckets: token buckets of the changed engine; None: its default ones.
    """
    deviations: list[Deviation] = []
    for step, residual in zip(steps_with_tokens(past), times.residuals, strict=True):
        if residual > STALL:
            deviations.append(Deviation(1.0, step.seconds * (1 - 1 / residual)))
        else:
            deviations.append(Deviation(residual))
    if buckets is None:
        buckets = token_buckets(config.max_num_batched_tokens)
    times_of_run = times._replace(buckets=buckets, config=config)
    return Clock(times_of_run, deviations, range(len(deviations)))


def drawn(past: Past, of_run: Clock, times: StepTimes, seed: int) -> Clock:
    """A clock from recorded steps that are drawn in blocks: the fit is to them, and so are the
    deviations.

    Args:
        of_run: the clock of the run.
        times: the fit to all recorded steps, with the buckets of the recorded engine.
    """
    steps = steps_with_tokens(past)
    order = blocks_of(len(steps), random.Random(seed))
    drawn_steps = [steps[place] for place in order]
    refitted = fitted_to(drawn_steps, times.config, times.buckets, times.computes_padding)
    return of_run._replace(times=of_run.times._replace(model=refitted.model), order=order)


def blocks_of(count: int, draw: random.Random) -> list[int]:
    """`count` places of a sequence as long, in consecutive blocks of about sqrt(count) places that
    begin anywhere and wrap around.
    """
    length = max(math.isqrt(count), 1)
    places: list[int] = []
    while len(places) < count:
        start = draw.randrange(count)
        places += [(start + i) % count for i in range(length)]
    return places[:count]
