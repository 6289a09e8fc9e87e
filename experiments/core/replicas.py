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
    """What is called with a replica and what it did.

    Nothing is kept here: plans would fill the memory.
    """

    def step(self, replica: int, result: StepResult) -> None: ...

    def span(self, replica: int, span: DecodeSpan) -> None: ...


class Present(NamedTuple):
    """Which replicas are there. count: at the start; the others join by `changes`, in the order of
    their numbers.

    anew: called with a request whose replica failed, before it is routed again.
    """

    count: int
    changes: Sequence[Change] = ()
    anew: Callable[[str], None] = lambda request_id: None


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
    """Run `items` to their end, from time 0 -> request id to its replica.

    One engine makes the steps of `drive`.

    Args:
        engines: equal ones; the replica i is engines[i].
        known_blocks: see `routing.init`.
        notes: called with each step, or with several at once that only decode. Those of a replica
            come in order.
        clients: of a closed loop; None: an open loop (see `Sender`).
        present: None: all engines, from the beginning to the end.

    Raises:
        ValueError: an engine refused a request (with its reason), or items are not in order of
            arrival.
    """
    sender = Sender(items, sampling, clients)
    cluster = _Cluster(
        engines, router, known_blocks, sender, notes, present or Present(len(engines))
    )
    while cluster.happens():
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
        self._engines, self._router, self._sender, self._notes = engines, router, sender, notes
        self._hashes = router.prefixes and engines[0].config.enable_prefix_caching
        self._state, self._joined = routing.init(known_blocks), 0
        self._changes, self._anew = deque(present.changes), present.anew
        self._join(present.count)
        self.replicas: dict[str, int] = {}
        # in the order in which they were sent
        self._unfinished: dict[str, tuple[WorkItem, SamplingParams]] = {}
        # a heap: when each replica with work makes a step, or looks ahead
        self._steps: list[tuple[float, int]] = []
        # the steps of a replica before that one, which only decode
        self._ahead: dict[int, StepTimes] = {}
        # a heap: when a request ended, where, and its id
        self._ended: list[tuple[float, int, str]] = []
        # a heap: when a request is routed again, its order, and its id
        self._again: list[tuple[float, int, str]] = []

    def happens(self) -> bool:
        """The next event. False: there is none."""
        change = self._changes[0].at if self._changes else math.inf
        again = self._again[0][0] if self._again else math.inf
        sent = self._sender.next
        at = min(change, again, math.inf if sent is None else sent)
        if self._steps and self._steps[0][0] < at:
            self._step()  # it may end a request before `at`, and free a client
            return True
        if not (self._steps or self._again or self._sender.left):
            return False  # all requests have ended, so that changes to come do not matter
        while self._ended and self._ended[0][0] <= at:
            self._state = routing.finished(self._state, heappop(self._ended)[2])
        if at == change:
            self._change(self._changes.popleft())
        elif at == again:
            _, _, request_id = heappop(self._again)
            self._anew(request_id)
            self._sender.began(*self._unfinished[request_id])
            self._submit(at, *self._unfinished[request_id])
        else:
            self._submit(at, *self._sender.send())
        return True

    def _step(self) -> None:
        """A step of the replica that begins first, or a look ahead: if its next steps only decode,
        they wait.

        They concern no other replica. So they are made together, before the step that follows them,
        or before the next request arrives at this replica.
        """
        _, replica = heappop(self._steps)
        engine = self._engines[replica]
        if replica in self._ahead:
            self._advance(replica, math.inf)
        elif (times := engine.ahead()) is not None:
            self._ahead[replica] = times
            heappush(self._steps, (float(times.finished[-1]), replica))
            return
        result = engine.step()
        if result is None:
            raise RuntimeError(
                f"replica {replica} has work but makes no step: its scheduler is stuck"
            )
        self._notes.step(replica, result)
        for request_id in self._sender.ended(result, result.finished):
            del self._unfinished[request_id]
            heappush(self._ended, (result.finished, replica, request_id))
        if engine.has_work:
            heappush(self._steps, (engine.now, replica))

    def _advance(self, replica: int, before: float) -> None:
        """Make the steps ahead of a replica that begin before a time, and forget the others."""
        times = self._ahead.pop(replica)
        if begun := times.begun(before):
            self._notes.span(replica, self._engines[replica].advance(times.first(begun)))

    def _interrupt(self, replica: int, at: float) -> None:
        """Something happens at this replica: of the steps ahead, those are made that begin before
        it.
        """
        if replica in self._ahead:
            self._steps = [step for step in self._steps if step[1] != replica]
            heapify(self._steps)
            self._advance(replica, at)
            heappush(self._steps, (self._engines[replica].now, replica))

    def _submit(self, at: float, item: WorkItem, params: SamplingParams) -> None:
        """Route a request, and add it to its replica."""
        size, prompt = self._engines[0].config.block_size, item.prompt_token_ids
        keys = block_hashes.of_prompt(prompt, params, size)[1] if self._hashes else ()
        tokens = len(prompt) + params.n * params.max_tokens
        self._state, chosen = routing.route(
            self._state, self._router, RouterRequest(item.request_id, tokens, keys)
        )
        replica = int(chosen)
        self._interrupt(replica, at)
        engine = self._engines[replica]
        if not engine.has_work:
            while (
                engine.now < at
            ):  # in the pieces in which `drive` sleeps, so that times are the same
                engine.sleep(min(at - engine.now, LONGEST_SLEEP))
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
            self._state = routing.joined(self._state, self._joined)
            self._joined += 1

    def _fail(self, replica: int, at: float) -> None:
        """It makes no further step.

        Its requests are routed again when the step that it makes has ended.
        """
        self._interrupt(replica, at)
        self._steps = [step for step in self._steps if step[1] != replica]
        heapify(self._steps)
        when = max(at, self._engines[replica].now)
        lost = [name for name in self._unfinished if self.replicas[name] == replica]
        for order, request_id in enumerate(lost, len(self.replicas)):
            heappush(self._again, (when, order, request_id))


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


def of_replicas(
    where: Iterable[int], steps: Sequence[StepLoad], duration: float, replicas: range
) -> dict[str, Any]:
    """How even the replicas were: requests, computed tokens and the share of the time in which they
    made steps.

    Args:
        where: of each request, the replica that ended it. What a failed one computed of it counts
            as tokens there.
        replicas: the numbers of those that were present at some time of the run; steps of others
            are ignored. Shares are of the whole run.
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
        name: {"least": min(found), "mean": sum(found) / count, "most": max(found)}
        for name, found in values.items()
    }
    return {"count": count, **ends}
