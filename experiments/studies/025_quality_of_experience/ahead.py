"""The policy of study 025: who runs is decided by how far the tokens are ahead of their reader
(after Andes; Liu et al., arXiv 2404.16283).

A user reads one token in `itl` seconds, the first one `ttft` seconds after the arrival. If a
request is not served, its reader stalls within the next `horizon_s` seconds. The gain of a request
is the length of this stall, divided by the time that the reader has been reading at the end of it.
To first order, this is the QoE that the stall would cost (service.qoe: S_delay grows by the stall
for each token that is due, and S_whole with the square of the time). As in Andes, the gain over the
tokens of memory decides who is admitted first. So a new request comes before one that is long late.
If the first one does not fit, running requests are evicted whose readers have `ahead_s` seconds of
tokens left, those that are furthest ahead first.

Different from Andes: it does not predict how a step's time grows with its requests, and in place of
its estimate of what an eviction costs there is `ahead_s`.

Why every request of a finite workload ends: a request is evicted for one whose reader has tokens
for less than `horizon_s` seconds. That one enters in the same step, and stays until its reader has
tokens for `ahead_s` seconds, which are more. So each eviction is followed by tokens, of which there
are finitely many, and they survive a preemption for lack of blocks. In an endless overload an old
request may starve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from immutables import Map

from pagedjax.host.policies.eviction import make_way, most_urgent
from pagedjax.host.types import (
    Admitted,
    Finished,
    PolicyEvent,
    Preempted,
    Resumed,
    Running,
    Sampled,
    Seq,
    Submitted,
)
from pagedjax.policies import Policy


class Reader(NamedTuple):
    """The reader of an unfinished sequence.

    due: when the first token is due, in seconds since the scheduler began.
    itl: seconds in which a token is read.
    until: when all tokens that are there will have been read; `due` before the first one.
    since: the step in which the sequence began to wait; None: it runs.
    """

    due: float
    itl: float
    until: float
    since: int | None


class Readers(NamedTuple):
    """The memory: the number of the step, its time, and the readers by the ids of sequences."""

    step: int = 0
    now: float = 0.0
    readers: Map[str, Reader] = Map()


def ahead(
    targets: tuple[tuple[str, float, float], ...],
    horizon_s: float = 5.0,
    ahead_s: float = 10.0,
) -> Policy:
    """The policy.

    Args:
        targets: (service class, ttft, itl), in seconds.
        horizon_s: seconds for which a gain is predicted.
        ahead_s: seconds of tokens that a reader has left when the request may be evicted.

    Raises:
        ValueError: `ahead_s` is not above `horizon_s`.
    """
    if not ahead_s > horizon_s:
        raise ValueError(f"ahead has ahead_s {ahead_s!r}; it must be above horizon_s {horizon_s!r}")
    targets_of = {name: (ttft, itl) for name, ttft, itl in targets}

    def observe(memory: Readers, events: Sequence[PolicyEvent], now: float | None) -> Readers:
        assert now is not None, "the policy is timed"
        step = memory.step + 1
        readers = memory.readers.mutate()
        for event in events:
            if isinstance(event, Submitted):
                ttft, itl = targets_of[event.seq.request.service_class]
                reader = Reader(now + ttft, itl, now + ttft, step)
                readers.update(dict.fromkeys(event.seq.request.names, reader))
            elif isinstance(event, Finished):
                readers.pop(event.request_id, None)
            elif isinstance(event, Sampled):
                for name in event.request_ids:
                    reader = readers.get(name)
                    if reader is not None:
                        read = max(now, reader.until) + reader.itl
                        readers[name] = reader._replace(until=read)
            elif isinstance(event, (Admitted, Resumed, Preempted)):
                since = step if isinstance(event, Preempted) else None
                readers[event.request_id] = readers[event.request_id]._replace(since=since)
        return Readers(step, now, readers.finish())

    def urgency(memory: Readers, seq: Seq) -> tuple[float, int]:
        """The place of a waiting sequence; the least is the first."""
        reader = memory.readers[seq.request_id]
        end = memory.now + horizon_s
        stall = min(horizon_s, max(0.0, end - reader.until))
        gain = stall / max(horizon_s, end - reader.due)
        return -gain / seq.length, seq.arrival

    def lead(memory: Readers, seq: Seq) -> float:
        """Seconds for which the reader has tokens."""
        return memory.readers[seq.request_id].until - memory.now

    def order(
        memory: Readers, waiting: Sequence[Seq], running: Running, cached: object
    ) -> list[Seq]:
        return sorted(waiting, key=lambda seq: urgency(memory, seq))

    def preempt(memory: Readers, running: Sequence[Seq]) -> Seq:
        return max(running, key=lambda seq: (lead(memory, seq), seq.arrival))

    def evict(memory: Readers, waiting: Sequence[Seq], running: Running) -> list[str]:
        first = most_urgent(waiting, lambda seq: urgency(memory, seq))
        if first is None or not urgency(memory, first)[0]:
            return []
        if memory.readers[first.request_id].since == memory.step:
            return []  # it was not offered yet
        return make_way(
            first,
            running.seqs,
            rank=lambda seq: lead(memory, seq),
            evictable=lambda seq: lead(memory, seq) >= ahead_s,
        )

    return Policy(
        "ahead", order, preempt=preempt, init=Readers, observe=observe, evict=evict, timed=True
    )
