"""Attention on a CPU by a compiled kernel that reads the pages in place, decodes and prompt chunks alike.

numba (the `cpu` extra) compiles the kernel when it is first chosen on a machine. Its object code is kept, and a process
that finds it does not import numba.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import sys
import threading

import jax
import jax.numpy as jnp

DTYPES = ("float32", "bfloat16", "float8_e4m3fn")  # of numbers; the last one's pages are of uint8
HEAD_SIZES = 8  # and its multiples

# The handler's name. Programs on disk hold it: a handler that takes other arguments must get another number.
TARGET = "pallas_kernels.paged_attention.cpu.4"

_registered: list[str] = []
_lock = threading.Lock()


def paged_attention(
    q, k_pages, v_pages, block_tables, seq_lens, cu_q_lens, *, scale: float, window=None, soft_cap=None
) -> jax.Array:
    """See `api.paged_attention`. What lies before every window of an item's queries is not read.

    Raises:
        ValueError: what `obstacle` names.
    """
    dtype = "float8_e4m3fn" if k_pages.dtype == jnp.uint8 else str(k_pages.dtype)
    wrong = obstacle(jax.default_backend(), dtype, q.shape[-1])
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


def obstacle(platform: str, dtype: str, head_size: int) -> str:
    """What keeps this implementation from serving a cache, as the rest of a sentence; empty when nothing does."""
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


def prepare() -> None:
    """Begin to load the handler, or to compile it, in a thread; tracing waits for it.

    Compiling takes seconds, most of them Python's; what goes on beside it should not be (reading weights, say). Should
    it fail, tracing fails with the same error.
    """

    def quietly() -> None:
        with contextlib.suppress(Exception):
            _register()

    threading.Thread(target=quietly, name="attention").start()


def _register() -> None:
    """Load or compile the handler, once a process.

    Tracing calls this. Programs from the compilation cache on disk are traced too before they are looked up, so they
    find it as well.
    """
    with _lock:
        if not _registered:
            capsule = jax.ffi.pycapsule(ctypes.c_void_p(_handler()))
            jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")
            _registered.append(TARGET)


def _handler() -> int:
    """The handler's address."""
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
