"""Seconds of a step by coefficients that others published: fits to their own engines on their own
chips.

    simulate: {profile: distserve/opt-13b/tp2, padded: false}

The numbers are those of DistServe's simulator (https://github.com/LLMServe/DistServe, commit
82831f1, Apache-2.0): `simdistserve/estimators/profile_data/profiler-a100-80g.distserve.json` and
`...vllm.json`, rounded to six digits, for A100 with 80 GB; its overheads are those of
`simdistserve/base/worker.py` and `estimators/time_estimator.py`. `tp2` is tensor parallelism over
two GPUs. `vllm` is the vLLM of that time (2023).

Both engines compute prompts and decodes in different steps, so nothing is published about a step
with both. Here it takes the sum of both times, with the larger of their constants once: weights are
read once in a step. That is our assumption, and the best case for such a step.

Times that others measured at points, without coefficients, are in measured.py; a config names them
in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from experiments.simulation.measured import MEASURED

if TYPE_CHECKING:
    from experiments.simulation.cost import Work

Coefficients = tuple[float, float, float]


class Profile(NamedTuple):
    """The time of a step: coefficients in milliseconds.

    prompts: a constant, for each token, and for each squared token. A whole prompt of n tokens has
        n^2 squared tokens, and a chunk from a to b has b^2 - a^2.
    small, large: for decodes: a constant, for each token of context, and for each sequence. `large`
        is for LARGE sequences or more.
    """

    prompts: Coefficients
    small: Coefficients
    large: Coefficients

    def __call__(self, work: Work) -> float:
        """The seconds of a step. A prompt, or a chunk, of one token counts as a decode."""
        constant = 0.0
        milliseconds = STEP_MS + CONTEXT_MS * work.context
        tokens = work.tokens - work.single
        if tokens:
            constant, per_token, per_square = self.prompts
            # a chunk from a to b has (b^2 - a^2 + b - a) / 2 pairs
            squares = 2 * (work.pairs - work.single_context) - tokens
            milliseconds += PROMPT_STEP_MS + per_token * tokens + per_square * squares
        if work.single:
            decodes = self.small if work.single < LARGE else self.large
            decode_constant, per_context, per_sequence = decodes
            constant = max(constant, decode_constant)
            milliseconds += per_context * work.single_context + per_sequence * work.single
        return (constant + milliseconds) / 1e3


LARGE = 95  # sequences
STEP_MS = 2.0  # overhead of Ray in every step
CONTEXT_MS = 1e-4  # overhead of Ray in every step, for each token of context
PROMPT_STEP_MS = 1.0  # what a step with prompts takes in addition

PROFILES = {
    "distserve/opt-13b/tp1": Profile(
        (18.1025, 0.101912, 7.12226e-06),
        (19.9347, 0.000626936, 0.038507),
        (7.16619, 0.0005798, 0.158311),
    ),
    "distserve/opt-13b/tp2": Profile(
        (14.743, 0.0685772, 2.44957e-06),
        (13.2948, 0.000341092, 0.0629639),
        (10.6387, 0.000311834, 0.0856291),
    ),
    "distserve/opt-13b/tp4": Profile(
        (12.0623, 0.0380814, 5.22625e-07),
        (10.2562, 0.000187867, 0.0326927),
        (10.4835, 0.000171209, 0.0456665),
    ),
    "vllm/opt-13b/tp1": Profile(
        (22.0522, 0.140509, 8.07658e-06),
        (23.475, 0.000592934, 0.0607269),
        (20.2064, 0.000490773, 0.120003),
    ),
    "vllm/opt-13b/tp2": Profile(
        (27.4408, 0.0905453, 8.45205e-06),
        (24.5406, 0.000224401, 0.0871579),
        (17.9478, 0.000457085, 0.111791),
    ),
    "vllm/opt-13b/tp4": Profile(
        (30.5363, 0.0515064, 4.23247e-07),
        (25.9011, 7.75363e-05, 0.0552809),
        (23.8839, 0.000284002, 0.0627652),
    ),
}
NAMES = (*PROFILES, *MEASURED)


def find(name: str) -> Callable[[Work], float]:
    """The function Work -> seconds that a name of NAMES stands for: by coefficients (PROFILES), or
    by measured points (measured.py).
    """
    return MEASURED[name] if name in MEASURED else PROFILES[name]
