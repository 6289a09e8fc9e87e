"""Decode attention over pages, one query token a row: Pallas, Mosaic GPU, Hopper.

    grid       (part of the context, key head, row)
    producer   a warpgroup that copies pages into a ring of tiles, each of `tile` context tokens, keys and values
    consumer   a warpgroup that computes the tiles in turn: an online softmax (FlashAttention, Dao et al. 2022)

Queries are columns. With G query heads a key head, padded to 8 or 16,

        s [tile, G] = k [tile, D] . q^T [D, G]            o [D, G] += v^T [D, tile] . p [tile, G]

so that the long side of both products is the side of which WGMMA needs 64 rows. The padding is 8 columns, not 64 rows.

A long context of few rows is split over the grid (Flash-Decoding): each part writes its normalised sum and the log of
its weights, and XLA merges them. All arithmetic of the softmax is in powers of two.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.pallas_gpu.pages import (
    Ring,
    barrier_of_pages,
    capped,
    numbered,
    produce,
    product,
    swizzled,
)
from pallas_kernels.tiles import Tiles

COLUMNS = 8  # WGMMA's smallest width
WGMMA = plgpu.Layout.WGMMA


def parts_of(rows: int, heads: int, longest: int, tiles: Tiles) -> int:
    """Returns the number of parts of a context: enough to fill the device twice, of at least `min_split` tokens."""
    wanted = math.ceil(2 * tiles.multiprocessors / (rows * heads))
    return max(1, min(wanted, longest // tiles.min_split))


def shared_bytes(d: int, group: int, itemsize: int, tiles: Tiles) -> int:
    """Returns the bytes of shared memory of one block of threads, without barriers and compiler scratch memory."""
    tile, columns = dict(tiles.decode_tile)[d], _columns(group)
    return itemsize * (2 * tiles.decode_stages * tile * d + columns * (d + tile)) + 4 * columns * (d + 1)


def _columns(group: int) -> int:
    return -(-group // COLUMNS) * COLUMNS


def decode(q, k_pages, v_pages, block_tables, seq_lens, *, scale, window, soft_cap, tiles: Tiles) -> jax.Array:
    """q [B, N, D], one token a row, the last of its context -> [B, N, D]; zeros where seq_lens [B] is 0."""
    b, n, d = q.shape
    _, heads, s, _ = k_pages.shape
    dtype, group = k_pages.dtype, n // heads
    tile, stages, columns = dict(tiles.decode_tile)[d], tiles.decode_stages, _columns(group)
    parts = parts_of(b, heads, block_tables.shape[1] * s, tiles)

    def body(q_ref, k_ref, v_ref, tables, lengths, o_ref, log_ref, q_s, k_s, v_s, p_s, o_s, log_s, *barriers):
        q_full, k_full, v_full, k_free, v_free = barriers
        part, head, row = (lax.axis_index(name) for name in ("part", "head", "row"))
        length = lengths[row]
        begin = jnp.int32(0) if window is None else lax.max(length - window, 0) // tile
        each = pl.cdiv(pl.cdiv(length, tile) - begin, parts)
        first = begin + part * each
        count = lax.clamp(0, pl.cdiv(length, tile) - first, each)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def fetch_all():
            rings = Ring(k_ref, k_s, k_full, k_free), Ring(v_ref, v_s, v_full, v_free)
            produce(rings, head, tables, row, first, count, length)

        @pl.when(lax.axis_index("warpgroup") == 0)
        def consume():
            plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_s, q_full)
            plgpu.barrier_wait(q_full)

            def attend(i, carry):
                o, top, weights = carry
                slot, start = lax.rem(i, jnp.int32(stages)), (first + i) * tile
                last_use = i + stages >= count

                plgpu.barrier_wait(k_full.at[slot])
                x = product((tile, columns), k_s.at[slot], q_s.transpose((1, 0)))
                pl.when(~last_use)(lambda: plgpu.barrier_arrive(k_free.at[slot]))
                token = numbered((tile, columns), 0) + start
                seen = token < length if window is None else (token < length) & (token >= length - window)
                x = jnp.where(seen, capped(x, scale, soft_cap), -jnp.inf)  # a tile has a token that is seen
                new = jnp.maximum(top, x.max(axis=0))
                kept = jnp.exp2(top - new)
                p = jnp.exp2(x - lax.broadcast_in_dim(new, x.shape, [1]))
                weights = weights * lax.broadcast_in_dim(kept, x.shape, [1]) + p  # summed after the loop
                p_s.transpose((1, 0))[...] = p.astype(dtype)
                plgpu.commit_smem()

                plgpu.barrier_wait(v_full.at[slot])

                @pl.when(start + tile > length)  # a weight of 0 does not hide a NaN
                def clear():
                    at = numbered((tile, d), 0) + start
                    v_s[slot] = jnp.where(at < length, v_s[slot], jnp.zeros((), dtype))
                    plgpu.commit_smem()

                y = product((d, columns), v_s.at[slot].transpose((1, 0)), p_s.transpose((1, 0)))
                pl.when(~last_use)(lambda: plgpu.barrier_arrive(v_free.at[slot]))
                return o * lax.broadcast_in_dim(kept, o.shape, [1]) + y, new, weights

            o = plgpu.layout_cast(jnp.full((d, columns), 0.0, jnp.float32), WGMMA)
            weights = plgpu.layout_cast(jnp.full((tile, columns), 0.0, jnp.float32), WGMMA)
            top = plgpu.layout_cast(jnp.full((columns,), -jnp.inf, jnp.float32), WGMMA.reduce(0))
            o, top, weights = lax.fori_loop(0, count, attend, (o, top, weights))
            norm = weights.sum(axis=0)
            some = norm > 0
            safe = jnp.where(some, norm, 1.0)
            o_s[...] = o * lax.broadcast_in_dim(1.0 / safe, o.shape, [1])
            log_s[...] = jnp.where(some, top + jnp.log2(safe), -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_s, o_ref.at[row, head, part])
            plgpu.copy_smem_to_gmem(log_s, log_ref.at[row, head, part])
            plgpu.wait_smem_to_gmem(0)

    ring = swizzled((stages, tile, d), dtype)
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((b, heads, parts, d, columns), jnp.float32),
            jax.ShapeDtypeStruct((b, heads, parts, columns), jnp.float32),
        ),
        scratch_types=(
            swizzled((columns, d), dtype),
            ring,
            ring,
            swizzled((columns, tile), dtype),
            plgpu.SMEM((d, columns), jnp.float32),
            plgpu.SMEM((columns,), jnp.float32),
            plgpu.Barrier(),
            barrier_of_pages(tile, s, stages),
            barrier_of_pages(tile, s, stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ),
        grid=(parts, heads, b),
        grid_names=("part", "head", "row"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=4096,  # the largest score of a column is found across warps
        ),
    )
    padding = ((0, 0), (0, 0), (0, columns - group), (0, 0))
    grouped = jnp.pad(q.reshape(b, heads, group, d).astype(dtype), padding)
    o, logs = kernel(grouped, k_pages, v_pages, block_tables, seq_lens)
    return _merge(o, logs)[..., :group].swapaxes(2, 3).reshape(b, n, d).astype(q.dtype)


def _merge(o, logs):
    """o [B, K, parts, D, G], logs [B, K, parts, G] base 2 -> [B, K, D, G]; zeros where all parts are empty."""
    top = logs.max(axis=2, keepdims=True)
    weights = jnp.exp2(logs - jnp.where(top == -jnp.inf, 0.0, top))
    norm = weights.sum(axis=2, keepdims=True)
    weights = weights / jnp.where(norm > 0, norm, 1.0)
    return (o * weights[..., None, :]).sum(axis=2)
