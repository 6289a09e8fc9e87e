"""The environment that a run records: machine, code, processor time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from experiments.core import environment
from experiments.core.environment import processor_time, stolen_share
from tests import fresh_python

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports stolen processor time")
def test_stolen_share_is_relative_to_requested_time():
    times = processor_time()
    assert times is not None
    used, stolen = times
    assert used > 0
    # so many jiffies that other processes change nothing
    earlier_times = (used - 900_000, stolen - 100_000)
    assert stolen_share(earlier_times) == pytest.approx(0.1, abs=0.001)


def test_source_hash_changes_with_measuring_code_only(tmp_path, monkeypatch):
    hashed = (
        "pagedjax/a.py",
        "pagedjax/device/models/b.py",
        "pallas_kernels/c.py",
        "pallas_kernels/tiles/h200.json",
        "experiments/run.py",
        "experiments/core/environment.py",
        "experiments/simulation/cost.py",
        "experiments/analysis/plots.py",
    )
    unhashed = (
        "experiments/studies/001/study.py",
        "experiments/bench/scale.py",
        "experiments/results/a.json",
        "experiments/hardware/on_gpu.py",
        "experiments/training/train_tiny.py",
        "pagedjax/notes.txt",
    )
    files = (*hashed, *unhashed)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "experiments/core/environment.py"))
    hashes = [environment.source.__wrapped__()]
    for name in files:
        (tmp_path / name).write_text("edited")
        hashes.append(environment.source.__wrapped__())
    assert len(set(hashes)) == len(hashed) + 1
    assert set(hashes[len(hashed) :]) == {hashes[len(hashed)]}, (
        "studies, benchmarks and results measure nothing in a run"
    )


def test_source_hash_covers_every_module_that_the_commands_import():
    program = """
import sys
from experiments import capacity, compare, report, run
print(*(m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "experiments"), sep="\\n")
"""
    imported = {Path(line) for line in fresh_python.output_of(program).splitlines()}
    covered = set(environment.source_files(ROOT))
    assert imported <= covered
    folders = {
        path.relative_to(ROOT).parts[1]
        for path in covered
        if path.relative_to(ROOT).parts[0] == "experiments"
    }
    assert not folders & {"studies", "bench", "hardware", "training", "results"}
    assert folders >= {"core", "simulation", "analysis", "run.py"}
