"""Jobs in processes of their own, so that one that hangs or crashes on a device stops no other and not the command."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

Job = TypeVar("Job")


def _share_memory() -> None:
    """In a new process, before it starts a backend: several of them use the memory of one GPU."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def results(
    function: Callable[[Job], Any], jobs: Sequence[Job], processes: int, seconds: float
) -> Iterator[tuple[Job, Any]]:
    """Yields each job with its result, or with the exception, as they come.

    A process runs one job at a time. What a job that crashes its process leaves is done by a new one. Jobs that are not
    done after `seconds` are yielded with a TimeoutError, and their processes are killed.
    """
    context = multiprocessing.get_context(
        "spawn"
    )  # a fork of a process with a device's threads hangs
    end, waiting = time.monotonic() + seconds, deque(jobs)
    pools: list[ProcessPoolExecutor] = []
    running: dict[Future[Any], tuple[Job, ProcessPoolExecutor]] = {}

    def start(pool: ProcessPoolExecutor | None = None) -> None:
        if waiting:
            if pool is None:
                pools.append(
                    pool := ProcessPoolExecutor(1, mp_context=context, initializer=_share_memory)
                )
            job = waiting.popleft()
            running[pool.submit(function, job)] = job, pool

    try:
        for _ in range(processes):
            start()
        while running:
            done, _ = wait(running, max(0.0, end - time.monotonic()), FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                job, pool = running.pop(future)
                error = future.exception()
                start(None if isinstance(error, BrokenProcessPool) else pool)
                yield job, future.result() if error is None else error
        for job in [*(job for job, _ in running.values()), *waiting]:
            yield job, TimeoutError(f"not done after {seconds:.0f} s")
    finally:
        for pool in pools:
            alive = list((pool._processes or {}).values())
            for process in alive:
                process.kill()
                process.join(5)  # a process that waits for a device may not end
            pool.shutdown(
                wait=not any(process.is_alive() for process in alive), cancel_futures=True
            )
