"""Decode attention over pages, one query token a row or a few: Pallas, Mosaic GPU, Hopper.

    grid       (part of the context, row, key head)
    producer   a warpgroup that copies pages into a ring of tiles, each of `tile` context tokens,
               keys and values
    consumer   a warpgroup that computes the tiles in turn: an online softmax (FlashAttention, Dao
               et al. 2022)

Queries are columns. With G query heads a key head and Q query tokens, G * Q padded to 8, 16, 32 or
64,

        s [tile, GQ] = k [tile, D] . q^T [D, GQ]          o [D, GQ] += v^T [D, tile] . p [tile, GQ]

so that the long side of both products is the side of which WGMMA needs 64 rows. The padding is 8
columns, not 64 rows. A page is read once for all columns. A tile is masked only if some query does
not see all of it.

With more blocks of threads than fit on the device, a long row that begins last is waited for by the
whole device. So the rows of such a decode are in the order of their lengths, the longest first, and
the heads of a row follow one another: longest processing time first (Graham 1969). No GPU has
measured it.

A long context of few rows is split over the grid (Flash-Decoding): each part writes its normalised
sum and the log of its weights, and XLA merges them. A context that is not split, of one query
token, is written where it belongs in the result, so that a decode is one launch. All arithmetic of
the softmax is in powers of two.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.pallas_gpu.pages import (
    Ring,
    barrier_of_pages,
    clear_outside,
    first_tops,
    index_along,
    log2_scores,
    produce,
    product,
    sinks_of_queries,
    swizzled_memory,
    tokens_outside,
)
from pallas_kernels.shared.hopper import store
from pallas_kernels.tiles import Tiles

COLUMNS = 8  # WGMMA's smallest width
WGMMA = plgpu.Layout.WGMMA


def parts_of(rows: int, heads: int, longest: int, tiles: Tiles) -> int:
    """Returns the number of parts of a context.

    They are as many as fit on the device at once, each of at least `min_split` tokens. The blocks
    of threads of one more part would begin only when others have ended.
    """
    parts_that_fit = 2 * tiles.multiprocessors // (rows * heads)
    return max(1, min(parts_that_fit, longest // tiles.min_split))


def shared_bytes(d: int, group: int, itemsize: int, tiles: Tiles, queries: int = 1) -> int:
    """Returns the bytes of shared memory of one block of threads.

    Barriers and the compiler's scratch memory are not counted.
    """
    columns = _columns(group * queries)
    tile = _tile(d, group, queries, tiles)
    return itemsize * (2 * tiles.decode_stages * tile * d + columns * (d + tile)) + 4 * columns * (
        d + 1
    )


def _tile(d: int, group: int, queries: int, tiles: Tiles) -> int:
    """Returns the context tokens of a tile.

    With more columns than a decode has, it is as short as WGMMA allows, to save registers.
    """
    tile = dict(tiles.decode_tile)[d]
    return min(tile, 64) if _columns(group * queries) > _columns(group) else tile


def _columns(queries: int) -> int:
    """Returns the columns of a product.

    They are a power of two, with which the compiler needs the fewest registers.
    """
    return max(COLUMNS, 1 << (queries - 1).bit_length())


def decode(q, k_pages, v_pages, block_tables, seq_lens, **options) -> jax.Array:
    """Computes the attention of q [B, N, D]: one token of each row, the last of its context.

    options: those of `_decode`. Returns [B, N, D]; zeros where seq_lens [B] is 0.
    """
    return _decode(q[:, None], k_pages, v_pages, block_tables, seq_lens, **options)[:, 0]


def decode_short(q, k_pages, v_pages, block_tables, seq_lens, rows, counts, **options) -> jax.Array:
    """Computes the attention of rows of a few query tokens, q [I, Q, N, D].

    Row rows[i] of the tables has the query tokens q[i, : counts[i]], the last tokens of its
    context. options: those of `_decode`. Returns [I, Q, N, D], undefined for other tokens. A row
    with a count of 0 costs almost nothing.
    """
    lengths = jnp.where(counts > 0, seq_lens[rows], 0)
    return _decode(q, k_pages, v_pages, block_tables, lengths, rows, counts, **options)


def _decode(
    q,
    k_pages,
    v_pages,
    block_tables,
    seq_lens,
    *rows_and_counts,
    scale,
    window,
    soft_cap,
    tiles: Tiles,
    sinks=None,
    in_place: bool = False,
):
    """Computes the attention of q [B, Q, N, D].

    Args:
        rows_and_counts: those of `decode_short`.
        sinks: [N], or None.
        in_place: queries are read from q if its heads fill columns; else, or if they do not, from a
            padded copy of them.
    """
    b, queries, n, d = q.shape
    _, heads, s, _ = k_pages.shape
    dtype = k_pages.dtype
    query_dtype = q.dtype
    group = n // heads
    tile = _tile(d, group, queries, tiles)
    stages = tiles.decode_stages
    columns = _columns(group * queries)
    parts = parts_of(b, heads, block_tables.shape[1] * s, tiles)
    is_short = bool(rows_and_counts)
    is_one_part = parts == 1 and not is_short  # the result needs no merge
    in_place = in_place and is_one_part and columns % group == 0 and n % columns == 0
    # key heads whose queries are one another's columns
    neighbours = columns // group if in_place else 1
    fits_at_once = b * heads <= 2 * tiles.multiprocessors
    orders = () if not is_one_part or fits_at_once else (longest_first(seq_lens),)
    sink_arrays = []
    if sinks is not None:  # the first part of a context has them, so each counts once
        of_columns = sinks_of_queries(sinks, heads // neighbours, queries, columns)
        later_parts = ((0, parts - 1), (0, 0), (0, 0))
        sink_arrays = [jnp.pad(of_columns[None], later_parts, constant_values=-jnp.inf)]

    def paged_decode(q_ref, k_ref, v_ref, tables, lengths, *refs):
        rows, counts = refs[:2] if is_short else (None, None)
        first_result = len(orders) + len(rows_and_counts) + len(sink_arrays)
        first_scratch = first_result + len(out_s)
        results = refs[first_result:first_scratch]
        scratch = refs[first_scratch:]
        q_s, k_s, v_s, p_s, *results_s, q_full, k_full, v_full, k_free, v_free = scratch
        part, place, head = (lax.axis_index(name) for name in ("part", "row", "head"))
        row = refs[0][place] if orders else place
        heads_together = lax.div(head, jnp.int32(neighbours))
        first_column = lax.rem(head, jnp.int32(neighbours)) * group
        length = lengths[row]
        nearest = length - (1 if counts is None else counts[row])  # the first query in its context
        earliest = jnp.int32(0) if window is None else lax.max(nearest + 1 - window, 0)
        begin = earliest // tile
        part_tiles = pl.cdiv(pl.cdiv(length, tile) - begin, parts)
        first = begin + part * part_tiles
        count = lax.clamp(0, pl.cdiv(length, tile) - first, part_tiles)

        is_used = True if counts is None else counts[row] > 0

        @pl.when((lax.axis_index("warpgroup") == 1) & is_used)
        def fetch_all():
            rings = Ring(k_ref, k_s, k_full, k_free), Ring(v_ref, v_s, v_full, v_free)
            produce(rings, head, tables, row if rows is None else rows[row], first, count, length)

        @pl.when((lax.axis_index("warpgroup") == 0) & is_used)
        def consume():
            plgpu.copy_gmem_to_smem(q_ref.at[row, heads_together], q_s, q_full)
            plgpu.barrier_wait(q_full)

            # The carry, for each column over the tiles so far: o [D, columns] the sum of the
            # values, weighted by 2^(score - top); top [columns] the largest score; weights [tile,
            # columns] the sums of these weights over the tokens at one place of their tiles.
            def attend(i, carry):
                o, top, weights = carry
                slot = lax.rem(i, jnp.int32(stages))
                start = (first + i) * tile  # the tile's first context token
                last_use = i + stages >= count

                plgpu.barrier_wait(k_full.at[slot])
                x = product((tile, columns), k_s.at[slot], q_s.transpose((1, 0)))
                pl.when(~last_use)(lambda: plgpu.barrier_arrive(k_free.at[slot]))

                def masked(x):
                    token = index_along((tile, columns), 0) + start
                    if is_short:
                        query = (index_along((tile, columns), 1) & (queries - 1)) + nearest
                        visible = (token <= query) & (token < length)
                        visible = visible if window is None else visible & (token > query - window)
                    else:
                        visible = (
                            token < length
                            if window is None
                            else (token < length) & (token >= length - window)
                        )
                    return jnp.where(visible, x, -jnp.inf)

                x = log2_scores(x, scale, soft_cap)
                if is_short:
                    partly = start + tile - 1 > nearest
                    partly = partly if window is None else partly | (start < length - window)
                    x = lax.cond(partly, masked, lambda x: x, x)
                    new = jnp.maximum(top, x.max(axis=0))
                    # -inf: the query has seen nothing yet
                    base = jnp.where(new == -jnp.inf, 0.0, new)
                else:
                    x = masked(x)  # a tile has a token that is seen
                    base = new = jnp.maximum(top, x.max(axis=0))
                decay, weights = weigh(x, top, base, weights, p_s)

                plgpu.barrier_wait(v_full.at[slot])
                pl.when(tokens_outside(start, tile, length, earliest, window))(
                    lambda: clear_outside(v_s.at[slot], start, length, earliest, window)
                )
                y = product((d, columns), v_s.at[slot].transpose((1, 0)), p_s.transpose((1, 0)))
                pl.when(~last_use)(lambda: plgpu.barrier_arrive(v_free.at[slot]))
                return o * lax.broadcast_in_dim(decay, o.shape, [1]) + y, new, weights

            o = plgpu.layout_cast(jnp.full((d, columns), 0.0, jnp.float32), WGMMA)
            # The weight of a sink is spread over the places of a tile. In a part without sinks, the
            # first score takes it away.
            first_weight = 1.0 / tile if sink_arrays else 0.0
            weights = plgpu.layout_cast(jnp.full((tile, columns), first_weight, jnp.float32), WGMMA)
            part_sinks = refs[first_result - 1].at[part, heads_together] if sink_arrays else None
            top = first_tops(part_sinks, columns, WGMMA.reduce(0))
            carry = lax.fori_loop(0, count, attend, (o, top, weights))
            if is_one_part:
                (o_ref,) = results
                (o_s,) = results_s
                write_whole(carry, o_s)
                plgpu.copy_smem_to_gmem(
                    o_s.at[pl.ds(first_column, group)], o_ref.at[row, pl.ds(head * group, group)]
                )
            else:
                write_part(carry, results_s, [result.at[row, head, part] for result in results])
            plgpu.wait_smem_to_gmem(0)

    ring = swizzled_memory((stages, tile, d), dtype)
    if is_one_part:
        out_type = (jax.ShapeDtypeStruct((b, n, d), query_dtype),)
        out_s = (plgpu.SMEM((columns, d), query_dtype),)
    else:
        out_type, out_s = results_of_parts((b, heads, parts), d, columns)
    kernel = plgpu.kernel(
        paged_decode,
        out_type=out_type,
        scratch_types=(
            swizzled_memory((columns, d), dtype),
            ring,
            ring,
            swizzled_memory((columns, tile), dtype),
            *out_s,
            plgpu.Barrier(),
            barrier_of_pages(tile, s, stages),
            barrier_of_pages(tile, s, stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ),
        grid=(parts, b, heads),
        grid_names=("part", "row", "head"),
        **threads(),
    )
    if in_place:
        columns_of_heads = q.reshape(b, heads // neighbours, columns, d).astype(dtype)
    else:
        padding = ((0, 0), (0, 0), (0, columns - group * queries), (0, 0))
        grouped = (
            q.reshape(b, queries, heads, group, d)
            .transpose(0, 2, 3, 1, 4)
            .reshape(b, heads, group * queries, d)
        )
        columns_of_heads = jnp.pad(grouped.astype(dtype), padding)
    of_rows = block_tables, seq_lens, *orders, *(a.astype(jnp.int32) for a in rows_and_counts)
    results = kernel(columns_of_heads, k_pages, v_pages, *of_rows, *sink_arrays)
    if is_one_part:
        return results[0][:, None]
    out = merged(*results)[..., : group * queries].reshape(b, heads, d, group, queries)
    return out.transpose(0, 4, 1, 3, 2).reshape(b, queries, n, d).astype(q.dtype)


def longest_first(seq_lens: jax.Array) -> jax.Array:
    """Returns the rows [B] int32 in the order of their lengths, the longest first.

    Rows of equal length keep their order. All layers of a step share one sort, which XLA finds.
    """
    return jnp.argsort(-seq_lens).astype(jnp.int32)


def weigh(x, top, base, weights, p_s):
    """Returns the factor of the sums so far, and the sums of the weights with those of a tile.

    The weights 2^(x - base) of the scores x [tile, columns] are written to p_s [columns, tile].
    """
    decay = jnp.exp2(top - base)
    p = jnp.exp2(x - lax.broadcast_in_dim(base, x.shape, [1]))
    # the places of the tile are summed after the loop
    weights = weights * lax.broadcast_in_dim(decay, x.shape, [1]) + p
    p_s.transpose((1, 0))[...] = p.astype(p_s.dtype)
    plgpu.commit_smem()
    return decay, weights


def _normalised(o, weights):
    """Returns o divided by the sums of its weights; of these, which are not 0, and the others as 1."""
    norm = weights.sum(axis=0)
    has_weights = norm > 0
    safe = jnp.where(has_weights, norm, 1.0)
    return o * lax.broadcast_in_dim(1.0 / safe, o.shape, [1]), has_weights, safe


def write_whole(carry, o_s) -> None:
    """Writes the result of a carry to o_s [columns, D], of a context in one part."""
    o, _, weights = carry
    store(o_s.transpose((1, 0)), _normalised(o, weights)[0].astype(o_s.dtype))
    plgpu.commit_smem()


def write_part(carry, scratch, results) -> None:
    """Writes the sum of a part and the log of its weights, through shared memory, to `results`."""
    o, top, weights = carry
    o, has_weights, safe = _normalised(o, weights)
    o_s, log_s = scratch
    o_s[...] = o
    log_s[...] = jnp.where(has_weights, top + jnp.log2(safe), -jnp.inf)
    plgpu.commit_smem()
    for source, result in zip(scratch, results, strict=True):
        plgpu.copy_smem_to_gmem(source, result)


def results_of_parts(rows: tuple[int, int, int], d: int, columns: int) -> tuple[Any, Any]:
    """Returns the results of `write_part`, (B, K, parts) of them, and their shared memory."""
    shapes = (d, columns), (columns,)
    results = tuple(jax.ShapeDtypeStruct((*rows, *shape), jnp.float32) for shape in shapes)
    return results, tuple(plgpu.SMEM(shape, jnp.float32) for shape in shapes)


def threads() -> dict[str, Any]:
    """Returns the options of a kernel with a producer and a consumer of columns."""
    return {
        "num_threads": 2,
        "thread_name": "warpgroup",
        "compiler_params": plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=4096,  # the largest score of a column is found across warps
        ),
    }


def merged(o, logs):
    """Merges the parts o [B, K, parts, D, G] by the logs of their weights [B, K, parts, G], base 2.

    Returns [B, K, D, G]; zeros where all parts are empty.
    """
    top = logs.max(axis=2, keepdims=True)
    weights = jnp.exp2(logs - jnp.where(top == -jnp.inf, 0.0, top))
    norm = weights.sum(axis=2, keepdims=True)
    weights = weights / jnp.where(norm > 0, norm, 1.0)
    return (o * weights[..., None, :]).sum(axis=2)
