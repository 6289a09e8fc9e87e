"""What the ingress and its request router know of each other.

They run in one process, in two threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pagedjax.routing.recording import Recorder


class NotRouted(Exception):
    """A call that no replica gets: the one it names has left, or the router failed."""


class Router(Protocol):
    """request_router.PureRouter."""

    recorder: Recorder

    def end(self, request_id: str) -> None: ...

    def avoid(self, names: frozenset[str]) -> None: ...


class Link:
    """The two ends. Serve makes the router when the ingress first calls a replica.

    router: None before that.
    avoided: replicas that do not answer, and get no requests. They have not left.
    left, drained: called, in the router's thread, when a replica has left, and when its time to
        drain is over.
    """

    def __init__(self) -> None:
        self.router: Router | None = None
        self.avoided: frozenset[str] = frozenset()
        self.left: Callable[[str], None] = lambda name: None
        self.drained: Callable[[str], None] = lambda name: None

    def present(self) -> Sequence[Any]:
        """The names of the replicas. Any thread may call this, because a state is never changed: it
        is replaced by a new one.
        """
        return () if self.router is None else self.router.recorder.state.replicas

    def replica_of(self, request_id: str) -> str | None:
        """The replica that an unfinished request was given to."""
        unfinished = {} if self.router is None else self.router.recorder.state.unfinished
        routed = unfinished.get(request_id)
        return None if routed is None else str(routed.replica)

    def avoid(self, names: frozenset[str]) -> None:
        """Give no requests to these replicas, which do not answer. The next call replaces them."""
        self.avoided = names
        if self.router is not None:
            self.router.avoid(names)

    def end(self, request_id: str) -> None:
        """A request is over, whatever ended it."""
        if self.router is not None:
            self.router.end(request_id)


LINK = Link()
