"""The seconds of a step on arrays, from any step time of the simulator that has this form:

    base(tokens, sampled) + max(per_context * context, per_pair * pairs)

or with + in place of max. Rooflines and fits have it. `Cost.of` reads the parts off by calling the
function, and then compares both at random steps, so a step time of another form is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.simulation.cost import StepTime, Work
from experiments.twin.scheduler import Plan, Sizes

MICROSECONDS = 1e6  # of a second
LARGE = 2**20  # context tokens of a step whose attention takes longer than anything else
TOLERANCE = 1e-5  # relative error: times are float32
CHECKS = 64  # random steps


class Cost(NamedTuple):
    """base: float32 [budget + 1, rows + 1], microseconds by tokens and by sampled rows.
    per_context, per_pair: float32 [], microseconds.
    summed: bool [], whether the two parts of attention are added, and not the longer one taken.
    """

    base: Any
    per_context: Any
    per_pair: Any
    summed: Any

    @staticmethod
    def of(step_time: StepTime, sizes: Sizes, name: str = "the step time") -> Cost:
        """The cost of steps of these sizes.

        Args:
            step_time: such as a `Roofline`, of steps that are not padded.
            name: of the step time, for the error.

        Raises:
            ValueError: the step time has another form.
        """
        budget = int(sizes.budget)
        rows = int(sizes.max_running)

        def seconds(tokens: int, sampled: int, context: int, pairs: int) -> float:
            work = Work(tokens, sampled, sampled, context, pairs)
            return float(step_time(work))

        base = [
            [seconds(tokens, sampled, 0, 0) for sampled in range(rows + 1)]
            for tokens in range(budget + 1)
        ]
        per_context = (seconds(1, 1, LARGE, 0) - base[1][1]) / LARGE
        per_pair = (seconds(1, 1, 0, LARGE) - base[1][1]) / LARGE
        attention = seconds(1, 1, LARGE, LARGE) - base[1][1]
        summed = attention > 0.5 * (max(per_context, per_pair) + per_context + per_pair) * LARGE
        cost = Cost(
            MICROSECONDS * np.asarray(base, np.float32),
            np.float32(MICROSECONDS * per_context),
            np.float32(MICROSECONDS * per_pair),
            np.bool_(summed),
        )
        rng = np.random.default_rng(0)
        for _ in range(CHECKS):
            tokens = int(rng.integers(1, budget + 1))
            sampled = int(rng.integers(0, min(rows, tokens) + 1))
            context = int(rng.integers(tokens, 40 * tokens + 1))
            pairs = int(rng.integers(context, 40 * context + 1))
            expected = MICROSECONDS * seconds(tokens, sampled, context, pairs)
            result = float(cost.microseconds(tokens, sampled, context, pairs))
            if not abs(result - expected) <= TOLERANCE * expected:
                raise ValueError(
                    f"{name} takes {expected:.3f} us for a step of {tokens} tokens, {sampled} "
                    f"samples, {context} tokens of context and {pairs} pairs, and its parts "
                    f"{result:.3f}; the scheduler on arrays needs a step time that depends on "
                    "nothing else, with attention beside the rest: use a roofline of a dense model "
                    "on one device, or the simulator"
                )
        return cost

    def microseconds(self, tokens: Any, sampled: Any, context: Any, pairs: Any) -> Any:
        """float32 [], from the counts of a step as in `Work`."""
        base = jnp.asarray(self.base)[tokens, sampled]
        reads = self.per_context * context
        products = self.per_pair * pairs
        attention = jnp.where(self.summed, reads + products, jnp.maximum(reads, products))
        return base + attention


def microseconds(cost: Cost, plan: Plan) -> jax.Array:
    """int32 []: how long the step of a plan takes. One without rows takes no time.

    Pairs are counted in float32, because the pairs of one long prompt may be more than int32 holds.
    """
    has_row = plan.counts > 0
    ends = plan.starts + plan.counts
    counts = plan.counts.astype(jnp.float32)
    pairs = jnp.sum(counts * plan.starts + counts * (counts + 1) / 2)
    seconds = cost.microseconds(
        jnp.sum(plan.counts),
        jnp.sum(plan.samples),
        jnp.sum(jnp.where(has_row, ends, 0)),
        pairs,
    )
    return jnp.where(jnp.any(has_row), jnp.round(seconds).astype(jnp.int32), 0)
