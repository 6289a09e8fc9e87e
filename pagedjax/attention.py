"""The only importer of pallas_kernels: chooses an implementation once, by name, and never falls back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from pallas_kernels.paged_attention import IMPLS, cpu, gpu, paged_attention

# (q, k_pages, v_pages, block_tables, seq_lens, cu_q_lens, *, window, soft_cap) -> [T, N, D]
Attend = Callable[..., jax.Array]


def default_impl(platform: str, dtype: str, head_dim: int) -> str:
    """The implementation for a platform ("cpu", "gpu", "tpu") and a cache. Plain XLA runs on all of them.

    "pallas_gpu" has to be asked for by name until it has run on a GPU.
    """
    return "xla" if cpu.obstacle(platform, dtype, head_dim) else "cpu"


def choose(
    wanted: str | None,
    device: Any,
    *,
    dtype: str,
    query_dtype: str,
    head_dim: int,
    block_size: int,
    kv_heads: int,
    heads: int,
) -> str:
    """The implementation of an engine: the one wanted, or the default.

    Args:
        dtype: of the keys and values in the cache.

    Raises:
        ValueError: the one wanted cannot serve this cache on this device; the message says why.
    """
    if wanted is None:
        return default_impl(device.platform, dtype, head_dim)
    wrong = ""
    if wanted == "cpu":
        wrong = cpu.obstacle(device.platform, dtype, head_dim)
    if wanted == "pallas_gpu":
        wrong = gpu.obstacle(device) or gpu.unsupported(dtype, head_dim, block_size, heads // kv_heads)
        if not wrong and dtype != query_dtype:
            wrong = f"reads keys and values of the queries' dtype, and they are {dtype} and {query_dtype}"
    if wrong:
        raise ValueError(f"attention_impl {wanted!r} {wrong}; 'xla' has no such limit")
    return wanted


def prepare(wanted: str | None, dtype: str) -> None:
    """Begin what an implementation has to do once a process, in a thread, before the model is there to trace."""
    if wanted in (None, "cpu") and not cpu.obstacle(jax.default_backend(), dtype, cpu.HEAD_SIZES):
        cpu.prepare()


def attend(impl: str, scale: float) -> Attend:
    """`paged_attention` with its choices bound. Raises ValueError for an unknown name."""
    if impl not in IMPLS:
        raise ValueError(f"attention_impl is {impl!r}; it must be one of {', '.join(map(repr, IMPLS))}")
    return partial(paged_attention, scale=scale, impl=impl)
