"""One process of an engine, for tests: python -m tests.processes.worker N I PORT JOB

A job is JSON: the model's folder, the engine's options, runs of `play` with the files of their
recordings, and faults that this process has.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedjax import LLM
from pagedjax.engine import state as engine_state
from pagedjax.engine.processes.join import join
from tests import quick_compiler
from tests.engine.test_lookahead import WITH_GIVEN, play


def main(processes: int, process: int, port: int, job: dict[str, Any]) -> None:
    join(f"127.0.0.1:{port}", processes, process, timeout=job.get("timeout", 60.0))
    fault = job.get("faults", {}).get(str(process))
    if fault:
        break_at(job.get("step", 5), FAULTS[fault])
    quick_compiler.choose(True)  # as the engine that its recordings are compared with
    for run in job["runs"]:
        llm = LLM(job["model"], progress=False, **job["engine"] | run.get("engine", {}))
        if llm.follows:
            llm.follow(record=f"{run['log']}.{process}")
            continue
        results = play(llm.engine, run["seed"], Path(run["log"]), kinds=WITH_GIVEN).results
        Path(f"{run['log']}.results").write_text(repr(results))
        llm.release_followers()


def break_at(step: int, fault: Callable[[], None]) -> None:
    """Have the fault when a step's commit begins, after its program ended on all devices."""
    commit = engine_state.scheduler.commit
    count = 0

    def breaks(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == step:
            fault()
        return commit(*args, **options)

    engine_state.scheduler.commit = breaks


def raises() -> None:
    raise RuntimeError("no more memory")


FAULTS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stalled": lambda: time.sleep(1000),
    "raises": raises,
}


if __name__ == "__main__":
    _, n, i, at, text = sys.argv
    main(int(n), int(i), int(at), json.loads(text))
