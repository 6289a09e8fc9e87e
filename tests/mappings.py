"""Memory mappings of this process. Linux allows 65,530 of them by default, and XLA crashes without
a message of its own if it gets no more: `mmap` fails while it loads a program. A small program for
a CPU takes 15, a step of an engine 450.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests import garbage

MAPS = Path("/proc/self/maps")
LIMIT_FILE = Path("/proc/sys/vm/max_map_count")


def used() -> int:
    """How many mappings this process has; 0 where the system does not tell."""
    return MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0


def limit() -> int:
    """How many a process may have; Linux's default where the system does not tell."""
    return int(LIMIT_FILE.read_text("ascii")) if LIMIT_FILE.exists() else 65_530


def forget_applications() -> None:
    """Clear what FastAPI keeps of the last 4,096 routes: their functions keep the engine that they
    serve.
    """
    for value in vars(sys.modules.get("fastapi.dependencies.models", object)).values():
        if clear := getattr(value, "cache_clear", None):
            clear()
    garbage.collect()  # an application is a circle
