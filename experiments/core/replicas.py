"""Driver of several simulated engines behind a router (pagedjax/routing), in one loop of events.

An event is an arrival, the begin of a replica's step, or the end of a request. They happen in the order of their
times; at one time requests end first, then requests arrive, then steps begin, by number of the replica. A request is
routed when it arrives, by what is known then: the end of a request is known when its last step has ended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush, merge
from typing import Any, Generic, Protocol, TypeVar

from experiments.core.metrics import StepRecord
from experiments.core.submit import LONGEST_SLEEP, Engine, in_order, submit
from experiments.core.workloads import WorkItem, branch_ids
from pagedjax import routing
from pagedjax.config import EngineConfig
from pagedjax.engine import block_hashes
from pagedjax.host.types import Finished, StepResult
from pagedjax.params import SamplingParams
from pagedjax.routing import Router, RouterRequest


class VirtualEngine(Engine, Protocol):
    """An engine with a clock of its own (simulation.simulate.SimulatedEngine)."""

    config: EngineConfig
    now: float  # seconds; while it has work, when its next step begins

    def sleep(self, seconds: float) -> None: ...


E_co = TypeVar("E_co", bound=VirtualEngine, covariant=True)


class Fleet(Generic[E_co]):
    """Engines behind a router, and when each of them begins its next step. The replica i is engines[i]."""

    def __init__(self, engines: Sequence[E_co], router: Router, known_blocks: int) -> None:
        """See `drive_replicas`."""
        self.engines, self._router = engines, router
        state = routing.init(known_blocks)
        for replica in range(len(engines)):
            state = routing.joined(state, replica)
        self._state = state
        self._steps: list[tuple[float, int]] = []  # a heap
        self._due: set[int] = set()  # the replicas in it
        self._ended: list[tuple[float, int, str]] = []  # a heap: when a request ended, where, and its id

    @property
    def next(self) -> float:
        """Seconds: when the next step begins. Infinity without one."""
        return self._steps[0][0] if self._steps else math.inf

    @property
    def next_replica(self) -> int:
        """Whose step is next. Only if there is one."""
        return self._steps[0][1]

    def wake(self, replica: int, now: float) -> None:
        """The replica gets work at `now`: its next step begins then, or when the step before it has ended."""
        engine = self.engines[replica]
        if replica not in self._due:
            while engine.now < now:  # in the pieces in which `drive` sleeps, so that times are the same
                engine.sleep(min(now - engine.now, LONGEST_SLEEP))
            heappush(self._steps, (engine.now, replica))
            self._due.add(replica)

    def step(self) -> tuple[int, StepResult | None]:
        """The next step, by the replica that begins it first; None if it waits for blocks, and has to be woken."""
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

    def ends(self, request_id: str, replica: int, at: float) -> None:
        """A request of this replica ends at a time that may be in the future."""
        heappush(self._ended, (at, replica, request_id))


class Unfinished:
    """Branches that have not ended, by their requests."""

    def __init__(self) -> None:
        self._requests: dict[str, str] = {}  # branch -> its request
        self._left: Counter[str] = Counter()  # request -> its unfinished branches

    def add(self, request_id: str, branches: Sequence[str]) -> None:
        self._requests.update(dict.fromkeys(branches, request_id))
        self._left[request_id] = len(branches)

    def ended(self, branch: str) -> str | None:
        """The branch's request, if that was its last branch."""
        request_id = self._requests.pop(branch)
        self._left[request_id] -= 1
        if self._left[request_id]:
            return None
        del self._left[request_id]
        return request_id


def drive_replicas(
    engines: Sequence[VirtualEngine],
    router: Router,
    known_blocks: int,
    items: Sequence[WorkItem],
    sampling: SamplingParams,
    note: Callable[[int, StepResult], None],
) -> dict[str, int]:
    """Run `items` to their end, from time 0 -> request id to its replica. One engine makes the steps of `drive`.

    Args:
        engines: equal ones; the replica i is engines[i].
        known_blocks: see `routing.init`.
        note: called with a replica and each of its steps. None is kept here: their plans would fill the memory.

    Raises:
        ValueError: an engine refused a request (with its reason), or items are not in order of arrival.
    """
    fleet, unfinished = Fleet(engines, router, known_blocks), Unfinished()
    replicas: dict[str, int] = {}

    def step() -> None:
        replica, result = fleet.step()
        if result is None:
            raise RuntimeError(f"replica {replica} has work but makes no step: its scheduler is stuck")
        note(replica, result)
        for event in result.events:
            if isinstance(event, Finished) and (request_id := unfinished.ended(event.request_id)) is not None:
                fleet.ends(request_id, replica, result.finished)

    for item, params in in_order(items, sampling):
        while fleet.next < item.arrival:
            step()
        replica = fleet.route(item, params, item.arrival)
        fleet.wake(replica, item.arrival)
        submit(engines[replica], item, params)
        unfinished.add(item.request_id, branch_ids(item.request_id, params.n))
        replicas[item.request_id] = replica
    while fleet.next < math.inf:
        step()
    return replicas


def by_end(steps: Iterable[Sequence[StepRecord]]) -> list[StepRecord]:
    """The steps of all replicas in the order in which they ended; of those at one time, by number of the replica."""
    return list(merge(*steps, key=lambda step: step.started + step.seconds))


def of_replicas(where: Iterable[int], steps: Sequence[StepRecord], duration: float, replicas: range) -> dict[str, Any]:
    """How even the replicas were: requests, computed tokens and the share of the time in which they made steps.

    Args:
        where: of each request, its replica.
        replicas: their numbers; steps of others are ignored.
    """
    count, first = len(replicas), replicas.start
    asked, tokens, busy = ([0.0] * count for _ in range(3))
    for replica in where:
        asked[replica - first] += 1
    for step in steps:
        if step.replica in replicas:
            tokens[step.replica - first] += step.tokens
            busy[step.replica - first] += step.seconds / duration
    values = {"requests": asked, "tokens_computed": tokens, "busy_share": busy}
    ends = {
        name: {"least": min(found), "mean": sum(found) / count, "most": max(found)} for name, found in values.items()
    }
    return {"count": count, **ends}
