"""Users who send requests of their own lengths at their own rates, and a policy that is fair by
admissions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from immutables import Map

from pagedjax.host.types import Admitted, Finished, PolicyEvent, Running, Seq, Submitted
from pagedjax.policies import Policy


def users(
    rng: np.random.Generator,
    *,
    rates: Sequence[float],
    prompts: Sequence[int],
    outputs: Sequence[int],
    seconds: float,
    starts: Sequence[float] = (),
    even: bool = True,
    exponential: bool = False,
) -> Iterator[tuple[int, int, float, str]]:
    """The prompt tokens, output tokens, seconds of arrival and user of each request.

    Args:
        rates: requests/s of each user; its first request comes within the first gap.
        prompts, outputs: tokens of each user's requests.
        seconds: how long each user sends requests.
        starts: when each user begins; empty: all at 0.
        even: equal gaps; False: exponential ones.
        exponential: lengths are exponential with these means, at most four times as long.
    """
    users_starts = starts or [0.0] * len(rates)
    everyone = zip(rates, prompts, outputs, users_starts, strict=True)
    for i, (rate, prompt, output, start) in enumerate(everyone):
        arrival = start + rng.random() / rate
        while arrival < start + seconds:
            lengths = [prompt, output]
            if exponential:
                draws = [min(rng.exponential(mean), 4.0 * mean) for mean in lengths]
                lengths = [max(1, round(draw)) for draw in draws]
            yield lengths[0], lengths[1], arrival, f"u{i}"
            arrival += 1 / rate if even else rng.exponential(1 / rate)


Turns = tuple[Map[str, str], Map[str, int], int]


def observe(memory: Turns, events: Sequence[PolicyEvent], now: float | None) -> Turns:
    """The user of each unfinished request, the turn of each user's last admission, and the number
    of turns.
    """
    users_by_id, turns, count = memory
    for event in events:
        if isinstance(event, Submitted):
            users_by_id = users_by_id.set(event.seq.request_id, event.seq.request.user)
        elif isinstance(event, Admitted):
            count += 1
            turns = turns.set(users_by_id[event.request_id], count)
        elif isinstance(event, Finished):
            users_by_id = users_by_id.delete(event.request_id)
    return users_by_id, turns, count


def order(memory: Turns, waiting: Sequence[Seq], running: Running, cached: object) -> list[Seq]:
    """One request of each user in turn, the user who was admitted least recently first."""
    _, turns, _ = memory
    queues: dict[str, list[Seq]] = {}
    for seq in sorted(waiting, key=lambda seq: seq.arrival):
        queues.setdefault(seq.request.user, []).append(seq)
    users_in_turn = sorted(queues, key=lambda user: (turns.get(user, 0), queues[user][0].arrival))
    rounds = range(max(map(len, queues.values()), default=0))
    return [queues[user][i] for i in rounds for user in users_in_turn if i < len(queues[user])]


ROUND_ROBIN = Policy("round_robin", order, init=lambda: (Map(), Map(), 0), observe=observe)
