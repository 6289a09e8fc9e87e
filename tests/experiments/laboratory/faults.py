"""Policies that are wrong in a rare case, as faults to find."""

from __future__ import annotations

from pagedjax.policies import FCFS

RARE = 3  # the priority of a rare request


def _wrong_victim(running):
    """The oldest sequence in place of the newest, if a rare request runs."""
    if any(seq.request.priority == RARE for seq in running):
        return min(running, key=lambda seq: seq.arrival)
    return FCFS.preempt(running)


def _wrong_order(waiting, running, cached):
    """The last of the queue first, if a rare request is the first of it."""
    ordered = list(FCFS.order(waiting, running, cached))
    if len(ordered) > 1 and ordered[0].request.priority == RARE:
        ordered = [ordered[-1], *ordered[:-1]]
    return ordered


WRONG_VICTIM = FCFS._replace(name="wrong_victim", preempt=_wrong_victim)
WRONG_ORDER = FCFS._replace(name="wrong_order", order=_wrong_order, bound=None)
