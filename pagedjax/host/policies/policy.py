"""`Policy`: the decisions of the scheduler as a value of pure functions; and the policies without
memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from operator import attrgetter
from typing import Any, NamedTuple

from pagedjax.host.types import PolicyEvent, Request, Row, Running, Seq
from pagedjax.options.own_errors import placed
from pagedjax.options.own_values import true_or_false

Cached = Callable[[Seq], int]  # tokens of a waiting sequence that are found in the cache
Memory = Any  # what a policy remembers: an immutable value that can be hashed
# (a request, all requests that may come) -> how many later ones may enter before it, at most
Bound = Callable[[Request, Sequence[Request]], int]

arrival_of = attrgetter("arrival")


def always(seq: Seq, need: int, free: int) -> bool:
    """Admits every sequence."""
    return True


def latest(running: Sequence[Seq]) -> Seq:
    """Preempts the latest arrival, so that the oldest running sequence always advances."""
    return max(running, key=arrival_of)


def to_host(victims: Sequence[Seq]) -> bool:
    """Swaps every victim."""
    return True


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

    A policy with `init` has a memory. The memory is part of the scheduler's state, and each
    function above gets it before its other arguments. The functions below are for such policies:

    init: () -> the first memory, an immutable value that can be hashed.
    observe: (memory, events, now) -> the memory after these events. It is called at the beginning
        of each step, with the events since the last call (`types.PolicyEvent`). It is the only
        place where a policy reads the time: `now` is None unless the policy is timed.
    evict: (memory, waiting, running) -> ids of running sequences that go back to the queue before
        the step, with their groups, as a preemption sends them there. They are not offered in the
        same step. The proof above does not hold for a policy that evicts: its docstring says why
        every request ends.
    compose: (memory, rows, budget) -> the tokens of each row of the step: at least 0 and at most
        those that the row has; of a decode (`row.samples` with one token) 0 or 1. `budget` is
        max_num_batched_tokens.
    reject: (memory, waiting) -> ids of requests that end with the reason "rejected". It gets the
        waiting sequences that have no output yet.
    show: memory -> its text in the viewer.
    timed: whether `observe` gets the time, in seconds since the scheduler began. It is an input of
        the step, so a recording has it.

    What a policy promises is data, which decides nothing. `pagedjax check` checks it:

    bound: how many later requests may enter before a request, at most: a number, or a function as
        `Bound`. None: no number is promised.
    urgent_first: whether no later and less urgent request is preferred to one that waits.
    """

    name: str
    order: Callable[..., Sequence[Seq]]
    admit: Callable[..., bool] = always
    preempt: Callable[..., Seq] = latest
    swap: Callable[..., bool] = to_host
    init: Callable[[], Hashable] | None = None
    observe: Callable[[Memory, Sequence[PolicyEvent], float | None], Hashable] | None = None
    evict: Callable[[Memory, Sequence[Seq], Running], Iterable[str]] | None = None
    compose: Callable[[Memory, Sequence[Row], int], Sequence[int]] | None = None
    reject: Callable[[Memory, Sequence[Seq]], Iterable[str]] | None = None
    show: Callable[[Memory], str] = repr
    timed: bool = False
    bound: Bound | int | None = None
    urgent_first: bool = False


# function of a policy -> (number of its arguments, how an error tells the user to write it)
ARGUMENTS: Mapping[str, tuple[int, str]] = {
    "order": (
        3,
        "order(waiting, running, cached), where cached(seq) is the number of the sequence's tokens "
        "that are found in the cache",
    ),
    "admit": (3, "admit(seq, need, free)"),
    "preempt": (1, "preempt(running)"),
    "swap": (1, "swap(victims)"),
}
# the same for functions that only a policy with memory has
MEMORY_ARGUMENTS: Mapping[str, tuple[int, str]] = {
    "init": (0, "init()"),
    "observe": (3, "observe(memory, events, now)"),
    "evict": (3, "evict(memory, waiting, running)"),
    "compose": (3, "compose(memory, rows, budget)"),
    "reject": (2, "reject(memory, waiting)"),
    "show": (1, "show(memory)"),
}
# these ignore a memory, so they do not get one
WITHOUT_MEMORY = {"admit": always, "preempt": latest, "swap": to_host}


def arguments_of(policy: Policy) -> dict[str, tuple[int, str]]:
    """Of each function of a policy: the number of its arguments, and how to write it.

    Raises:
        ValueError: the policy has a function that needs a memory, and no memory.
    """
    if policy.init is None:
        needs_memory = [name for name in MEMORY_ARGUMENTS if name not in ("init", "show")]
        needs_memory.append("timed")
        attribute = next((name for name in needs_memory if getattr(policy, name)), None)
        if attribute:
            raise ValueError(
                f"policy {policy.name!r} has {attribute}, and no memory; "
                "give it init=lambda: MEMORY, or leave it out"
            )
        return dict(ARGUMENTS)
    arguments = {}
    for name, (count, usage) in ARGUMENTS.items():
        if getattr(policy, name) is WITHOUT_MEMORY.get(name):
            continue
        head, _, tail = usage.partition("(")
        arguments[name] = (count + 1, f"{head}(memory, {tail}")
    for name, pair in MEMORY_ARGUMENTS.items():
        function = getattr(policy, name)
        if function and function is not repr:  # `repr`, the default of `show`, has no signature
            arguments[name] = pair
    return arguments


