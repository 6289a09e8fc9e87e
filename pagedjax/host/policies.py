"""Scheduling policies as values: four pure functions each. A new idea is a new function here, not a flag."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from pagedjax.config import own_value
from pagedjax.host.types import Running, Seq

WINDOW = 64  # arrivals that one level of priority is worth
RATE = 16  # tokens of a prompt that one arrival is worth


class Policy(NamedTuple):
    """What a policy decides; the mechanism (budget, blocks, queues) stays in scheduler.py.

    order: (waiting, running) -> the waiting sequences in the order in which they are offered admission. The first one
        that cannot be admitted ends admission for the step, so that nothing overtakes it for ever.
    admit: (sequence, blocks it needs now, free blocks) -> whether to let it in. It is never asked when the
        blocks do not suffice. One that refuses while nothing runs stops the engine.
    preempt: running (never empty) -> the one of them that gives its blocks up.
    swap: those who give them up, a group in one -> whether their content moves to the host, if there is a swap space
        with room for it, or is computed again.

    A finite workload ends whatever `order` and `preempt` say, because generated tokens survive a preemption. That each
    request ends while others keep coming is up to the policy. It holds if one unfinished request is the first that
    `order` offers and the last that `preempt` takes until it ends, and if everybody's turn to be that one comes:
    nothing is admitted before it, so it enters when the running ones have ended or given way, and nothing evicts it.
    """

    name: str
    order: Callable[[tuple[Seq, ...], Running], Sequence[Seq]]
    admit: Callable[[Seq, int, int], bool]
    preempt: Callable[[Sequence[Seq]], Seq]
    swap: Callable[[Sequence[Seq]], bool] = lambda victims: True


_arrival = attrgetter("arrival")


def _anyone(seq: Seq, need: int, free: int) -> bool:
    return True


def by_key(name: str, key: Callable[[Seq], float]) -> Policy:
    """The least key is offered first and gives way last; ties go to the earlier arrival.

    Every request ends if its key stays the same for life and only finitely many others can ever have a smaller one:
    once those have ended, this one is the first to enter and the last to leave. A preempted sequence has the key it
    had, so it goes back to its old place.
    """

    def line(seqs: Sequence[Seq]) -> list[Seq]:
        return sorted(sorted(seqs, key=_arrival), key=key)  # two stable sorts of numbers beat one of pairs

    return Policy(
        name, order=lambda waiting, running: line(waiting), admit=_anyone, preempt=lambda seqs: line(seqs)[-1]
    )


def _fair(waiting: Sequence[Seq], running: Running) -> list[Seq]:
    """By the tokens that a user has running or earlier in this order; ties go to the earlier arrival.

    Sorting by that sum is the same as asking before each place who has least: along a user's requests it only grows.
    """
    tokens: dict[str, int] = defaultdict(int)
    for seq, length in zip(running.seqs, running.lengths, strict=True):
        tokens[seq.request.user] += length
    line, ahead = sorted(waiting, key=_arrival), []
    for seq in line:
        user = seq.request.user
        ahead.append(tokens[user])
        tokens[user] += seq.length
    return [line[i] for i in sorted(range(len(line)), key=ahead.__getitem__)]


# First come, first served. The queue is kept in order of arrival, preempted sequences at its front; the latest
# arrival gives way, so the oldest running sequence always advances and every request ends.
FCFS = Policy(
    "fcfs",
    order=lambda waiting, running: waiting,
    admit=_anyone,
    preempt=lambda running: max(running, key=_arrival),
)

# The lower number first, until age makes up for it. At most WINDOW * (its number - the lowest in use) later requests
# come before one, so every request ends as long as the numbers have a lowest. Age is counted in arrivals and not in
# seconds: a policy has no clock, and a run replays.
PRIORITY = by_key("priority", lambda seq: seq.arrival + WINDOW * seq.request.priority)

# The shorter prompt first, until age makes up for it. At most prompt_len / RATE later requests come before one, so
# every request ends. The prompt and not `length`, which would push a sequence back as it grows.
SHORTEST = by_key("shortest", lambda seq: RATE * seq.arrival + seq.request.prompt_len)

# The user with the fewest tokens first. A user's running requests are older than its waiting ones (`order` and
# `preempt` both see to that), so a place in line is the sum of the lengths of the user's older unfinished requests.
# The oldest request of all has 0, and nobody is older: it is offered first and gives way last, as under FCFS, so every
# request ends. Later ones come before one only while an older request of its user is unfinished.
FAIR = Policy("fair", order=_fair, admit=_anyone, preempt=lambda running: _fair(running, Running())[-1])

# A batch enters together and runs to the end of its last member before anyone else enters: how engines worked before
# Orca's batching by iterations, to compare with. Every request ends, because every batch does.
STATIC = Policy(
    "static",
    order=lambda waiting, running: () if running.seqs else waiting,
    admit=_anyone,
    preempt=lambda running: max(running, key=_arrival),
)

POLICIES = {policy.name: policy for policy in (FCFS, PRIORITY, SHORTEST, FAIR, STATIC)}


def find(name: str) -> Policy:
    """The policy of that name; "module:NAME" or "folder/file.py:NAME" is a value that a module of yours holds.

    Raises:
        ValueError: no such policy, module, file or value, or a value that is no policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    policy = own_value("policy", name, Policy, POLICIES)
    if policy.name in POLICIES:  # a recording would be replayed with the other one
        raise ValueError(f"policy {name!r} calls itself {policy.name!r}, which is another one; rename it")
    return policy
