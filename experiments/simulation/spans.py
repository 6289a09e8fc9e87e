"""Several steps at once in which a simulated engine only decodes, and their times
(host/decode_spans.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from experiments.simulation.cost import StepTime, Work
from experiments.simulation.layer_kinds import Seen
from pagedjax.host.types import Seq


class StepTimes(NamedTuple):
    """The times of consecutive steps; float64 [steps] seconds, as the engine's clock shows them."""

    started: np.ndarray
    finished: np.ndarray
    device: np.ndarray  # time of the device, a part of finished - started

    def first(self, steps: int) -> StepTimes:
        return StepTimes(self.started[:steps], self.finished[:steps], self.device[:steps])

    def begun(self, before: float) -> int:
        """How many of the steps begin before a time."""
        return int(self.started.searchsorted(before))


class DecodeSpan(NamedTuple):
    """Consecutive steps that compute one token of each of the same sequences.

    No sequence is admitted or ends in these steps.
    """

    step: int  # the number of the first step
    times: StepTimes
    seqs: tuple[Seq, ...]  # with the blocks that they have after the last step
    lengths: tuple[int, ...]  # known tokens of each sequence before the first step
    vocabulary: int  # tokens, see `sampled`
    padded: int  # tokens of each step, padding included
    waiting: int  # sequences that wait
    blocks: int  # blocks with an owner before the first step
    allocated: tuple[int, ...]  # blocks that each step allocates
    listed: int  # entries of all block tables before the first step
    num_blocks: int

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each sequence."""
        steps = np.arange(len(self.allocated))
        return [
            sampled(seq.arrival, length + steps, self.vocabulary).tolist()
            for seq, length in zip(self.seqs, self.lengths, strict=True)
        ]


def sampled(arrival: int, length: Any, vocabulary: int) -> Any:
    """The token that a sequence gets after `length` known ones: an int, or int64 [n] for n lengths.

    Different sequences get different tokens, so the prefix cache finds only what was computed.
    """
    return (arrival * 7919 + length) % vocabulary


def step_times(start: float, steps: int, work: Work, seconds: StepTime, host_s: float) -> StepTimes:
    """The times of consecutive steps. Each step has one more token of context for each sequence
    than the step before.

    The sums are equal, bit by bit, to those of a clock that is advanced step by step.

    Args:
        start: seconds; when the first step begins.
        work: of the first step, which samples for each of its sequences.
        host_s: seconds of the host in each step.
    """
    contexts: Any = work.context + work.sequences * np.arange(steps)
    device = seconds(
        work._replace(
            context=contexts,
            pairs=contexts,
            single_context=contexts,
            seen=(Seen(contexts, contexts),) * len(work.seen),
        )
    )
    device = np.broadcast_to(device, steps)
    parts = np.full((steps, 2), host_s)  # of each step, the time of the device and of the host
    parts[:, 0] = device
    sums = np.add.accumulate(np.concatenate(([start], parts.ravel())))
    clock = sums[::2]  # the start and the end of each step
    return StepTimes(clock[:-1], clock[1:], device)
