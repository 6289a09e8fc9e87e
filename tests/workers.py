"""Which process of pytest-xdist runs which tests, and when.

A file stays in one process, whose fixtures and programs its tests share. Files that take long come
first, so that all processes end together: some folders, then those with most tests. Clusters of
Ray's start many processes, so there is one at a time: their folder is as one file.

--drawn-order=WORD  files in an order that is drawn from a word, such as a commit
--seconds=N         a test that would begin later is skipped, and the summary says how many were
"""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Callable

import pytest
from xdist.scheduler import LoadFileScheduling

CLUSTERS = "tests/server/replicas"
# The embedded model takes 700 MiB, which a process has at its beginning rather than at its end.
FIRST = (
    CLUSTERS,
    "tests/engine/test_goldens_engine.py",
    "tests/docs",
    "tests/experiments",
    "tests/processes",
)


class ByFile(LoadFileScheduling):
    """Gives files to processes in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return CLUSTERS if nodeid.startswith(CLUSTERS) else super()._split_scope(nodeid)


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("which tests, and when")
    group.addoption("--drawn-order", metavar="WORD", help="files in an order drawn from this word")
    group.addoption("--seconds", type=int, help="tests that would begin later are skipped")


def sort(items: list[pytest.Item], word: str | None) -> None:
    """Sort tests by their files: the longest first, or in the order drawn from a word."""
    items.sort(key=_longest_first(items) if word is None else _drawn(items, word))


def _longest_first(items: list[pytest.Item]) -> Callable[[pytest.Item], tuple[int, int, str]]:
    counts = collections.Counter(map(_file, items))

    def place(item: pytest.Item) -> tuple[int, int, str]:
        file = _file(item)
        ranks = [rank for rank, folder in enumerate(FIRST) if file.startswith(folder)]
        return min(ranks, default=len(FIRST)), -counts[file], file

    return place


def _drawn(items: list[pytest.Item], word: str) -> Callable[[pytest.Item], int]:
    files = sorted(set(map(_file, items)))
    random.Random(word).shuffle(files)
    places = {file: place for place, file in enumerate(files)}
    return lambda item: places[_file(item)]


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class Deadline:
    """A plugin: tests that would begin later are skipped."""

    REASON = "no time left"

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds
        self.end = time.monotonic() + seconds

    @pytest.hookimpl(tryfirst=True)  # before fixtures
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.end:
            pytest.skip(self.REASON)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        skipped = terminalreporter.stats.get("skipped", [])
        late = [report for report in skipped if self.REASON in str(report.longrepr)]
        if late:
            files = {report.nodeid.partition("::")[0] for report in late}
            terminalreporter.write_line(
                f"{len(late)} tests in {len(files)} files did NOT run: {self.seconds} s were over"
            )
