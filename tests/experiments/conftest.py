"""Trainers and measurements compile programs of their own, and small ones of single operations:
with few optimisations, as those of tests' engines (quick_compiler.py). A module of which slow tests
run has all optimisations, so that programs of one run are compiled in one way."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of runs: a sweep draws no report, which takes a second. test_report.py has reports."""
    monkeypatch.setattr("experiments.report.write", lambda folder: folder)


@pytest.hookimpl(trylast=True)  # when pytest has deselected by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow_modules = {item.path for item in items if item.get_closest_marker("slow")}
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.path not in slow_modules:
            item.add_marker("few_optimisations")
