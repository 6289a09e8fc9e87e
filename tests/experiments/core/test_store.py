"""Run folders: written atomically, read back unchanged, with clear errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

import experiments
from experiments.core import store
from experiments.core.optional_imports import require
from pagedjax.options.config import Speculative


def summary(point: str = "abc", repeat: int = 0, order: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "schema": store.SCHEMA,
        "name": "unit",
        "label": f"block_size={8 * (order + 1)}",
        "swept": {"engine.block_size": 8 * (order + 1)},
        "point": point,
        "repeat": repeat,
        "order": order,
        "run": f"{point}/{repeat}",
        "failed": None,
        "commit": "c0ffee",
        "device": "cpu",
        "metrics": {"output_tokens_per_s": 10.0 + order, "ttft_s": {"p50": 0.5}},
        **fields,
    }


def put(sweep: Path, run: dict[str, Any]) -> Path:
    folder = store.run_folder(sweep, run["point"], run["repeat"])
    store.write_run(folder, {"summary.json": store.json_text(run), "steps.jsonl": ""})
    return folder


def test_run_is_written_whole_and_failed_run_is_replaced(tmp_path):
    folder = put(tmp_path, summary(failed="it broke"))
    assert store.read_summary(folder) == summary(failed="it broke")
    put(tmp_path, summary())
    assert store.read_summary(folder) == summary()
    assert [path.name for path in folder.parent.iterdir()] == ["0"]
    assert store.read_summary(tmp_path / "other") is None


def test_interrupted_write_leaves_no_run(tmp_path, monkeypatch):
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            put(tmp_path, summary())
        with pytest.raises(KeyboardInterrupt):
            store.write_file(tmp_path / "runs.jsonl", "x")
    assert store.read_summary(store.run_folder(tmp_path, "abc", 0)) is None
    assert not (tmp_path / "runs.jsonl").exists()
    with pytest.raises(ValueError, match="contains no runs"):
        store.read_runs(tmp_path)
    store.clean(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(".")] == []


def test_clean_keeps_files_of_live_process(tmp_path):
    alive = tmp_path / "abc" / f".writing-{os.getppid()}-0"
    dead = tmp_path / "abc" / ".writing-999999999-0"
    alive.mkdir(parents=True)
    dead.mkdir()
    store.clean(tmp_path)
    assert alive.exists()
    assert not dead.exists()


def test_load_runs_returns_data_frame(tmp_path):
    runs = [
        summary("a", 0, 0),
        summary("a", 1, 0),
        summary("b", 0, 1, failed="it broke", metrics=None),
    ]
    for run in runs:
        put(tmp_path / "unit", run)
    frame = experiments.load_runs(tmp_path)  # no index: every run below the folder
    assert list(frame["block_size"]) == [8, 8, 16]
    assert list(frame["output_tokens_per_s"])[:2] == [10.0, 10.0]
    assert frame["ttft_s.p50"].isna().tolist() == [False, False, True]
    assert frame["failed"].isna().tolist() == [True, True, False]
    assert all((Path(run) / "summary.json").is_file() for run in frame["run"])
    store.write_file(tmp_path / "unit" / "runs.jsonl", store.json_lines(runs[:2]))
    frame = experiments.load_runs(str(tmp_path))  # the sweep as it now is
    assert list(frame["repeat"]) == [0, 1]
    assert all((Path(run) / "summary.json").is_file() for run in frame["run"])


def test_folder_without_runs_error_describes_a_run(tmp_path):
    with pytest.raises(
        ValueError, match=r"contains no runs: a run is a folder with a summary\.json"
    ):
        experiments.load_runs(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        experiments.load_runs(tmp_path / "no")


def test_damaged_or_old_summary_error_has_remedy(tmp_path):
    folder = put(tmp_path, summary())
    (folder / "summary.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"summary\.json is damaged .*delete the folder .* and run again"
    ):
        store.read_summary(folder)
    (folder / "summary.json").write_text(json.dumps({"schema": 0}))
    with pytest.raises(ValueError, match=r"has another schema than 1; delete the folder"):
        store.read_summary(folder)


def test_missing_extra_error_names_install_command():
    with pytest.raises(
        ImportError, match=r"needs nosuchthing, .*pip install 'pagedjax\[experiments\]'"
    ):
        require("nosuchthing.inner")


def test_plain_yaml_and_json():
    assert store.yaml_text({"a": (1, 2), "b": {3: None}}) == "a:\n- 1\n- 2\nb:\n  3: null\n"
    assert yaml.safe_load(store.yaml_text({"s": Speculative(num_tokens=2)}))["s"]["num_tokens"] == 2
    assert store.json_lines([{"a": 1}, [2]]) == '{"a":1}\n[2]\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        store.json_text({"a": float("nan")})
