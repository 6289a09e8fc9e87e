"""Memory in huge pages, for arrays that are read whole in every step: a CPU then looks up fewer addresses.

JAX uses such an array as it is, because it is aligned: there is no second copy.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from math import prod
from typing import Any

import numpy as np

PAGE, ALIGNED = (
    2 << 20,
    64,
)  # bytes of a huge page; what JAX wants of an array that it does not copy
PIECE = 64 << 20  # bytes that are mapped at a time, for several arrays

_lock = threading.Lock()
_last: tuple[Any, int] = (
    lambda: None,
    0,
)  # a weak reference to the last piece, which arrays keep alive; bytes in use


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array without values; in ordinary memory where the system has no huge pages."""
    global _last
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(shape, dtype)
    size = prod(shape) * np.dtype(dtype).itemsize
    with _lock:
        piece, used = _last[0](), _last[1]
        if piece is None or used + size > len(piece):
            piece, used = _mapped(max(size, PIECE)), 0
        found = piece[used : used + size]
        _last = weakref.ref(piece), -(-(used + size) // ALIGNED) * ALIGNED
    return found.view(dtype).reshape(shape)


def _mapped(size: int) -> np.ndarray:
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % PAGE
    return np.frombuffer(memory, np.uint8, size, start)
