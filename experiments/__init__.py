"""Experiments on PagedJAX: strict configs, workloads, sweeps, metrics and reports.

    python -m experiments.run configs/quickstart.yaml      measure
    experiments.measure("configs/quickstart.yaml")         the same in Python; a pandas DataFrame
    experiments.load_runs("runs/quickstart")               read the results of earlier runs
    experiments.load_requests("runs/quickstart")           their requests; load_steps: their steps
    python -m experiments.report runs/quickstart           draw the report again
    python -m experiments.compare runs/before runs/after   is a difference more than noise?
    python -m experiments.capacity configs/...yaml         the highest rate that meets the targets
    python -m experiments.reproduce 003                    a published result, reproduced

This folder holds one module for each of these commands, and nothing else. Imports between the
folders go one way:

    reproduce -> studies -> hardware -> bench -> core
    run, capacity, compare, report -> analysis -> core -> simulation -> pagedjax

    core/         config, workload, driver, metrics, sweep, and the folders of results
    simulation/   an engine without a device, and its cost model
    analysis/     a sweep as tables, sentences and plots
    bench/        benchmarks, one question in each module
    hardware/     programs that run on, or compile for, a GPU or a TPU
    training/     a small model that is served while it is trained
    studies/      published results, one folder each
    results/      measurements that the documents quote
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from experiments.core.records import RequestRecord

__all__ = ["load_requests", "load_runs", "load_steps", "measure"]


def measure(
    config: str | PathLike[str],
    settings: Mapping[str, Any] | None = None,
    out: str | PathLike[str] = "runs",
    *,
    jobs: int = 1,
    engines: int = 4,
    quiet: bool = True,
) -> pd.DataFrame:
    """Measure the missing runs of an experiment as `python -m experiments.run` does, and read all
    of its runs.

    Args:
        config: a YAML file.
        settings: values of keys that replace those of the file, such as {"engine.block_size": 32}.
        out: the folder of results. The experiment has a folder of its name there, with its runs and
            its report.
        jobs: the number of simulated runs at a time, each in a process of its own.
        engines: the number of engines that are kept alive at a time.
        quiet: show no progress bar.

    Returns:
        The runs of this experiment, in the rows and columns of `load_runs`. A run that failed has
        its reason in `failed`, and no numbers.

    Raises:
        ValueError: the config is wrong, or a model is missing.
        ImportError: pandas or matplotlib is missing; the message says how to install it.
    """
    from experiments import run

    return load_runs(run.measure(config, settings, out, jobs=jobs, engines=engines, quiet=quiet))


def load_runs(folder: str | PathLike[str], where: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """Every run below `folder`, one row for each point and repeat.

    Args:
        where: values of swept keys that choose some of the runs, in place of a folder with a hash,
            such as {"engine.policy": "fcfs", "repeat": 0}. The last name of a key is enough.

    Columns: the swept keys by their short names (`block_size`), `label`, `point` (hash), `repeat`,
    `failed` (missing, or the reason), the summary's numbers with dotted names (`ttft_s.p50`),
    `commit`, `device`, and `run` (the run's folder).

    Raises:
        ValueError: there is no run below `folder`, which the message describes; or none with these
            values, and the message lists those that exist.
        ImportError: pandas is missing; the message says how to install it.
    """
    from experiments.core.optional_imports import require

    pandas = require("pandas")
    return pandas.DataFrame([_row(run) for run in _chosen_runs(folder, where)])


def _chosen_runs(
    folder: str | PathLike[str], where: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """The summaries of the runs below a folder, with these values of swept keys."""
    from experiments.core import selection
    from experiments.core.store import read_runs

    values = [f"{key}={selection.value_text(value)}" for key, value in (where or {}).items()]
    runs, _ = selection.choose(read_runs(folder), selection.Selection(str(folder), tuple(values)))
    return runs


def load_requests(
    folder: str | PathLike[str], where: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """Every request of every good run below `folder`, one row for each. A run is good as well if
    nothing but a metric of your own failed.

    Args:
        where: as of `load_runs`.

    Columns of the request's run: the swept keys by their short names, `label`, `point`, `repeat`
    and `run`. Columns of the request: `request_id`, `prompt_tokens`, `max_tokens`, `output_tokens`,
    `branches` and `preemptions` (counts), `arrival` and `first_scheduled` (seconds from the start
    of the run), `queue_s`, `ttft_s`, `tpot_s` (the mean gap between tokens) and `e2e_s` (seconds
    from its arrival), `finish_reason` of its first branch, and `replica`; where the workload has
    them, `predicted` (output tokens), `user`, `priority`, `service_class`, `deadline` (seconds from
    its arrival), `session` and `turn`. A value that did not happen is missing.

    Raises:
        ValueError, ImportError: as of `load_runs`.
    """
    from experiments.core.store import read_requests

    return _load(folder, where, lambda run_folder: map(_request_row, read_requests(run_folder)))


def load_steps(folder: str | PathLike[str], where: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """Every step of every good run below `folder`, one row for each, in the order of the run.

    Args:
        where: as of `load_runs`.

    Columns: first the columns of its run, as in `load_requests`; then the keys of steps.jsonl. A
    run with `records: sums` has no steps.

    Raises:
        ValueError, ImportError: as of `load_runs`.
    """

    def steps(run_folder: Path) -> Iterable[dict[str, Any]]:
        path = run_folder / "steps.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return map(json.loads, lines)

    return _load(folder, where, steps)


def _load(
    folder: str | PathLike[str],
    where: Mapping[str, Any] | None,
    rows_of: Callable[[Path], Iterable[dict[str, Any]]],
) -> pd.DataFrame:
    """The rows of each good run, beside the facts of the run."""
    from experiments.core.optional_imports import require
    from experiments.core.own_metrics import only_metrics_failed

    pandas = require("pandas")
    rows: list[dict[str, Any]] = []
    for run in _chosen_runs(folder, where):
        if run["failed"] and not only_metrics_failed(run["failed"]):
            continue
        facts = _swept(run) | {key: run[key] for key in ("label", "point", "repeat", "run")}
        rows += [facts | row for row in rows_of(Path(run["run"]))]
    return pandas.DataFrame(rows)


def _request_row(request: RequestRecord) -> dict[str, Any]:
    from experiments.core.records import GROUPING

    gaps = [branch.tpot for branch in request.branches if branch.tpot is not None]
    optional = {name: getattr(request, name) or None for name in GROUPING}
    optional["predicted"] = request.predicted
    if request.session:
        optional["turn"] = request.turn
    return {
        "request_id": request.request_id,
        "prompt_tokens": request.prompt_tokens,
        "max_tokens": request.max_tokens,
        "output_tokens": sum(branch.num_tokens for branch in request.branches),
        "branches": len(request.branches),
        "preemptions": sum(branch.preemptions for branch in request.branches),
        "arrival": request.arrival,
        "first_scheduled": request.first_scheduled,
        "queue_s": request.queue,
        "ttft_s": request.ttft,
        "tpot_s": sum(gaps) / len(gaps) if gaps else None,
        "e2e_s": request.e2e,
        "finish_reason": request.branches[0].finish_reason,
        "replica": request.replica,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _swept(run: dict[str, Any]) -> dict[str, Any]:
    """The swept keys of a run by their short names."""
    from experiments.core.config import short_names

    names = short_names(run["swept"])
    return {names[path]: value for path, value in run["swept"].items()}


def _row(run: dict[str, Any]) -> dict[str, Any]:
    from experiments.core.store import flatten

    facts = {
        key: run[key] for key in ("label", "point", "repeat", "failed", "commit", "device", "run")
    }
    return {**_swept(run), **facts, **flatten(run["metrics"] or {})}
