"""The compiled steps of an engine, a program a bucket: all before the first request, or each when it is first wanted.

Tracing holds Python's lock and compiling does not, so programs are made in threads, as many as there are processors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from tqdm import tqdm

from pagedjax.config import Resolved

Build = Callable[[int, Resolved], Any]  # (bucket, config) -> its program, for a cache of config.num_blocks

THREADS = 4  # at most: each compilation uses several processors for a part of its time


def at_once(
    build: Build, config: Resolved, settle: Callable[[Any], Resolved], *, progress: bool = False
) -> tuple[dict[int, Any], Resolved]:
    """Make every program -> (programs by bucket, the configuration they were made for).

    Args:
        settle: from the program of the largest bucket, the first to be made, the configuration that fits beside it.
            Should it have another number of blocks, what was made for the first number is dropped.
    """
    buckets = config.token_buckets[::-1]
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1, len(buckets))) as pool:
        started = {t: pool.submit(build, t, config) for t in buckets}
        try:
            fitted = settle(started[buckets[0]].result())
            if fitted.num_blocks != config.num_blocks:
                _cancel(started)
                started = {t: pool.submit(build, t, fitted) for t in buckets}
            bar = tqdm(as_completed(started.values()), "compiling", len(buckets), False, disable=not progress)
            for done in bar:
                done.result()  # the first error ends the others
        except BaseException:
            _cancel(started)
            raise
    return {t: started[t].result() for t in sorted(started)}, fitted


def _cancel(started: dict[int, Future]) -> None:
    for future in started.values():
        future.cancel()


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
