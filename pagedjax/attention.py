"""The only importer of pallas_kernels: chooses an implementation once, by name, and never falls back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax

from pallas_kernels.paged_attention import IMPLS, cpu, paged_attention

Attend = Callable[..., jax.Array]  # (q, k_pages, v_pages, block_tables, seq_lens, cu_q_lens) -> [T, N, D]


def default_impl(platform: str, dtype: str, head_dim: int) -> str:
    """The implementation for a platform ("cpu", "gpu", "tpu") and a cache. Plain XLA runs on all of them."""
    return "xla" if cpu.obstacle(platform, dtype, head_dim) else "cpu"


def attend(impl: str, scale: float) -> Attend:
    """`paged_attention` with its choices bound. Raises ValueError for an unknown name."""
    if impl not in IMPLS:
        raise ValueError(f"attention_impl is {impl!r}; it must be one of {', '.join(map(repr, IMPLS))}")
    return partial(paged_attention, scale=scale, impl=impl)
