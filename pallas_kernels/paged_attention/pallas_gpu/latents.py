"""Attention of single query tokens over pages of latents: Pallas, Mosaic GPU, Hopper.

    grid       (part of the context, group of query heads, row)
    producer   a warpgroup that copies pages into a ring of tiles, each of TILE context tokens
    consumer   a warpgroup that computes the tiles in turn, as in `decode.py`

A row of a page is a token's key of R numbers, and its first Z are the token's value (MLA with
absorbed queries, see `expanded.py`). So a tile is copied once, and both products read it:

        s [TILE, C] = rows [TILE, R] . q^T [R, C]          o [Z, C] += rows[:, :Z]^T [Z, TILE] . p [TILE, C]

The C columns are query heads. With more than MAX_COLUMNS their sums, Z numbers each, do not fit in
registers. So more heads are groups of the grid, which read the same pages.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.pallas_gpu.decode import (
    COLUMNS,
    merged,
    parts_of,
    results_of_parts,
    threads,
    weigh,
    write_part,
    write_whole,
)
from pallas_kernels.paged_attention.pallas_gpu.pages import (
    Ring,
    barrier_of_pages,
    first_tops,
    index_along,
    log2_scores,
    produce,
    product,
    swizzled_memory,
    tokens_outside,
)
from pallas_kernels.tiles import Tiles

TILE = 64  # context tokens: as few as WGMMA allows
STAGES = 2  # two tiles of 576 numbers of 16 bits are 144 KiB of the 227 of a multiprocessor
MAX_COLUMNS = 16
CLEARED = 64  # numbers of a value that are cleared at a time, so that they fit in registers
WGMMA = plgpu.Layout.WGMMA


def columns_of(heads: int) -> int:
    """Returns the columns of a product over `heads` query heads."""
    return COLUMNS if heads <= COLUMNS else MAX_COLUMNS


def shared_bytes(row: int, rank: int, heads: int, itemsize: int) -> int:
    """Returns the bytes of shared memory of one block of threads.

    Barriers and the compiler's scratch memory are not counted.
    """
    columns = columns_of(heads)
    return itemsize * (STAGES * TILE * row + columns * (row + TILE)) + 4 * columns * (rank + 1)


def attend(
    q,
    pages,
    block_tables,
    seq_lens,
    rows,
    *,
    rank: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    tiles: Tiles,
) -> jax.Array:
    """Computes the attention of query tokens q [I, N, R], each of which is the last of its context.

    Args:
        pages: [P, 1, S, R].
        block_tables: [B, M].
        seq_lens: [I] context tokens that a query sees; 0 costs almost nothing.
        rows: [I] the row of the tables of each query.
        rank: Z.

    Returns:
        [I, N, Z]; zeros where seq_lens is 0.
    """
    count, heads, row = q.shape
    s = pages.shape[2]
    dtype = pages.dtype
    query_dtype = q.dtype
    columns = columns_of(heads)
    groups = -(-heads // columns)
    # half as many as of `decode.py`: one block of threads has most of the shared memory
    parts = parts_of(count, 2 * groups, block_tables.shape[1] * s, tiles)
    is_one_part = parts == 1  # the result needs no merge

    def latent_decode(q_ref, pages_ref, tables, lengths, rows_ref, *refs):
        results = refs[: len(out_s)]
        q_s, rows_s, p_s, *results_s, q_full, full, free = refs[len(out_s) :]
        part, group, index = (lax.axis_index(name) for name in ("part", "group", "row"))
        length = lengths[index]
        earliest = jnp.int32(0) if window is None else lax.max(length - window, 0)
        begin = earliest // TILE
        part_tiles = pl.cdiv(pl.cdiv(length, TILE) - begin, parts)
        first = begin + part * part_tiles
        turns = lax.clamp(0, pl.cdiv(length, TILE) - first, part_tiles)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def fetch_all():
            ring = Ring(pages_ref, rows_s, full, free)
            produce([ring], 0, tables, rows_ref[index], first, turns, length)

        @pl.when(lax.axis_index("warpgroup") == 0)
        def consume():
            plgpu.copy_gmem_to_smem(q_ref.at[index, group], q_s, q_full)
            plgpu.barrier_wait(q_full)

            # The carry as in `decode.py`: o [Z, columns], top [columns] and weights [TILE, columns]
            def add_tile(i, carry):
                o, top, weights = carry
                slot = lax.rem(i, jnp.int32(STAGES))
                start = (first + i) * TILE  # the tile's first context token
                last_use = i + STAGES >= turns

                plgpu.barrier_wait(full.at[slot])
                x = product((TILE, columns), rows_s.at[slot], q_s.transpose((1, 0)))
                token = index_along((TILE, columns), 0) + start
                visible = token < length
                if window is not None:
                    visible &= token >= length - window
                x = jnp.where(visible, log2_scores(x, scale, soft_cap), -jnp.inf)
                new = jnp.maximum(top, x.max(axis=0))  # a tile has a token that is seen
                decay, weights = weigh(x, top, new, weights, p_s)

                # as `pages.clear_outside`, in pieces
                @pl.when(tokens_outside(start, TILE, length, earliest, window))
                def clear():
                    position = index_along((TILE, CLEARED), 0) + start
                    real = (position >= earliest) & (position < length)
                    for begin in range(0, rank, CLEARED):
                        piece = rows_s.at[slot, :, pl.ds(begin, CLEARED)]
                        piece[...] = jnp.where(real, piece[...], jnp.zeros((), dtype))
                    plgpu.commit_smem()

                values = rows_s.at[slot, :, pl.ds(0, rank)]
                y = product((rank, columns), values.transpose((1, 0)), p_s.transpose((1, 0)))
                pl.when(~last_use)(lambda: plgpu.barrier_arrive(free.at[slot]))
                return o * lax.broadcast_in_dim(decay, o.shape, [1]) + y, new, weights

            o = plgpu.layout_cast(jnp.full((rank, columns), 0.0, jnp.float32), WGMMA)
            weights = plgpu.layout_cast(jnp.full((TILE, columns), 0.0, jnp.float32), WGMMA)
            top = first_tops(None, columns, WGMMA.reduce(0))
            carry = lax.fori_loop(0, turns, add_tile, (o, top, weights))
            if is_one_part:
                (o_ref,) = results
                (o_s,) = results_s
                write_whole(carry, o_s)
                plgpu.copy_smem_to_gmem(o_s, o_ref.at[index, pl.ds(group * columns, columns)])
            else:
                write_part(carry, results_s, [result.at[index, group, part] for result in results])
            plgpu.wait_smem_to_gmem(0)

    if is_one_part:
        out_type = (jax.ShapeDtypeStruct((count, groups * columns, rank), query_dtype),)
        out_s = (plgpu.SMEM((columns, rank), query_dtype),)
    else:
        out_type, out_s = results_of_parts((count, groups, parts), rank, columns)
    kernel = plgpu.kernel(
        latent_decode,
        out_type=out_type,
        scratch_types=(
            swizzled_memory((columns, row), dtype),
            swizzled_memory((STAGES, TILE, row), dtype),
            swizzled_memory((columns, TILE), dtype),
            *out_s,
            plgpu.Barrier(),
            barrier_of_pages(TILE, s, STAGES),
            plgpu.Barrier(num_barriers=STAGES),
        ),
        grid=(parts, groups, count),
        grid_names=("part", "group", "row"),
        **threads(),
    )
    padded = jnp.pad(q.astype(dtype), ((0, 0), (0, groups * columns - heads), (0, 0)))
    padded = padded.reshape(count, groups, columns, row)
    ints = (array.astype(jnp.int32) for array in (block_tables, seq_lens, rows))
    results = kernel(padded, pages, *ints)
    if is_one_part:
        return results[0][:, :heads]
    out = merged(*results).transpose(0, 1, 3, 2).reshape(count, groups * columns, rank)
    return out[:, :heads].astype(query_dtype)
