"""Runs jobs in processes of their own.

A job that hangs or crashes on a device does not stop the other jobs, nor the command.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

Job = TypeVar("Job")


def gpu() -> str:
    """The name of the GPU and the version of its driver; "unknown" if nothing says so."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()


def _share_memory() -> None:
    """Keep JAX from taking all memory of the GPU. Runs in a new process, before its backend starts.

    Several processes use the memory of one GPU.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def results(
    function: Callable[[Job], Any], jobs: Sequence[Job], processes: int, seconds: float
) -> Iterator[tuple[Job, Any]]:
    """Yields each job with its result, or with its exception, as jobs end.

    A process runs one job at a time. If a job crashes its process, a new process does the jobs that
    are left. Jobs that are not done after `seconds` are yielded with a TimeoutError, and their
    processes are killed.
    """
    # a fork of a process with a device's threads hangs
    context = multiprocessing.get_context("spawn")
    end = time.monotonic() + seconds
    waiting = deque(jobs)
    pools: list[ProcessPoolExecutor] = []
    running: dict[Future[Any], tuple[Job, ProcessPoolExecutor]] = {}

    def start_job(pool: ProcessPoolExecutor | None = None) -> None:
        """Give the next job to the process of this pool, or to a new process."""
        if not waiting:
            return
        if pool is None:
            pool = ProcessPoolExecutor(1, mp_context=context, initializer=_share_memory)
            pools.append(pool)
        job = waiting.popleft()
        running[pool.submit(function, job)] = job, pool

    try:
        for _ in range(processes):
            start_job()
        while running:
            finished, _ = wait(running, max(0.0, end - time.monotonic()), FIRST_COMPLETED)
            if not finished:
                break
            for future in finished:
                job, pool = running.pop(future)
                error = future.exception()
                start_job(None if isinstance(error, BrokenProcessPool) else pool)
                yield job, future.result() if error is None else error
        interrupted = [job for job, _ in running.values()]
        for job in [*interrupted, *waiting]:
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
