"""Which nodes are one node for the search: equal up to names.

What a key leaves out, and why a run does not depend on it:

- Names of blocks. `allocate` takes any free block, and no content depends on which. A key names
  the blocks in the order in which tables list them. A policy could read them, and must not.
- The number of the step, and the ids of requests: the scheduler copies them and compares them for
  equality. A key has ranks in their place. In the memory of a policy, ids are replaced by ranks.
- The events that a policy with memory has not observed yet: a key has the memory that it will have
  when it has observed them. This is exact if observing events in two parts is the same.
- What the memory's own `folded()` leaves out, if it has that method: it returns a value that is
  equal for two memories with which the policy decides the same for ever.
- Arrival numbers. A shift changes no comparison. A distance above `world.gap` counts as `gap`: see
  `largest_gap`. This is exact if the policy compares distances with nothing above it. In a world
  with strides, distances count in strides.

The state that the search goes on with is one that was reached, never a renamed one. So a stem is a
real run, and a wrong fold can hide a state but cannot invent one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pagedjax.host import blocks, scheduler
from pagedjax.host.checker.moves import Node, plan_step, shape_of, unfinished
from pagedjax.host.checker.worlds import STOP, World
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import Request

Key = tuple[Any, ...]
FURTHEST = 256  # arrivals; distances of which `largest_gap` tries


def key_of(world: World, node: Node) -> Key:
    """A value that is equal for two nodes exactly if the search counts them as one node."""
    state = node.state
    ranked = unfinished(state)
    ranks = {seq.arrival: rank for rank, seq in enumerate(ranked)}
    waited_again = node.waited_again
    waiting = tuple(
        [
            (ranks[seq.arrival], seq.length, seq.computed, seq.arrival in waited_again)
            for seq in state.waiting
        ]
    )
    active = state.running
    names = [ranks[seq.arrival] for seq in active.seqs]
    tables: tuple[Any, ...]
    content: tuple[Any, ...] = ()
    if state.pool.hashes:
        tables, content = _renamed_pool(state)
        if state.config.prefix_checkpoints is not None:
            content = (*content, tuple([seq.junction for seq in active.seqs]))
    else:
        tables = tuple([len(seq.blocks) for seq in active.seqs])
    letters = "".join(map(shape_of, ranked))
    running = (*names, *active.lengths, *active.computed)
    memory = None
    if state.news is not None:
        names_by_id = {seq.request_id: rank for rank, seq in enumerate(ranked)}
        memory = renamed(_observed_memory(world, node), names_by_id), True
    gaps = _gaps(world, [*ranks, state.arrivals]) if ranks else ()  # up to the next request's
    return letters, gaps, waiting, running, tables, content, memory, node.now


def _gaps(world: World, arrivals: Sequence[int]) -> tuple[int, ...]:
    """The distances between successive arrivals, as far as the world tells them apart."""
    return tuple(
        [
            min(later - earlier, world.gap) // world.stride
            for earlier, later in itertools.pairwise(arrivals)
        ]
    )


def _observed_memory(world: World, node: Node) -> Any:
    """The memory with which the policy will decide if a step runs next, folded if it can be."""
    policy = world.policy
    memory = node.state.memory
    if policy.observe is not None:
        now = node.now if world.timed else None
        memory = policy.observe(memory, node.state.news or (), now)
    folded = getattr(memory, "folded", None)
    return memory if folded is None else folded()


def _renamed_pool(state: SchedulerState) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(block tables, content of the blocks in them and of the idle ones in order of eviction), with
    the blocks named in the order in which they stand there.
    """
    places: dict[int, int] = {}
    hashes = state.pool.hashes
    tables = tuple(
        [
            tuple([places.setdefault(block, len(places)) for block in seq.blocks])
            for seq in state.running.seqs
        ]
    )
    owned = tuple([hashes.get(block) for block in places])
    idle = tuple([hashes[block] for block in blocks.idle_ids(state.pool)])
    return tables, (owned, idle)


def renamed(value: Any, names: Mapping[str, Any]) -> Any:
    """A value of a policy's memory with the ids of unfinished requests replaced by ranks.

    Tuples and mappings are searched; what else it holds is compared by value.
    """
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, tuple):
        return tuple([renamed(item, names) for item in value])
    if isinstance(value, frozenset):
        return frozenset(renamed(item, names) for item in value)
    if hasattr(value, "items"):
        return frozenset((renamed(key, names), renamed(item, names)) for key, item in value.items())
    return value


def largest_gap(world: World) -> int:
    """The smallest distance of two arrivals from which on the policy prefers the same one, for each
    pair of shapes, and for each shape whose prompt is in the prefix cache; at least 1, and at least
    the number that the policy states as its bound: a preference may change with the output.

    Two requests are submitted so far apart, and one of them can enter. Distances that are powers of
    two are tried, up to `FURTHEST`, and a change between two of them is found by halving. A policy
    that compares larger distances, or distances of other things, is not seen.
    """
    one_row = world._replace(config=world.config._replace(max_num_seqs=1))
    empty = scheduler.init(one_row.config)
    cached = [_cached(one_row, empty, shape) for shape in world.shapes if shape.hashes]
    bound = world.policy.bound
    last_change = max(1, bound) if isinstance(bound, int) else 1
    for state in (empty, *cached):
        for first, second in itertools.product(world.shapes, repeat=2):
            queue = scheduler.submit(state, first)
            preferred = partial(_preferred, one_row, queue, second)
            last_change = max(last_change, _last_change(preferred))
    return last_change


def _last_change(value_at: Callable[[int], Any]) -> int:
    """The distance from which on a value is that at FURTHEST, as `largest_gap` tries it."""
    far = FURTHEST
    last = value_at(far)
    while far > 1 and value_at(far // 2) == last:
        far //= 2
    near = far // 2
    while far - near > 1:
        middle = (near + far) // 2
        if value_at(middle) == last:
            far = middle
        else:
            near = middle
    return far


def _cached(world: World, state: SchedulerState, request: Request) -> SchedulerState:
    """The state after a request has run alone, so that its prompt is in the prefix cache."""
    state = scheduler.submit(state, request)
    while state.ids:
        state, plan = plan_step(world, state, now=0)
        if not plan.seqs:
            state, _ = scheduler.cancel(state, request.request_id)
        state, _ = scheduler.commit(state, plan, [STOP] * len(plan.seqs))
    return state


def _preferred(
    world: World, queue: SchedulerState, request: Request, distance: int
) -> tuple[str, ...]:
    """Who enters if a request arrives so much later than the one that waits."""
    number = queue.waiting[0].arrival + distance
    later = request._replace(request_id="other")
    state = scheduler.submit(queue._replace(arrivals=number), later)
    _, plan = plan_step(world, state, now=0)
    return plan.admitted
