"""Simulated engines behind a router, and the one loop of events that runs them.

A source has events, and says when the next one happens. `run_events` takes the events of all
sources in the order of their times. The steps of a fleet are a source; arrivals of requests, and
what else happens to engines, are others (replicas.py, pools.py).

A request is routed by what is known then: the end of a request is known when its last step has
ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, Protocol, TypeVar

from experiments.core.submit import LONGEST_SLEEP, Engine
from experiments.core.workloads import WorkItem
from experiments.simulation.spans import DecodeSpan, StepTimes
from pagedjax import routing
from pagedjax.engine import block_hashes
from pagedjax.host.types import StepResult
from pagedjax.options.config import EngineConfig
from pagedjax.options.params import SamplingParams
from pagedjax.routing import Router, RouterRequest


class Source(NamedTuple):
    """Events in the order of their times.

    next: when the next event happens, in seconds; infinity without one.
    handle: handles the next event.
    """

    next: Callable[[], float]
    handle: Callable[[], None]


def run_events(*sources: Source) -> None:
    """Handle the events of all sources. Of events at the same time, the first source's is first."""
    while True:
        times = [source.next() for source in sources]
        first = min(times)
        if first == math.inf:
            return
        sources[times.index(first)].handle()


class VirtualEngine(Engine, Protocol):
    """An engine with a clock of its own (simulation.simulate.SimulatedEngine)."""

    config: EngineConfig
    now: float  # seconds; while it has work, when its next step begins

    def sleep(self, seconds: float) -> None: ...

    def next_step_times(self) -> StepTimes | None: ...

    def advance(self, times: StepTimes) -> DecodeSpan: ...


class Notes(Protocol):
    """A fleet calls this with each step, or each span of steps, of an engine.

    The fleet itself keeps no results: their plans would fill the memory.
    """

    def step(self, replica: int, result: StepResult) -> None: ...

    def span(self, replica: int, span: DecodeSpan) -> None: ...


E_co = TypeVar("E_co", bound=VirtualEngine, covariant=True)


