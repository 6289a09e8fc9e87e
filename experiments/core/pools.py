"""Driver of two pools of simulated engines: one computes prompts and first tokens, the other one
goes on with them.

    prefill   submit -> steps -> released, its blocks are held          given back, when it was adopted
                                     |    its pages, over the link of this engine
    decode                           arrived -> waits for room -> adopted, in front of a step -> steps -> finished

One loop takes the events in the order of their times: pages that arrived, sequences that are
released, arrivals of requests, steps of `decode`, steps of `prefill`; those at one time in this
order. Each pool has a router (pagedjax/routing), which knows the ends in its pool up to the time at
which it is asked. The transitions are those of the real engines (pagedjax/host/handover.py).

All pages of a sequence are sent, even those that `decode` has in its prefix cache. Its row in
`prefill` is free once it is released; its blocks are not until it was adopted, so a full `decode`
holds `prefill` up. It never decodes there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

from experiments.core.config import Experiment
from experiments.core.fleet import Fleet, Unfinished
from experiments.core.pool_options import POOLS, Pool, of_pool
from experiments.core.records import RequestRecord, StepRecord, Transfer
from experiments.core.replicas import VirtualEngine, of_replicas
from experiments.core.submit import Sender, submit
from experiments.core.workloads import WorkItem, branch_ids
from experiments.simulation.simulate import Handover, SimulatedEngine, SimulatedLLM
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import HOLE, Finished, Request, StepResult
from pagedjax.load_client.summary import spread
from pagedjax.params import SamplingParams
from pagedjax.routing import Router

# Keys of a summary that are of one engine: two kinds of engines have no value in common.
OF_ONE_ENGINE = ("blocks_total", "blocks_used", "slots_used")


class PoolEngine(VirtualEngine, Protocol):
    """An engine that hands sequences over (simulation.simulate.SimulatedEngine)."""

    scheduler_state: SchedulerState

    def check(self, request: Request) -> None: ...

    def prefilled(self) -> tuple[str, ...]: ...

    def release(self, request_id: str) -> Handover: ...

    def free(self, found: Handover) -> None: ...

    def adopt(self, found: Handover) -> bool: ...


class Link(NamedTuple):
    """What pages are sent by.

    Each engine of `prefill` has one, and sends one sequence after the other.
    """

    block_bytes: float
    bandwidth: float = math.inf  # bytes/s
    latency: float = 0.0  # seconds of each sequence, in which the next one is sent already


class Moving(NamedTuple):
    """A sequence on its way. replica: in `prefill`; target: in `decode`."""

    found: Handover
    request_id: str  # of its request; its own is in `found`
    replica: int
    target: int
    bytes: float
    released: float
    arrived: float


class Where(NamedTuple):
    """Where requests ran. Numbers of `decode` follow those of `prefill`."""

    prefill: Mapping[str, int]
    # by request; none of a request whose first token was its last
    transfers: Mapping[str, Sequence[Transfer]]


class Note(Protocol):
    """What a driver tells: steps, and sequences whose blocks were given back between two steps."""

    def step(self, replica: int, result: StepResult) -> None: ...

    def left(self, replica: int, branch_id: str) -> None: ...


def drive_pools(
    prefill: Fleet[PoolEngine],
    decode: Fleet[PoolEngine],
    link: Link,
    items: Sequence[WorkItem],
    sampling: SamplingParams,
    note: Note,
    clients: int | None = None,
) -> Where:
    """Run `items` to their end, from time 0.

    Args:
        clients: of a closed loop; None: an open loop (see `Sender`).

    Raises:
        ValueError: an engine refused a request (with its reason), or items are not in order of
            arrival.
        RuntimeError: sequences are left, and no engine can make a step.
    """
    sender = Sender(items, sampling, clients)
    run = _Run(prefill, decode, link, note, sender)
    while True:
        sent = sender.next
        arrival = math.inf if sent is None else sent
        stepping = min(prefill.next, decode.next)
        if run.moves and run.moves[0][0] <= min(arrival, stepping):
            run.move()
        elif sent is not None and arrival <= stepping:
            run.submit(arrival, *sender.send())
        elif decode.next <= prefill.next and decode.next < math.inf:
            run.step_decode()
        elif prefill.next < math.inf:
            run.step_prefill()
        else:
            break
    if left := [engine for engine in (*prefill.engines, *decode.engines) if engine.has_work]:
        raise RuntimeError(
            f"{len(left)} engines have work but make no step: their schedulers are stuck"
        )
    return Where(run.prefills, run.transfers)


class _Run:
    """The state of a run of two pools, and its events."""

    def __init__(
        self,
        prefill: Fleet[PoolEngine],
        decode: Fleet[PoolEngine],
        link: Link,
        note: Note,
        sender: Sender,
    ) -> None:
        self.prefills: dict[str, int] = {}
        self.transfers: dict[str, list[Transfer]] = {}
        # a heap: time, 0 for an arrival, order, what moves
        self.moves: list[tuple[float, int, int, Any]] = []
        self._prefill, self._decode, self._link, self._note = prefill, decode, link, note
        self._count = 0  # of moves
        self._free = [0.0] * len(prefill.engines)  # when each link is free
        self._arrived: list[deque[Moving]] = [deque() for _ in decode.engines]  # they wait for room
        self._items: dict[str, tuple[WorkItem, SamplingParams]] = {}  # by the id of the request
        self._branches: dict[str, str] = {}  # branch in `prefill` -> its request
        self._targets: dict[str, int] = {}  # request -> its engine of `decode`
        self._computing, self._sender = Unfinished(), sender

    def submit(self, now: float, item: WorkItem, params: SamplingParams) -> None:
        replica = self._prefill.route(item, params, now)
        self._prefill.wake(replica, now)
        engine = self._prefill.engines[replica]
        submit(engine, item, params)
        try:
            self._decode.engines[0].check(engine.scheduler_state.waiting[-1].request)
        except ValueError as error:
            raise ValueError(
                f"an engine of pools.decode refused {item.request_id}: {error}. Bound the "
                "workload's lengths, or raise the limit"
            ) from error
        names = branch_ids(item.request_id, params.n)
        self._computing.add(item.request_id, names)
        self._branches.update(dict.fromkeys(names, item.request_id))
        self._items[item.request_id] = item, params
        self.prefills[item.request_id] = replica

    def step_prefill(self) -> None:
        """A step that computes prompts.

        Sequences that have their first token are released when it has ended.
        """
        replica, result = self._prefill.step()
        if result is None:  # it waits until blocks are given back
            return
        self._note.step(replica, result)
        for event in result.events:
            if isinstance(event, Finished):
                self._gone(event.request_id, replica, result.finished)
        self._sender.ended(result, result.finished)
        engine = self._prefill.engines[replica]
        for name in engine.prefilled():
            request_id = self._gone(name, replica, result.finished)
            self._push(result.finished, 1, (engine.release(name), request_id, replica))

    def _gone(self, branch: str, replica: int, now: float) -> str:
        """A branch has ended in `prefill`, or leaves it -> its request."""
        if (request_id := self._computing.ended(branch)) is not None:
            self._prefill.ends(request_id, replica, now)
        return self._branches.pop(branch)

    def _push(self, at: float, kind: int, what: Any) -> None:
        heappush(self.moves, (at, kind, self._count, what))
        self._count += 1

    def move(self) -> None:
        """Pages have arrived, or a sequence that was released is sent."""
        now, kind, _, what = heappop(self.moves)
        if kind == 0:
            self._arrived[what.target].append(what)
            self._decode.wake(what.target, now)
            return
        found, request_id, replica = what
        if request_id not in self._targets:  # the branches of a request go to one engine
            item, params = self._items[request_id]
            self._targets[request_id] = self._decode.route(item, params, now)
        pages = sum(block != HOLE for block in found.released.blocks) * self._link.block_bytes
        sent = max(now, self._free[replica]) + pages / self._link.bandwidth
        self._free[replica] = sent
        moving = Moving(
            found,
            request_id,
            replica,
            self._targets[request_id],
            pages,
            now,
            sent + self._link.latency,
        )
        self._push(moving.arrived, 0, moving)

    def step_decode(self) -> None:
        """A step of an engine of `decode`, in front of which it adopts what has arrived and has
        room, in order.
        """
        now, target = self._decode.next, self._decode.next_replica
        engine, waiting = self._decode.engines[target], self._arrived[target]
        while waiting and engine.adopt(waiting[0].found):
            self._adopted(waiting.popleft(), now)
        replica, result = self._decode.step()
        if result is None:
            raise RuntimeError(
                f"engine {target} of pools.decode has work but makes no step: its scheduler is "
                "stuck"
            )
        number = replica + len(self._prefill.engines)
        self._note.step(number, result)
        for request_id in self._sender.ended(result, result.finished):
            self._decode.ends(request_id, replica, result.finished)
            del self._targets[request_id]
        if waiting:  # even if nothing runs there any more
            self._decode.wake(target, engine.now)

    def _adopted(self, moving: Moving, now: float) -> None:
        """A sequence runs in `decode`, so its blocks in `prefill` are free, where others may wait
        for them.
        """
        engine, name = (
            self._prefill.engines[moving.replica],
            moving.found.released.request.request_id,
        )
        engine.free(moving.found)
        self._note.left(moving.replica, name)
        if engine.has_work:
            self._prefill.wake(moving.replica, now)
        number = moving.target + len(self._prefill.engines)
        transfer = Transfer(name, number, moving.bytes, moving.released, moving.arrived, now)
        self.transfers.setdefault(moving.request_id, []).append(transfer)


class PooledLLM:
    """Two pools of an experiment.

    The attributes of an `LLM` that `drive.measure` uses; `engine` is of `prefill`.
    """

    def __init__(self, experiment: Experiment) -> None:
        """Raises ValueError if the experiment cannot be simulated."""
        assert experiment.pools is not None, "see `Experiment`"
        self._pools = experiment.pools
        self.prefill, self.decode = (self._made(experiment, name) for name in POOLS)
        self.engines: tuple[SimulatedEngine, ...] = self.prefill.engines + self.decode.engines
        self.engine, self.tokenizer = self.prefill.engine, self.prefill.tokenizer
        self.startup: dict[str, float] = {}
        speed = experiment.pools.link_gb_s
        bandwidth = math.inf if speed is None else 1e9 * speed
        self.link = Link(self.prefill.block_bytes, bandwidth, experiment.pools.latency_s)

    def _made(self, experiment: Experiment, name: str) -> SimulatedLLM:
        one, pool = of_pool(experiment, name), getattr(self._pools, name)
        assert one.simulate is not None, "see `check_pools`"
        try:
            return SimulatedLLM(one.simulate, one.engine_config, one.model, pool.count)
        except ValueError as error:
            raise ValueError(f"pools.{name}: {error}") from error

    def fleets(self, find: Callable[[str], Router]) -> tuple[Fleet[PoolEngine], Fleet[PoolEngine]]:
        """`prefill` and `decode` behind their routers, each of which knows as many hashes as an
        engine has blocks.
        """

        def fleet(pool: Pool, llm: SimulatedLLM) -> Fleet[PoolEngine]:
            assert llm.engine.config.num_blocks is not None, "see `resolved`"
            return Fleet(llm.engines, find(pool.router), llm.engine.config.num_blocks)

        return fleet(self._pools.prefill, self.prefill), fleet(self._pools.decode, self.decode)


def of_pools(
    requests: Iterable[RequestRecord],
    steps: Sequence[StepRecord],
    counts: Sequence[int],
    duration: float,
) -> dict[str, Any]:
    """How even the engines of each pool were, their blocks, and what moving took.

    `blocks_used` over `blocks_total` says how full a pool was. In `prefill` it has the blocks of
    sequences that wait for room in `decode`: if it is full, these hold it up.

    Args:
        counts: engines of `prefill` and of `decode`.
    """
    requests = list(requests)
    found = [transfer for request in requests for transfer in request.transfers]
    moved = [request.transfers[0].replica for request in requests if request.transfers]
    first, second = range(counts[0]), range(counts[0], sum(counts))
    return {
        "prefill": of_replicas([one.replica for one in requests], steps, duration, first)
        | _blocks(steps, first),
        "decode": of_replicas(moved, steps, duration, second) | _blocks(steps, second),
        "transfers": len(found),
        "moved_bytes": sum(one.bytes for one in found),
        "transfer_s": spread(one.arrived - one.released for one in found),
        "wait_s": spread(one.adopted - one.arrived for one in found),
    }


def _blocks(steps: Sequence[StepRecord], engines: range) -> dict[str, Any]:
    """Blocks of an engine of a pool, and those in use, over the steps of its engines; None without
    a step.
    """
    found = [step for step in steps if step.replica in engines]
    if not found:
        return {"blocks_total": None, "blocks_used": None}
    used = [step.blocks_used for step in found]
    return {
        "blocks_total": found[0].num_blocks,
        "blocks_used": {"mean": sum(used) / len(used), "peak": max(used)},
    }
