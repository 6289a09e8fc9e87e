"""Routers as values: one pure function each. A new router is a new value, not a flag."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pagedjax.options.own_errors import placed
from pagedjax.options.own_values import check_call, named_value
from pagedjax.routing import prefixes
from pagedjax.routing.state import Load, Replica, Routed, RouterRequest, RouterState, left

# No replica gets a request beyond this multiple of the mean number of unfinished requests
FACTOR = 1.5
# Unfinished requests of a replica up to which the router "prefix" does not look at the mean
PREFIX_SLACK = 8


class Router(NamedTuple):
    """The decision of a router. The mechanism (loads, known prefixes, turns) stays in `route`.

    choose: (state, request) -> the replica that gets the request, one of `state.replicas`, which is
        never empty. It must be a function of its arguments alone, so that a simulated run repeats
        and a real one can be explained.
    prefixes: whether `choose` reads which prefixes are known. If not, no prefix is remembered, and
        prompts need no hashes.
    """

    name: str
    choose: Callable[[RouterState, RouterRequest], Replica]
    prefixes: bool = True


def route(
    state: RouterState, router: Router, request: RouterRequest
) -> tuple[RouterState, Replica]:
    """Assign a request -> (state, replica).

    The replica knows the request's prefix from now on: a request that follows at once finds the
    blocks while they are computed.

    Raises:
        ValueError: no replica is present, the request is unfinished, its tokens are below 0, the
            router chose a replica that is not present, or it raised.
    """
    name = request.request_id
    if not state.replicas:
        raise ValueError(
            f"request {name!r} has nowhere to go: 0 replicas are present, and 1 is needed; let one "
            "join"
        )
    if name in state.unfinished:
        replica = state.unfinished[name].replica
        raise ValueError(
            f"request {name!r} is unfinished on replica {replica!r}; give the new one another id"
        )
    if request.tokens < 0:
        raise ValueError(f"request {name!r} has {request.tokens} tokens; give at least 0")
    eligible = _without(state, request.avoids) if request.avoids else state
    with placed(f"choose of the router {router.name!r}"):
        chosen = router.choose(eligible, request)
    if chosen not in eligible.replicas:  # compared and not hashed: it may be anything
        present = ", ".join(map(repr, eligible.replicas))
        raise ValueError(
            f"router {router.name!r} chose replica {chosen!r} for request {name!r}; present are "
            f"{present}; its choose must return one of state.replicas"
        )
    by_replica = state.known
    if router.prefixes and request.hashes and state.known_blocks:
        learned = prefixes.learned(by_replica[chosen], request.hashes)
        by_replica = by_replica.set(chosen, learned)
    load = state.loads[chosen]
    new_load = Load(load.requests + 1, load.tokens + request.tokens)
    new_state = RouterState(
        replicas=state.replicas,
        loads=state.loads.set(chosen, new_load),
        known=by_replica,
        unfinished=state.unfinished.set(name, Routed(chosen, request.tokens)),
        last=chosen,
        known_blocks=state.known_blocks,
    )
    return new_state, chosen


def _without(state: RouterState, avoided: Sequence[Replica]) -> RouterState:
    """The state without these replicas, or the state itself if no replica would be left."""
    present = [replica for replica in state.replicas if replica in avoided]
    if len(present) == len(state.replicas):
        return state
    for replica in present:
        state = left(state, replica)
    return state


def lightest(state: RouterState, replicas: Iterable[Replica]) -> Replica:
    """The first replica with the fewest unfinished requests, then with the fewest tokens."""
    loads = state.loads
    return min(replicas, key=lambda replica: loads[replica])


def by_prefix(name: str, factor: float = FACTOR, slack: int = PREFIX_SLACK) -> Router:
    """The replica that knows the longest prefix of the prompt; ties go to the lightest, then to the
    next in turn.

    Only replicas below a limit are considered: with this request, the chosen replica has at most
    `slack` unfinished requests, or `factor` times the mean, whichever is more, rounded up. A
    replica with the mean or less is always below the limit. So requests with a prefix that is asked
    for too often go to a second replica, which knows the prefix from then on.

    Raises:
        ValueError: `factor` is below 1, or `slack` below 0.
    """
    if not 1 <= factor < math.inf:
        raise ValueError(
            f"factor is {factor}; it must be at least 1, or no replica may be below the limit, and "
            "finite"
        )
    if slack < 0:
        raise ValueError(f"slack is {slack}; it must be at least 0 requests")

    def choose(state: RouterState, request: RouterRequest) -> Replica:
        count = len(state.replicas)
        multiple = min(factor, count)  # a larger factor limits nothing
        limit = max(slack, math.ceil(multiple * (len(state.unfinished) + 1) / count))
        candidates = [replica for replica in state.turn if state.loads[replica].requests < limit]
        depths = {replica: state.known_prefix(replica, request) for replica in candidates}
        longest = max(depths.values())
        return lightest(state, [replica for replica in candidates if depths[replica] == longest])

    return Router(name, choose)


# In turn, whatever the loads are.
ROUND_ROBIN = Router("round_robin", lambda state, request: state.turn[0], prefixes=False)

# The fewest unfinished requests, then the fewest tokens, then the next in turn.
LEAST_LOADED = Router(
    "least_loaded", lambda state, request: lightest(state, state.turn), prefixes=False
)

PREFIX = by_prefix("prefix")

ROUTERS = {router.name: router for router in (ROUND_ROBIN, LEAST_LOADED, PREFIX)}


def find(name: Any) -> Router:
    """The router of that name.

    "module:NAME" or "folder/file.py:NAME" is a router of the user, in that module or file, with
    parameters as in a mapping {"name": "mine.py:NAME", "worth": 64}. A `Router` is returned as it
    is.

    Raises:
        ValueError: no such router, module, file or value; a value that is no router; or a `choose`
            that does not take two arguments.
    """
    router = named_value("router", name, Router, ROUTERS)
    if router not in ROUTERS.values():
        start = f"router {getattr(name, 'name', name)!r}: its choose"
        usage = "choose(state, request), which returns one of state.replicas"
        check_call(start, router.choose, 2, usage)
    return router
