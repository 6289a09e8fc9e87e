"""Seconds of a step by times that others measured: lines between the measured points.

    simulate: {profile: splitwise/bloom-176b/a100, padded: false, model: bloom-176b}

The numbers are those of Splitwise's simulator (https://github.com/Mutinifni/splitwise-sim, commit
8f99e7d, MIT): medians of `data/perf_model.csv`, rounded to five digits, for BLOOM-176B in float16
on the eight GPUs with 80 GB of a DGX-A100 and of a DGX-H100.

- As in its performance_model.py, a step of prompts takes the time measured for the sum of their
  tokens, and a step of prompts and decodes takes 1.1 times the time of prompts with the step's
  number of tokens.
- A step of n decodes takes the time measured for n sequences with prompts of 512 tokens and 128
  tokens of output. Each token of context beyond that adds `per_context`, fitted to one sequence
  (least squares, 512 to 8,192 tokens).

The profiles `splitwise-sim/...` have other times of decodes, with an error of that simulator kept.
Its table gives the time of a token by the number of *prompt tokens* of a measurement (prompt length
x batch size). For a step of n decodes it reads that table at n, as if n were prompt tokens, so the
time hardly depends on n. In the measurements 64 decodes take up to twice the time of one.

Beyond its ends, a curve goes on as a straight line through its two last points, as in that
simulator.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from experiments.simulation.cost import Work

Curve = tuple[tuple[float, float], ...]  # points (x, milliseconds), in the order of x

MIXED = 1.1  # a step of prompts and decodes takes so many times the time of prompts
# mean tokens of a sequence in the measurements of decodes: a prompt of 512 and half of its output
MEAN_CONTEXT = 576


def at(curve: Curve, x: float) -> float:
    """The milliseconds at x, on the line through the points on both sides of x, or beyond an end
    through the two nearest points.
    """
    i = min(max(bisect_right(curve, (x,)), 1), len(curve) - 1)
    (left_x, left_y), (right_x, right_y) = curve[i - 1 : i + 1]
    return left_y + (right_y - left_y) * (x - left_x) / (right_x - left_x)


class Measured(NamedTuple):
    """The time of a step: curves in milliseconds.

    prompts: the time of a step with prompts, by all tokens of the step.
    decodes: the time of a step of decodes, by its sequences.
    per_context: milliseconds that a step of decodes takes in addition, for each token of context
        beyond MEAN_CONTEXT tokens a sequence.
    """

    prompts: Curve
    decodes: Curve
    per_context: float = 0.0

    def __call__(self, work: Work) -> float:
        """The seconds of a step. A prompt of one token counts as a decode, and a chunk counts as a
        prompt of its tokens.
        """
        if work.tokens > work.single:
            factor = MIXED if work.single else 1.0
            return at(self.prompts, work.tokens) * factor / 1e3
        context_beyond = work.context - MEAN_CONTEXT * work.single
        return (at(self.decodes, work.single) + self.per_context * context_beyond) / 1e3


TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # of all prompts together
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)


def _curve(xs: tuple[int, ...], *milliseconds: float) -> Curve:
    return tuple(zip(xs, milliseconds, strict=True))


class Machine(NamedTuple):
    """The measurements of a machine; see `Measured`.

    token_ms: the time of a token by TOKENS (prompt length x batch size), in milliseconds.
    """

    prompts: Curve
    decodes: Curve
    per_context: float
    token_ms: Curve


BLOOM = {
    "a100": Machine(
        _curve(TOKENS, 79.668, 99.164, 174.38, 287.47, 536.06, 1332.6, 3591.5, 5782.0, 11252.0),
        _curve(SEQUENCES, 48.764, 49.991, 51.004, 52.953, 57.341, 65.38, 96.583),
        3.4083e-4,
        _curve(TOKENS, 47.612, 47.707, 49.313, 49.442, 50.188, 51.631, 54.274, 65.38, 96.583),
    ),
    "h100": Machine(
        _curve(TOKENS, 48.284, 51.179, 76.142, 132.22, 251.96, 649.6, 1411.6, 2521.9, 4996.5),
        _curve(SEQUENCES, 36.113, 36.912, 38.058, 38.142, 40.64, 45.842, 63.821),
        2.3598e-4,
        _curve(TOKENS, 35.739, 36.154, 36.166, 36.334, 36.739, 37.53, 39.016, 45.842, 63.821),
    ),
}

MEASURED = {
    **{f"splitwise/bloom-176b/{name}": Measured(*machine[:3]) for name, machine in BLOOM.items()},
    **{
        f"splitwise-sim/bloom-176b/{name}": Measured(machine.prompts, machine.token_ms)
        for name, machine in BLOOM.items()
    },
}
