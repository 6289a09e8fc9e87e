"""The policies without memory: four pure functions each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pagedjax.host.policies.policy import Cached, Policy, arrival_of, by_key, latest
from pagedjax.host.types import Running, Seq

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
FCFS = Policy("fcfs", order=lambda waiting, running, cached: waiting, preempt=latest)

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
FAIR = Policy("fair", order=_fair, preempt=lambda running: _fair(running, Running())[-1])


def _longest_prefix(waiting: Sequence[Seq], running: Running, cached: Cached) -> list[Seq]:
    return sorted(waiting, key=lambda seq: (RATE * seq.arrival - cached(seq), seq.arrival))


# The longest cached prefix first (SGLang's longest-prefix-match), up to a limit of age: a request
# with c cached tokens comes before at most c / RATE earlier ones. So at most L / RATE later
# requests (L: the longest sequence) ever come before a request, whatever the cache holds. Once
# these have ended, the request is offered first. `preempt` takes the oldest request last.
LONGEST_PREFIX = Policy("longest_prefix", order=_longest_prefix, preempt=latest)

# A batch enters together, and the next one enters when its last member has ended: the engines
# before Orca's iteration-level batching, as a baseline. Every request ends, because every batch
# does.
STATIC = Policy(
    "static",
    order=lambda waiting, running, cached: () if running.seqs else waiting,
    preempt=latest,
)
