"""Attention of prompt chunks over pages, causal within each row: Pallas, Mosaic GPU, Hopper.

    item       consecutive (token, query head) pairs of one row and one key head: GROUPS x 64, one pair a row of WGMMA
    grid       (key head, item), as many items as the batch can need; those it does not need end at once
    producer   a warpgroup that copies the pages of the item's context into a ring of tiles, keys and values
    consumers  GROUPS warpgroups that share the tiles, 64 pairs each: online softmax (FlashAttention, Dao et al. 2022)

XLA gathers the queries into items and puts the results back: a copy of each, and no item ever writes another row's
tokens. Only tiles that some pair of the item sees are read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_pages import (
    Ring,
    barrier_of_pages,
    capped,
    numbered,
    produce,
    product,
    swizzled,
)
from pallas_kernels.tiles import Tiles

GROUPS = 2
LANES = 64  # rows of a WGMMA
WGMMA = plgpu.Layout.WGMMA


def shared_bytes(d: int, itemsize: int, tiles: Tiles) -> int:
    """Shared memory of one block of threads, barriers and the compiler's own scratch aside."""
    return itemsize * (2 * tiles.chunk_stages * tiles.chunk_tile * d + GROUPS * LANES * (d + tiles.chunk_tile))


def chunks(
    q, k_pages, v_pages, block_tables, seq_lens, first, q_lens, *, scale, window, soft_cap, tiles: Tiles
) -> jax.Array:
    """Row b's tokens are first[b] : first[b] + q_lens[b] of q [T, N, D], the last of its context of seq_lens[b] tokens.

    Returns [T, N, D]; zeros for tokens of no row.
    """
    t, n, d = q.shape
    _, heads, s, _ = k_pages.shape
    b, dtype, group = len(seq_lens), k_pages.dtype, n // heads
    tile, stages = tiles.chunk_tile, tiles.chunk_stages
    tokens = GROUPS * LANES // group  # of an item

    items_of = -(-q_lens // tokens)
    ends = jnp.cumsum(items_of)
    items = -(-t // tokens) + min(b, t // 2)  # rows of two tokens or more, each with one item begun
    item = jnp.arange(items, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, item, side="right"), b - 1).astype(jnp.int32)
    offset = (item - (ends - items_of)[row]) * tokens  # of the item's first token in its row
    needed = item < ends[-1]
    position = ((seq_lens - q_lens)[row] + offset).astype(jnp.int32)  # of the item's first token in its context
    length = jnp.where(needed, jnp.minimum(position + tokens, seq_lens[row]), 0).astype(jnp.int32)  # context it sees

    def body(q_ref, k_ref, v_ref, tables, rows, positions, lengths, o_ref, q_s, k_s, v_s, p_s, *barriers):
        q_full, k_full, v_full, k_free, v_free, clean = barriers
        head, item, me = (lax.axis_index(name) for name in ("head", "item", "warpgroup"))
        row, position, length = rows[item], positions[item], lengths[item]
        begin = jnp.int32(0) if window is None else lax.max(position + 1 - window, 0) // tile
        count = lax.max(pl.cdiv(length, tile) - begin, 0)

        @pl.when(me == GROUPS)
        def fetch_all():
            plgpu.set_max_registers(40, action="decrease")
            rings = Ring(k_ref, k_s, k_full, k_free), Ring(v_ref, v_s, v_full, v_free)
            produce(rings, head, tables, row, begin, count, length)

        @pl.when((me < GROUPS) & (length > 0))
        def consume():
            plgpu.set_max_registers(232, action="increase")
            mine, weights = q_s.at[me], p_s.at[me]
            pairs = pl.ds(me * LANES, LANES)
            plgpu.copy_gmem_to_smem(q_ref.at[item, head, pairs], mine, q_full.at[me])
            plgpu.barrier_wait(q_full.at[me])

            def attend(i, carry):
                o, top, norm = carry
                slot, start = lax.rem(i, jnp.int32(stages)), (begin + i) * tile
                last_use = i + stages >= count

                plgpu.barrier_wait(k_full.at[slot])
                x = product((LANES, tile), mine, k_s.at[slot].transpose((1, 0)))
                pl.when(~last_use)(lambda: plgpu.barrier_arrive(k_free.at[slot]))
                query = (numbered((LANES, tile), 0) + me * LANES) // group + position
                key = numbered((LANES, tile), 1) + start
                seen = (key <= query) & (key < length)
                if window is not None:
                    seen &= key > query - window
                x = jnp.where(seen, capped(x, scale, soft_cap), -jnp.inf)
                new = jnp.maximum(top, x.max(axis=1))
                base = jnp.where(new == -jnp.inf, 0.0, new)  # of a pair that has seen nothing yet
                kept = jnp.exp2(top - base)
                p = jnp.exp2(x - lax.broadcast_in_dim(base, x.shape, [0]))
                norm = norm * kept + p.sum(axis=1)
                weights[...] = p.astype(dtype)
                plgpu.commit_smem()

                plgpu.barrier_wait(v_full.at[slot])

                @pl.when(start + tile > length)  # a weight of 0 does not hide a NaN; one warpgroup for all
                def clear():
                    @pl.when(me == 0)
                    def write():
                        at = numbered((tile, d), 0) + start
                        v_s[slot] = jnp.where(at < length, v_s[slot], jnp.zeros((), dtype))
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(clean)

                    plgpu.barrier_wait(clean)

                y = product((LANES, d), weights, v_s.at[slot])
                pl.when(~last_use)(lambda: plgpu.barrier_arrive(v_free.at[slot]))
                return o * lax.broadcast_in_dim(kept, o.shape, [0]) + y, new, norm

            o = plgpu.layout_cast(jnp.full((LANES, d), 0.0, jnp.float32), WGMMA)
            top = plgpu.layout_cast(jnp.full((LANES,), -jnp.inf, jnp.float32), WGMMA.reduce(1))
            norm = plgpu.layout_cast(jnp.full((LANES,), 0.0, jnp.float32), WGMMA.reduce(1))
            o, _, norm = lax.fori_loop(0, count, attend, (o, top, norm))
            o = o * lax.broadcast_in_dim(1.0 / jnp.where(norm > 0, norm, 1.0), o.shape, [0])
            mine[...] = o.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mine, o_ref.at[item, head, pairs])
            plgpu.wait_smem_to_gmem(0)

    ring = swizzled((stages, tile, d), dtype)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((items, heads, GROUPS * LANES, d), dtype),
        scratch_types=(
            swizzled((GROUPS, LANES, d), dtype),
            ring,
            ring,
            swizzled((GROUPS, LANES, tile), dtype),
            plgpu.Barrier(num_barriers=GROUPS),
            barrier_of_pages(tile, s, stages),
            barrier_of_pages(tile, s, stages),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
            plgpu.Barrier(),
        ),
        grid=(heads, items),
        grid_names=("head", "item"),
        num_threads=GROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    number = (first[row] + offset)[:, None] + jnp.arange(tokens)  # [items, tokens] of q
    gathered = q.reshape(t, heads, group, d).astype(dtype)[jnp.minimum(number, t - 1)]
    gathered = gathered.transpose(0, 2, 1, 3, 4).reshape(items, heads, tokens * group, d)
    padding = ((0, 0), (0, 0), (0, GROUPS * LANES - tokens * group), (0, 0))
    o = kernel(jnp.pad(gathered, padding), k_pages, v_pages, block_tables, row, position, length)
    o = o[:, :, : tokens * group].reshape(items, heads, tokens, group, d).transpose(0, 2, 1, 3, 4)
    own = needed[:, None] & (jnp.arange(tokens) < (q_lens[row] - offset)[:, None])
    out = jnp.zeros((t, heads, group, d), q.dtype)
    return out.at[jnp.where(own, number, t)].set(o.astype(q.dtype), mode="drop").reshape(t, n, d)
