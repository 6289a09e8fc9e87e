"""Scheduling policies as values: four pure functions each. A new policy is a new value, not a
flag.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from pagedjax.host.types import Running, Seq
from pagedjax.options.config import one_of
from pagedjax.options.own_errors import placed
from pagedjax.options.own_values import check_call, named, true_or_false

WINDOW = 64  # arrivals that one level of priority is worth
RATE = 16  # tokens of a prompt that one arrival is worth


Cached = Callable[[Seq], int]  # tokens of a waiting sequence that are found in the cache


class Policy(NamedTuple):
    """The decisions of a policy. The mechanism (budget, blocks, queues) stays in scheduler.py.

    order: (waiting, running, cached) -> the waiting sequences in the order in which they are
        offered admission. The first one that cannot be admitted ends admission for the step, so
        that no sequence is overtaken for ever. `running.seqs` are current records, as `preempt`
        gets them. `cached(seq)` is the number of a waiting sequence's tokens whose keys and values
        are found in the cache now.
    admit: (sequence, blocks it needs now, free blocks) -> whether to admit it. It is only called if
        the free blocks suffice. A policy that refuses while nothing runs stops the engine.
    preempt: the running sequences (never empty) -> the sequence that releases its blocks.
    swap: the preempted sequences (a group together) -> whether their content moves to the swap
        space, if it has room, or is computed again.

    A finite workload ends under every `order` and `preempt`, because generated tokens survive a
    preemption. In an endless stream, each request ends if the policy ensures two rules. First, one
    unfinished request is the first that `order` offers and the last that `preempt` takes, until it
    ends: nothing is admitted before it, so it enters when the running requests have ended or were
    preempted, and nothing preempts it. Second, each request becomes that first request at some
    time.
    """

    name: str
    order: Callable[[tuple[Seq, ...], Running, Cached], Sequence[Seq]]
    admit: Callable[[Seq, int, int], bool]
    preempt: Callable[[Sequence[Seq]], Seq]
    swap: Callable[[Sequence[Seq]], bool] = lambda victims: True


_arrival = attrgetter("arrival")


def _always(seq: Seq, need: int, free: int) -> bool:
    return True


def _latest(running: Sequence[Seq]) -> Seq:
    return max(running, key=_arrival)


def by_key(name: str, key: Callable[[Seq], float]) -> Policy:
    """The policy that offers the sequence with the least key first and preempts it last; ties go to
    the earlier arrival.

    Every request ends if its key never changes and only finitely many others can ever have a
    smaller key: once those have ended, it is the first to be admitted and the last to be preempted.
    A preempted sequence keeps its key, so it returns to its old place.
    """

    def ordered(seqs: Sequence[Seq]) -> list[Seq]:
        # two stable sorts by numbers are faster than one sort by pairs
        return sorted(sorted(seqs, key=_arrival), key=key)

    return Policy(
        name,
        order=lambda waiting, running, cached: ordered(waiting),
        admit=_always,
        preempt=lambda seqs: ordered(seqs)[-1],
    )


def _fair(waiting: Sequence[Seq], running: Running, cached: Cached | None = None) -> list[Seq]:
    """The waiting sequences by the tokens that their user has running or earlier in this order;
    ties go to the earlier arrival.

    The sum only grows along a user's requests. So sorting by it gives each place to the user with
    the fewest tokens.
    """
    tokens: dict[str, int] = defaultdict(int)
    for seq in running.seqs:
        tokens[seq.request.user] += seq.length
    queue = sorted(waiting, key=_arrival)
    older_tokens: list[int] = []  # for each sequence of the queue: its user's tokens before it
    for seq in queue:
        user = seq.request.user
        older_tokens.append(tokens[user])
        tokens[user] += seq.length
    return [queue[i] for i in sorted(range(len(queue)), key=older_tokens.__getitem__)]


# First come, first served. The queue is kept in order of arrival, preempted sequences at its front;
# the latest arrival is preempted, so the oldest running sequence always advances and every request
# ends.
FCFS = Policy(
    "fcfs", order=lambda waiting, running, cached: waiting, admit=_always, preempt=_latest
)

# The lower number first, up to a limit of age. At most WINDOW * (its number - the lowest in use)
# later requests come before a request, so every request ends if the numbers have a lowest. Age is
# counted in arrivals and not in seconds: a policy has no clock, and a run replays.
PRIORITY = by_key("priority", lambda seq: seq.arrival + WINDOW * seq.request.priority)

# The shorter prompt first, up to a limit of age. At most prompt_len / RATE later requests come
# before a request, so every request ends. The key uses the prompt and not `length`, because a key
# must not grow with the sequence.
SHORTEST = by_key("shortest", lambda seq: RATE * seq.arrival + seq.request.prompt_len)

# The user with the fewest tokens first. A user's running requests are older than its waiting ones
# (`order` and `preempt` both ensure it), so a sequence's key is the sum of the lengths of its
# user's older unfinished requests. The oldest request of all has key 0: it is offered first and
# preempted last, as under FCFS, so every request ends. Later requests come before a request only
# while an older request of its user is unfinished.
FAIR = Policy(
    "fair", order=_fair, admit=_always, preempt=lambda running: _fair(running, Running())[-1]
)


def _longest_prefix(waiting: Sequence[Seq], running: Running, cached: Cached) -> list[Seq]:
    return sorted(waiting, key=lambda seq: (RATE * seq.arrival - cached(seq), seq.arrival))


# The longest cached prefix first (SGLang's longest-prefix-match), up to a limit of age: a request
# with c cached tokens comes before at most c / RATE earlier ones. So at most L / RATE later
# requests (L: the longest sequence) ever come before a request, whatever the cache holds. Once
# these have ended, the request is offered first. `preempt` takes the oldest request last.
LONGEST_PREFIX = Policy("longest_prefix", order=_longest_prefix, admit=_always, preempt=_latest)

# A batch enters together, and the next one enters when its last member has ended: the engines
# before Orca's iteration-level batching, as a baseline. Every request ends, because every batch
# does.
STATIC = Policy(
    "static",
    order=lambda waiting, running, cached: () if running.seqs else waiting,
    admit=_always,
    preempt=_latest,
)

POLICIES = {
    policy.name: policy for policy in (FCFS, PRIORITY, SHORTEST, FAIR, LONGEST_PREFIX, STATIC)
}


# function of a policy -> (number of its arguments, how an error tells the user to write it)
ARGUMENTS = {
    "order": (
        3,
        "order(waiting, running, cached), where cached(seq) is the number of the sequence's tokens "
        "that are found in the cache",
    ),
    "admit": (3, "admit(seq, need, free)"),
    "preempt": (1, "preempt(running)"),
    "swap": (1, "swap(victims)"),
}


def find(name: Any) -> Policy:
    """The policy of that name. "module:NAME" or "folder/file.py:NAME" is a policy of the user, in
    that module or file, with parameters as in a mapping {"name": "mine.py:aged", "worth": 64}; a
    `Policy` is itself.

    Raises:
        ValueError: no such policy, module, file or value; a value that is no policy; or a function
            of it that takes other arguments.
    """
    policy = named("policy", name, Policy, POLICIES)
    if policy not in POLICIES.values():
        for function, (count, usage) in ARGUMENTS.items():
            start = f"policy {getattr(name, 'name', name)!r}: its {function}"
            check_call(start, getattr(policy, function), count, usage)
    return policy


def shipped(policy: Policy | str) -> Policy:
    """The policy, which may be given by the name of a shipped one.

    Raises:
        ValueError: there is no such name. A policy of a user's own is found once, by `find`.
    """
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES and ":" in policy:
        raise ValueError(
            f"policy is {policy!r}; give the value that pagedjax.policies.find({policy!r}) returns"
        )
    one_of("policy", policy, tuple(POLICIES))
    return POLICIES[policy]


def called(policy: Policy, function: str, *arguments: Any) -> Any:
    """The result of one of a policy's functions.

    Raises:
        OwnError: a function of the user raised. The message names its file and line.
    """
    try:
        return getattr(policy, function)(*arguments)
    except Exception:  # a context around each call would cost time in every step
        with placed(f"{function} of the policy {policy.name!r}"):
            raise


def decision(policy: Policy, function: str, *arguments: Any) -> bool:
    """The result of a policy's `admit` or `swap`.

    Raises:
        ValueError: the result is neither True nor False.
    """
    result = called(policy, function, *arguments)
    if isinstance(result, bool):
        return result
    return true_or_false(f"{function} of the policy {policy.name!r}", result)
