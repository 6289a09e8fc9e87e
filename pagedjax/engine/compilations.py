"""XLA compilations: a count of them, and a bounded cache of them on disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

# JAX records the first event for each program that it compiles or loads, the second for each that
# it loads from disk.
_MADE = "/jax/core/compile/backend_compile_duration"
_CACHED = "/jax/compilation_cache/cache_hits"
_events = {_MADE: 0, _CACHED: 0}
_lock = threading.Lock()  # programs are compiled in threads
# .uncounted: whether the thread is in a block of `uncounted`; .cached: programs that it has loaded
# from disk
_thread = threading.local()

# of the cache on disk; the program that was not used for the longest time goes first
MAX_BYTES = 2**30
# of `disk_cache` that run now, in all threads, with the options that the first of them has set
_blocks = 0
_before: dict[str, Any] = {}  # JAX's options before them
_options = threading.Lock()  # of _blocks, _before and JAX's options


class Counts(NamedTuple):
    """Programs that this process has compiled, including those that it loaded from disk, outside of
    `uncounted`.
    """

    compilations: int
    cached: int  # of them, loaded from disk

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.compilations - other.compilations, self.cached - other.cached)


def _listen(event: str, *_: Any, **__: Any) -> None:
    if event == _CACHED:
        _thread.cached = cached_by_thread() + 1
    if event in _events and not getattr(_thread, "uncounted", False):
        with _lock:
            _events[event] += 1


jax.monitoring.register_event_duration_secs_listener(_listen)  # type: ignore[arg-type]
jax.monitoring.register_event_listener(_listen)  # type: ignore[arg-type]


def counts() -> Counts:
    return Counts(_events[_MADE], _events[_CACHED])


def compilations() -> int:
    """Programs that this process has compiled or loaded."""
    return _events[_MADE]


def cached_by_thread() -> int:
    """Programs that this thread has loaded from JAX's cache on disk."""
    return getattr(_thread, "cached", 0)


def count_kept() -> None:
    """Count a program that JAX was not asked for, because it was there or on disk."""
    _listen(_MADE)
    _listen(_CACHED)


def folder() -> Path | None:
    """Where programs are kept now; None if they are not, or not in a folder."""
    place = getattr(jax.config, "jax_compilation_cache_dir", None)
    enabled = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009  (pyright does not know it)
    return Path(place) if enabled and place and "://" not in place else None


@contextmanager
def uncounted() -> Iterator[None]:
    """Within the block, what this thread compiles is not counted: it belongs to no step and to no
    start-up.
    """
    _thread.uncounted = True
    try:
        yield
    finally:
        _thread.uncounted = False


def disk_cache_active() -> bool:
    """Whether a block of `disk_cache` runs."""
    return _blocks > 0


@contextmanager
def disk_cache(enabled: bool = True) -> Iterator[None]:
    """Within the block, JAX keeps programs in the user's cache folder, MAX_BYTES of them at most.

    JAX's options apply to the whole process, so they are restored after the block; if blocks of
    several threads overlap, after the last of them. If JAX has a cache folder already
    (`JAX_COMPILATION_CACHE_DIR`), or its cache is switched off (`JAX_ENABLE_COMPILATION_CACHE=0`),
    nothing changes.
    """
    mine = enabled and _enter()
    try:
        yield
    finally:
        if mine:
            _leave()


def _enter() -> bool:
    """Begin a block, and set JAX's options if it is the only one. Returns False if JAX's own
    settings count.
    """
    global _blocks, _before
    folder = Path(os.path.expanduser("~/.cache")) / "pagedjax" / "xla"
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": MAX_BYTES,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    with _options:
        if _blocks == 0:
            before = {name: getattr(jax.config, name) for name in options}
            switched_on = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009  (pyright does not know it)
            if not switched_on or before["jax_compilation_cache_dir"] is not None:
                return False
            _before = before
            _add_access_times(folder)
            _set(options)
        _blocks += 1
        return True


def _leave() -> None:
    global _blocks
    with _options:
        _blocks -= 1
        if _blocks == 0:
            _set(_before)


def _set(options: dict[str, Any]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX reads the options only when it opens the cache


def _add_access_times(folder: Path) -> None:
    """JAX cannot evict a program without a file of its access time, and writes none without a
    bound.
    """
    with suppress(OSError):
        for program in folder.glob("*-cache"):
            time = program.with_name(program.name.removesuffix("-cache") + "-atime")
            if not time.exists():
                time.write_bytes(program.stat().st_mtime_ns.to_bytes(8, "little"))
