"""Driver of several simulated engines behind a router (pagedjax/routing), in one loop of events.

An event is an arrival, the begin of a replica's step, the end of a request, or a change of the
replicas. They happen in the order of their times; at one time requests end first, then replicas
change, then requests of failed replicas are routed again, then requests arrive, then steps begin,
by number of the replica. A request is routed when it arrives, by what is known then: the end of a
request is known when its last step has ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush, merge
from typing import Any, NamedTuple, Protocol

from experiments.core.present import Change
from experiments.core.records import StepRecord
from experiments.core.submit import LONGEST_SLEEP, Engine, Sender, submit
from experiments.core.workloads import WorkItem
from experiments.simulation.spans import DecodeSpan, StepTimes
from pagedjax import routing
from pagedjax.config import EngineConfig
from pagedjax.engine import block_hashes
from pagedjax.host.types import StepResult
from pagedjax.params import SamplingParams
from pagedjax.routing import Router, RouterRequest


class VirtualEngine(Engine, Protocol):
    """An engine with a clock of its own (simulation.simulate.SimulatedEngine)."""

    config: EngineConfig
    now: float  # seconds; while it has work, when its next step begins

    def sleep(self, seconds: float) -> None: ...

    def ahead(self) -> StepTimes | None: ...

    def advance(self, times: StepTimes) -> DecodeSpan: ...


class Notes(Protocol):
    """What a driver calls with each step, or each span of steps, of a replica.

    The driver keeps no results: their plans would fill the memory.
    """

    def step(self, replica: int, result: StepResult) -> None: ...

    def span(self, replica: int, span: DecodeSpan) -> None: ...


class Present(NamedTuple):
    """Which replicas are present.

    count: at the start; the others join by `changes`, in the order of their numbers.
    forget_request: called with a request whose replica failed, before it is routed again.
    """

    count: int
    changes: Sequence[Change] = ()
    forget_request: Callable[[str], None] = lambda request_id: None


def drive_replicas(
    engines: Sequence[VirtualEngine],
    router: Router,
    known_blocks: int,
    items: Sequence[WorkItem],
    sampling: SamplingParams,
    notes: Notes,
    clients: int | None = None,
    present: Present | None = None,
) -> dict[str, int]:
    """Run `items` to their end, from time 0. With one engine the steps are those of `drive`.

    Args:
        engines: equal ones; the replica i is engines[i].
        known_blocks: see `routing.init`.
        notes: called with each step, or with several at once that only decode. Those of a replica
            come in order.
        clients: of a closed loop; None: an open loop (see `Sender`).
        present: None: all engines, from the beginning to the end.

    Returns:
        The replica of each request, by its id.

    Raises:
        ValueError: an engine refused a request (with its reason), or items are not in order of
            arrival.
    """
    sender = Sender(items, sampling, clients)
    cluster = _Cluster(
        engines, router, known_blocks, sender, notes, present or Present(len(engines))
    )
    while cluster.advance():
        pass
    return cluster.replicas


class _Cluster:
    """The loop's state: what each replica has, and heaps of what is to come."""

    def __init__(
        self,
        engines: Sequence[VirtualEngine],
        router: Router,
        known_blocks: int,
        sender: Sender,
        notes: Notes,
        present: Present,
    ) -> None:
        self._engines = engines
        self._router = router
        self._sender = sender
        self._notes = notes
        self._hashes_prompts = router.prefixes and engines[0].config.enable_prefix_caching
        self._state = routing.init(known_blocks)
        self._num_joined = 0
        self._changes = deque(present.changes)
        self._forget_request = present.forget_request
        self._join(present.count)
        self.replicas: dict[str, int] = {}  # of each request that was routed
        # in the order in which they were sent
        self._unfinished: dict[str, tuple[WorkItem, SamplingParams]] = {}
        # a heap: when each replica with work makes a step, or looks ahead
        self._steps: list[tuple[float, int]] = []
        # by replica, its steps before that one, which only decode
        self._ahead: dict[int, StepTimes] = {}
        # a heap: when a request ended, its replica, and its id
        self._ended: list[tuple[float, int, str]] = []
        # a heap: when a request is routed again, its order, and its id
        self._lost: list[tuple[float, int, str]] = []

    def advance(self) -> bool:
        """Handle the next event. False: there is none."""
        change_time = self._changes[0].at if self._changes else math.inf
        lost_time = self._lost[0][0] if self._lost else math.inf
        next_sent = self._sender.next
        arrival = math.inf if next_sent is None else next_sent
        time = min(change_time, lost_time, arrival)
        if self._steps and self._steps[0][0] < time:
            self._step()  # it may end a request before `time`, and free a client
            return True
        if not (self._steps or self._lost or self._sender.has_unsent):
            return False  # all requests have ended, so that changes to come do not matter
        while self._ended and self._ended[0][0] <= time:
            self._state = routing.finished(self._state, heappop(self._ended)[2])
        if time == change_time:
            self._change(self._changes.popleft())
        elif time == lost_time:
            _, _, request_id = heappop(self._lost)
            item, params = self._unfinished[request_id]
            self._forget_request(request_id)
            self._sender.begin_request(item, params)
            self._submit(time, item, params)
        else:
            self._submit(time, *self._sender.send())
        return True

    def _step(self) -> None:
        """Make a step of the replica that begins first, or look ahead there.

        If its next steps only decode, they concern no other replica, and wait. So they are made
        together: before the step that follows them, or before the next request arrives at this
        replica.
        """
        _, replica = heappop(self._steps)
        engine = self._engines[replica]
        if replica in self._ahead:
            self._make_steps_ahead(replica, math.inf)
        else:
            times = engine.ahead()
            if times is not None:
                self._ahead[replica] = times
                heappush(self._steps, (float(times.finished[-1]), replica))
                return
        result = engine.step()
        if result is None:
            raise RuntimeError(
                f"replica {replica} has work but makes no step: its scheduler is stuck"
            )
        self._notes.step(replica, result)
        for request_id in self._sender.end_branches(result, result.finished):
            del self._unfinished[request_id]
            heappush(self._ended, (result.finished, replica, request_id))
        if engine.has_work:
            heappush(self._steps, (engine.now, replica))

    def _make_steps_ahead(self, replica: int, before: float) -> None:
        """Make the steps ahead of a replica that begin before a time, and forget the others."""
        times = self._ahead.pop(replica)
        count = times.begun(before)
        if count:
            self._notes.span(replica, self._engines[replica].advance(times.first(count)))

    def _interrupt(self, replica: int, time: float) -> None:
        """Make the steps ahead of a replica that begin before a time, at which something happens
        there.
        """
        if replica in self._ahead:
            self._remove_step(replica)
            self._make_steps_ahead(replica, time)
            heappush(self._steps, (self._engines[replica].now, replica))

    def _remove_step(self, replica: int) -> None:
        self._steps = [step for step in self._steps if step[1] != replica]
        heapify(self._steps)

    def _submit(self, time: float, item: WorkItem, params: SamplingParams) -> None:
        """Route a request, and add it to its replica."""
        block_size = self._engines[0].config.block_size
        prompt = item.prompt_token_ids
        hashes: tuple[str, ...] = ()
        if self._hashes_prompts:
            hashes = block_hashes.of_prompt(prompt, params, block_size)[1]
        tokens = len(prompt) + params.n * params.max_tokens
        request = RouterRequest(item.request_id, tokens, hashes)
        self._state, chosen = routing.route(self._state, self._router, request)
        replica = int(chosen)
        self._interrupt(replica, time)
        engine = self._engines[replica]
        if not engine.has_work:
            # in the pieces in which `drive` sleeps, so that times are the same
            while engine.now < time:
                engine.sleep(min(time - engine.now, LONGEST_SLEEP))
            heappush(self._steps, (engine.now, replica))
        submit(engine, item, params)
        self._unfinished[item.request_id] = (item, params)
        self.replicas[item.request_id] = replica

    def _change(self, change: Change) -> None:
        self._join(change.join)
        for _ in range(change.leave):  # its steps go on until its requests have ended
            self._state = routing.left(self._state, self._state.replicas[-1])
        for _ in range(change.fail):
            failed = self._state.replicas[-1]
            self._state = routing.left(self._state, failed)
            self._fail(int(failed), change.at)

    def _join(self, count: int) -> None:
        for _ in range(count):
            self._state = routing.joined(self._state, self._num_joined)
            self._num_joined += 1

    def _fail(self, replica: int, time: float) -> None:
        """Stop a replica: it makes no further step.

        Its requests are routed again when the step that it makes has ended.
        """
        self._interrupt(replica, time)
        self._remove_step(replica)
        route_time = max(time, self._engines[replica].now)
        lost = [name for name in self._unfinished if self.replicas[name] == replica]
        for order, request_id in enumerate(lost, len(self.replicas)):
            heappush(self._lost, (route_time, order, request_id))


