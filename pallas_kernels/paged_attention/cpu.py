"""Decodes on a CPU by a compiled kernel that reads the pages in place; prompt chunks by the loop of `xla`.

numba compiles the kernel when it is first chosen, and only then is it imported (the `cpu` extra).
"""

from __future__ import annotations

import ctypes
import importlib
import threading

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import xla

DTYPES = ("float32", "bfloat16")

_registered: set[str] = set()
_lock = threading.Lock()


def paged_attention(q, k_pages, v_pages, block_tables, seq_lens, cu_q_lens, *, scale: float) -> jax.Array:
    """See `api.paged_attention`.

    Raises:
        ValueError: pages of another dtype than DTYPES, a head size that is no multiple of 8, a platform that is no
            CPU, or no numba. "xla" supports all of them.
    """
    platform, size = jax.default_backend(), q.shape[-1]
    for wrong in (
        f"runs on platform 'cpu' and not on {platform!r}" if platform != "cpu" else "",
        f"reads pages of {' or '.join(DTYPES)} and not of {k_pages.dtype}" if str(k_pages.dtype) not in DTYPES else "",
        f"has v_pages of {v_pages.dtype} beside k_pages of {k_pages.dtype}" if v_pages.dtype != k_pages.dtype else "",
        f"takes head sizes that are multiples of 8 and not {size}" if size % 8 else "",
    ):
        if wrong:
            raise ValueError(f"impl 'cpu' {wrong}; impl 'xla' does")
    _register(str(k_pages.dtype))
    return xla.paged_attention(
        q, k_pages, v_pages, block_tables, seq_lens, cu_q_lens, scale=scale, decodes=_decodes
    )


def _decodes(q, k_pages, v_pages, block_tables, seq_lens) -> jax.Array:
    """As `xla._decodes`: q [B, K, G, D], one query a row -> [B, K, G, D] float32."""
    result = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return jax.ffi.ffi_call(_target(str(k_pages.dtype)), result)(
        q.astype(jnp.float32), k_pages, v_pages, block_tables, seq_lens
    )


def _target(dtype: str) -> str:
    """The handler's name. Programs on disk hold it, so a handler that reads its arguments otherwise needs another."""
    return f"pallas_kernels.paged_attention.decodes.1.{dtype}"


def _register(dtype: str) -> None:
    """Compile and register the handler, once a process. Tracing does it, so a program loaded from disk finds it too."""
    with _lock:
        if dtype in _registered:
            return
        try:
            kernel = importlib.import_module("pallas_kernels.paged_attention.cpu_kernel")
        except ImportError as error:
            raise ValueError(f"impl 'cpu' needs numba (pip install pagedjax[cpu]); impl 'xla' does not: {error}") from error
        capsule = jax.ffi.pycapsule(ctypes.c_void_p(kernel.compile_handler(dtype)))
        jax.ffi.register_ffi_target(_target(dtype), capsule, platform="cpu")
        _registered.add(dtype)
