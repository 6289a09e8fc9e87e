"""Driver of several simulated engines behind a router (pagedjax/routing), in one loop of events.

An event is an arrival, the begin of a replica's step, or the end of a request. They happen in the order of their
times; at one time requests end first, then requests arrive, then steps begin, by number of the replica. A request is
routed when it arrives, by what is known then: the end of a request is known when its last step has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush, merge
from typing import Any, Protocol

from experiments.core.metrics import RequestRecord, StepRecord
from experiments.core.submit import LONGEST_SLEEP, Engine, Sender, submit
from experiments.core.workloads import WorkItem
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


def drive_replicas(
    engines: Sequence[VirtualEngine],
    router: Router,
    known_blocks: int,
    items: Sequence[WorkItem],
    sampling: SamplingParams,
    note: Callable[[int, StepResult], None],
    clients: int | None = None,
) -> dict[str, int]:
    """Run `items` to their end, from time 0 -> request id to its replica. One engine makes the steps of `drive`.

    Args:
        engines: equal ones; the replica i is engines[i].
        known_blocks: see `routing.init`.
        note: called with a replica and each of its steps. None is kept here: their plans would fill the memory.
        clients: of a closed loop; None: an open loop (see `Sender`).

    Raises:
        ValueError: an engine refused a request (with its reason), or items are not in order of arrival.
    """
    config, state = engines[0].config, routing.init(known_blocks)
    for replica in range(len(engines)):
        state = routing.joined(state, replica)
    hashes = router.prefixes and config.enable_prefix_caching
    replicas: dict[str, int] = {}
    steps: list[tuple[float, int]] = []  # a heap: when each replica that has work begins its next step
    ended: list[tuple[float, int, str]] = []  # a heap: when a request ended, where, and its id
    sender = Sender(items, sampling, clients)

    def step() -> None:
        _, replica = heappop(steps)
        engine = engines[replica]
        result = engine.step()
        if result is None:
            raise RuntimeError(f"replica {replica} has work but makes no step: its scheduler is stuck")
        note(replica, result)
        for request_id in sender.ended(result, result.finished):
            heappush(ended, (result.finished, replica, request_id))
        if engine.has_work:
            heappush(steps, (engine.now, replica))

    while (at := sender.next) is not None or steps:
        if at is None or (steps and steps[0][0] < at):
            step()  # it may end a request before `at`, and free a client
            continue
        while ended and ended[0][0] <= at:
            state = routing.finished(state, heappop(ended)[2])
        item, params = sender.send()
        keys = block_hashes.of_prompt(item.prompt_token_ids, params, config.block_size)[1] if hashes else ()
        tokens = len(item.prompt_token_ids) + params.n * params.max_tokens
        state, replica = routing.route(state, router, RouterRequest(item.request_id, tokens, keys))
        engine = engines[int(replica)]
        if not engine.has_work:
            while engine.now < at:  # in the pieces in which `drive` sleeps, so that times are the same
                engine.sleep(min(at - engine.now, LONGEST_SLEEP))
            heappush(steps, (engine.now, int(replica)))
        submit(engine, item, params)
        replicas[item.request_id] = int(replica)
    return replicas


def by_end(steps: Iterable[Sequence[StepRecord]]) -> list[StepRecord]:
    """The steps of all replicas in the order in which they ended; of those at one time, by number of the replica."""
    return list(merge(*steps, key=lambda step: step.started + step.seconds))


def of_replicas(
    requests: Sequence[RequestRecord], steps: Sequence[StepRecord], count: int, duration: float
) -> dict[str, Any]:
    """How even the replicas were: requests, computed tokens and the share of the time in which they made steps."""
    asked, tokens, busy = ([0.0] * count for _ in range(3))
    for request in requests:
        asked[request.replica] += 1
    for step in steps:
        tokens[step.replica] += step.tokens
        busy[step.replica] += step.seconds / duration
    values = {"requests": asked, "tokens_computed": tokens, "busy_share": busy}
    ends = {
        name: {"least": min(found), "mean": sum(found) / count, "most": max(found)} for name, found in values.items()
    }
    return {"count": count, **ends}
