"""Zeros for large arrays that are written later, such as the pages of a cache.

XLA writes its zeros. For 4 GiB that takes two seconds, because the system gives a process each
page of memory when it is first written. Here the result's memory is given back to the system,
which has zeros for whoever reads a page before it is written.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.shared.cpu.handler import Handler

# Programs on disk contain the target: a handler that takes other arguments needs another number.
TARGET = "pallas_kernels.zeros.cpu.1."

HANDLER = Handler("zeros", TARGET, __name__, Path(__file__).parent, {})


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _zeros(*, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    HANDLER.register()
    sizes = np.array([dtype.itemsize, len(shape)], np.int32)
    return jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(shape, dtype))(sizes)


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros of a shape and dtype, on the default device, which is a CPU."""
    if sys.platform != "linux":  # elsewhere pages that were given back may keep their numbers
        return jnp.zeros(shape, dtype)
    return _zeros(shape=shape, dtype=jnp.dtype(dtype))
