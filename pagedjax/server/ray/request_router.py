"""Ray Serve's request router around a router of `pagedjax.routing`.

The ingress's handle asks it for every call.

Serve says which replicas are present. The ingress says when a request has ended. It learns when the
drain time of a replica that left is over (link.py). The pure state does the rest. All methods run
in one event loop of the ingress's process, which is not the one that answers clients; so one thread
alone changes the state.

Serve pickles this module by value: a global object of it would be another one in the ingress. So it
has none.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pagedjax import routing
from pagedjax.routing import RouterRequest
from pagedjax.routing.recording import Recorder
from pagedjax.server.ray import link

# Requests that are remembered; they are few, and Serve asks for each within a moment
EARLY_ENDS = 4096
log = logging.getLogger("pagedjax.server")


class PureRouter(RequestRouter):
    """Chooses the replica of each call.

    Calls carry `routed=RouterRequest(...)`, or `target=NAME` for one replica. A call without both
    goes to any replica, and the router does not know of it.
    """

    def initialize_state(
        self, router: str, known_blocks: int, drain_seconds: float, record: str | None = None
    ) -> None:
        """Begin. `record`: the file of `routing.recording`; if it exists, `unused_path` of it."""
        path = None if record is None else unused_path(Path(record))
        self.routing = Recorder(routing.find(router), known_blocks, path)
        self._drain_seconds = drain_seconds
        self._early: dict[str, None] = {}  # requests that ended before they were routed
        self._loop: asyncio.AbstractEventLoop | None = None
        link.LINK.router = self

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The one replica that gets the call. Serve asks again until it is sent."""
        if pending_request is None:
            return [candidate_replicas]
        call = pending_request
        call.routing_context.should_backoff = True  # if Serve asks again, it waits a little before
        self._update_presence()
        replicas = self.curr_replicas.values()
        by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        target = call.kwargs.get("target")
        request = call.kwargs.get("routed")
        if call.future.done() or (target is None and request is None):
            return [candidate_replicas]
        if request is not None:
            if request.request_id in self._early:
                call.future.cancel()
                return [candidate_replicas]
            try:
                target = self._assign(request)
            except Exception as error:  # of a router of the user's own
                log.exception("the router failed")
                call.future.set_exception(
                    link.NotRouted(f"the router failed: {type(error).__name__}: {error}")
                )
                return [candidate_replicas]
        if target not in by_name:
            call.future.set_exception(link.NotRouted(f"replica {target!r} is not present"))
            return [candidate_replicas]
        return [[by_name[target]]]

    def _assign(self, request: RouterRequest) -> Any:
        """Route a request -> its replica, as before if that one is present."""
        routed = self.routing.state.unfinished.get(request.request_id)
        return self.routing.route(request) if routed is None else routed.replica

    def end(self, request_id: str) -> None:
        """A request is over, whatever ended it. Any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end, request_id)

    def _end(self, request_id: str) -> None:
        if request_id in self.routing.state.unfinished:
            self.routing.finished(request_id)
        else:  # its client left before Serve asked for a replica; Serve may still ask
            self._early[request_id] = None
            while len(self._early) > EARLY_ENDS:
                del self._early[next(iter(self._early))]

    def _update_presence(self) -> None:
        """Let replicas join and leave as Serve has them."""
        self._loop = asyncio.get_running_loop()
        present = {replica_id.unique_id for replica_id in self.curr_replicas}
        previous = self.routing.state.replicas
        for name in previous:
            if name not in present:
                self.routing.left(name)
                self._loop.call_later(self._drain_seconds, link.LINK.drained, str(name))
        for name in sorted(present.difference(previous)):
            self.routing.joined(name)

    # called by Serve ------------------------------------------------------------------------------

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._update_presence()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._update_presence()


def unused_path(path: Path) -> Path:
    """The path, or the next one that does not exist: a.jsonl, a.2.jsonl.

    So an ingress that is started again writes the second file.
    """
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_suffix(f".{number}{path.suffix}")
    return candidate
