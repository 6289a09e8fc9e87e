"""Memory of this process. What JAX traced and compiled for thousands of tests would have gigabytes
in each worker.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

STATUS = Path("/proc/self/statm")
# MiB: of a process that needs no care yet; since memory was given back
BASELINE = 1700
GROWTH = 120

_after = 0


def used() -> int:
    """MiB of this process; 0 where the system does not tell."""
    if not STATUS.exists():
        return 0
    pages = int(STATUS.read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def grown() -> bool:
    """Whether so much memory is used that caches should be cleared."""
    return used() > max(BASELINE, _after + GROWTH)


def give_back() -> None:
    """Give what is free to the system."""
    global _after
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc
        trim(0)
    _after = used()
