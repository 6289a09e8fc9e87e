"""Is a policy pure? A policy that keeps something between calls makes equal runs differ."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from pagedjax.host import scheduler
from pagedjax.host.policies import Policy
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Request, Seq

# A pool that is too small for all requests at once, so that some wait and some are preempted.
CONFIG = SchedulerConfig(
    block_size=2, num_blocks=10, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=16
)
REQUESTS = [
    Request(f"r{i}", 1 + 3 * i % 7, max_tokens=5, priority=i % 3, user=f"u{i % 2}")
    for i in range(10)
]
MAX_STEPS = 80


class Impure(ValueError):
    """A function of a policy whose result or effect depends on earlier calls."""


def check(policy: Policy) -> None:
    """Runs a small scheduler with the policy, and calls each of its functions twice.

    An exception of the policy itself ends the check: it may need requests of another kind.

    Raises:
        Impure: two equal calls return different values, or a call changes a value that outlives it
            (a global of its file, an attribute, a default argument).
    """
    twice = Policy(
        policy.name,
        order=_twice(policy, "order"),
        admit=_twice(policy, "admit"),
        preempt=_twice(policy, "preempt"),
        swap=_twice(policy, "swap"),
    )
    try:
        _run(twice)
    except Impure:
        raise
    except Exception:  # a real run will raise it, too
        pass


def _run(policy: Policy) -> None:
    state = scheduler.init(CONFIG._replace(host_blocks=4))
    for step in range(MAX_STEPS):
        if step < len(REQUESTS):
            state = scheduler.submit(state, REQUESTS[step])
        state, plan = scheduler.schedule(state, policy)
        state, _ = scheduler.commit(state, plan, (0,) * len(plan.seqs))


def _twice(policy: Policy, name: str) -> Callable[..., Any]:
    """The function of a policy that is called twice, and whose values are compared."""
    function = getattr(policy, name)

    def call(*arguments: Any) -> Any:
        before = dict(_lasting_values(function))
        first, second = (_value(function(*arguments)) for _ in range(2))
        if first != second:
            raise Impure(
                f"{name} of the policy {policy.name!r} returned {_text(first)} and then "
                f"{_text(second)} for the same arguments; let it depend on its arguments alone"
            )
        after = dict(_lasting_values(function))
        for place, value in after.items():
            if before.get(place) != value:
                raise Impure(
                    f"{name} of the policy {policy.name!r} changes {place}, so that equal runs "
                    "would differ; let it depend on its arguments alone"
                )
        return first

    return call


def _value(result: Any) -> Any:
    """A result that can be compared: an `order` may return any iterable."""
    return result if isinstance(result, (bool, tuple)) else tuple(result)


def _text(result: Any) -> str:
    """A result, for an error: sequences by the ids of their requests."""
    if isinstance(result, Seq):
        return result.request_id
    if isinstance(result, tuple):
        return f"({', '.join(map(_text, result))})"
    return repr(result)


def _lasting_values(function: Any, seen: set[int] | None = None) -> Iterator[tuple[str, bytes]]:
    """What outlives a call of a function: (where it is, its value as bytes)."""
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, MethodType):
        yield from _values_of("an attribute of its object", vars(function.__self__), seen)
        function = function.__func__
    if not isinstance(function, FunctionType):
        yield from _values_of("an attribute of its object", getattr(function, "__dict__", {}), seen)
        return
    if not function.__module__.startswith("pagedjax."):
        yield from _values_of("the global", function.__globals__, seen)
    cells = {
        name: cell.cell_contents
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        )
    }
    yield from _values_of("the variable", cells, seen)
    yield from _values_of("its attribute", function.__dict__, seen)
    yield from _values_of("a default of", {function.__name__: function.__defaults__}, seen)


def _values_of(kind: str, values: dict[str, Any], seen: set[int]) -> Iterator[tuple[str, bytes]]:
    for name, value in values.items():
        if isinstance(value, (FunctionType, MethodType)):
            yield from _lasting_values(value, seen)
        elif not (name.startswith("__") or isinstance(value, (type, ModuleType))):
            try:
                yield f"{kind} {name}", pickle.dumps(value)
            except Exception:  # such as a lock
                continue
