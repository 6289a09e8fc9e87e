"""A record of routing: the transitions of a router's state as JSON lines, and their replay.

    {"routing": 1, "router": "prefix", "known_blocks": 65536}   (own_router: of a user's file)
    {"joined": "a"}      {"left": "a"}      {"finished": "request-7"}
    {"routed": "request-7", "to": "a", "tokens": 48, "hashes": ["9f..."], "user": ""}
    (avoids: replicas that the request is not given to, if there are any)

Routing is pure, so the same inputs give the same assignments: in a simulation, in a test, and again
from this record.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pagedjax.routing import routers, state
from pagedjax.routing.routers import Router
from pagedjax.routing.state import Replica, RouterRequest, RouterState

FORMAT = 1
log = logging.getLogger("pagedjax.routing")


class Recorder:
    """Holds a router's state, makes its transitions, and writes each as a line.

    It is not safe for several threads.
    """

    def __init__(
        self,
        router: Router,
        known_blocks: int,
        path: Path | None = None,
        *,
        own_router: str | None = None,
    ) -> None:
        """Begin a record in the file at `path`; None writes nothing.

        own_router: how a router in a user's file was named, with its parameters.

        If the file cannot be written, now or later, an error is logged, and routing continues
        without a record.
        """
        self.router = router
        self.state = state.init(known_blocks)
        self._file = None
        if path is not None:
            try:
                self._file = path.open("w", encoding="utf-8", buffering=1)
            except OSError as error:
                log.error("routing is not recorded: %s", error)
        own_field = {} if own_router is None else {"own_router": own_router}
        self._write(routing=FORMAT, router=router.name, **own_field, known_blocks=known_blocks)

    def joined(self, replica: Replica) -> None:
        self.state = state.joined(self.state, replica)
        self._write(joined=replica)

    def left(self, replica: Replica) -> None:
        self.state = state.left(self.state, replica)
        self._write(left=replica)

    def route(self, request: RouterRequest) -> Replica:
        self.state, chosen = routers.route(self.state, self.router, request)
        avoids = {"avoids": request.avoids} if request.avoids else {}
        self._write(
            routed=request.request_id,
            to=chosen,
            tokens=request.tokens,
            hashes=request.hashes,
            user=request.user,
            **avoids,
        )
        return chosen

    def finished(self, request_id: str) -> None:
        """End a request. Does nothing if no request of that id is unfinished."""
        if request_id in self.state.unfinished:
            self.state = state.finished(self.state, request_id)
            self._write(finished=request_id)

    def close(self) -> None:
        """Close the file. Later transitions are not written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, **line: Any) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            except OSError as error:
                log.error("the record of routing ends here: %s", error)
                self._file = None


def replay(lines: Iterable[str], router: Router | None = None) -> tuple[RouterState, int]:
    """Make the recorded transitions again -> the last state, and the number of assignments, all as
    recorded.

    Args:
        router: the router to replay with; None: the recorded router, which must be a shipped one.

    Raises:
        ValueError: the text is no record, a transition is not possible, or an assignment differs;
            the message names the line.
    """
    router_state: RouterState | None = None
    count = 0
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if router_state is None:
                if entry["routing"] != FORMAT:
                    raise ValueError(
                        f"format {entry['routing']!r} is not {FORMAT}, which this version reads"
                    )
                router = router or _shipped(entry)
                router_state = state.init(entry["known_blocks"])
            elif "routed" in entry:
                request = RouterRequest(
                    entry["routed"],
                    entry["tokens"],
                    tuple(entry["hashes"]),
                    entry["user"],
                    tuple(entry.get("avoids", ())),
                )
                assert router is not None
                router_state, chosen = routers.route(router_state, router, request)
                if chosen != entry["to"]:
                    raise ValueError(
                        f"router {router.name!r} sends {request.request_id!r} to {chosen!r}, and "
                        f"the record to {entry['to']!r}"
                    )
                count += 1
            elif "finished" in entry:
                router_state = state.finished(router_state, entry["finished"])
            elif "joined" in entry:
                router_state = state.joined(router_state, entry["joined"])
            else:
                router_state = state.left(router_state, entry["left"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} is no transition of a router: {line.strip()!r:.80}"
            ) from error
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    if router_state is None:
        raise ValueError("the record is empty; its first line names the router")
    return router_state, count


def _shipped(header: dict[str, Any]) -> Router:
    """The router that the first line of a record names, if it is shipped."""
    name = header["router"]
    if name in routers.ROUTERS:
        return routers.ROUTERS[name]
    own_router = header.get("own_router") or "file.py:NAME"
    raise ValueError(
        f"the router is {name!r}, and a recording runs no file; add --policy "
        f"{shlex.quote(own_router)}, or where that file is now"
    )
