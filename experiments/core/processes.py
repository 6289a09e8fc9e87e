"""Runs whose engine several processes share: process 0 measures and writes, and the others follow
it from run to run.

Every process is started with the same command, so all have the same plan. Process 0 says which run
comes next; then each builds that run's engine, or takes one that is alive.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from experiments.core.engines import Engines, Run
from pagedjax.engine.processes.group import Follower, Leader
from pagedjax.engine.processes.join import joined


@contextmanager
def lead(run: Run) -> Generator[None, None, None]:
    """Have the other processes compute their part of a run.

    Without others, and in a simulated run, it does nothing.
    """
    group = joined()
    if not isinstance(group, Leader) or run.point.experiment.simulate is not None:
        yield
        return
    group.order("run", point=run.point.key)
    group.flush()
    try:
        yield
    finally:
        group.order("release")
        group.flush()


def follow(group: Follower, plan: Sequence[Run], engines: Engines) -> None:
    """Follow process 0 through the runs of a sweep, until it ends."""
    experiments = {run.point.key: run.point.experiment for run in plan}
    while (message := group.receive())["input"] != "end":
        if message["input"] != "run":
            continue
        if message["point"] not in experiments:
            reason = f"has no point {message['point'][:12]}"
            group.report(
                "failed",
                f"process {group.process} {reason}; start all processes with the same command",
            )
        try:
            engine: Any = engines.get(experiments[message["point"]]).engine
        except Exception as error:  # process 0 gets the same error, and writes a failed run
            _skip(group, error)
            continue
        if not engine.follow():
            return


def _skip(group: Follower, error: Exception) -> None:
    """Wait for the end of a run whose engine cannot be built here.

    If process 0 can build the engine, all processes end.
    """
    while (message := group.receive())["input"] != "release":
        if message["input"] in ("open", "step"):
            group.report(
                "failed",
                f"process {group.process} cannot build the engine: {type(error).__name__}: {error}",
            )
