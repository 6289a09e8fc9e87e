"""XLA compilations: counted, so that a measured run can prove it had none, and kept on disk between processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"  # recorded by JAX once for each program it builds or loads
_count = 0


def _listen(event: str, duration: float, **_: Any) -> None:
    global _count
    _count += event == _EVENT


jax.monitoring.register_event_duration_secs_listener(_listen)  # type: ignore[arg-type]


def compilations() -> int:
    """Programs this process has compiled so far; one loaded from the cache on disk counts as well."""
    return _count


def keep_compilations() -> None:
    """Use JAX's persistent compilation cache, in the user's cache folder unless JAX was told another place."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        home = Path(os.path.expanduser("~/.cache"))
        jax.config.update("jax_compilation_cache_dir", str(home / "pagedjax" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
