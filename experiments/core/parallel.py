"""Simulated runs side by side: python -m experiments.run CONFIG --jobs 4 [--backend ray].

joblib starts the processes: `loky` on this machine, `ray` where ray runs. Time is virtual in a simulated run, so that
neighbours change none of its numbers. Measured runs would disturb each other and are refused. The parent process
writes every folder, one at a time as results come, so stopping and resuming work as with one process. If it is killed,
its workers write nothing and exit after five idle minutes.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Generator, Iterable, Sequence
from itertools import islice
from typing import Any

from experiments.core.config import Point
from experiments.core.engines import Engines, Run
from experiments.core.execution import Result, one_run
from experiments.core.optional_imports import require

BACKENDS = ("loky", "ray")


def check(points: Sequence[Point], jobs: int, backend: str) -> None:
    """Raises ValueError if the points cannot run in `jobs` processes, and ImportError without joblib."""
    if jobs < 1:
        raise ValueError(f"--jobs is {jobs}; it must be at least 1")
    if jobs == 1:
        return
    measured = [point.label for point in points if point.experiment.simulate is None]
    if measured:
        raise ValueError(
            f"--jobs is {jobs}, but {len(measured)} of {len(points)} points are measured (such as {measured[0]}), and "
            "measured runs would disturb each other; use --jobs 1, or give the config a section `simulate`"
        )
    require("joblib")
    if backend == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError("--backend is ray, which is not installed: pip install ray, or leave --backend out")


def results(
    runs: Iterable[Run], where: dict[str, Any], *, jobs: int, backend: str = "loky"
) -> Generator[Result, None, None]:
    """`one_run` of each of `runs`, as they finish. Closing the generator ends the processes."""
    joblib = require("joblib")
    if backend == "ray":
        require("ray.util.joblib").register_ray()
    warnings.filterwarnings("ignore", "[0-9]+ tasks (which|have been)")  # expected when the generator is closed
    tasks = (joblib.delayed(_one)(run, where) for run in runs)
    with joblib.parallel_config(backend=backend, n_jobs=jobs):
        if backend == "loky":
            yield from joblib.Parallel(return_as="generator_unordered", batch_size=1)(tasks)
            return
        with joblib.Parallel(batch_size=1) as parallel:  # ray returns a group's results together, so groups are small
            while group := list(islice(tasks, 4 * jobs)):
                yield from parallel(group)


def _one(run: Run, where: dict[str, Any]) -> Result:
    """One simulated run, in a worker process."""
    return one_run(run, Engines(1, _no_device, _no_device), where)


def _no_device(*_: Any, **__: Any) -> Any:
    raise AssertionError("a simulated run builds no engine of a device")
