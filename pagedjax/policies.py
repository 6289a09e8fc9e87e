"""Scheduling policies as values: three pure functions each. A new idea is a new function here, not a flag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagedjax.types import Running, Seq


class Policy(NamedTuple):
    """What a policy decides; the mechanism (budget, blocks, queues) stays in scheduler.py.

    order: (waiting, running) -> the waiting sequences in the order in which they are offered admission. The first one
        that cannot be admitted ends admission for the step, so that nothing overtakes it for ever.
    admit: (sequence, blocks it needs now, free blocks) -> whether to let it in. It is never asked when the
        blocks do not suffice.
    preempt: running (never empty) -> the one that gives its blocks up.
    """

    name: str
    order: Callable[[tuple[Seq, ...], Running], Sequence[Seq]]
    admit: Callable[[Seq, int, int], bool]
    preempt: Callable[[Sequence[Seq]], Seq]


def _latest(running: Sequence[Seq]) -> Seq:
    return max(running, key=lambda seq: seq.arrival)


# First come, first served. The queue is kept in order of arrival, preempted sequences at its front; the latest
# arrival gives way, so the oldest running sequence always advances and every request ends.
FCFS = Policy("fcfs", order=lambda waiting, running: waiting, admit=lambda seq, need, free: True, preempt=_latest)

POLICIES = {policy.name: policy for policy in (FCFS,)}
