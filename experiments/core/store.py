"""Run folders: written atomically, read without pandas.

    <out>/<name>/<first 12 digits of the point's hash>/<repeat>/
        config.yaml     the resolved config, without any choice left; small files that it names are copied beside it
        env.json        the environment: commit, hash of the code, versions, device, flags
        requests.jsonl  one line a request, its branches in it
        steps.jsonl     one line a step; not in a run that keeps sums (totals.py)
        recording.jsonl, recording.html     with `record: true`, see recordings.py
        summary.json    the metrics; a run exists if and only if this file exists
    <out>/<name>/sweep.json, runs.jsonl, report.html    the sweep: its runs in order, their summaries, the report

A run is written under a temporary name and renamed, so a killed sweep leaves no incomplete run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from experiments.core.records import BranchRecord, RequestRecord, Transfer
from pagedjax.text import yaml_words

SCHEMA = 1
_SUMMARY = "summary.json"
_STALE = "stale.json"  # the former summary of a run that is measured again
_TEMPORARY = ".writing-"


def run_folder(sweep: Path, point: str, repeat: int) -> Path:
    return sweep / point[:12] / str(repeat)


def write_run(folder: Path, files: dict[str, str]) -> None:
    """Write a run's `files` (name -> text) as one atomic change.

    An earlier run in `folder` is replaced.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f"{_TEMPORARY}{os.getpid()}-{folder.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for name, text in files.items():
        (temporary / name).write_text(text, encoding="utf-8")
    if folder.exists():  # os.replace does not replace a folder that is not empty
        shutil.rmtree(folder)
    os.replace(temporary, folder)


def set_aside(folders: Sequence[Path]) -> None:
    """Mark runs as missing, because they are measured again.

    Their files stay until new ones replace them.
    """
    for folder in folders:
        with suppress(FileNotFoundError):
            os.replace(folder / _SUMMARY, folder / _STALE)


def points(sweep: Path) -> set[str]:
    """The names of the points' folders that contain a run."""
    return {path.parent.parent.name for path in sweep.glob(f"*/[0-9]*/{_SUMMARY}")}


def write_file(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def clean(sweep: Path) -> None:
    """Remove incomplete files of killed processes. Files of a live process stay."""
    for path in [*sweep.glob(f"{_TEMPORARY}*"), *sweep.glob(f"*/{_TEMPORARY}*")]:
        pid = path.name.removeprefix(_TEMPORARY).split("-")[0]
        if pid.isdigit() and _alive(int(pid)):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # this process has written nothing yet: the number is an old one, used again
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of the run in `folder`, or None when there is no run."""
    try:
        text = (folder / _SUMMARY).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        summary = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{folder / _SUMMARY} is damaged ({error}); delete the folder {folder} and run again"
        ) from None
    if not isinstance(summary, dict) or summary.get("schema") != SCHEMA:
        raise ValueError(
            f"{folder / _SUMMARY} has another schema than {SCHEMA}; delete the folder {folder} "
            "and run again"
        )
    return summary


def read_runs(folder: str | PathLike[str]) -> list[dict[str, Any]]:
    """Summaries of the runs below `folder`, in the order of their sweeps; `run` becomes the path of
    the run's folder.

    For the folder of a sweep, or of several sweeps: the runs that belong to the sweeps now
    (runs.jsonl). For a folder without a sweep: every run below it.

    Raises:
        ValueError: there is no run, or one is damaged.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(
            f"there is no folder {root}; `python -m experiments.run CONFIG --out {root}` creates it"
        )
    runs: list[dict[str, Any]] = []
    for index in sorted(root.rglob("runs.jsonl")):
        lines = index.read_text(encoding="utf-8").splitlines()
        runs += [{**run, "run": str(index.parent / run["run"])} for run in map(json.loads, lines)]
    if not runs:
        folders = sorted(
            path.parent
            for path in root.rglob(_SUMMARY)
            if not path.parent.name.startswith(_TEMPORARY)
        )
        runs = [{**(read_summary(path) or {}), "run": str(path)} for path in folders]
    if not runs:
        raise ValueError(
            f"{root} contains no runs: a run is a folder with a {_SUMMARY}, such as "
            f"{root}/<point>/<repeat>/{_SUMMARY}; `python -m experiments.run CONFIG` creates them"
        )
    return runs


def read_requests(folder: Path) -> list[RequestRecord]:
    """The lines of a run's requests.jsonl.

    Raises:
        ValueError: there is no such file.
    """
    path = folder / "requests.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ValueError(
            f"there is no {path}; `python -m experiments.run` writes it into a run folder"
        ) from None
    return [_request(json.loads(line)) for line in lines]


def _request(row: dict[str, Any]) -> RequestRecord:
    row["branches"] = tuple(_branch(branch) for branch in row["branches"])
    row["transfers"] = tuple(Transfer(**transfer) for transfer in row.get("transfers", ()))
    return RequestRecord(**row)


def _branch(row: dict[str, Any]) -> BranchRecord:
    row["token_times"] = tuple(row["token_times"])
    row["token_ids"] = tuple(row["token_ids"])
    return BranchRecord(**row)


def json_text(value: Any) -> str:
    """Indented JSON. NaN is refused, because other readers do not accept it."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def json_lines(values: Iterable[Any]) -> str:
    return "".join(
        json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n" for value in values
    )


def yaml_text(value: Any) -> str:
    """YAML of plain values; tuples become lists, dataclasses mappings."""
    return yaml_words.dump(_plain(value), sort_keys=False, allow_unicode=True, width=120)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted names, in order: {"a": {"b": 1}} becomes {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
