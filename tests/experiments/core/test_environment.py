"""What a run says of the machine it ran on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from experiments.core import environment
from experiments.core.environment import processor_time, stolen_share


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a virtual machine what its host takes")
def test_the_share_that_the_host_took_is_of_what_was_asked_for():
    now = processor_time()
    assert now is not None
    used, stolen = now
    assert used > 0
    since = used - 900_000, stolen - 100_000  # jiffies: so many that what happens meanwhile is no part of it
    assert stolen_share(since) == pytest.approx(0.1, abs=0.001)


def test_where_nothing_is_told_nothing_is_claimed():
    assert stolen_share(None) is None


def test_the_hash_of_the_source_follows_what_measures_and_needs_no_commit(tmp_path: Path, monkeypatch):
    files = ("pagedjax/a.py", "pagedjax/device/models/b.py", "pallas_kernels/c.py", "pallas_kernels/tiles/h200.json")
    files += ("experiments/core/environment.py", "experiments/studies/001/study.py", "pagedjax/notes.txt")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "experiments/core/environment.py"))
    found = [environment.source.__wrapped__()]
    for name in files:
        (tmp_path / name).write_text("edited")
        found.append(environment.source.__wrapped__())
    assert len(set(found[:6])) == 6
    assert found[5:] == [found[5]] * 3, "studies and notes measure nothing"


@pytest.mark.parametrize(
    ("name", "identifies"),
    [
        ("experiments/run.py", True),
        ("experiments/simulation/simulate.py", True),
        ("experiments/analysis/plots.py", True),
        ("experiments/bench/floors.py", False),
        ("experiments/results/w1.json", False),
        ("experiments/studies/findings.py", False),
    ],
)
def test_source_hash_covers_what_makes_a_run(name: str, identifies: bool, tmp_path: Path, monkeypatch):
    (tmp_path / name).parent.mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "experiments/core/environment.py"))
    before = environment.source.__wrapped__()
    (tmp_path / name).write_text("edited")
    assert (environment.source.__wrapped__() != before) == identifies
