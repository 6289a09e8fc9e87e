"""Driver of two pools of simulated engines: one computes prompts and first tokens, the other one
goes on with them.

    prefill  submit -> steps -> released, its blocks are held       given back when it is adopted
                                    |    its pages, over the link of this engine
    decode                          arrived -> waits for room -> adopted before a step -> finished

Events happen in the order of their times. Events at the same time happen in this order: pages that
arrived, sequences that are released, arrivals of requests, steps of `decode`, steps of `prefill`.
Each pool has a router (pagedjax/routing), which knows the requests that have ended in its pool
until it is asked. The transitions are those of the real engines (pagedjax/host/handover.py).

All pages of a sequence are sent, even those that `decode` has in its prefix cache. A released
sequence gives its row in `prefill` back at once, but its blocks only when `decode` has adopted it.
So a full `decode` holds `prefill` up. No sequence decodes in `prefill`, unless `split` says so: then
a sequence leaves when `prefill` has computed a share of its tokens, be it prompt or output.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

from experiments.core.config import Experiment
from experiments.core.fleet import Fleet, Notes, Source, VirtualEngine, run_events
from experiments.core.pool_options import pool_experiment
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
# Kinds of moves; of moves at the same time, arrivals are first
ARRIVED = 0
RELEASED = 1


class PoolEngine(VirtualEngine, Protocol):
    """An engine that hands sequences over (simulation.simulate.SimulatedEngine)."""

    scheduler_state: SchedulerState

    def check(self, request: Request) -> None: ...

    def prefilled(self, split: float | None = None) -> tuple[str, ...]: ...

    def release(self, request_id: str) -> Handover: ...

    def free(self, handover: Handover) -> None: ...

    def adopt(self, handover: Handover) -> bool: ...


class Link(NamedTuple):
    """The link that an engine of `prefill` sends pages over, one sequence after the other."""

    block_bytes: float
    bandwidth: float = math.inf  # bytes/s
    # seconds that each sequence needs in addition; meanwhile the next one is sent
    latency: float = 0.0


class Release(NamedTuple):
    """A sequence that an engine of `prefill` has released."""

    handover: Handover
    request_id: str
    replica: int


class Shipment(NamedTuple):
    """A sequence on its way from `prefill` to `decode`, with the times of its transfer."""

    handover: Handover
    request_id: str  # the request's; the sequence's own id is in `handover`
    replica: int  # the engine of `prefill` that sends it
    target: int  # the engine of `decode` that gets it
    bytes: float
    released: float
    arrived: float


class Placement(NamedTuple):
    """Where requests ran. Engines are numbered: those of `prefill` first, then those of `decode`.

    prefill: by request, the engine that computed its prompt.
    transfers: by request; a request whose first token was its last has none.
    """

    prefill: Mapping[str, int]
    transfers: Mapping[str, Sequence[Transfer]]


class PoolNotes(Notes, Protocol):
    """A driver calls this with each step, and with each sequence that left between two steps."""

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
    split: float | None = None,
) -> Placement:
    """Run `items` to their end, from time 0.

    Args:
        prefill, decode: the engines of each pool.
        routers: of `prefill` and of `decode`. Each knows as many hashes as an engine of its pool
            has blocks.
        clients: the number of clients of a closed loop; None: an open loop (see `Sender`).
        split: see `Pools.split`.

    Raises:
        ValueError: an engine refused a request (with its reason), or items are not in order of
            arrival.
        RuntimeError: sequences are left, and no engine can make a step.
    """
    prefill_blocks = prefill[0].config.num_blocks
    decode_blocks = decode[0].config.num_blocks
    assert prefill_blocks is not None, "`simulation.simulate.resolved` sets it"
    assert decode_blocks is not None, "`simulation.simulate.resolved` sets it"
    # Steps are made one by one: sequences leave and enter between them.
    prefill_fleet = Fleet(prefill, routers[0], prefill_blocks, notes, waits=True, looks_ahead=False)
    decode_fleet = Fleet(
        decode,
        routers[1],
        decode_blocks,
        notes,
        number=len(prefill),
        name="engine {} of pools.decode",
        looks_ahead=False,
    )
    sender = Sender(items, sampling, clients)
    run = _Run(prefill_fleet, decode_fleet, link, notes, sender, split)
    run_events(
        Source(run.next_move, run.move),
        Source(run.sender.next, run.send),
        Source(decode_fleet.next, run.step_decode),
        Source(prefill_fleet.next, run.step_prefill),
    )
    stuck = [engine for engine in (*prefill, *decode) if engine.has_work]
    if stuck:
        raise RuntimeError(
            f"{len(stuck)} engines have work but make no step: their schedulers are stuck"
        )
    return Placement(run.prefill_replicas, run.transfers)


class _Run:
    """The state of a run of two pools, and its events."""

    def __init__(
        self,
        prefill_fleet: Fleet[PoolEngine],
        decode_fleet: Fleet[PoolEngine],
        link: Link,
        notes: PoolNotes,
        sender: Sender,
        split: float | None,
    ) -> None:
        self.sender = sender
        self.prefill_replicas: dict[str, int] = {}  # request -> its engine of `prefill`
        self.transfers: dict[str, list[Transfer]] = {}
        # a heap: time, kind, order, and the `Shipment` or the `Release`
        self._moves: list[tuple[float, int, int, Any]] = []
        self._prefill_fleet = prefill_fleet
        self._decode_fleet = decode_fleet
        self._link = link
        self._notes = notes
        self._split = split
        self._num_moves = 0
        self._link_free = [0.0] * len(prefill_fleet.engines)  # seconds: when each link is free
        # for each engine of `decode`, the sequences that wait for room
        self._arrived: list[deque[Shipment]] = [deque() for _ in decode_fleet.engines]
        self._items: dict[str, tuple[WorkItem, SamplingParams]] = {}  # by the id of the request
        self._branches: dict[str, str] = {}  # branch in `prefill` -> its request
        self._targets: dict[str, int] = {}  # request -> its engine of `decode`
        self._computing = Unfinished()

    def send(self) -> None:
        """Give the next request that arrives to an engine of `prefill`."""
        now = self.sender.next()
        item, params = self.sender.take_next()
        replica = self._prefill_fleet.route(item, params, now)
        self._prefill_fleet.wake(replica, now)
        engine = self._prefill_fleet.engines[replica]
        submit(engine, item, params)
        try:
            # the last one that waits is this request; the engines of a pool are equal, so the first
            # of them answers for all
            self._decode_fleet.engines[0].check(engine.scheduler_state.waiting[-1].request)
        except ValueError as error:
            raise ValueError(
                f"an engine of pools.decode refused {item.request_id}: {error}. Bound the "
                "workload's lengths, or raise the limit"
            ) from error
        branches = branch_ids(item.request_id, params.n)
        self._computing.add(item.request_id, branches)
        self._branches.update(dict.fromkeys(branches, item.request_id))
        self._items[item.request_id] = item, params
        self.prefill_replicas[item.request_id] = replica

    def step_prefill(self) -> None:
        """Make a step of an engine of `prefill`.

        When it has ended, the sequences with a first token are released, or those of which enough
        is computed.
        """
        replica, result = self._prefill_fleet.step()
        if result is None:  # the engine waits until blocks are given back
            return
        for event in result.events:
            if isinstance(event, Finished):
                self._leave_prefill(event.request_id, replica, result.finished)
        self.sender.end_branches(result, result.finished)
        engine = self._prefill_fleet.engines[replica]
        for branch in engine.prefilled(self._split):
            request_id = self._leave_prefill(branch, replica, result.finished)
            release = Release(engine.release(branch), request_id, replica)
            self._push(result.finished, RELEASED, release)

    def _leave_prefill(self, branch: str, replica: int, now: float) -> str:
        """Note that a branch has ended in `prefill`, or leaves it.

        Returns:
            The branch's request.
        """
        ended_request = self._computing.end_branch(branch)
        if ended_request is not None:
            self._prefill_fleet.end_request(ended_request, replica, now)
        return self._branches.pop(branch)

    def _push(self, time: float, kind: int, sequence: Shipment | Release) -> None:
        heappush(self._moves, (time, kind, self._num_moves, sequence))
        self._num_moves += 1

    def next_move(self) -> float:
        """When the next pages arrive, or the next sequence is released."""
        return self._moves[0][0] if self._moves else math.inf

    def move(self) -> None:
        """Handle the next move: pages have arrived, or a sequence that was released is sent."""
        now, kind, _, sequence = heappop(self._moves)
        if kind == ARRIVED:
            self._arrived[sequence.target].append(sequence)
            self._decode_fleet.wake(sequence.target, now)
            return
        handover, request_id, replica = sequence  # a `Release`
        if request_id not in self._targets:  # the branches of a request go to one engine
            item, params = self._items[request_id]
            self._targets[request_id] = self._decode_fleet.route(item, params, now)
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
        self._push(shipment.arrived, ARRIVED, shipment)

    def step_decode(self) -> None:
        """Make a step of an engine of `decode`.

        Before it, the engine adopts the sequences that have arrived, in order, while it has room.
        """
        now = self._decode_fleet.next()
        target = self._decode_fleet.next_replica()
        engine = self._decode_fleet.engines[target]
        arrived = self._arrived[target]
        while arrived and engine.adopt(arrived[0].handover):
            self._end_transfer(arrived.popleft(), now)
        _, result = self._decode_fleet.step()
        assert result is not None, "`decode` neither waits nor looks ahead"
        for request_id in self.sender.end_branches(result, result.finished):
            self._decode_fleet.end_request(request_id, target, result.finished)
            del self._targets[request_id]
        if arrived:  # sequences that found no room are tried again before the next step
            self._decode_fleet.wake(target, engine.now)

    def _end_transfer(self, shipment: Shipment, now: float) -> None:
        """Free the blocks in `prefill` of a sequence that `decode` has adopted.

        Sequences that wait for blocks in `prefill` can go on. The transfer is recorded.
        """
        engine = self._prefill_fleet.engines[shipment.replica]
        branch = shipment.handover.released.request.request_id
        engine.free(shipment.handover)
        self._notes.drop_branch(shipment.replica, branch)
        if engine.has_work:
            self._prefill_fleet.wake(shipment.replica, now)
        transfer = Transfer(
            branch_id=branch,
            replica=shipment.target + len(self._prefill_fleet.engines),
            bytes=shipment.bytes,
            released=shipment.released,
            arrived=shipment.arrived,
            adopted=now,
        )
        self.transfers.setdefault(shipment.request_id, []).append(transfer)


class PooledLLM:
    """Two pools of an experiment, with the attributes of an `LLM` that `drive.measure` uses.

    `engine` is the first engine of `prefill`.
    """

    def __init__(self, experiment: Experiment) -> None:
        """Raises ValueError if the experiment cannot be simulated."""
        pools = experiment.pools
        assert pools is not None, "see `Experiment`"
        self.prefill = _pool_llm(experiment, "prefill")
        self.decode = _pool_llm(experiment, "decode")
        _check_groups(self.prefill, self.decode)
        self.engines: tuple[SimulatedEngine, ...] = self.prefill.engines + self.decode.engines
        self.engine = self.prefill.engine
        self.tokenizer = self.prefill.tokenizer
        self.startup: dict[str, float] = {}
        bandwidth = math.inf if pools.link_gb_s is None else 1e9 * pools.link_gb_s
        self.link = Link(self.prefill.block_bytes, bandwidth, pools.latency_s)


def _check_groups(prefill: SimulatedLLM, decode: SimulatedLLM) -> None:
    """Raises ValueError if blocks of one pool have other layers than those of the other."""
    groups = [llm.engine.scheduler_state.config.groups for llm in (prefill, decode)]
    if groups[0] != groups[1]:
        raise ValueError(
            f"pools.prefill has {groups[0]} groups of layers and pools.decode {groups[1]}, so a "
            "block of one does not fit the other; give both the same mesh, max_model_len and "
            "free_window_blocks"
        )


def _pool_llm(experiment: Experiment, name: str) -> SimulatedLLM:
    """The simulated engines of a pool."""
    experiment_of_pool = pool_experiment(experiment, name)
    simulate = experiment_of_pool.simulate
    assert simulate is not None, "see `check_pools`"
    count = getattr(experiment.pools, name).count
    try:
        return SimulatedLLM(
            simulate, experiment_of_pool.engine_config, experiment_of_pool.model, count
        )
    except ValueError as error:
        raise ValueError(f"pools.{name}: {error}") from error


def pools_summary(
    requests: Sequence[RequestRecord],
    steps: Sequence[StepRecord],
    counts: Sequence[int],
    duration: float,
) -> dict[str, Any]:
    """For each pool, how evenly its engines worked and how full they were; and the transfers.

    `blocks_used` over `blocks_total` is how full an engine was. The blocks of sequences that wait
    for room in `decode` are counted in `prefill`: if `prefill` is full, those sequences hold it up.

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
    """The blocks of one engine of a pool, and how many were in use over the steps of all engines.

    Both are None without a step.
    """
    pool_steps = [step for step in steps if step.replica in engines]
    if not pool_steps:
        return {"blocks_total": None, "blocks_used": None}
    blocks_used = [step.blocks_used for step in pool_steps]
    return {
        "blocks_total": pool_steps[0].num_blocks,
        "blocks_used": {"mean": sum(blocks_used) / len(blocks_used), "peak": max(blocks_used)},
    }
