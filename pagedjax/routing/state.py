"""The state of a router, and its transitions, except `route` (routers.py).

Each transition returns a new state.
"""

from __future__ import annotations

from typing import NamedTuple

from immutables import Map

from pagedjax.routing.prefixes import Prefixes, depth

Replica = str | int  # its name or its number


class RouterRequest(NamedTuple):
    """A request as a router sees it: counts and hashes, never text or token values."""

    request_id: str
    tokens: int  # at its longest: the prompt, and the most output tokens of all its branches
    # hashes of the prompt's full blocks, `engine.block_hashes.of_prompt`; () shares no blocks
    hashes: tuple[str, ...] = ()
    user: str = ""
    # replicas that it is not given to, as long as there is another one
    avoids: tuple[Replica, ...] = ()


class Load(NamedTuple):
    """The unfinished requests of a replica, and their tokens at their longest."""

    requests: int = 0
    tokens: int = 0


class Routed(NamedTuple):
    """An unfinished request."""

    replica: Replica
    tokens: int


class RouterState(NamedTuple):
    """What a router knows of its replicas. It is never changed: a transition returns another
    one."""

    replicas: tuple[Replica, ...]  # the present ones, in the order in which they joined
    loads: Map[Replica, Load]  # of each replica that is present
    known: Map[Replica, Prefixes]  # what each has in its cache, as far as the router can know
    unfinished: Map[str, Routed]  # by request id
    # the replica of the last request; when it leaves, the one that joined before it
    last: Replica | None
    known_blocks: int  # most hashes that are remembered of each replica

    @property
    def turn(self) -> tuple[Replica, ...]:
        """The replicas in turn: first the one after `last`, in the order of joining."""
        if self.last is None:
            return self.replicas
        start = self.replicas.index(self.last) + 1
        return self.replicas[start:] + self.replicas[:start]

    def known_prefix(self, replica: Replica, request: RouterRequest) -> int:
        """Blocks at the beginning of the request's prompt that earlier requests brought to the
        replica."""
        return depth(self.known[replica], request.hashes)


def init(known_blocks: int = 1 << 16) -> RouterState:
    """A router without replicas.

    Args:
        known_blocks: hashes to remember of each replica, best as many as its cache has blocks;
            about 300 bytes each.

    Raises:
        ValueError: `known_blocks` is below 0.
    """
    if known_blocks < 0:
        raise ValueError(
            f"known_blocks is {known_blocks}; it must be at least 0, which remembers no prefix"
        )
    return RouterState(
        replicas=(),
        loads=Map(),
        known=Map(),
        unfinished=Map(),
        last=None,
        known_blocks=known_blocks,
    )


def joined(state: RouterState, replica: Replica) -> RouterState:
    """The state with one replica more, which has no requests and knows nothing.

    Raises:
        ValueError: the replica is present already.
    """
    if replica in state.loads:
        raise ValueError(
            f"replica {replica!r} is present already; give it another name, or let it leave first"
        )
    return state._replace(
        replicas=(*state.replicas, replica),
        loads=state.loads.set(replica, Load()),
        known=state.known.set(replica, Prefixes(state.known_blocks)),
    )


def left(state: RouterState, replica: Replica) -> RouterState:
    """The state without a replica. Its prefixes and its unfinished requests are forgotten.

    Those who still wait for these requests route them again, under the same ids if they like.

    Raises:
        ValueError: the replica is not present.
    """
    if replica not in state.loads:
        raise ValueError(
            f"replica {replica!r} is not present, so it cannot leave; present: {_listed(state)}"
        )
    position = state.replicas.index(replica)
    replicas = tuple(present for present in state.replicas if present != replica)
    last = state.last
    if last == replica:  # so that the turn goes on where it was
        last = replicas[position - 1] if replicas else None
    unfinished = state.unfinished.mutate()
    for request_id, routed in state.unfinished.items():
        if routed.replica == replica:
            del unfinished[request_id]
    return state._replace(
        replicas=replicas,
        loads=state.loads.delete(replica),
        known=state.known.delete(replica),
        unfinished=unfinished.finish(),
        last=last,
    )


def finished(state: RouterState, request_id: str) -> RouterState:
    """The state after the end of a request, whatever ended it.

    If no request of that id is unfinished, the state is unchanged: the news of an end may come
    after the replica has left.
    """
    routed = state.unfinished.get(request_id)
    if routed is None:
        return state
    load = state.loads[routed.replica]
    new_load = Load(load.requests - 1, load.tokens - routed.tokens)
    return state._replace(
        loads=state.loads.set(routed.replica, new_load),
        unfinished=state.unfinished.delete(request_id),
    )


def check(state: RouterState) -> None:
    """Check the invariants that hold between any two transitions. Raises AssertionError."""
    present = set(state.replicas)
    assert len(present) == len(state.replicas), "a replica is present twice"
    assert present == set(state.loads) == set(state.known), "a replica is lost or left over"
    assert state.last is None or state.last in present, "the turn is at a replica that has left"
    loads = dict.fromkeys(state.replicas, Load())
    for routed in state.unfinished.values():
        load = loads[routed.replica]
        loads[routed.replica] = Load(load.requests + 1, load.tokens + routed.tokens)
    assert loads == dict(state.loads), "loads are not those of the unfinished requests"
    for prefixes in state.known.values():
        stamps = prefixes.stamps
        assert len(stamps) <= prefixes.limit == state.known_blocks, (
            "more hashes than may be remembered"
        )
        assert {stamp: key for key, stamp in stamps.items()} == dict(prefixes.hashes), (
            "a stamp is wrong"
        )
        assert all(prefixes.oldest <= stamp < prefixes.newest for stamp in prefixes.hashes), (
            "a stamp is out of range"
        )


def _listed(state: RouterState) -> str:
    return ", ".join(map(repr, state.replicas)) or "none"
