"""Properties of drawn examples: the default run draws a bounded sample, `-m slow` many more.

The sample is the same in each run, so the default run fails because of a change, and not by chance.
`-m slow` draws other examples each time, and finds what nobody thought of. A failure prints the
smallest example and the line `@reproduce_failure` that draws it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

Property = Callable[..., None]


ASKS_FOR_SLOW = re.compile(r"(?<!not )\b(slow|exhaustive)\b")


def choose_settings(mark_expression: str) -> None:
    """Of every property: no limit of time, because a machine may be busy.

    mark_expression: what pytest got as `-m`.
    """
    settings.register_profile(
        "pagedjax",
        deadline=None,
        derandomize=not ASKS_FOR_SLOW.search(mark_expression),
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("pagedjax")


def examples(sample: int, full: int) -> pytest.MarkDecorator:
    """The test has a parameter `number`, the number of examples: `sample` by default, `full` if it
    is slow.
    """
    cases = [
        pytest.param(sample, id="sample"),
        pytest.param(full, id="whole", marks=pytest.mark.slow),
    ]
    return pytest.mark.parametrize("number", cases)


def run_machine(machine: Any, number: int, steps: int) -> None:
    """Runs `number` histories of a state machine, of at most `steps` rules each."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    limits = settings(max_examples=number, stateful_step_count=steps, suppress_health_check=checks)
    run_state_machine_as_test(machine, settings=limits)


def check(number: int, holds: Property, *columns: Any, **strategies: Any) -> None:
    """Calls `holds` with `number` examples of the strategies of its arguments."""
    limits = settings(max_examples=number)
    limits(hypothesis.given(*columns, **strategies)(holds))()


def given(
    sample: int, full: int, *columns: Any, **strategies: Any
) -> Callable[[Property], Property]:
    """In place of hypothesis' `given`, for a test without fixtures, with the numbers of
    `examples`.
    """

    def of(holds: Property) -> Property:
        @examples(sample, full)
        def test(number: int) -> None:
            check(number, holds, *columns, **strategies)

        test.__name__ = holds.__name__
        test.__doc__ = holds.__doc__
        return test

    return of
