"""Ray Serve's request router around a router of `pagedjax.routing`.

The handle through which the ingress calls replicas asks this router about every call. Serve tells
it which replicas are present. The ingress tells it when a request has ended, and is told when a
replica has left, and has had its time to drain (link.py). The pure functions of `pagedjax.routing`
decide which replica a request gets.

All methods but `end` run in one event loop of the ingress's process; another loop answers the
clients. `end` only passes the request on to it. So one thread alone changes the state.

Serve pickles this module by value, so the ingress would have its own copy of an object that this
module makes. What both share, `LINK`, is therefore in link.py.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pagedjax import routing
from pagedjax.options.own_names import names_own_value
from pagedjax.routing import RouterRequest
from pagedjax.routing.recording import Recorder
from pagedjax.server.ray import link

# Most requests that are remembered because they ended before they were routed; Serve asks for each
# of them soon
MAX_EARLY_ENDS = 4096
log = logging.getLogger("pagedjax.server")


class PureRouter(RequestRouter):
    """Chooses the replica of each call.

    Calls carry `routed=RouterRequest(...)`, or `target=NAME` for one replica. A call without both
    goes to any replica, and the router does not know of it.
    """

    def initialize_state(
        self, router: str, known_blocks: int, drain_seconds: float, record: str | None = None
    ) -> None:
        """Begin. Serve calls it, with the options of the cluster.

        Args:
            record: where the recording is written; if that file exists, to `unused_path` of it.
        """
        path = None if record is None else unused_path(Path(record))
        own_router = router if names_own_value(router) else None
        self.recorder = Recorder(routing.find(router), known_blocks, path, own_router=own_router)
        self._drain_seconds = drain_seconds
        self._early_ends: dict[str, None] = {}  # requests that ended before they were routed
        self._avoided: frozenset[str] = frozenset()  # replicas that do not answer
        self._present: set[str] = set()  # replicas that Serve has
        self._loop: asyncio.AbstractEventLoop | None = None
        link.LINK.router = self

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The one replica that gets the call. Serve asks again until it is sent.

        All candidates, if the call names no replica or is already over. None, if all that are
        present are avoided.
        """
        if pending_request is None:
            return [candidate_replicas]
        call = pending_request
        call.routing_context.should_backoff = True  # Serve waits a little before it asks again
        self._update_presence()
        replicas = self.curr_replicas.values()
        by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        target = call.kwargs.get("target")
        request = call.kwargs.get("routed")
        if call.future.done() or (target is None and request is None):
            return [candidate_replicas]
        if request is not None:
            if request.request_id in self._early_ends:
                call.future.cancel()
                # the call is over, so what is returned does not matter; as in the errors below
                return [candidate_replicas]
            if not self.recorder.state.replicas:
                return []  # Serve asks again soon; the ingress says how long
            try:
                target = self._assign(request)
            except Exception as error:  # of a router of the user's own
                log.exception("the router failed")
                cause = error.__cause__ or error  # without the path of a file: clients read it
                call.future.set_exception(
                    link.NotRouted(f"the router failed: {type(cause).__name__}: {cause}")
                )
                return [candidate_replicas]
        if target not in by_name:
            call.future.set_exception(link.NotRouted(f"replica {target!r} is not present"))
            return [candidate_replicas]
        return [[by_name[target]]]

    def _assign(self, request: RouterRequest) -> Any:
        """Route a request, if it is not yet routed. Returns its replica.

        Requests of a replica that left are forgotten, so they are routed again.
        """
        routed = self.recorder.state.unfinished.get(request.request_id)
        return self.recorder.route(request) if routed is None else routed.replica

    def avoid(self, names: frozenset[str]) -> None:
        """Route nothing to these replicas, until the next call. Any thread may call it."""
        self._avoided = names
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._update_presence)

    def end(self, request_id: str) -> None:
        """End a request, whatever ended it. Any thread may call it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end, request_id)

    def _end(self, request_id: str) -> None:
        if request_id in self.recorder.state.unfinished:
            self.recorder.finished(request_id)
        else:  # its client left before Serve asked for a replica; Serve may still ask
            self._early_ends[request_id] = None
            while len(self._early_ends) > MAX_EARLY_ENDS:
                del self._early_ends[next(iter(self._early_ends))]

    def _update_presence(self) -> None:
        """Let replicas join and leave as Serve has them. One that is avoided leaves for the router
        alone.
        """
        self._loop = asyncio.get_running_loop()
        present = {replica_id.unique_id for replica_id in self.curr_replicas}
        for name in self._present - present:
            link.LINK.left(name)
            self._loop.call_later(self._drain_seconds, link.LINK.drained, name)
        self._present = present
        routable = present - self._avoided
        previous = self.recorder.state.replicas
        for name in previous:
            if name not in routable:
                self.recorder.left(name)
        for name in sorted(routable.difference(previous)):
            self.recorder.joined(name)

    # called by Serve ------------------------------------------------------------------------------

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._update_presence()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._present.discard(replica_id.unique_id)  # it has not left: its calls fail by themselves
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
