"""Files that take long come first, unless an order is drawn; clusters of Ray's are in one process;
tests that would begin too late are skipped.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from tests import workers
from tests.fresh_python import ROOT

NAMES = (
    "tests/host/test_few.py::test_b",
    "tests/host/test_many.py::test_b",
    "tests/host/test_many.py::test_a",
    "tests/docs/test_guides.py::test_a",
    "tests/server/replicas/test_cut.py::test_a",
    "tests/server/replicas/test_storm.py::test_a",
)


def sorted_names(word: str | None) -> list[str]:
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in NAMES]
    workers.sort(items, word)
    return [item.nodeid for item in items]


def test_long_files_come_first_and_their_tests_keep_their_order():
    assert sorted_names(None) == [NAMES[place] for place in (4, 5, 3, 1, 2, 0)]


def test_a_drawn_order_is_that_of_its_word_and_keeps_the_tests_of_a_file_together():
    orders = {word: sorted_names(word) for word in "abcdefgh"}
    assert sorted_names("a") == orders["a"]
    assert len({tuple(order) for order in orders.values()}) > 4
    for order in orders.values():
        assert sorted(order) == sorted(NAMES)
        first = order.index(NAMES[1])
        assert order[first + 1] == NAMES[2]


def test_one_process_has_a_file_and_one_has_all_clusters():
    scheduler = object.__new__(workers.ByFile)
    files = [scheduler._split_scope(name) for name in NAMES]
    assert files[1] == files[2] == "tests/host/test_many.py" != files[0]
    assert files[4] == files[5] == workers.CLUSTERS


def test_tests_behind_the_last_second_are_skipped_and_counted():
    command = [sys.executable, "-m", "pytest", "-n", "1", "--seconds", "0", "--drawn-order", "word"]
    files = ["tests/host/test_event_log.py", "tests/test_documents.py"]
    run = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout
    assert "tests in 2 files did NOT run: 0 s were over" in run.stdout
    assert "passed" not in run.stdout
