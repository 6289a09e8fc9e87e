"""Programs of experiments are compiled with few optimisations, as those of tests' engines are (quick_compiler.py).

Trainers and measurements compile programs of their own, and small ones of single operations. A module of which slow
tests run has all optimisations, so that programs of one run are compiled in one way.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

OPTION = "jax_disable_most_optimizations"


@pytest.fixture(scope="module", autouse=True)
def _quick_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    items = [item for item in request.session.items if item.path == request.node.path]
    quick = not any(item.get_closest_marker("slow") for item in items)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OPTION.upper(), str(quick).lower())  # of processes that tests start
        before = jax.config.read(OPTION)
        jax.config.update(OPTION, quick)
        yield
        jax.config.update(OPTION, before)
