"""Arrays whose numbers are whatever their memory holds, for pages that are written before they are read.

JAX has arrays of zeros alone. On a CPU, zeros for a cache of 4 GiB take two seconds, because the
system gives a process each page of memory when it first writes there.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.shared.cpu.handler import Handler

TARGET = "pallas_kernels.unwritten.cpu.1"  # of other arguments: another number, for programs on disk


@cache
def _handler() -> Handler:
    return Handler("unwritten", TARGET, __name__, Path(__file__).parent, {})


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _array(*, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    _handler().register()
    return jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(shape, dtype))()


def array(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """[*shape] of a dtype, on the default device, which is a CPU."""
    return _array(shape=shape, dtype=jax.numpy.dtype(dtype))
