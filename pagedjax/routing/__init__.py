"""Routers: which replica of an engine gets a request.

Pure, as the scheduler is; imports no jax, no numpy and no Ray.

state.py      RouterState: the replicas, their unfinished requests, the prefixes they know; its
              transitions `joined`, `left` and `finished`
purity.py     whether a router is a function of its arguments alone
prefixes.py   the prefixes that one replica knows, in bounded memory
recording.py  a record of a router's transitions, and its replay
routers.py    a router as a value, `route`, and the routers that are shipped
"""

from __future__ import annotations

from pagedjax.routing.routers import (
    LEAST_LOADED,
    PREFIX,
    ROUND_ROBIN,
    ROUTERS,
    Router,
    by_prefix,
    find,
    lightest,
    route,
)
from pagedjax.routing.state import (
    Load,
    Replica,
    RouterRequest,
    RouterState,
    finished,
    init,
    joined,
    left,
)

__all__ = [
    "LEAST_LOADED",
    "PREFIX",
    "ROUND_ROBIN",
    "ROUTERS",
    "Load",
    "Replica",
    "Router",
    "RouterRequest",
    "RouterState",
    "by_prefix",
    "find",
    "finished",
    "init",
    "joined",
    "left",
    "lightest",
    "route",
]
