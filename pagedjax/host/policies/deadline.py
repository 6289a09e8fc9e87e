"""`deadline`: the least slack first, as in schedulers of real-time systems (Liu and Layland 1973,
https://doi.org/10.1145/321738.321743; least laxity: Dertouzos and Mok 1989).

A request is due at its arrival plus its `deadline`, or plus the target of its `service_class`, or
plus `default_s`. Its slack is the time until then without what it still needs: `token_s` for each
output token that it is predicted to have left (none, if nothing is predicted). Time passes equally
for all, so the order of slack is that of (due - token_s * tokens left), and a policy needs the time
only when a request arrives. A late request keeps its place; nothing ends it.

The time of an arrival is that of the first step after it, so it is late by a step at most.

Why every request ends, and the bound: a request's key is at most its due time. Requests that arrive
after that time, plus token_s * max_model_len, have a greater key. So only those that come before
the request, or within that time after it, ever come before it, and they are finitely many. When
they have ended, the request is the first of the queue and the last victim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import isfinite
from typing import NamedTuple

from immutables import Map

from pagedjax.host.policies.eviction import by_rank
from pagedjax.host.policies.policy import Policy, name_with
from pagedjax.host.types import Finished, PolicyEvent, Request, Seq, Submitted


class Dues(NamedTuple):
    """The memory: the time, and when each unfinished sequence is due, by id."""

    now: float = 0.0
    due: Map[str, float] = Map()


def deadline(
    targets: tuple[tuple[str, float], ...] = (), default_s: float = 60.0, token_s: float = 0.0
) -> Policy:
    """The policy.

    Args:
        targets: (service class, seconds from arrival to end): [["chat", 2.0], ["batch", 600.0]].
        default_s: seconds of a request with no deadline, whose class has no target.
        token_s: seconds that an output token takes, for predicted tokens.

    Raises:
        ValueError: a number of seconds is not finite, or a target is not above 0.
    """
    pairs = tuple([(str(name), float(seconds)) for name, seconds in targets])
    for name, seconds in (("default_s", default_s), *pairs):
        if not (isfinite(seconds) and seconds > 0):
            raise ValueError(f"deadline has {name} {seconds!r}; it must be seconds above 0")
    if not (isfinite(token_s) and token_s >= 0):
        raise ValueError(f"deadline has token_s {token_s!r}; it must be seconds of at least 0")
    return _policy(pairs, float(default_s), float(token_s))


@cache
def _policy(targets: tuple[tuple[str, float], ...], default_s: float, token_s: float) -> Policy:
    target_of = dict(targets)

    def seconds_of(request: Request) -> float:
        if request.deadline is not None:
            return request.deadline
        return target_of.get(request.service_class, default_s)

    def observe(memory: Dues, events: Sequence[PolicyEvent], now: float | None) -> Dues:
        assert now is not None, "the policy is timed"
        due = memory.due.mutate()
        for event in events:
            if isinstance(event, Submitted):
                time = now + seconds_of(event.seq.request)
                due.update(dict.fromkeys(event.seq.request.names, time))
            elif isinstance(event, Finished):
                due.pop(event.request_id, None)
        return Dues(now, due.finish())

    def rank(memory: Dues, seq: Seq) -> tuple[float, int]:
        tokens_left = max(0, (seq.request.predicted or 0) - seq.num_output)
        return memory.due[seq.request_id] - token_s * tokens_left, seq.arrival

    order, preempt = by_rank(rank)
    name = name_with(deadline, targets, default_s, token_s)
    return Policy(name, order, preempt=preempt, init=Dues, observe=observe, show=shown, timed=True)


def shown(memory: Dues) -> str:
    """How many seconds each sequence has left, the least first."""
    times = sorted(memory.due.items(), key=lambda item: (item[1], item[0]))
    lines = [f"{name}: due in {time - memory.now:.3f} s" for name, time in times]
    return "\n".join(lines) or "nothing is due"
