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

# JAX records the first event for each program that it compiles or loads, and the second for each
# program that it loads from disk.
_COMPILED = "/jax/core/compile/backend_compile_duration"
_CACHED = "/jax/compilation_cache/cache_hits"
_events = {_COMPILED: 0, _CACHED: 0}
_lock = threading.Lock()  # programs are compiled in threads
# .uncounted: whether the thread is in a block of `uncounted`
# .cached: the number of programs that the thread has loaded from disk
_thread = threading.local()

# the size of the cache on disk; the program that was not used for the longest time goes first
MAX_BYTES = 2**30
# the number of open `with disk_cache()` statements, in all threads; the first has set JAX's options
_num_open = 0
_restored_options: dict[str, Any] = {}  # JAX's options before the first such statement
_options_lock = threading.Lock()  # guards _num_open, _restored_options and JAX's options


class Counts(NamedTuple):
    """Numbers of programs that this process has compiled or loaded from disk, outside of
    `uncounted`.
    """

    compilations: int
    cached: int  # how many of them were loaded from disk

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(self.compilations - earlier.compilations, self.cached - earlier.cached)


def _listen(event: str, *_: Any, **__: Any) -> None:
    if event == _CACHED:
        _thread.cached = cached_by_thread() + 1
    if event in _events and not getattr(_thread, "uncounted", False):
        with _lock:
            _events[event] += 1


jax.monitoring.register_event_duration_secs_listener(_listen)  # type: ignore[arg-type]
jax.monitoring.register_event_listener(_listen)  # type: ignore[arg-type]


def counts() -> Counts:
    return Counts(_events[_COMPILED], _events[_CACHED])


def compilations() -> int:
    """Returns the number of programs that this process has compiled or loaded."""
    return _events[_COMPILED]


def cached_by_thread() -> int:
    """Returns the number of programs that this thread has loaded from JAX's cache on disk."""
    return getattr(_thread, "cached", 0)


def count_kept() -> None:
    """Count a program that was in memory or on disk, so that JAX was not asked for it."""
    _listen(_COMPILED)
    _listen(_CACHED)


def folder() -> Path | None:
    """Returns the folder of JAX's cache; None if the cache is off, or is not in a local folder."""
    place = getattr(jax.config, "jax_compilation_cache_dir", None)
    return Path(place) if _cache_enabled() and place and "://" not in place else None


def _cache_enabled() -> bool:
    return getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009  (unknown to pyright)


@contextmanager
def uncounted() -> Iterator[None]:
    """Within the block, programs that this thread compiles are not counted: they belong to no step
    and to no start-up.
    """
    _thread.uncounted = True
    try:
        yield
    finally:
        _thread.uncounted = False


def disk_cache_active() -> bool:
    """Returns whether a `with disk_cache()` statement is open."""
    return _num_open > 0


@contextmanager
def disk_cache(enabled: bool = True) -> Iterator[None]:
    """Within the block, JAX keeps programs in the user's cache folder, MAX_BYTES of them at most.

    JAX's options apply to the whole process, so they are restored after the block; if blocks of
    several threads overlap, after the last of them. If JAX has a cache folder already
    (`JAX_COMPILATION_CACHE_DIR`), or its cache is switched off (`JAX_ENABLE_COMPILATION_CACHE=0`),
    nothing changes.
    """
    entered = enabled and _enter()
    try:
        yield
    finally:
        if entered:
            _leave()


def _enter() -> bool:
    """Begin a block, and set JAX's options if it is the only one. Returns False, and changes
    nothing, if JAX has a cache folder already or its cache is switched off.
    """
    global _num_open, _restored_options
    cache_folder = Path(os.path.expanduser("~/.cache")) / "pagedjax" / "xla"
    options = {
        "jax_compilation_cache_dir": str(cache_folder),
        "jax_compilation_cache_max_size": MAX_BYTES,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    with _options_lock:
        if _num_open == 0:
            present = {name: getattr(jax.config, name) for name in options}
            if not _cache_enabled() or present["jax_compilation_cache_dir"] is not None:
                return False
            _restored_options = present
            _add_access_times(cache_folder)
            _set(options)
        _num_open += 1
        return True


def _leave() -> None:
    global _num_open
    with _options_lock:
        _num_open -= 1
        if _num_open == 0:
            _set(_restored_options)


def _set(options: dict[str, Any]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX reads the options only when it opens the cache


def _add_access_times(folder: Path) -> None:
    """Write the missing files with access times. JAX writes such a file only when the cache has a
    bound, and cannot evict a program without one.
    """
    with suppress(OSError):
        for program in folder.glob("*-cache"):
            time_file = program.with_name(program.name.removesuffix("-cache") + "-atime")
            if not time_file.exists():
                time_file.write_bytes(program.stat().st_mtime_ns.to_bytes(8, "little"))
