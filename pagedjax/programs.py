"""The compiled steps of an engine, a program a bucket: all before the first request, or each when it is first wanted.

Tracing holds Python's lock and compiling does not, so programs are made in threads, as many as there are processors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from tqdm import tqdm

from pagedjax.config import Resolved

Build = Callable[[int, Resolved], Any]  # (bucket, config) -> its program, for a cache of config.num_blocks

THREADS = 4  # at most: each compilation uses several processors for a part of its time


def at_once(
    build: Build, config: Resolved, settle: Callable[[Any], Resolved], *, progress: bool = False
) -> tuple[dict[int, Any], Resolved]:
    """Make every program, the largest first and the others side by side -> (programs by bucket, their configuration).

    Args:
        settle: from the program of the largest bucket, the configuration that fits beside it. Should it have another
            number of blocks, that one program is made again.
    """
    *others, largest = config.token_buckets
    with tqdm(desc="compiling", total=1 + len(others), unit="bucket", leave=False, disable=not progress) as bar:
        steps = {largest: build(largest, config)}
        fitted = settle(steps[largest])
        if fitted.num_blocks != config.num_blocks:
            steps = {largest: build(largest, fitted)}
        bar.update()
        pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
        try:
            started = {t: pool.submit(build, t, fitted) for t in reversed(others)}
            for done in as_completed(started.values()):
                done.result()
                bar.update()
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, what has not begun never does
    return {t: started[t].result() for t in others} | steps, fitted


class Lazy(dict[int, Any]):
    """Programs by bucket; one that is not there yet is made. `build` is as in `at_once`."""

    def __init__(self, build: Build, config: Resolved) -> None:
        super().__init__()
        self._build, self._config = build, config

    def __missing__(self, t: int) -> Any:
        self[t] = self._build(t, self._config)
        return self[t]


def summary(startup: dict[str, Any]) -> str:
    """One line for people: seconds by stage, and how many programs there are."""
    made, found = startup["compilations"], startup["cached"]
    stages = {"import": "import", "load": "load", "compile": "compile", "warmup": "warm-up"}
    seconds = ", ".join(f"{name} {startup[stage]:.1f} s" for stage, name in stages.items() if stage in startup)
    return f"start-up: {seconds}; {made} programs, {found} of them from the cache on disk"
