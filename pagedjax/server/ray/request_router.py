"""Ray Serve's request router around a router of `pagedjax.routing`: the ingress's handle asks it for every call.

Serve tells which replicas are present, and when a call has ended. The pure state does the rest. All methods run in one
event loop of the ingress's process, so nothing is locked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pagedjax import routing
from pagedjax.routing.recording import Recorder


class PureRouter(RequestRouter):
    """Calls carry `routed=RouterRequest(...)`, or `target=NAME` for one replica; without both, the call is a request
    of 0 tokens without a prefix."""

    def initialize_state(self, router: str, known_blocks: int, record: str | None = None) -> None:
        """`record`: the file of `routing.recording`."""
        self.routing = Recorder(routing.find(router), known_blocks, None if record is None else Path(record))
        self._routed: dict[str, str] = {}  # Serve's id of a call -> the id of its request

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one replica that gets the call; none if the named one has left. Serve asks again until it is sent."""
        if pending_request is None:
            return [candidate_replicas]
        self._take_presence()
        by_name = {replica.replica_id.unique_id: replica for replica in self.curr_replicas.values()}
        target = pending_request.kwargs.get("target")
        if target is None:
            target = self._assigned(pending_request)
        return [[by_name[target]]] if target in by_name else []

    def _assigned(self, call: PendingRequest) -> Any:
        """The replica of a call: as before if it was routed before, and that replica is present."""
        key = call.metadata.internal_request_id
        request = call.kwargs.get("routed") or routing.RouterRequest(key, 0)
        self._routed[key] = request.request_id
        # a call that is cancelled before it is sent has no end that Serve tells
        call.future.add_done_callback(lambda sent: self._finished(key) if sent.cancelled() else None)
        unfinished = self.routing.state.unfinished.get(request.request_id)
        return self.routing.route(request) if unfinished is None else unfinished.replica

    def _finished(self, key: str) -> None:
        if (request_id := self._routed.pop(key, None)) is not None:
            self.routing.finished(request_id)

    def _take_presence(self) -> None:
        """Let replicas join and leave as Serve has them."""
        here = {replica_id.unique_id for replica_id in self.curr_replicas}
        before = self.routing.state.replicas
        for name in before:
            if name not in here:
                self.routing.left(name)
        for name in sorted(here.difference(before)):
            self.routing.joined(name)

    # called by Serve --------------------------------------------------------------------------------------------------

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._take_presence()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._take_presence()

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._finished(internal_request_id)