def with_memory(policy: Policy, memory: Memory) -> Policy:
    """The policy with this memory, as one whose functions need none."""
    functions = {
        name: partial(getattr(policy, name), memory)
        for name in ARGUMENTS
        if getattr(policy, name) is not WITHOUT_MEMORY.get(name)
    }
    return policy._replace(**functions, init=None)


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


def name_with(policy: Callable[..., Policy], *values: Any) -> str:
    """The name of a shipped policy with its parameters, such as "vtc(output_weight=4.0)".

    Args:
        policy: the function that makes it.
        values: of the function's parameters, in their order. Those that have their default are left
            out.
    """
    parameters = signature(policy).parameters.values()
    texts = [
        f"{parameter.name}={value!r}"
        for parameter, value in zip(parameters, values, strict=True)
        if value != parameter.default
    ]
    name = policy.__name__
    return f"{name}({', '.join(sorted(texts))})" if texts else name


def by_key(name: str, key: Callable[[Seq], float]) -> Policy:
    """The policy that offers the sequence with the least key first and preempts it last; ties go to
    the earlier arrival.

    Every request ends if its key never changes and only finitely many others can ever have a
    smaller key: once those have ended, it is the first to be admitted and the last to be preempted.
    A preempted sequence keeps its key, so it returns to its old place.
    """

    def ordered(seqs: Sequence[Seq]) -> list[Seq]:
        # two stable sorts by numbers are faster than one sort by pairs
        return sorted(sorted(seqs, key=arrival_of), key=key)

    return Policy(
        name,
        order=lambda waiting, running, cached: ordered(waiting),
        preempt=lambda seqs: ordered(seqs)[-1],
    )


WINDOW = 64  # arrivals that one level of priority is worth
RATE = 16  # tokens of a prompt that one arrival is worth


def _fair(waiting: Sequence[Seq], running: Running, cached: Cached | None = None) -> list[Seq]:
    """The waiting sequences by the tokens that their user has running or earlier in this order;
    ties go to the earlier arrival.

    The sum only grows along a user's requests. So sorting by it gives each place to the user with
    the fewest tokens.
    """
    tokens: dict[str, int] = defaultdict(int)
    for seq in running.seqs:
        tokens[seq.request.user] += seq.length
    queue = sorted(waiting, key=arrival_of)
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
    "fcfs",
    order=lambda waiting, running, cached: waiting,
    preempt=latest,
    bound=0,
    urgent_first=True,
)

# The lower number first, up to a limit of age: its bound. So every request ends if the numbers have
# a lowest. Age is counted in arrivals and not in seconds: a policy has no clock, and a run replays.
PRIORITY = by_key("priority", lambda seq: seq.arrival + WINDOW * seq.request.priority)._replace(
    bound=lambda request, others: (
        WINDOW * (request.priority - min([other.priority for other in others]))
    ),
    urgent_first=True,
)

# The shorter prompt first, up to a limit of age: its bound. So every request ends. The key uses the
# prompt and not `length`, because a key must not grow with the sequence.
SHORTEST = by_key("shortest", lambda seq: RATE * seq.arrival + seq.request.prompt_len)._replace(
    bound=lambda request, others: request.prompt_len // RATE
)

# The user with the fewest tokens first. A user's running requests are older than its waiting ones
# (`order` and `preempt` both ensure it), so a sequence's key is the sum of the lengths of its
# user's older unfinished requests. The oldest request of all has key 0: it is offered first and
# preempted last, as under FCFS, so every request ends. Later requests come before a request only
# while an older request of its user is unfinished: a bound would depend on how long those live.
FAIR = Policy("fair", order=_fair, preempt=lambda running: _fair(running, Running())[-1])


def _longest_prefix(waiting: Sequence[Seq], running: Running, cached: Cached) -> list[Seq]:
    return sorted(waiting, key=lambda seq: (RATE * seq.arrival - cached(seq), seq.arrival))


# The longest cached prefix first (SGLang's longest-prefix-match), up to a limit of age: a request
# with c cached tokens comes before at most c / RATE earlier ones. So its bound is that of the
# longest sequence, whatever the cache holds. Once these have ended, the request is offered first.
# `preempt` takes the oldest request last.
LONGEST_PREFIX = Policy(
    "longest_prefix",
    order=_longest_prefix,
    preempt=latest,
    bound=lambda request, others: (
        max([other.prompt_len + other.max_tokens for other in others]) // RATE
    ),
)

# A batch enters together, and the next one enters when its last member has ended: the engines
# before Orca's iteration-level batching, as a baseline. Every request ends, because every batch
# does.
STATIC = Policy(
    "static",
    order=lambda waiting, running, cached: () if running.seqs else waiting,
    preempt=latest,
    bound=0,
    urgent_first=True,
)
