"""Trainers and measurements compile programs of their own, and small ones of single operations:
with few optimisations, as those of tests' engines (quick_compiler.py). A module of which slow tests
run has all optimisations, so that programs of one run are compiled in one way."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)  # when pytest has deselected by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow_modules = {item.path for item in items if item.get_closest_marker("slow")}
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.path not in slow_modules:
            item.add_marker("few_optimisations")
