"""Paged attention on a CPU by a compiled kernel that reads the pages in place, for decodes and prompt chunks."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.implementation import Implementation
from pallas_kernels.shared.cpu.handler import Handler
from pallas_kernels.shared.page_bits import BITS, FLOATS

DTYPES = ("float32", "bfloat16", "float8_e4m3fn")  # of keys and values
HEAD_SIZES = 8  # and its multiples

# Programs on disk contain the target: a handler that takes other arguments needs another number.
TARGET = "pallas_kernels.paged_attention.cpu.6"
HANDLER = Handler("paged_attention", TARGET, __package__ or "", Path(__file__).parent)


def paged_attention(
    q, k_pages, v_pages, block_tables, seq_lens, cu_q_lens, *, scale: float, window=None, soft_cap=None, invariant=False
) -> jax.Array:
    """See `api.paged_attention`. Tokens before the windows of all of an item's queries are not read.

    Args:
        invariant: see `Implementation.invariant`.

    Raises:
        ValueError: `unsupported` gives a reason.
    """
    dtype = jnp.dtype(FLOATS.get(k_pages.dtype.name, k_pages.dtype)).name
    wrong = unsupported(jax.default_backend(), dtype, q.shape[-1])
    if not wrong and v_pages.dtype != k_pages.dtype:
        wrong = f"needs k_pages and v_pages of one dtype, and they are {k_pages.dtype} and {v_pages.dtype}"
    if wrong:
        raise ValueError(f"impl 'cpu' {wrong}; impl 'xla' has no such limit")
    HANDLER.register()
    t, n, d = q.shape
    k = k_pages.shape[1]
    grouped = (q.astype(jnp.float32) * scale).reshape(t, k, n // k, d)
    factor = scale if q.dtype == jnp.bfloat16 else 0  # the kernel divides by it, to have the bfloat16 numbers again
    options = (
        jnp.array([window or 0, invariant], jnp.int32),
        *(jnp.full(1, x or 0, jnp.float32) for x in (soft_cap, factor)),
    )
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


def page_dtype(dtype: str) -> str:
    return BITS.get(dtype, dtype)


def prepare(dtype: str) -> None:
    """Loads or compiles the handler in a thread, if it can serve such keys and values here."""
    if not unsupported(jax.default_backend(), dtype, HEAD_SIZES):
        HANDLER.start()


IMPLEMENTATION = Implementation(
    "cpu",
    paged_attention,
    obstacle,
    prepare=prepare,
    page_dtype=page_dtype,
    invariant=partial(paged_attention, invariant=True),
)
