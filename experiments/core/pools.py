"""Driver of two pools of simulated engines: one computes prompts and first tokens, the other one
goes on with them.

    prefill  submit -> steps -> released, its blocks are held       given back, when it was adopted
                                    |    its pages, over the link of this engine
    decode                          arrived -> waits for room -> adopted before a step -> finished

Events happen in the order of their times: pages that arrived, sequences that are released, arrivals
of requests, steps of `decode`, steps of `prefill`; those at one time in this order. Each pool has a
router (pagedjax/routing), which knows the ends in its pool up to the time at which it is asked. The
transitions are those of the real engines (pagedjax/host/handover.py).

All pages of a sequence are sent, even those that `decode` has in its prefix cache. Its row in
`prefill` is free once it is released; its blocks are not until it was adopted, so a full `decode`
holds `prefill` up. It never decodes there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

from experiments.core.config import Experiment
from experiments.core.fleet import Fleet, Notes, Source, VirtualEngine, run_events
from experiments.core.pool_options import POOLS, of_pool
from experiments.core.records import RequestRecord, StepRecord, Transfer
from experiments.core.replicas import replicas_summary
from experiments.core.submit import Sender, Unfinished, submit
from experiments.core.workloads import WorkItem, branch_ids
from experiments.simulation.simulate import Handover, SimulatedEngine, SimulatedLLM
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import HOLE, Finished, Request
from pagedjax.options.params import SamplingParams
from pagedjax.routing import Router
from pagedjax.server.load_client.summary import spread

# Keys of a summary that describe one engine: two kinds of engines have no value in common.
OF_ONE_ENGINE = ("blocks_total", "blocks_used", "slots_used")


class PoolEngine(VirtualEngine, Protocol):
    """An engine that hands sequences over (simulation.simulate.SimulatedEngine)."""

    scheduler_state: SchedulerState

    def check(self, request: Request) -> None: ...

    def prefilled(self) -> tuple[str, ...]: ...

    def release(self, request_id: str) -> Handover: ...

    def free(self, handover: Handover) -> None: ...

    def adopt(self, handover: Handover) -> bool: ...


class Link(NamedTuple):
    """The link that an engine of `prefill` sends pages over, one sequence after the other."""

    block_bytes: float
    bandwidth: float = math.inf  # bytes/s
    latency: float = 0.0  # seconds of each sequence, in which the next one is sent already


class Shipment(NamedTuple):
    """A sequence on its way from `prefill` to `decode`, with the times of its transfer."""

    handover: Handover
    request_id: str  # of its request; its own is in `handover`
    replica: int  # in `prefill`
    target: int  # in `decode`
    bytes: float
    released: float
    arrived: float


class Placement(NamedTuple):
    """Where requests ran. Numbers of `decode` follow those of `prefill`."""

    prefill: Mapping[str, int]
    # by request; none of a request whose first token was its last
    transfers: Mapping[str, Sequence[Transfer]]


class PoolNotes(Notes, Protocol):
    """What a driver calls with each step, and with each sequence that left between two steps."""

    def drop_branch(self, replica: int, branch_id: str) -> None: ...


def drive_pools(
    prefill: Sequence[PoolEngine],
    decode: Sequence[PoolEngine],
    routers: tuple[Router, Router],
    link: Link,
    items: Sequence[WorkItem],
    sampling: SamplingParams,
    notes: PoolNotes,
    clients: int | None = None,
) -> Placement:
    """Run `items` to their end, from time 0.

    Args:
        prefill, decode: the engines of each pool.
        routers: of `prefill` and of `decode`. Each knows as many hashes as an engine of its pool
            has blocks.
        clients: of a closed loop; None: an open loop (see `Sender`).

    Raises:
        ValueError: an engine refused a request (with its reason), or items are not in order of
            arrival.
        RuntimeError: sequences are left, and no engine can make a step.
    """
    blocks = [pool[0].config.num_blocks for pool in (prefill, decode)]
    assert blocks[0] is not None, "see `resolved`"
    assert blocks[1] is not None, "see `resolved`"
    # Steps are made one by one: sequences leave and enter between them.
    prefills = Fleet(prefill, routers[0], blocks[0], notes, waits=True, looks_ahead=False)
    decodes = Fleet(
        decode,
        routers[1],
        blocks[1],
        notes,
        number=len(prefill),
        name="engine {} of pools.decode",
        looks_ahead=False,
    )
    run = _Run(prefills, decodes, link, notes, Sender(items, sampling, clients))
    run_events(
        Source(run.next_move, run.move),
        Source(run.sender.next, run.send),
        Source(decodes.next, run.step_decode),
        Source(prefills.next, run.step_prefill),
    )
    stuck = [engine for engine in (*prefill, *decode) if engine.has_work]
    if stuck:
        raise RuntimeError(
            f"{len(stuck)} engines have work but make no step: their schedulers are stuck"
        )
    return Placement(run.prefills, run.transfers)


class _Run:
    """The state of a run of two pools, and its events."""

    def __init__(
        self,
        prefill: Fleet[PoolEngine],
        decode: Fleet[PoolEngine],
        link: Link,
        notes: PoolNotes,
        sender: Sender,
    ) -> None:
        self.sender = sender
        self.prefills: dict[str, int] = {}  # request -> its engine of `prefill`
        self.transfers: dict[str, list[Transfer]] = {}
        # a heap: time, 0 for an arrival or 1 for a release, order, and the sequence
        self._moves: list[tuple[float, int, int, Any]] = []
        self._prefill = prefill
        self._decode = decode
        self._link = link
        self._notes = notes
        self._num_moves = 0
        self._link_free = [0.0] * len(prefill.engines)  # seconds: when each link is free
        # by engine of `decode`, the sequences that wait for room there
        self._arrived: list[deque[Shipment]] = [deque() for _ in decode.engines]
        self._items: dict[str, tuple[WorkItem, SamplingParams]] = {}  # by the id of the request
        self._branches: dict[str, str] = {}  # branch in `prefill` -> its request
        self._targets: dict[str, int] = {}  # request -> its engine of `decode`
        self._computing = Unfinished()

    def send(self) -> None:
        """Give the next request that arrives to an engine of `prefill`."""
        now = self.sender.next()
        item, params = self.sender.send()
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
        """Make a step that computes prompts.

        Sequences that have their first token are released when it has ended.
        """
        replica, result = self._prefill.step()
        if result is None:  # it waits until blocks are given back
            return
        for event in result.events:
            if isinstance(event, Finished):
                self._leave_prefill(event.request_id, replica, result.finished)
        self.sender.end_branches(result, result.finished)
        engine = self._prefill.engines[replica]
        for name in engine.prefilled():
            request_id = self._leave_prefill(name, replica, result.finished)
            self._push(result.finished, 1, (engine.release(name), request_id, replica))

    def _leave_prefill(self, branch: str, replica: int, now: float) -> str:
        """Note that a branch has ended in `prefill`, or leaves it.

        Returns:
            The branch's request.
        """
        ended_request = self._computing.end_branch(branch)
        if ended_request is not None:
            self._prefill.end_request(ended_request, replica, now)
        return self._branches.pop(branch)

    def _push(self, time: float, kind: int, sequence: Any) -> None:
        heappush(self._moves, (time, kind, self._num_moves, sequence))
        self._num_moves += 1

    def next_move(self) -> float:
        """When the next pages arrive, or the next sequence is released."""
        return self._moves[0][0] if self._moves else math.inf

    def move(self) -> None:
        """Handle the next move: pages have arrived, or a sequence that was released is sent."""
        now, kind, _, sequence = heappop(self._moves)
        if kind == 0:
            self._arrived[sequence.target].append(sequence)
            self._decode.wake(sequence.target, now)
            return
        handover, request_id, replica = sequence
        if request_id not in self._targets:  # the branches of a request go to one engine
            item, params = self._items[request_id]
            self._targets[request_id] = self._decode.route(item, params, now)
        num_blocks = sum(block != HOLE for block in handover.released.blocks)
        num_bytes = num_blocks * self._link.block_bytes
        sent = max(now, self._link_free[replica]) + num_bytes / self._link.bandwidth
        self._link_free[replica] = sent
        shipment = Shipment(
            handover=handover,
            request_id=request_id,
            replica=replica,
            target=self._targets[request_id],
            bytes=num_bytes,
            released=now,
            arrived=sent + self._link.latency,
        )
        self._push(shipment.arrived, 0, shipment)

    def step_decode(self) -> None:
        """Make a step of an engine of `decode`.

        In front of it the engine adopts the sequences that have arrived, in order, while it has
        room.
        """
        now = self._decode.next()
        target = self._decode.next_replica()
        engine = self._decode.engines[target]
        arrived = self._arrived[target]
        while arrived and engine.adopt(arrived[0].handover):
            self._free_prefill_blocks(arrived.popleft(), now)
        _, result = self._decode.step()
        assert result is not None, "`decode` neither waits nor looks ahead"
        for request_id in self.sender.end_branches(result, result.finished):
            self._decode.end_request(request_id, target, result.finished)
            del self._targets[request_id]
        if arrived:  # even if nothing runs there any more
            self._decode.wake(target, engine.now)

    def _free_prefill_blocks(self, shipment: Shipment, now: float) -> None:
        """Free the blocks in `prefill` of a sequence that `decode` has adopted.

        Others may wait for them there.
        """
        engine = self._prefill.engines[shipment.replica]
        name = shipment.handover.released.request.request_id
        engine.free(shipment.handover)
        self._notes.drop_branch(shipment.replica, name)
        if engine.has_work:
            self._prefill.wake(shipment.replica, now)
        transfer = Transfer(
            branch_id=name,
            replica=shipment.target + len(self._prefill.engines),
            bytes=shipment.bytes,
            released=shipment.released,
            arrived=shipment.arrived,
            adopted=now,
        )
        self.transfers.setdefault(shipment.request_id, []).append(transfer)


class PooledLLM:
    """Two pools of an experiment, with the attributes of an `LLM` that `drive.measure` uses.

    `engine` is of `prefill`.
    """

    def __init__(self, experiment: Experiment) -> None:
        """Raises ValueError if the experiment cannot be simulated."""
        pools = experiment.pools
        assert pools is not None, "see `Experiment`"
        self.prefill, self.decode = (_pool_llm(experiment, name) for name in POOLS)
        self.engines: tuple[SimulatedEngine, ...] = self.prefill.engines + self.decode.engines
        self.engine = self.prefill.engine
        self.tokenizer = self.prefill.tokenizer
        self.startup: dict[str, float] = {}
        bandwidth = math.inf if pools.link_gb_s is None else 1e9 * pools.link_gb_s
        self.link = Link(self.prefill.block_bytes, bandwidth, pools.latency_s)


def _pool_llm(experiment: Experiment, name: str) -> SimulatedLLM:
    """The simulated engines of a pool."""
    pool_experiment = of_pool(experiment, name)
    simulate = pool_experiment.simulate
    assert simulate is not None, "see `check_pools`"
    count = getattr(experiment.pools, name).count
    try:
        return SimulatedLLM(simulate, pool_experiment.engine_config, pool_experiment.model, count)
    except ValueError as error:
        raise ValueError(f"pools.{name}: {error}") from error


def pools_summary(
    requests: Sequence[RequestRecord],
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
    transfers = [transfer for request in requests for transfer in request.transfers]
    prefill_replicas = [request.replica for request in requests]
    decode_replicas = [request.transfers[0].replica for request in requests if request.transfers]
    prefill = range(counts[0])
    decode = range(counts[0], sum(counts))
    return {
        "prefill": replicas_summary(prefill_replicas, steps, duration, prefill)
        | _blocks_summary(steps, prefill),
        "decode": replicas_summary(decode_replicas, steps, duration, decode)
        | _blocks_summary(steps, decode),
        "transfers": len(transfers),
        "moved_bytes": sum(transfer.bytes for transfer in transfers),
        "transfer_s": spread(transfer.arrived - transfer.released for transfer in transfers),
        "wait_s": spread(transfer.adopted - transfer.arrived for transfer in transfers),
    }


def _blocks_summary(steps: Sequence[StepRecord], engines: range) -> dict[str, Any]:
    """Blocks of an engine of a pool, and those in use, over the steps of its engines.

    Both are None without a step.
    """
    pool_steps = [step for step in steps if step.replica in engines]
    if not pool_steps:
        return {"blocks_total": None, "blocks_used": None}
    used = [step.blocks_used for step in pool_steps]
    return {
        "blocks_total": pool_steps[0].num_blocks,
        "blocks_used": {"mean": sum(used) / len(used), "peak": max(used)},
    }
