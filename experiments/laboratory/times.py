"""How long a step would have taken: a fit to the steps of a timed recording, `fitted(past)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from experiments.laboratory.contents import Refused
from experiments.laboratory.past import Past, PastStep
from experiments.simulation.cost import Fitted, fit, work_of
from pagedjax.device.batch import token_buckets
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Plan

NOTHING = Fitted((1,), (0.0,), 0.0, 0.0, 0.0)  # a model before it is fitted


class StepTimes(NamedTuple):
    """Seconds of a step, by its plan.

    model: seconds of a step's counts; `model.error` is its median relative error on the recording.
    buckets: padded numbers of tokens, ascending. A step with more tokens is not padded.
    config: of the recorded scheduler, whose KV policy decides what queries see.
    computes_padding: whether all steps of a bucket take as long as a full one. The compiled kernels
        for CPUs skip padding; XLA's products compute it.
    residuals: seconds that each recorded step took / seconds of the model, in their order.
    """

    model: Fitted
    buckets: Sequence[int]
    config: SchedulerConfig
    computes_padding: bool = True
    residuals: Sequence[float] = ()

    def __call__(self, plan: Plan) -> float:
        return self.model(work_of(plan, self.tokens(plan), config=self.config))

    def tokens(self, plan: Plan) -> int:
        """The tokens that the device computes in a step."""
        return computed_tokens(plan, self.buckets if self.computes_padding else ())


def fitted(past: Past, buckets: Sequence[int] | None = None) -> StepTimes:
    """Fits seconds to the steps of a recording.

    Args:
        buckets: the engine's token buckets; None: its default ones.

    Raises:
        Refused: the recording has no times, or fewer than 8 steps with tokens.
    """
    if not past.timed:
        raise Refused(
            "the recording has no times, so steps have no seconds; record with times=True, or "
            "count steps"
        )
    if buckets is None:
        buckets = token_buckets(past.config.max_num_batched_tokens)
    steps = steps_with_tokens(past)
    if len(steps) < 8:
        raise Refused(f"the recording has {len(steps)} steps with tokens; a fit takes at least 8")
    return fitted_to(steps, past.config, buckets)


def steps_with_tokens(past: Past) -> list[PastStep]:
    """The recorded steps that are fitted."""
    return [step for step in past.steps if step.plan.seqs and step.seconds > 0]


def fitted_to(
    steps: Sequence[PastStep],
    config: SchedulerConfig,
    buckets: Sequence[int],
    computes_padding: bool | None = None,
) -> StepTimes:
    """Fits seconds to steps, at least 8, of a scheduler with this configuration.

    computes_padding: of `StepTimes`; None: what fits better.
    """
    if computes_padding is None:
        either = [fitted_to(steps, config, buckets, padding) for padding in (True, False)]
        return min(either, key=_mean_error)
    times = StepTimes(NOTHING, buckets, config, computes_padding)
    rows = []
    for step in steps:
        tokens = times.tokens(step.plan)
        work = work_of(step.plan, tokens, config=config)
        rows.append(
            {
                "seconds": step.seconds,
                "padded_tokens": tokens,
                "context_tokens": work.context,
                "pairs": work.pairs,
                "sampled": work.sampled,
            }
        )
    sizes: list[int] = []
    if not computes_padding and buckets:
        sizes = _ends_of_programs(buckets, max(row["padded_tokens"] for row in rows))
    times = times._replace(model=fit(rows, sizes, samples=True))
    return times._replace(residuals=[step.seconds / times(step.plan) for step in steps])


def _ends_of_programs(buckets: Sequence[int], largest: int) -> list[int]:
    """The fewest and the most tokens of each program, ascending: a step of one token more runs the
    next one, whose small kernels compute its padding.

    largest: tokens of the largest step.
    """
    smaller = [size for size in buckets if size < largest]
    return sorted({1, largest, *smaller, *[size + 1 for size in smaller]})


def _mean_error(times: StepTimes) -> float:
    """Of the model, relative to the seconds of the recorded steps."""
    return sum(abs(1 / residual - 1) for residual in times.residuals) / len(times.residuals)


def computed_tokens(plan: Plan, buckets: Sequence[int]) -> int:
    """The tokens that a step computes, with its padding to a bucket."""
    tokens = plan.num_tokens
    return next((size for size in buckets if size >= tokens), tokens)
