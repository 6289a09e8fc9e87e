"""Paged attention on a CPU by a compiled kernel that reads the pages in place, for decodes and prompt chunks.

numba (the `cpu` extra) compiles the kernel when it is first used on a machine. The object code is stored on disk, and a
process that finds it does not import numba.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.implementation import Implementation

DTYPES = ("float32", "bfloat16", "float8_e4m3fn")  # of keys and values; pages of the last one are uint8
HEAD_SIZES = 8  # and its multiples

# The handler's name. Programs on disk contain it: a handler that takes other arguments needs another number.
TARGET = "pallas_kernels.paged_attention.cpu.4"

_registered: list[str] = []
_lock = threading.Lock()


def paged_attention(
    q, k_pages, v_pages, block_tables, seq_lens, cu_q_lens, *, scale: float, window=None, soft_cap=None
) -> jax.Array:
    """See `api.paged_attention`. Tokens before the windows of all of an item's queries are not read.

    Raises:
        ValueError: `unsupported` gives a reason.
    """
    dtype = "float8_e4m3fn" if k_pages.dtype == jnp.uint8 else str(k_pages.dtype)
    wrong = unsupported(jax.default_backend(), dtype, q.shape[-1])
    if not wrong and v_pages.dtype != k_pages.dtype:
        wrong = f"needs k_pages and v_pages of one dtype, and they are {k_pages.dtype} and {v_pages.dtype}"
    if wrong:
        raise ValueError(f"impl 'cpu' {wrong}; impl 'xla' has no such limit")
    _register()
    t, n, d = q.shape
    k = k_pages.shape[1]
    grouped = (q.astype(jnp.float32) * scale).reshape(t, k, n // k, d)
    options = jnp.full(1, window or 0, jnp.int32), jnp.full(1, soft_cap or 0, jnp.float32)  # 0 is none
    attend = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(grouped.shape, jnp.float32))
    out = attend(grouped, k_pages, v_pages, block_tables, seq_lens, cu_q_lens, *options)
    return out.reshape(t, n, d).astype(q.dtype)


def unsupported(platform: str, dtype: str, head_size: int) -> str:
    """Returns why this implementation cannot serve a cache, as the rest of a sentence; empty if it can."""
    if platform != "cpu":
        return f"runs on platform 'cpu' and not on {platform!r}"
    if sys.platform == "win32":
        return "calls POSIX functions, which Windows does not have"
    if dtype not in DTYPES:
        return f"reads pages of {', '.join(DTYPES)} and not of {dtype}"
    if head_size % HEAD_SIZES:
        return f"needs a head size that is a multiple of {HEAD_SIZES}, and it is {head_size}"
    if importlib.util.find_spec("numba") is None:
        return "needs numba, which is not installed (pip install 'pagedjax[cpu]')"
    return ""


def obstacle(
    device: Any, *, dtype: str, query_dtype: str, head_dim: int, block_size: int, kv_heads: int, heads: int
) -> str:
    """See `Implementation`."""
    return unsupported(device.platform, dtype, head_dim)


def prepare(dtype: str) -> None:
    """Loads or compiles the handler in a thread, if it can serve such keys and values here. Tracing waits for it.

    Compiling takes seconds and runs Python code most of the time, so other Python code beside it slows down; reading
    weights does not. If it fails, tracing fails with the same error.
    """
    if unsupported(jax.default_backend(), dtype, HEAD_SIZES):
        return

    def quietly() -> None:
        with contextlib.suppress(Exception):
            _register()

    threading.Thread(target=quietly, name="attention").start()


def _register() -> None:
    """Loads or compiles the handler, once a process.

    Tracing calls this. Programs from the compilation cache on disk are also traced before they are looked up, so the
    handler is registered for them as well.
    """
    with _lock:
        if not _registered:
            capsule = jax.ffi.pycapsule(ctypes.c_void_p(_handler()))
            jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")
            _registered.append(TARGET)


def _handler() -> int:
    """Returns the handler's address."""
    from pallas_kernels.paged_attention.cpu import object_files  # imports llvmlite

    file = object_files.place()
    objects = object_files.read(file) if file else None
    address = object_files.load(objects) if objects else None
    if address is None:
        from pallas_kernels.paged_attention.cpu import kernel  # imports numba

        address, objects = kernel.compile_handler()
        if file and objects:
            object_files.keep(file, objects)
    return address


IMPLEMENTATION = Implementation("cpu", paged_attention, obstacle, prepare=prepare)
