"""Memory in huge pages, for arrays that are read as a whole in every step.

A CPU then looks up fewer addresses. JAX uses such an array without a copy, because it is aligned.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from math import prod
from typing import Any

import numpy as np

PAGE = 2 << 20  # bytes of a huge page
ALIGNMENT = 64  # bytes; JAX copies an array with a smaller alignment
PIECE = 64 << 20  # bytes that are mapped at a time; small arrays share a piece

_lock = threading.Lock()
# A weak reference to the last piece, which its arrays keep alive, and the bytes of it in use
_last: tuple[Any, int] = (lambda: None, 0)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an array without values; in ordinary memory where the system has no huge pages."""
    global _last
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(shape, dtype)
    size = prod(shape) * np.dtype(dtype).itemsize
    with _lock:
        piece = _last[0]()
        used = _last[1]
        if piece is None or used + size > len(piece):
            piece = _map_piece(max(size, PIECE))
            used = 0
        array = piece[used : used + size]
        _last = weakref.ref(piece), -(-(used + size) // ALIGNMENT) * ALIGNMENT
    return array.view(dtype).reshape(shape)


def _map_piece(size: int) -> np.ndarray:
    """Returns [size] bytes of new memory, which begin at a huge page."""
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % PAGE
    return np.frombuffer(memory, np.uint8, size, start)
