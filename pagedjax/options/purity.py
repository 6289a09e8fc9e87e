"""Checks that functions of a user are pure: a function that keeps something between calls makes
equal runs differ.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from pagedjax.options.own_errors import LIBRARIES


class Impure(ValueError):
    """A function whose result or effect depends on earlier calls. The message names the function,
    and what it returned or changed.
    """


def called_twice(
    function: Callable[..., Any], name: str, *, as_tuple: bool = True
) -> Callable[..., Any]:
    """Returns the function, with a check: each call is made twice.

    Args:
        name: the function, in words, for the error.
        as_tuple: whether an iterable result becomes a tuple.

    Raises:
        Impure: two equal calls return different values, or a call changes a value that outlives it
            (a global of its file, an attribute, a default argument).
    """

    def call(*arguments: Any) -> Any:
        before = dict(_lasting_values(function))
        value_of = _value if as_tuple else _itself
        first = value_of(function(*arguments))
        second = value_of(function(*arguments))
        if first != second:
            raise Impure(
                f"{name} returned {_text(first)} and then {_text(second)} for the same arguments; "
                "let it depend on its arguments alone"
            )
        after = dict(_lasting_values(function))
        for place, value in after.items():
            if before.get(place) != value:
                raise Impure(
                    f"{name} changes {place}, so that equal runs would differ; "
                    "let it depend on its arguments alone"
                )
        return first

    return call


def names_read(function: Any, visited: set[int] | None = None) -> set[str]:
    """Returns the names of globals and attributes that a user's function reads, with those of the
    functions of the user that it can reach.
    """
    visited = set() if visited is None else visited
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        function = vars(type(function)).get("__call__")  # of an object that can be called
    if not isinstance(function, FunctionType) or id(function) in visited:
        return set()
    visited.add(id(function))
    variables = inspect.getclosurevars(function)
    names: set[str] = set()
    if not str(function.__module__).startswith("pagedjax."):
        codes = [function.__code__]
        for code in codes:  # the list grows in the loop: an inner function has its own code
            names.update(code.co_names)
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for value in (*variables.nonlocals.values(), *variables.globals.values()):
        if callable(value) and not isinstance(value, type):
            names |= names_read(value, visited)
    return names


def _value(result: Any) -> Any:
    """A result that can be compared: an `order` may return any iterable."""
    if isinstance(result, (bool, int, str, tuple)) or not isinstance(result, Iterable):
        return result
    return tuple(result)


def _itself(result: Any) -> Any:
    return result


def _text(result: Any) -> str:
    """A result, for an error: sequences by the ids of their requests."""
    if hasattr(result, "request_id"):
        return result.request_id
    if isinstance(result, tuple):
        return f"({', '.join(map(_text, result))})"
    return repr(result)


def _lasting_values(function: Any, visited: set[int] | None = None) -> Iterator[tuple[str, bytes]]:
    """What outlives a call of a function: (where it is, its value as bytes).

    Globals of a library that the function calls are not among them: a library may have a cache, a
    counter or a clock, and the results of the two calls are compared anyway.
    """
    is_users = visited is None or not _is_of_a_library(function)
    visited = set() if visited is None else visited
    if id(function) in visited:
        return
    visited.add(id(function))
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, MethodType):
        yield from _values_of("an attribute of its object", vars(function.__self__), visited)
        function = function.__func__
    if not isinstance(function, FunctionType):
        yield from _values_of(
            "an attribute of its object", getattr(function, "__dict__", {}), visited
        )
        return
    variables = function.__globals__
    is_users = is_users and not str(function.__module__).startswith("pagedjax.")
    if is_users and id(variables) not in visited:
        visited.add(id(variables))
        yield from _values_of("the global", variables, visited)
    enclosed = inspect.getclosurevars(function).nonlocals
    yield from _values_of("the variable", dict(enclosed), visited)
    yield from _values_of("its attribute", function.__dict__, visited)
    yield from _values_of("a default of", {function.__name__: function.__defaults__}, visited)


def _is_of_a_library(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(LIBRARIES)


def _values_of(kind: str, values: dict[str, Any], visited: set[int]) -> Iterator[tuple[str, bytes]]:
    for name, value in values.items():
        if isinstance(value, (FunctionType, MethodType)):
            yield from _lasting_values(value, visited)
        elif not (name.startswith("__") or isinstance(value, (type, ModuleType))):
            try:
                yield f"{kind} {name}", pickle.dumps(value)
            except Exception:  # such as a lock
                continue
