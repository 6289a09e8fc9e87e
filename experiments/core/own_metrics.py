"""Metrics of a user's own: functions of the records of a run, named file.py:NAME.

def jain(requests, steps):
    shares = [1 / request.e2e for request in requests if request.done]
    if not shares:
        return None
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from pagedjax.options.own_errors import OwnError, place_of, placed
from pagedjax.options.own_names import own_name
from pagedjax.options.own_values import own_function

OWN = "own"  # the section of a summary that has the values of these metrics
PREFIX = "metrics"  # if a metric failed, the reason begins with this; other reasons do not


def check(names: Sequence[str]) -> None:
    """Raises ValueError if a function is missing or takes other arguments, or two have one name."""
    for name in names:
        find(name)
    short = [name_of(name) for name in names]
    repeated = next((name for name in short if short.count(name) > 1), None)
    if repeated:
        raise ValueError(f"metrics has two functions named {repeated!r}; rename one of them")


def find(name: str) -> Callable[..., Any]:
    """The function that a config names, with its parameters."""
    return own_function("metrics", name, 2)


def name_of(name: str) -> str:
    """The name of a metric in a summary, with its parameters and without its file."""
    metric = own_name(name)
    return metric.attribute + metric.call


def only_metrics_failed(reason: str) -> bool:
    """Whether a run that failed for this reason has records that may be used."""
    return reason.startswith(PREFIX)


def values_of(
    names: Sequence[str], requests: Sequence[Any], steps: Sequence[Any]
) -> tuple[dict[str, Any], list[str]]:
    """The value of each metric, by its name, and why some have none.

    A metric that raises, or that returns no number, has the value None: what was measured stays.

    Args:
        requests: `RequestRecord`s.
        steps: `StepRecord`s.
    """
    values: dict[str, Any] = {}
    errors = []
    for name in names:
        try:
            values[name_of(name)] = _value(name, requests, steps)
        except ValueError as error:
            values[name_of(name)] = None
            errors.append(str(error))
    return values, errors


def _value(name: str, requests: Sequence[Any], steps: Sequence[Any]) -> Any:
    """The value of a metric.

    Raises:
        ValueError: the function raises an error, or returns neither a number nor a mapping of names
            to numbers.
    """
    metric = find(name)
    try:
        with placed(f"metrics: {name}"):
            value = metric(list(requests), list(steps))
    except OwnError:
        raise
    except Exception as error:
        place = place_of(error, installed=True)
        raise ValueError(
            f"metrics: {name} raised {type(error).__name__}: {error}{place}"
        ) from error
    if isinstance(value, Mapping):
        return {str(key): _number(name, item) for key, item in value.items()}
    return _number(name, value)


def _number(name: str, value: Any) -> float | int | None:
    """A finite number for JSON. None and NaN become None: the run has no such value."""
    if value is None or (isinstance(value, Real) and math.isnan(value)):
        return None
    if not isinstance(value, Real) or math.isinf(value):
        raise ValueError(
            f"metrics: {name} returned {value!r:.80}; it must be a finite number, null, or a "
            "mapping of names to them"
        )
    return int(value) if isinstance(value, int) else float(value)