def by_end(steps: Iterable[Sequence[StepRecord]]) -> list[StepRecord]:
    """The steps of all replicas in the order in which they ended; of those at one time, by number
    of the replica.
    """
    return list(merge(*steps, key=lambda step: step.started + step.seconds))


class StepLoad(Protocol):
    """A step of a replica, or the sums of several."""

    @property
    def replica(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...


def replicas_summary(
    request_replicas: Iterable[int], steps: Sequence[StepLoad], duration: float, replicas: range
) -> dict[str, Any]:
    """How even the replicas were: requests, computed tokens and the share of the time in which they
    made steps.

    Args:
        request_replicas: of each request, the replica that ended it. What a failed one computed of
            it counts as tokens there.
        replicas: the numbers of those that were present at some time of the run; steps of others
            are ignored. Shares are of the whole run.
    """
    count = len(replicas)
    requests = [0.0] * count
    tokens = [0.0] * count
    busy_shares = [0.0] * count
    for replica in request_replicas:
        requests[replica - replicas.start] += 1
    for step in steps:
        if step.replica in replicas:
            tokens[step.replica - replicas.start] += step.tokens
            busy_shares[step.replica - replicas.start] += step.seconds / duration
    columns = {"requests": requests, "tokens_computed": tokens, "busy_share": busy_shares}
    spreads = {
        name: {"least": min(values), "mean": sum(values) / count, "most": max(values)}
        for name, values in columns.items()
    }
    return {"count": count, **spreads}
