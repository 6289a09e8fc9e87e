"""What a policy promises, beside that every request ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagedjax.host.checker.worlds import World
from pagedjax.host.policies import POLICIES, RATE, WINDOW, Policy
from pagedjax.host.types import Request

# (a request, all shapes of the world) -> how many later requests may enter before it
Bound = Callable[[Request, Sequence[Request]], int]


class Promises(NamedTuple):
    """What is checked of a policy because it says so.

    bound: the later requests that may enter before a request; None: no number is stated.
    urgent_first: whether no later and less urgent request is preferred to a request.
    """

    bound: Bound | int | None = None
    urgent_first: bool = False


NOTHING = Promises()

# As the comments of the policies say. "fair" states none: it depends on the lives of older
# requests of the same user.
SHIPPED = {
    "fcfs": Promises(0, urgent_first=True),
    "static": Promises(0, urgent_first=True),
    "priority": Promises(
        lambda request, shapes: WINDOW * (request.priority - min(x.priority for x in shapes)),
        urgent_first=True,
    ),
    "shortest": Promises(lambda request, shapes: request.prompt_len // RATE),
    "longest_prefix": Promises(
        lambda request, shapes: max(x.prompt_len + x.max_tokens for x in shapes) // RATE
    ),
}


def promises_of(policy: Policy) -> Promises:
    """What a policy says of itself: a shipped one in `SHIPPED`, another one by fields `bound` (a
    number, or a function as `Bound`) and `urgent_first`, if it has them.
    """
    if POLICIES.get(policy.name) is policy:
        return SHIPPED.get(policy.name, NOTHING)
    return Promises(getattr(policy, "bound", None), getattr(policy, "urgent_first", False))


def limits(bound: Bound | int, world: World) -> dict[str, int]:
    """The bound for each shape of a world, by its letter."""
    return {
        shape.request_id: bound(shape, world.shapes) if callable(bound) else bound
        for shape in world.shapes
    }
