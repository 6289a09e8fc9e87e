"""The only importer of pallas_kernels: chooses an implementation once, by name, and never falls back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from pagedjax.device import cache
from pagedjax.device.batch import Batch
from pallas_kernels.paged_attention import IMPLS, paged_attention
from pallas_kernels.paged_attention.cpu import implementation as cpu
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.paged_attention.pallas_tpu import implementation as pallas_tpu

# (q, k_pages, v_pages, block_tables, seq_lens, cu_q_lens, *, window, soft_cap) -> [T, N, D]
Attend = Callable[..., jax.Array]


def default_impl(platform: str, dtype: str, head_dim: int) -> str:
    """The implementation for a platform ("cpu", "gpu", "tpu") and a cache. Plain XLA runs on all of them.

    "pallas_gpu" and "pallas_tpu" have to be asked for by name until they have run on a GPU and on a TPU.
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
        wrong = pallas_gpu.obstacle(device) or pallas_gpu.unsupported(dtype, head_dim, block_size, heads // kv_heads)
        if not wrong and dtype != query_dtype:
            wrong = f"reads keys and values of the queries' dtype, and they are {dtype} and {query_dtype}"
    if wanted == "pallas_tpu":
        wrong = pallas_tpu.obstacle(device) or pallas_tpu.unsupported(dtype, head_dim, block_size, heads // kv_heads)
    if wrong:
        raise ValueError(f"attention_impl {wanted!r} {wrong}; 'xla' has no such limit")
    return wanted


def page_row(impl: str | None, head_dim: int) -> int:
    """Numbers in a row of a page as an implementation reads it: head_dim, or of several tokens for a TPU."""
    return pallas_tpu.row_size(head_dim) if impl == "pallas_tpu" else head_dim


def prepare(wanted: str | None, dtype: str) -> None:
    """Begin what an implementation has to do once a process, in a thread, before the model is there to trace."""
    if wanted in (None, "cpu") and not cpu.obstacle(jax.default_backend(), dtype, cpu.HEAD_SIZES):
        cpu.prepare()


@dataclass(frozen=True)
class Bound:
    """`paged_attention` with its choices bound: an `Attend`."""

    impl: str
    scale: float

    def __call__(self, *arrays: jax.Array, **options: Any) -> jax.Array:
        return paged_attention(*arrays, scale=self.scale, impl=self.impl, **options)


def attend(impl: str, scale: float) -> Attend:
    """`paged_attention` with its choices bound. Raises ValueError for an unknown name."""
    if impl not in IMPLS:
        raise ValueError(f"attention_impl is {impl!r}; it must be one of {', '.join(map(repr, IMPLS))}")
    return Bound(impl, scale)


def write(attend: Attend, k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, batch: Batch):
    """Put the keys and values of the batch's tokens into their slots, as suits what will read them.

    XLA's scatter is in place everywhere but in a step for a TPU, so its kernel brings one that is.
    """
    if isinstance(attend, Bound) and attend.impl == "pallas_tpu":
        return pallas_tpu.write(k_pages, v_pages, k, v, batch.slots, rows=len(batch.seq_lens))
    return cache.write(k_pages, v_pages, k, v, batch.slots)
