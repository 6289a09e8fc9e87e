"""XLA compilations: counted, so that a measured run can prove it had none, and kept on disk between processes."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax

# Recorded by JAX once for each program it builds or loads, and once more for each it loads from the cache on disk.
_MADE = "/jax/core/compile/backend_compile_duration"
_CACHED = "/jax/compilation_cache/cache_hits"
_events = {_MADE: 0, _CACHED: 0}
_lock = threading.Lock()  # programs are made in threads


class Counts(NamedTuple):
    """Programs this process has compiled so far; one loaded from the cache on disk counts as well."""

    compilations: int
    cached: int  # of them, loaded from the cache on disk

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.compilations - other.compilations, self.cached - other.cached)


def _listen(event: str, *_: Any, **__: Any) -> None:
    if event in _events:
        with _lock:
            _events[event] += 1


jax.monitoring.register_event_duration_secs_listener(_listen)  # type: ignore[arg-type]
jax.monitoring.register_event_listener(_listen)  # type: ignore[arg-type]


def counts() -> Counts:
    return Counts(_events[_MADE], _events[_CACHED])


def compilations() -> int:
    """Programs this process has compiled or loaded so far."""
    return _events[_MADE]


def keep_compilations() -> None:
    """Use JAX's persistent compilation cache, in the user's cache folder unless JAX was told another place."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        home = Path(os.path.expanduser("~/.cache"))
        jax.config.update("jax_compilation_cache_dir", str(home / "pagedjax" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
