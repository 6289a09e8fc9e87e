"""Files that take long come first, and clusters of Ray's are in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests import workers

NAMES = (
    "tests/host/test_few.py::test_b",
    "tests/host/test_many.py::test_b",
    "tests/host/test_many.py::test_a",
    "tests/docs/test_guides.py::test_a",
    "tests/server/replicas/test_cut.py::test_a",
    "tests/server/replicas/test_storm.py::test_a",
)


def test_long_files_come_first_and_their_tests_keep_their_order():
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in NAMES]
    workers.longest_first(items)
    order = (4, 5, 3, 1, 2, 0)
    assert [item.nodeid for item in items] == [NAMES[place] for place in order]


def test_one_process_has_a_file_and_one_has_all_clusters():
    scheduler = object.__new__(workers.ByFile)
    files = [scheduler._split_scope(name) for name in NAMES]
    assert files[1] == files[2] == "tests/host/test_many.py" != files[0]
    assert files[4] == files[5] == workers.CLUSTERS
