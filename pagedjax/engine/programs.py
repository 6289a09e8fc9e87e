"""The compiled steps of an engine, a program a bucket: all before the first request, or each when it is first wanted.

Buckets of decodes have a second program where several of their steps may be one dispatch (`steps_per_dispatch`).
Tracing holds Python's lock and compiling does not, so programs are made in threads, as many as there are processors.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

from tqdm import tqdm

from pagedjax.config import Resolved
from pagedjax.engine import compilations


class Key(NamedTuple):
    """A program: of one bucket, and of one step or of up to so many."""

    tokens: int
    steps: int = 1


Build = Callable[[Key, Resolved], Any]  # (key, config) -> its program, for a cache of config.num_blocks

THREADS = 4  # at most: each compilation uses several processors for a part of its time


def keys(config: Resolved) -> tuple[Key, ...]:
    """The programs of an engine; the last one is of the largest bucket."""
    buckets, steps = config.token_buckets, config.steps_per_dispatch
    decodes = buckets[: bisect_left(buckets, config.max_num_seqs) + 1] if steps > 1 else ()
    return (*(Key(t, steps) for t in decodes), *(Key(t) for t in buckets))


def at_once(
    build: Build, config: Resolved, settle: Callable[[Any], Resolved], *, progress: bool = False
) -> tuple[dict[Key, Any], Resolved]:
    """Make every program, the largest first and the others side by side -> (programs by key, their configuration).

    Args:
        settle: from the program of the largest bucket, the configuration that fits beside it. Should it have another
            number of blocks, that one program is made again.
    """
    *others, largest = keys(config)
    with tqdm(desc="compiling", total=1 + len(others), unit="program", leave=False, disable=not progress) as bar:
        steps = {largest: build(largest, config)}
        fitted = settle(steps[largest])
        if fitted.num_blocks != config.num_blocks:
            steps = {largest: build(largest, fitted)}
        bar.update()
        pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
        try:
            started = {key: pool.submit(build, key, fitted) for key in reversed(others)}
            for done in as_completed(started.values()):
                done.result()
                bar.update()
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, what has not begun never does
    return {key: started[key].result() for key in others} | steps, fitted


class Lazy(dict[Key, Any]):
    """Programs by key; one that is not there yet is made. `build` is as in `at_once`."""

    def __init__(self, build: Build, config: Resolved) -> None:
        super().__init__()
        self._build, self._config = build, config
        self._on_disk = compilations.disk_cache_active()

    def __missing__(self, key: Key) -> Any:
        with compilations.disk_cache(self._on_disk):
            self[key] = self._build(key, self._config)
        return self[key]


def summary(startup: dict[str, Any]) -> str:
    """One line for people: seconds by stage, and how many programs there are."""
    made, found = startup["compilations"], startup["cached"]
    stages = {"import": "import", "load": "load", "compile": "compile", "warmup": "warm-up"}
    seconds = ", ".join(f"{name} {startup[stage]:.1f} s" for stage, name in stages.items() if stage in startup)
    return f"start-up: {seconds}; {made} programs, {found} of them from the cache on disk"
