"""Simulated runs side by side on this machine: python -m experiments.run CONFIG --jobs 4.

joblib starts the processes. Time is virtual in a simulated run, so that neighbours change none of
its numbers. Measured runs would disturb each other here and are refused; `--backend ray` spreads
them over machines (cluster.py). The parent process writes every folder, one at a time as results
come, so stopping and resuming work as with one process. If it is killed, its workers write nothing
and exit after five idle minutes.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from experiments.core import cluster
from experiments.core.config import Point
from experiments.core.engines import Run, simulated_engines
from experiments.core.execution import Result, measure_run
from experiments.core.optional_imports import require
from experiments.core.sweep import OnBegin

BACKENDS = ("loky", "ray")


def check(points: Sequence[Point], jobs: int | None, backend: str) -> None:
    """Raises ValueError if the points cannot run in `jobs` processes, and ImportError without
    joblib.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs is {jobs}; it must be at least 1")
    if backend == "ray":
        cluster.check()
        return
    if jobs in (None, 1):
        return
    measured = [point.label for point in points if point.experiment.simulate is None]
    if measured:
        raise ValueError(
            f"--jobs is {jobs}, but {len(measured)} of {len(points)} points are measured (such as "
            f"{measured[0]}), and measured runs would disturb each other; use --jobs 1, or "
            "--backend ray on several machines, or give the config a section `simulate`"
        )
    require("joblib")


def results(
    runs: Iterable[Run], env: dict[str, Any], on_begin: OnBegin, *, jobs: int
) -> Generator[Result, None, None]:
    """The result of `measure_run` for each of `runs`, in the order in which they finish.

    Closing the generator ends the processes.
    """
    joblib = require("joblib")
    # joblib's warning when the generator is closed, which is expected
    warnings.filterwarnings("ignore", "[0-9]+ tasks (which|have been)")

    def task(run: Run) -> Any:
        on_begin(run)
        return joblib.delayed(_measure_simulated)(run, env)

    with joblib.parallel_config(backend="loky", n_jobs=jobs):
        yield from joblib.Parallel(return_as="generator_unordered", batch_size=1)(map(task, runs))


def _measure_simulated(run: Run, env: dict[str, Any]) -> Result:
    """Measure a simulated run, in a worker process."""
    return measure_run(run, simulated_engines(), env)
