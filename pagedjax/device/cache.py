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


def write(k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array):
    """Put the keys and values of T tokens into their slots.

    Args:
        k_pages, v_pages: [P, K, S, D] of one layer, or in rows of several tokens.
        k, v: [T, K, D].
        slots: [T] int32, block id * S + offset; padding tokens point into block 0.
    """
    if v_pages.shape[3] != v.shape[2]:
        return _into_rows(k_pages, k, slots), _into_rows(v_pages, v, slots)
    size = v_pages.shape[2]
    block, offset = slots // size, slots % size
    # Padding tokens share slots of the trash block, so indices are not unique; which of them wins does not matter.
    k_pages = k_pages.at[block, :, offset].set(_stored(k, k_pages.dtype), mode="promise_in_bounds")
    v_pages = v_pages.at[block, :, offset].set(_stored(v, v_pages.dtype), mode="promise_in_bounds")
    return k_pages, v_pages


def _into_rows(pages: jax.Array, x: jax.Array, slots: jax.Array) -> jax.Array:
    """Put x [T, K, D] into pages whose rows hold several tokens, [P, K, S D / L, L]."""
    d, (rows, length) = x.shape[2], pages.shape[2:]
    tokens = length // d
    place = slots % (rows * tokens)
    where = jnp.stack([slots // (rows * tokens), place // tokens, place % tokens * d], axis=1)
    window = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(0, 2), scatter_dims_to_operand_dims=(0, 2, 3)
    )
    mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return jax.lax.scatter(pages, where, _stored(x, pages.dtype), window, mode=mode)


def _stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x as the cache keeps it. In 8 bits what is too large becomes the largest number; a plain cast makes it NaN."""
    if dtype != jnp.uint8:
        return x.astype(dtype)
    largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
    return jax.lax.bitcast_convert_type(jnp.clip(x, -largest, largest).astype(jnp.float8_e4m3fn), jnp.uint8)
