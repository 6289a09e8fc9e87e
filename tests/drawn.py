"""Properties of drawn examples: the default run draws a bounded sample, `-m slow` many more of the same.

A failure prints the smallest example and the line `@reproduce_failure` that draws it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings


def examples(sample: int, whole: int) -> pytest.MarkDecorator:
    """The test has a parameter `number`, the number of examples: `sample` by default, `whole` if it is slow."""
    cases = [pytest.param(sample, id="sample"), pytest.param(whole, id="whole", marks=pytest.mark.slow)]
    return pytest.mark.parametrize("number", cases)


def check(number: int, holds: Callable[..., None], **strategies: Any) -> None:
    """Calls `holds` with `number` examples of the strategies of its arguments."""
    limits = settings(
        max_examples=number, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    limits(given(**strategies)(holds))()
