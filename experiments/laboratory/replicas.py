"""Several equal engines behind a router, on a recorded past: `Fleet(past, change, count, router)`.

Each replica is a scheduler of its own. A request goes where the router says when it comes. The
router knows of an end when its step has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice

from experiments.laboratory.past import Past, Recorded
from experiments.laboratory.rerun import NEVER_RUN, Change, Run, Transition
from pagedjax import routing
from pagedjax.host.event_log import Cancel, Submit
from pagedjax.routing import Router, RouterRequest, RouterState


class Replica(Run):
    """One engine of several. It gets its inputs from `Fleet`, and never follows the recording."""

    def __init__(self, past: Past, change: Change) -> None:
        super().__init__(past, change)
        self.follows = False
        self.waits = False  # it has work, and can make no step before the next input
        self.new_ends: list[tuple[int, float]] = []  # requests that ended, and when

    def take(self, recorded: Recorded, at: float) -> Iterator[Transition]:
        """Takes an input that comes at a time, between two steps."""
        self.now = max(self.now, at)
        self.waits = False
        yield from self._take(recorded)

    def step(self) -> Iterator[Transition]:
        """Makes a step, or begins to wait."""
        transitions = self._step()
        if transitions is None:
            self.waits = True
        else:
            yield from transitions

    def hashes_of(self, arrival: int) -> tuple[str, ...]:
        """The hashes of a request's prompt, as the router gets them."""
        return self._contents.of_prompt(arrival, self.past.requests[arrival].prompt_len)

    def _end(self, names: Iterable[str]) -> None:
        num_before = len(self._ended_at)
        super()._end(names)
        num_new = len(self._ended_at) - num_before
        self.new_ends += islice(reversed(self._ended_at.items()), num_new)


class Inputs(Run):
    """The inputs of all replicas in the order of their times. It makes no step."""

    def __init__(self, past: Past, change: Change) -> None:
        super().__init__(past, change)
        self._refuse_what_time_decides()
        self._queue(0)

    @property
    def next(self) -> float | None:
        """When the next input comes; None: none is left."""
        return self._inputs[0][0] if self._inputs else None

    def pop(self) -> Recorded:
        return heappop(self._inputs)[2]

    def end(self, arrival: int, at: float) -> None:
        """Queues what comes after the end of a request."""
        self._ended_at[arrival] = at
        for group in self._followers.pop(arrival, ()):
            self._push_follower(group)


class Fleet:
    """An iterable of (number of the replica, transition), to go through once."""

    def __init__(self, past: Past, change: Change, count: int, router: Router) -> None:
        """Raises:
        Refused: the past cannot have this change.
        ValueError: `count` is below 1.
        """
        if count < 1:
            raise ValueError(f"replicas is {count}; it must be at least 1")
        self.past = past
        self.change = change
        self.router = router
        self.replicas = [Replica(past, change) for _ in range(count)]
        self.replica_of: dict[int, int] = {}  # by the arrival of a request
        self._inputs = Inputs(past, change)
        self._ended: list[tuple[float, int]] = []  # a heap: when a request ended, and its arrival
        self._state: RouterState = routing.init(change.config.num_blocks)
        for number in range(count):
            self._state = routing.joined(self._state, number)

    def __iter__(self) -> Iterator[tuple[int, Transition]]:
        while True:
            next_steps = [
                (replica.now, number)
                for number, replica in enumerate(self.replicas)
                if replica.has_work and not replica.waits
            ]
            at = self._inputs.next
            if at is not None and (not next_steps or at <= min(next_steps)[0]):
                yield from self._take(self._inputs.pop(), at)
            elif next_steps:
                _, number = min(next_steps)
                for transition in self.replicas[number].step():
                    yield number, transition
                self._learn_ends(number)
            else:
                for replica in self.replicas:
                    replica.inexact[NEVER_RUN] += len(replica.state.waiting)
                    replica.inexact = +replica.inexact  # without counts of 0
                return

    def _take(self, recorded: Recorded, at: float) -> Iterator[tuple[int, Transition]]:
        """Gives an input to its replica, or to all of them."""
        entry = recorded.entry
        arrival = recorded.arrival
        numbers: list[int] = []
        if isinstance(entry, Submit) and arrival is not None:
            if arrival not in self.change.without:
                numbers = [self._route(arrival, at)]
        elif isinstance(entry, Cancel):
            first = -1 if arrival is None else self.past.outputs[arrival].first
            if first in self.replica_of:
                numbers = [self.replica_of[first]]
        else:
            numbers = list(range(len(self.replicas)))
        for number in numbers:
            for transition in self.replicas[number].take(recorded, at):
                yield number, transition
            self._learn_ends(number)

    def _route(self, arrival: int, at: float) -> int:
        """The replica that gets a request, by the ends known at its time."""
        while self._ended and self._ended[0][0] <= at:
            self._state = routing.finished(self._state, str(heappop(self._ended)[1]))
        request = self.past.requests[arrival]
        tokens = request.prompt_len + len(request.names) * request.max_tokens
        hashes = self.replicas[0].hashes_of(arrival) if self.router.prefixes else ()
        router_request = RouterRequest(str(arrival), tokens, hashes, request.user)
        self._state, replica = routing.route(self._state, self.router, router_request)
        self.replica_of[arrival] = int(replica)
        return int(replica)

    def _learn_ends(self, number: int) -> None:
        ends = self.replicas[number].new_ends
        for arrival, at in ends:
            heappush(self._ended, (at, arrival))
            self._inputs.end(arrival, at)
        ends.clear()
