"""`vtc`: the virtual token counter, a fair share for each user (Sheng et al. 2024, arXiv
2401.00588).

A user's counter is the service that the user has had: `input_weight` for each prompt token, when
the prompt is admitted, and `output_weight` for each generated token, both divided by the user's
weight. The user with the least counter is offered first, and a user's requests in order of arrival.
A user who had nothing in the queue is lifted to the least counter there, or to that of the user who
left the queue last: time without requests is no credit. A preempted one is lifted, too.

The bound: while two users of weight 1 both have requests in the queue, their service
in any interval differs by at most 2 * max(w_p * L_input, w_q * M). L_input is the longest prompt.
M is the most tokens that running sequences can have together until they end: the tokens of the
pool, if the pool holds max_num_seqs sequences to their ends, as in the paper; else max_num_seqs *
max_model_len. What is computed again after a preemption is no service.

Why every request ends: while a request is the oldest unfinished one, `preempt` takes it last. In
the queue it is the first of its user, whose counter grows only by what the user has running. All
other counters grow with each admission, so with finitely many users this one is the least at some
time. Then the request is offered first, and it enters when enough running ones have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from immutables import Map

from pagedjax.host.policies.policy import Cached, Policy, arrival_of, name_with
from pagedjax.host.types import (
    TOKEN_EVENTS,
    Admitted,
    Finished,
    PolicyEvent,
    Preempted,
    Resumed,
    Running,
    Seq,
    Submitted,
)


class Service(NamedTuple):
    """A sequence, as far as its service is concerned.

    prompt_len: its prompt tokens that are not served yet; 0: they are.
    """

    user: str
    waits: bool
    prompt_len: int


class Counters(NamedTuple):
    """The memory.

    counters: service of each user. A user without requests whose counter is below the lift is left
        out.
    sequences: by id, those that are unfinished.
    queued: how many sequences of each user wait; users with none are left out.
    last: the lift while nobody waits: the counter of the user who left the queue last.
    """

    counters: Map[str, float] = Map()
    sequences: Map[str, Service] = Map()
    queued: Map[str, int] = Map()
    last: float = 0.0

    def lift(self) -> float:
        """The counter that a user gets at least, who comes to the queue."""
        counters = [self.counters.get(user, 0.0) for user in self.queued]
        return min(counters, default=self.last)

    def folded(self) -> tuple[object, ...]:
        """The counters above the lowest one: what decides about the future.

        `order` compares counters, and all of them grow by amounts that do not depend on them. The
        lift is one of them, or `last`. A user without a counter comes to the queue with the lift,
        whatever it is, since no counter is below 0. `last` is written before the queue is empty,
        so it only matters while nobody waits. This is exact if the sums of the weights are exact
        in floating point, as those of the default weights are.
        """
        last = None if self.queued else self.last
        lowest = min([*self.counters.values(), self.lift()])
        counters = self.counters.mutate()
        for user, counter in self.counters.items():
            counters[user] = counter - lowest
        above = None if last is None else last - lowest
        return counters.finish(), self.sequences, above


def vtc(
    input_weight: float = 1.0,
    output_weight: float = 2.0,
    weights: tuple[tuple[str, float], ...] = (),
) -> Policy:
    """The policy.

    Args:
        input_weight: of a prompt token (w_p).
        output_weight: of a generated token (w_q).
        weights: (user, its share) of users whose share is not 1: [["alice", 2.0]].

    Raises:
        ValueError: a weight is not above 0.
    """
    pairs = tuple([(str(user), float(weight)) for user, weight in weights])
    for name, weight in (("input_weight", input_weight), ("output_weight", output_weight), *pairs):
        if not weight > 0:
            raise ValueError(f"vtc has {name} {weight!r}; it must be above 0")
    return _policy(float(input_weight), float(output_weight), pairs)


@cache
def _policy(
    input_weight: float, output_weight: float, weights: tuple[tuple[str, float], ...]
) -> Policy:
    shares = dict(weights)

    def observe(memory: Counters, events: Sequence[PolicyEvent], now: float | None) -> Counters:
        for event in events:
            if isinstance(event, Submitted):
                memory = lifted(memory, event.seq.request.user)
                memory = arrived(memory, event.seq)
            elif isinstance(event, (Admitted, Resumed)):
                memory = admitted(memory, event.request_id, input_weight, shares)
            elif isinstance(event, TOKEN_EVENTS):
                memory = served(memory, event.request_ids, output_weight, shares)
            elif isinstance(event, Preempted):
                memory = queued_again(memory, event.request_id)
            elif isinstance(event, Finished):
                memory = left(memory, event.request_id)
        ended = any([isinstance(event, Finished) for event in events])
        return forgotten(memory) if ended else memory

    def order(
        memory: Counters, waiting: Sequence[Seq], running: Running, cached: Cached
    ) -> list[Seq]:
        """As if each sequence was admitted before the next one is chosen."""
        queues: dict[str, list[Seq]] = {}
        for seq in sorted(waiting, key=arrival_of, reverse=True):
            queues.setdefault(seq.request.user, []).append(seq)
        counters = {user: memory.counters.get(user, 0.0) for user in queues}
        ordered: list[Seq] = []
        while queues:
            user = min(queues, key=lambda name: (counters[name], queues[name][-1].arrival))
            seq = queues[user].pop()
            ordered.append(seq)
            tokens = memory.sequences[seq.request_id].prompt_len
            counters[user] += input_weight * tokens / shares.get(user, 1.0)
            if not queues[user]:
                del queues[user]
        return ordered

    name = name_with(vtc, input_weight, output_weight, weights)
    return Policy(name, order, init=Counters, observe=observe, show=shown)


def lifted(memory: Counters, user: str) -> Counters:
    """The memory when a user's request comes: a user without others in the queue gets no credit."""
    if user in memory.queued:
        return memory
    counter = max(memory.counters.get(user, 0.0), memory.lift())
    return memory._replace(counters=memory.counters.set(user, counter))


