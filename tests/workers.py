"""Which process of pytest-xdist runs which tests, and when.

A file stays in one process, whose fixtures and programs its tests share. Files that take long come
first, so that all processes end together: some folders, then those with most tests. Clusters of
Ray's start many processes, so there is one at a time: their folder is as one file.
"""

from __future__ import annotations

import collections

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


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by their files."""
    files = [item.nodeid.partition("::")[0] for item in items]
    counts = collections.Counter(files)

    def place(item: pytest.Item) -> tuple[int, int, str]:
        file = item.nodeid.partition("::")[0]
        ranks = [rank for rank, folder in enumerate(FIRST) if file.startswith(folder)]
        return min(ranks, default=len(FIRST)), -counts[file], file

    items.sort(key=place)
