"""Driver of several simulated engines behind a router (pagedjax/routing), in one loop of events.

An event is an arrival, the beginning of a replica's step, the end of a request, or a change of the
replicas. Events happen in the order of their times. At the same time, requests end first, then
replicas change, then requests of failed replicas are routed again, then requests arrive, then steps
begin, in the order of their replicas.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush, merge
from typing import Any, NamedTuple, Protocol

from experiments.core.fleet import Fleet, Notes, Source, VirtualEngine, run_events
from experiments.core.records import StepRecord
from experiments.core.replica_options import Change
from experiments.core.submit import Sender, submit
from experiments.core.workloads import WorkItem
from experiments.simulation.spans import DecodeSpan
from pagedjax.host.types import StepResult
from pagedjax.options.params import SamplingParams
from pagedjax.routing import Router


class ReplicaCount(NamedTuple):
    """Which replicas are present.

    count: the number at the start; others join by `changes`, in the order of their numbers.
    forget_request: called with the id of a request whose replica failed, before the request is
        routed again.
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
    present: ReplicaCount | None = None,
) -> dict[str, int]:
    """Run `items` to their end, from time 0. With one engine the steps are those of `drive`.

    Args:
        engines: equal engines; the replica i is engines[i].
        known_blocks: see `routing.init`.
        notes: called with each step, or with several steps at once that only decode. The steps of
            a replica come in order.
        clients: the number of clients of a closed loop; None: an open loop (see `Sender`).
        present: which replicas are present; None: all, from the beginning to the end.

    Returns:
        The replica of each request, by its id.

    Raises:
        ValueError: an engine refused a request (with its reason), or items are not in order of
            arrival.
    """
    present = present or ReplicaCount(len(engines))
    sender = Sender(items, sampling, clients)
    fleet = Fleet(engines, router, known_blocks, _Notes(notes, sender), count=present.count)
    cluster = _Cluster(fleet, sender, present)
    run_events(
        Source(cluster.next_change, cluster.change),
        Source(cluster.next_lost, cluster.route_again),
        Source(cluster.sender.next, cluster.send),
        Source(fleet.next, cluster.step),
    )
    return cluster.replicas


class _Notes(NamedTuple):
    """Notes that also give the sender the answers of steps that are made together. The sender gets
    those of other steps from `Sender.end_branches`.
    """

    notes: Notes
    sender: Sender

    def step(self, replica: int, result: StepResult) -> None:
        self.notes.step(replica, result)

    def span(self, replica: int, span: DecodeSpan) -> None:
        self.sender.answers.add_span(span)
        self.notes.span(replica, span)


class _Cluster:
    """The state of a run of replicas, and its events."""

    def __init__(self, fleet: Fleet[VirtualEngine], sender: Sender, present: ReplicaCount) -> None:
        self.sender = sender
        self.replicas: dict[str, int] = {}  # request that was routed -> its replica
        self._fleet = fleet
        self._changes = deque(present.changes)
        self._forget_request = present.forget_request
        # requests by their ids, in the order in which they were sent
        self._unfinished: dict[str, tuple[WorkItem, SamplingParams]] = {}
        # a heap: when a request is routed again, its order, and its id
        self._lost: list[tuple[float, int, str]] = []

    def next_lost(self) -> float:
        """When the next request of a failed replica is routed again."""
        return self._lost[0][0] if self._lost else math.inf

    def next_change(self) -> float:
        """When the replicas change; infinity if all requests have ended, or no change is left."""
        if not self._changes or not (self._unfinished or self.sender.has_unsent):
            return math.inf
        return self._changes[0].at

    def send(self) -> None:
        """Route the next request that arrives."""
        time = self.sender.next()
        item, params = self.sender.take_next()
        self._submit(time, item, params)

    def route_again(self) -> None:
        """Route a request of a failed replica, to compute it anew."""
        time, _, request_id = heappop(self._lost)
        item, params = self._unfinished[request_id]
        self._forget_request(request_id)
        self.sender.begin_request(item, params)
        self._submit(time, item, params)

    def _submit(self, time: float, item: WorkItem, params: SamplingParams) -> None:
        """Route a request, and add it to its replica."""
        replica = self._fleet.route(item, params, time)
        self._fleet.wake(replica, time)
        submit(self._fleet.engines[replica], item, params)
        self._unfinished[item.request_id] = (item, params)
        self.replicas[item.request_id] = replica

    def step(self) -> None:
        """Make the next step."""
        replica, result = self._fleet.step()
        if result is None:
            return
        for request_id in self.sender.end_branches(result, result.finished):
            del self._unfinished[request_id]
            self._fleet.end_request(request_id, replica, result.finished)

    def change(self) -> None:
        """Let replicas join, leave or fail.

        Requests of a replica that fails are routed again when its step in progress has ended.
        """
        change = self._changes.popleft()
        self._fleet.join(change.join, change.at)
        for _ in range(change.leave):
            self._fleet.leave(change.at)
        for _ in range(change.fail):
            replica, route_time = self._fleet.fail(change.at)
            lost = [
                request_id
                for request_id in self._unfinished
                if self.replicas[request_id] == replica
            ]
            for order, request_id in enumerate(lost, len(self.replicas)):
                heappush(self._lost, (route_time, order, request_id))


def by_end(steps: Iterable[Sequence[StepRecord]]) -> list[StepRecord]:
    """The steps of all replicas in the order in which they ended. Steps that ended at the same time
    are in the order of their replicas.
    """
    return list(merge(*steps, key=lambda step: step.started + step.seconds))


class StepLoad(Protocol):
    """A step of a replica, or the sums of several steps."""

    @property
    def replica(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...


def replicas_summary(
    request_replicas: Iterable[int], steps: Sequence[StepLoad], duration: float, replicas: range
) -> dict[str, Any]:
    """How evenly the replicas worked: requests, computed tokens and the share of the time in which
    they made steps.

    Args:
        request_replicas: the replica that ended each request. Tokens that a failed replica computed
            of a request count for the failed replica.
        duration: of the run, in seconds. Shares are of this time.
        replicas: the numbers of the replicas that were present at some time of the run; steps of
            others are ignored.
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
