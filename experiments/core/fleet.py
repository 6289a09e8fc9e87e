"""Several engines behind a router, with the times of their next steps: a pool of pools.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Generic, TypeVar

from experiments.core.replicas import VirtualEngine
from experiments.core.submit import LONGEST_SLEEP
from experiments.core.workloads import WorkItem
from pagedjax import routing
from pagedjax.engine import block_hashes
from pagedjax.host.types import StepResult
from pagedjax.params import SamplingParams
from pagedjax.routing import Router, RouterRequest

E_co = TypeVar("E_co", bound=VirtualEngine, covariant=True)


class Fleet(Generic[E_co]):
    """Engines behind a router, and when each of them begins its next step.

    The replica i is engines[i].
    """

    def __init__(self, engines: Sequence[E_co], router: Router, known_blocks: int) -> None:
        """known_blocks: see `routing.init`."""
        self.engines = engines
        self._router = router
        state = routing.init(known_blocks)
        for replica in range(len(engines)):
            state = routing.joined(state, replica)
        self._state = state
        self._steps: list[tuple[float, int]] = []  # a heap
        self._due: set[int] = set()  # the replicas in it
        # a heap: when a request ended, where, and its id
        self._ended: list[tuple[float, int, str]] = []

    @property
    def next(self) -> float:
        """Seconds: when the next step begins. Infinity without one."""
        return self._steps[0][0] if self._steps else math.inf

    @property
    def next_replica(self) -> int:
        """The replica whose step is next. Call it only if there is one."""
        return self._steps[0][1]

    def wake(self, replica: int, now: float) -> None:
        """Note that a replica gets work at `now`.

        Its next step begins then, or when the step before it has ended.
        """
        engine = self.engines[replica]
        if replica not in self._due:
            # in the pieces in which `drive` sleeps, so that times are the same
            while engine.now < now:
                engine.sleep(min(now - engine.now, LONGEST_SLEEP))
            heappush(self._steps, (engine.now, replica))
            self._due.add(replica)

    def step(self) -> tuple[int, StepResult | None]:
        """Make the next step, on the replica that begins it first.

        Returns:
            The replica, and the result of its step: None if it waits for blocks, and has to be
            woken.
        """
        _, replica = heappop(self._steps)
        self._due.remove(replica)
        engine = self.engines[replica]
        result = engine.step()
        if result is not None and engine.has_work:
            self.wake(replica, engine.now)
        return replica, result

    def route(self, item: WorkItem, params: SamplingParams, now: float) -> int:
        """The replica that gets a request, by the ends known at `now`."""
        while self._ended and self._ended[0][0] <= now:
            self._state = routing.finished(self._state, heappop(self._ended)[2])
        config = self.engines[0].config
        keys: Sequence[str] = ()
        if self._router.prefixes and config.enable_prefix_caching:
            keys = block_hashes.of_prompt(item.prompt_token_ids, params, config.block_size)[1]
        tokens = len(item.prompt_token_ids) + params.n * params.max_tokens
        request = RouterRequest(item.request_id, tokens, tuple(keys))
        self._state, replica = routing.route(self._state, self._router, request)
        return int(replica)

    def end_request(self, request_id: str, replica: int, time: float) -> None:
        """Note that a request of this replica ends at a time, which may be in the future."""
        heappush(self._ended, (time, replica, request_id))