class Fleet(Generic[E_co]):
    """Engines behind a router, and when each of them begins its next step.

    The replica i is engines[i]. Steps of a replica that only decode concern no other replica. So
    such steps wait, and are made together: before the next step of another kind, or before
    something happens at this replica.
    """

    def __init__(
        self,
        engines: Sequence[E_co],
        router: Router,
        known_blocks: int,
        notes: Notes,
        *,
        count: int | None = None,
        number: int = 0,
        name: str = "replica {}",
        waits: bool = False,
        looks_ahead: bool = True,
    ) -> None:
        """A fleet before its first event.

        Args:
            known_blocks: see `routing.init`.
            count: how many engines are present, counted from the first one; None: all.
            number: the number of the first engine, for `notes`.
            name: how errors name an engine; {} is its index.
            waits: whether an engine may have work and make no step, until it is woken.
            looks_ahead: whether steps that only decode are made together.
        """
        self.engines = engines
        self._router = router
        self._notes = notes
        self._number = number
        self._name = name
        self._waits = waits
        self._looks_ahead = looks_ahead
        self._state = routing.init(known_blocks)
        self._num_joined = 0
        # a heap: when each replica with work makes a step, or looks ahead
        self._steps: list[tuple[float, int]] = []
        self._due: set[int] = set()  # the replicas in `_steps`
        # replica -> its steps that only decode, before its step in `_steps`
        self._ahead: dict[int, StepTimes] = {}
        # a heap: when a request ended, where, and its id
        self._ended: list[tuple[float, int, str]] = []
        self.join(len(engines) if count is None else count, 0.0)

    def next(self) -> float:
        """Seconds: when the next step begins. Infinity without one."""
        return self._steps[0][0] if self._steps else math.inf

    def next_replica(self) -> int:
        """The replica whose step is next. Call it only if there is one."""
        return self._steps[0][1]

    def wake(self, replica: int, now: float) -> None:
        """Note that a replica gets work at `now`.

        Its next step begins then, or when the step before it has ended.
        """
        self._interrupt(replica, now)
        engine = self.engines[replica]
        if replica not in self._due:
            # `drive` sleeps in pieces of LONGEST_SLEEP; so does this, and times are equal
            while engine.now < now:
                engine.sleep(min(now - engine.now, LONGEST_SLEEP))
            self._push(replica, engine.now)

    def step(self) -> tuple[int, StepResult | None]:
        """Make a step of the replica that begins first, or look ahead there.

        Returns:
            The replica, and the result of its step. None: the replica has looked ahead, or waits.

        Raises:
            RuntimeError: the replica has work and makes no step, and must not wait.
        """
        _, replica = heappop(self._steps)
        self._due.remove(replica)
        engine = self.engines[replica]
        if replica in self._ahead:
            self._make_steps_ahead(replica, math.inf)
        else:
            times = engine.next_step_times() if self._looks_ahead else None
            if times is not None:
                self._ahead[replica] = times
                self._push(replica, float(times.finished[-1]))
                return replica, None
        result = engine.step()
        if result is not None:
            self._notes.step(self._number + replica, result)
            if engine.has_work:
                self._push(replica, engine.now)
        elif not self._waits:
            raise RuntimeError(
                f"{self._name.format(replica)} has work but makes no step: its scheduler is stuck"
            )
        return replica, result

    def route(self, item: WorkItem, params: SamplingParams, now: float) -> int:
        """The replica that gets a request, by the ends known at `now`."""
        self._learn_ends(now)
        config = self.engines[0].config
        prompt = item.prompt_token_ids
        hashes: tuple[str, ...] = ()
        if self._router.prefixes and config.enable_prefix_caching:
            hashes = tuple(block_hashes.of_prompt(prompt, params, config.block_size)[1])
        tokens = len(prompt) + params.n * params.max_tokens
        request = RouterRequest(item.request_id, tokens, hashes, item.user)
        self._state, replica = routing.route(self._state, self._router, request)
        return int(replica)

    def end_request(self, request_id: str, replica: int, time: float) -> None:
        """Note that a request of this replica ends at a time, which may be in the future."""
        heappush(self._ended, (time, replica, request_id))

    def join(self, count: int, now: float) -> None:
        """Let the next `count` engines get requests."""
        self._learn_ends(now)
        for _ in range(count):
            self._state = routing.joined(self._state, self._num_joined)
            self._num_joined += 1

    def leave(self, now: float) -> int:
        """Let the last replica get no more requests; it ends those that it has.

        Returns:
            The replica.
        """
        self._learn_ends(now)
        replica = self._state.replicas[-1]
        self._state = routing.left(self._state, replica)
        return int(replica)

    def fail(self, now: float) -> tuple[int, float]:
        """Let the last replica leave, and make no further step.

        Returns:
            The replica, and when its step in progress ends, in seconds.
        """
        replica = self.leave(now)
        self._interrupt(replica, now)
        self._remove_step(replica)
        return replica, max(now, self.engines[replica].now)

    def _learn_ends(self, now: float) -> None:
        while self._ended and self._ended[0][0] <= now:
            self._state = routing.finished(self._state, heappop(self._ended)[2])

    def _push(self, replica: int, time: float) -> None:
        heappush(self._steps, (time, replica))
        self._due.add(replica)

    def _remove_step(self, replica: int) -> None:
        self._steps = [step for step in self._steps if step[1] != replica]
        heapify(self._steps)
        self._due.discard(replica)

    def _interrupt(self, replica: int, time: float) -> None:
        """Make the steps ahead of a replica that begin before a time, at which something happens
        there.
        """
        if replica in self._ahead:
            self._remove_step(replica)
            self._make_steps_ahead(replica, time)
            self._push(replica, self.engines[replica].now)

    def _make_steps_ahead(self, replica: int, before: float) -> None:
        """Make the steps ahead of a replica that begin before a time, and forget the others."""
        times = self._ahead.pop(replica)
        count = times.begun(before)
        if count:
            span = self.engines[replica].advance(times.first(count))
            self._notes.span(self._number + replica, span)
