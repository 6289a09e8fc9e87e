"""The memory of this process.

JAX keeps what it traced and compiled. After thousands of tests that is gigabytes in each worker.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

STATUS = Path("/proc/self/statm")
BASELINE = 1100  # MiB of a process with all imports and the models of fixtures
GROWTH = 120  # MiB by which it may grow since memory was given back

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
    """Give free memory back to the system."""
    global _after
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc
        trim(0)
    _after = used()
