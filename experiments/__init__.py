"""Experiments on PagedJAX: strict configs, workloads, sweeps, metrics and a report.

python -m experiments.run configs/quickstart.yaml        measure
experiments.load_runs("runs/quickstart")                 read the results as a pandas DataFrame
python -m experiments.report runs/quickstart             draw the report again
python -m experiments.compare runs/before runs/after     is a difference real?
python -m experiments.capacity configs/...yaml           the highest rate that meets the config's targets
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load_runs"]


def load_runs(folder: str | PathLike[str]) -> pd.DataFrame:
    """Every run found below `folder`, one row for each point and repeat.

    Columns: the swept keys by their short names (`block_size`), `label`, `point` (hash), `repeat`, `failed` (missing,
    or why), the summary's numbers with dotted names (`ttft_s.p50`), `commit`, `device`, and `run` (the run's folder).

    Raises:
        ValueError: no run lies below `folder`; the message says what one looks like.
        ImportError: pandas is missing; the message says how to install it.
    """
    from experiments.core.libraries import require
    from experiments.core.store import read_runs

    pandas = require("pandas")
    runs = read_runs(folder)
    return pandas.DataFrame([_row(run) for run in runs])


def _row(run: dict[str, Any]) -> dict[str, Any]:
    from experiments.core.config import short_names
    from experiments.core.store import flatten

    names = short_names(run["swept"])
    swept = {names[path]: value for path, value in run["swept"].items()}
    known = {key: run[key] for key in ("label", "point", "repeat", "failed", "commit", "device", "run")}
    return {**swept, **known, **flatten(run["metrics"] or {})}
