"""Paged attention on a CPU by a compiled kernel that reads the pages in place."""

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
from pallas_kernels.shared.cpu.zeros import zeros
from pallas_kernels.shared.page_bits import BITS, FLOATS

DTYPES = ("float32", "bfloat16", "float8_e4m3fn")  # of keys and values
HEAD_SIZE_MULTIPLE = 8  # a head size must be a multiple of it

# Programs on disk contain the target: a handler that takes other arguments needs another number.
TARGET = "pallas_kernels.paged_attention.cpu.7"
BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
# The kind of bfloat16 queries over bfloat16 pages, whose chunks multiply pairs of bfloat16 numbers.
# Any other kind is the dtype of the keys and values, whose chunks multiply float32 numbers.
PAIRED = "bfloat16_bfloat16"


def _handler(kind: str, invariant: bool, sinks: bool) -> Handler:
    """Makes the handler of a variant. kind: PAIRED, or the dtype of the keys and values."""
    variant = kind + "_invariant" * invariant + "_sinks" * sinks
    size = BYTES["bfloat16" if kind == PAIRED else kind]
    options = {"size": size, "paired": int(kind == PAIRED), "invariant": int(invariant)}
    options["sinks"] = int(sinks)
    folder = Path(__file__).parent
    return Handler(
        f"paged_attention_{variant}", f"{TARGET}.{variant}.", __package__ or "", folder, options
    )


_KINDS = [(kind, invariant) for kind in BYTES for invariant in (False, True)]
_HANDLERS = {
    (kind, invariant, sinks): _handler(kind, invariant, sinks)
    for kind, invariant in (*_KINDS, (PAIRED, False))
    for sinks in (False, True)
}


def handler_of(dtype: str, query_dtype: str, invariant: bool, sinks: bool = False) -> Handler:
    """Returns the handler for keys and values, and queries, of these dtypes."""
    # an invariant chunk multiplies float32 numbers, as a decode does
    is_paired = dtype == query_dtype == "bfloat16" and not invariant
    return _HANDLERS[PAIRED if is_paired else dtype, invariant, sinks]


def _served_dtype(q, k_pages, v_pages) -> str:
    """Returns the dtype of keys and values, which may be stored as integers of their bits.

    Raises:
        ValueError: `cache_obstacle` gives a reason, or keys and values have different dtypes.
    """
    dtype = jnp.dtype(FLOATS.get(k_pages.dtype.name, k_pages.dtype)).name
    reason = cache_obstacle(jax.default_backend(), dtype, q.shape[-1])
    if not reason and v_pages.dtype != k_pages.dtype:
        reason = (
            "needs k_pages and v_pages of one dtype, "
            f"and they are {k_pages.dtype} and {v_pages.dtype}"
        )
    if reason:
        raise ValueError(f"impl 'cpu' {reason}; impl 'xla' has no such limit")
    return dtype


def paged_attention(
    q,
    k_pages,
    v_pages,
    block_tables,
    seq_lens,
    cu_q_lens,
    *,
    scale: float,
    window=None,
    soft_cap=None,
    sinks=None,
    invariant=False,
) -> jax.Array:
    """See `api.paged_attention`.

    A context token that is before the windows of all queries of a work item is not read.

    Args:
        invariant: see `Implementation.invariant`.

    Raises:
        ValueError: `cache_obstacle` gives a reason.
    """
    dtype = _served_dtype(q, k_pages, v_pages)
    handler = handler_of(dtype, q.dtype.name, invariant, sinks is not None)
    handler.register()
    t, n, d = q.shape
    k = k_pages.shape[1]
    grouped = (q.astype(jnp.float32) * scale).reshape(t, k, n // k, d)
    options = (
        jnp.full(1, window or 0, jnp.int32),
        jnp.full(1, soft_cap or 0, jnp.float32),
        # the kernel divides the queries by it, and then has the bfloat16 numbers again
        jnp.full(1, scale if q.dtype == jnp.bfloat16 else 0, jnp.float32),
        *(() if sinks is None else (sinks,)),
    )
    attend = jax.ffi.ffi_call(handler.target, jax.ShapeDtypeStruct(grouped.shape, jnp.float32))
    out = attend(grouped, k_pages, v_pages, block_tables, seq_lens, cu_q_lens, *options)
    return out.reshape(t, n, d).astype(q.dtype)


def cache_obstacle(platform: str, dtype: str, head_size: int) -> str:
    """Returns why this implementation cannot serve a cache; empty if it can.

    The reason is the rest of a sentence.
    """
    if platform != "cpu":
        return f"runs on platform 'cpu' and not on {platform!r}"
    if sys.platform == "win32":
        return "calls POSIX functions, which Windows does not have"
    if dtype not in DTYPES:
        return f"reads pages of {', '.join(DTYPES)} and not of {dtype}"
    if head_size % HEAD_SIZE_MULTIPLE:
        return (
            f"needs a head size that is a multiple of {HEAD_SIZE_MULTIPLE}, and it is {head_size}"
        )
    if importlib.util.find_spec("llvmlite") is None:
        return "needs llvmlite, which is not installed (pip install 'pagedjax[cpu]')"
    return ""


def obstacle(
    device: Any,
    *,
    dtype: str,
    query_dtype: str,
    head_dim: int,
    block_size: int,
    kv_heads: int,
    heads: int,
) -> str:
    """See `Implementation`."""
    return cache_obstacle(device.platform, dtype, head_dim)


def page_dtype(dtype: str) -> str:
    return BITS.get(dtype, dtype)


def prepare(*, dtype: str, query_dtype: str, invariant: bool) -> None:
    """Loads or compiles the handler in a thread, if it can serve such keys and values here."""
    # the model's head size is not known yet; any allowed one gives the same answer
    head_size = HEAD_SIZE_MULTIPLE
    if not cache_obstacle(jax.default_backend(), dtype, head_size):
        handler_of(dtype, query_dtype, invariant).start()


IMPLEMENTATION = Implementation(
    "cpu",
    paged_attention,
    obstacle,
    prepare=prepare,
    page_dtype=page_dtype,
    pages=zeros,
    invariant=partial(paged_attention, invariant=True),
    takes_sinks=True,
)