def arrived(memory: Counters, seq: Seq) -> Counters:
    """A sequence waits. Its branches are known too, and their prompt is served with its own."""
    user = seq.request.user
    sequences = memory.sequences.set(seq.request_id, Service(user, True, seq.request.prompt_len))
    for name in seq.request.forks:
        sequences = sequences.set(name, Service(user, False, 0))
    queued = memory.queued.set(user, memory.queued.get(user, 0) + 1)
    return memory._replace(sequences=sequences, queued=queued)


def admitted(
    memory: Counters, request_id: str, weight: float, shares: dict[str, float]
) -> Counters:
    """A sequence runs. Its prompt is served at its first admission."""
    record = memory.sequences[request_id]
    user = record.user
    counter = memory.counters.get(user, 0.0) + weight * record.prompt_len / shares.get(user, 1.0)
    memory = _out_of_queue(memory, request_id)
    return memory._replace(
        counters=memory.counters.set(user, counter),
        sequences=memory.sequences.set(request_id, Service(user, False, 0)),
        last=counter,
    )


def served(
    memory: Counters, request_ids: Sequence[str], weight: float, shares: dict[str, float]
) -> Counters:
    """Each of the sequences has generated a token."""
    counters = memory.counters.mutate()
    for request_id in request_ids:
        record = memory.sequences.get(request_id)
        if record is not None:
            user = record.user
            counters[user] = counters.get(user, 0.0) + weight / shares.get(user, 1.0)
    return memory._replace(counters=counters.finish())


def queued_again(memory: Counters, request_id: str) -> Counters:
    """A sequence waits again. Its user is lifted as by a request that comes: else the time in which
    only others waited would be credit, without a limit.
    """
    record = memory.sequences[request_id]
    memory = lifted(memory, record.user)
    return memory._replace(
        sequences=memory.sequences.set(request_id, record._replace(waits=True)),
        queued=memory.queued.set(record.user, memory.queued.get(record.user, 0) + 1),
    )


def left(memory: Counters, request_id: str) -> Counters:
    """A sequence has ended."""
    if request_id not in memory.sequences:
        return memory
    memory = _out_of_queue(memory, request_id)
    return memory._replace(sequences=memory.sequences.delete(request_id))


def forgotten(memory: Counters) -> Counters:
    """The memory without the counters that the lift would give anyway."""
    users = {record.user for record in memory.sequences.values()}
    lift = memory.lift()
    counters = memory.counters.mutate()
    for user, counter in memory.counters.items():
        if user not in users and counter <= lift:
            del counters[user]
    return memory._replace(counters=counters.finish())


def _out_of_queue(memory: Counters, request_id: str) -> Counters:
    """A sequence waits no more."""
    record = memory.sequences[request_id]
    if not record.waits:
        return memory
    count = memory.queued[record.user] - 1
    queued = memory.queued
    queued = queued.set(record.user, count) if count else queued.delete(record.user)
    return memory._replace(queued=queued, last=memory.counters.get(record.user, 0.0))


def shown(memory: Counters) -> str:
    """Each user's counter and waiting sequences, the next user first."""
    users = sorted(memory.counters.items(), key=lambda item: (item[1], item[0]))
    lines = [
        f"{user or '(no user)'}: {counter:g}, {memory.queued.get(user, 0)} waiting"
        for user, counter in users
    ]
    return "\n".join(lines) or "no user has had service"
