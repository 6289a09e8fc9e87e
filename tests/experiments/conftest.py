"""Trainers and measurements compile programs of their own, and small ones of single operations: with few optimisations,
as those of tests' engines (quick_compiler.py). A module of which slow tests run has all optimisations, so that programs
of one run are compiled in one way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import garbage


@pytest.fixture(scope="module", autouse=True)
def _objects_of_earlier_tests_set_aside() -> Iterator[None]:
    """Each measured run begins with a collection of garbage, which would look through what all earlier tests left."""
    garbage.set_aside()
    yield


@pytest.hookimpl(trylast=True)  # when pytest has deselected by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow_modules = {item.path for item in items if item.get_closest_marker("slow")}
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.path not in slow_modules:
            item.add_marker("few_optimisations")
