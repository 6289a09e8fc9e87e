"""Which request waits for which: `closed(outcomes)` and `sessions(outcomes)`.

A recording says when requests came, and not why. In a closed loop, and in a session, a request
comes when another one has ended. In a changed run it then comes after that end, as long after it as
in the recording.
"""

from __future__ import annotations

from collections.abc import Mapping

from experiments.laboratory.outcomes import Outcome
from experiments.laboratory.paired import end_of
from experiments.laboratory.rerun import Predecessor


def clients(outcomes: Mapping[int, Outcome]) -> int:
    """The most requests that were unfinished at a time: the clients of a closed loop."""
    changes: list[tuple[float, int]] = []
    for first in _firsts(outcomes):
        changes.append((outcomes[first].submitted, 1))
        ended_at = end_of(outcomes, first)
        if ended_at is not None:
            changes.append((ended_at, -1))
    unfinished = 0
    peak = 0
    for _, change in sorted(changes):
        unfinished += change
        peak = max(peak, unfinished)
    return peak


def closed(outcomes: Mapping[int, Outcome]) -> dict[int, Predecessor]:
    """Whom each request of a closed loop follows, by its arrival.

    With C clients, the first C requests come by themselves, and the request k follows the end
    k - C of the recorded run. So each client has its requests of the recorded run, in their order.

    Args:
        outcomes: of the recorded run.
    """
    num_clients = clients(outcomes)
    ends = [(end_of(outcomes, first), first) for first in _firsts(outcomes)]
    ended = sorted([(at, first) for at, first in ends if at is not None])
    predecessors: dict[int, Predecessor] = {}
    for first, (ended_at, leader) in zip(_firsts(outcomes)[num_clients:], ended, strict=False):
        predecessors[first] = Predecessor(leader, outcomes[first].submitted - ended_at)
    return predecessors


def sessions(outcomes: Mapping[int, Outcome]) -> dict[int, Predecessor]:
    """Whom each request of a session follows: the one before of its user, if that had ended.

    Requests without a user follow none.
    """
    predecessors: dict[int, Predecessor] = {}
    latest: dict[str, int] = {}
    for first in _firsts(outcomes):
        outcome = outcomes[first]
        user = outcome.request.user
        leader = latest.get(user)
        ended_at = None if leader is None else end_of(outcomes, leader)
        if leader is not None and ended_at is not None and ended_at <= outcome.submitted:
            predecessors[first] = Predecessor(leader, outcome.submitted - ended_at)
        if user:
            latest[user] = first
    return predecessors


def _firsts(outcomes: Mapping[int, Outcome]) -> list[int]:
    """The requests in the order in which they came, by the arrivals of their first sequences."""
    return sorted({outcome.first for outcome in outcomes.values()})
