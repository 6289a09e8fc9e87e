"""The KV cache on the device: one pair of page arrays a layer, an ordinary argument of the step, donated to it.

A tuple of per-layer arrays (not one stacked array) is what XLA updates in place with an unrolled layer loop.
Block 0 is the trash block: padding tokens write there and nobody owns it, so no kernel needs an "invalid" branch.

A TPU keeps the last axis of an array in rows of 128 and pads what is shorter, so for its kernel a row of a page holds
128 / D tokens where D is below 128: [P, K, S D / 128, 128], the same numbers in the same order and no byte more.

Numbers of 8 bits, float8_e4m3fn, are kept as the integers of their bits: to write a few floats of 8 bits, XLA for a CPU
would widen the whole array, and narrow it again.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KVCache(NamedTuple):
    k: tuple[jax.Array, ...]  # L x [P, K, S, D], or in rows of several tokens
    v: tuple[jax.Array, ...]


def init(
    *, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: str, row: int | None = None
) -> KVCache:
    """Zeros for `blocks` ownable blocks and the trash block: P = blocks + 1.

    Args:
        row: numbers in a row of a page, a multiple of head_dim; None is head_dim, a token a row.
    """
    row = row or head_dim
    shape = (blocks + 1, kv_heads, block_size * head_dim // row, row)
    dtype = "uint8" if jnp.dtype(dtype).itemsize == 1 else dtype
    k, v = (tuple(jnp.zeros(shape, dtype) for _ in range(layers)) for _ in "kv")
    return KVCache(k, v)


def block_bytes(
    *, layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: str, row: int | None = None
) -> int:
    """Bytes of one block over all layers: 2 (keys and values) * L * S * K * D * bytes of dtype, whatever the rows."""
    return 2 * layers * block_size * kv_heads * head_dim * jnp.dtype(dtype).itemsize


def copy(cache: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
    """Copy whole blocks in every layer: all of `source` [n] is read before any of `target` [n] is written."""

    def one(pages: jax.Array) -> jax.Array:
        return pages.at[target].set(pages.at[source].get(mode="promise_in_bounds"), mode="promise_in_bounds")

    return jax.tree.map(one, cache)


def read_blocks(cache: KVCache, ids: jax.Array) -> KVCache:
    """Whole blocks `ids` [n] of every layer: arrays [n, K, S, D]."""
    return jax.tree.map(lambda pages: pages.at[ids].get(mode="promise_in_bounds"), cache)


def write_blocks(cache: KVCache, ids: jax.Array, pages: KVCache) -> KVCache:
    """Put whole blocks, as `read_blocks` gives them, into `ids` [n]."""
    return jax.tree.map(lambda old, new: old.at[ids].set(new, mode="promise_in_bounds"), cache, pages)
