"""Experiments on PagedJAX: strict configs, workloads, sweeps, metrics and reports.

    python -m experiments.run configs/quickstart.yaml      measure
    experiments.measure("configs/quickstart.yaml")         the same in Python; a pandas DataFrame
    experiments.load_runs("runs/quickstart")               read the results of earlier runs
    python -m experiments.report runs/quickstart           draw the report again
    python -m experiments.compare runs/before runs/after   is a difference real?
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

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load_runs", "measure"]


def measure(
    config: str | PathLike[str],
    settings: Mapping[str, Any] | None = None,
    out: str | PathLike[str] = "runs",
    *,
    jobs: int = 1,
    engines: int = 4,
    quiet: bool = True,
) -> pd.DataFrame:
    """Measure what is missing of an experiment, and read all of its runs, as `python -m
    experiments.run` does.

    Args:
        config: a YAML file.
        settings: keys in place of those of the file, such as {"engine.block_size": 32}.
        out: the folder of results. The experiment has a folder of its name there, with its runs and
            its report.
        jobs: simulated runs at a time, each in a process of its own.
        engines: that are kept alive at a time.
        quiet: no progress bar.

    Returns:
        The runs of this experiment, in the rows and columns of `load_runs`. A run that failed has
        its reason in `failed`, and no numbers.

    Raises:
        ValueError: the config is wrong, or a model is missing.
        ImportError: pandas or matplotlib is missing; the message says how to install it.
    """
    from experiments import run

    return load_runs(run.measure(config, settings, out, jobs=jobs, engines=engines, quiet=quiet))


def load_runs(folder: str | PathLike[str]) -> pd.DataFrame:
    """Every run below `folder`, one row for each point and repeat.

    Columns: the swept keys by their short names (`block_size`), `label`, `point` (hash), `repeat`,
    `failed` (missing, or the reason), the summary's numbers with dotted names (`ttft_s.p50`),
    `commit`, `device`, and `run` (the run's folder).

    Raises:
        ValueError: there is no run below `folder`; the message describes a run's folder.
        ImportError: pandas is missing; the message says how to install it.
    """
    from experiments.core.optional_imports import require
    from experiments.core.store import read_runs

    pandas = require("pandas")
    return pandas.DataFrame([_row(run) for run in read_runs(folder)])


def _row(run: dict[str, Any]) -> dict[str, Any]:
    from experiments.core.config import short_names
    from experiments.core.store import flatten

    names = short_names(run["swept"])
    swept = {names[path]: value for path, value in run["swept"].items()}
    facts = {
        key: run[key] for key in ("label", "point", "repeat", "failed", "commit", "device", "run")
    }
    return {**swept, **facts, **flatten(run["metrics"] or {})}
