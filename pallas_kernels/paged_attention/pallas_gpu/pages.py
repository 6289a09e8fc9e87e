"""What both GPU kernels use: copies of pages, products, scores and sinks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)


def swizzled_memory(shape, dtype):
    """Returns shared memory in WGMMA's layout: tiles of 8 rows of 64 numbers of 16 bits.

    A row is 128 bytes.
    """
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    )


def copies(tile: int, block_size: int) -> int:
    """Returns the number of copies that fill a tile: one for each of its pages; one if a page is
    larger than the tile.
    """
    return tile // min(tile, block_size)


def barrier_of_pages(tile: int, block_size: int, stages: int):
    """Returns a barrier for each stage. It is complete when all copies of its tile have arrived."""
    return plgpu.Barrier(num_arrivals=copies(tile, block_size), num_barriers=stages)


def page_ids(tables, row, start, length, *, tile: int, block_size: int) -> tuple:
    """Returns the page of each copy of the tile that starts at context token `start`.

    start: a multiple of the tile's size. Behind the row's last page that page is repeated, so that
    the whole tile in shared memory is written, and by pages of the row.
    """
    rows = min(tile, block_size)
    last = lax.max(length - 1, 0) // block_size
    tokens = (start + piece * rows for piece in range(copies(tile, block_size)))
    return tuple(tables[row, lax.min(token // block_size, last)] for token in tokens)


class Ring(NamedTuple):
    """The source and the target of the tiles of keys, or of values."""

    pages: Any  # [P, K, S, D]
    tiles: Any  # [stages, tile, D] in shared memory
    full: Any  # a barrier for each stage: its tile has arrived
    free: Any  # a barrier for each stage: its consumers have finished


def produce(rings: Sequence[Ring], head, tables, row, begin, count, length) -> None:
    """Copies `count` tiles of a row's context, from tile `begin`, into the slots of the rings.

    This is all that a producer does.
    """
    stages, tile, _ = rings[0].tiles.shape
    block_size = rings[0].pages.shape[2]
    rows = min(tile, block_size)

    def pages_of(i):
        return page_ids(tables, row, (begin + i) * tile, length, tile=tile, block_size=block_size)

    def fetch(i, pages):
        following = pages_of(i + 1)  # read while this tile waits for a free slot
        slot = lax.rem(i, jnp.int32(stages))
        inside = pl.ds(
            lax.rem((begin + i) * tile, jnp.int32(block_size)) if rows < block_size else 0, rows
        )
        for ring in rings:
            pl.when(i >= stages)(lambda ring=ring: plgpu.barrier_wait(ring.free.at[slot]))
            for piece, page in enumerate(pages):
                into = ring.tiles.at[slot, pl.ds(piece * rows, rows)]
                plgpu.copy_gmem_to_smem(ring.pages.at[page, head, inside], into, ring.full.at[slot])
        return following

    lax.fori_loop(0, count, fetch, pages_of(0))


def log2_scores(x, scale: float, soft_cap: float | None):
    """Returns scores as powers of two.

    exp2 of the result is exp of the product, which is scaled and perhaps capped.
    """
    if soft_cap is None:
        return x * (scale * LOG2E)
    return jnp.tanh(x * (scale / soft_cap)) * (soft_cap * LOG2E)


def sinks_of_queries(sinks, heads: int, tokens: int, size: int) -> jax.Array:
    """Returns sinks [N] for the queries of a product, as powers of two, [K, `size`].

    The queries are `tokens` of each query head of a key head, and padding.
    """
    of_queries = jnp.repeat(sinks.reshape(heads, -1) * LOG2E, tokens, axis=1)
    return jnp.pad(of_queries, ((0, 0), (0, size - of_queries.shape[1])))


def first_tops(sinks, size: int, layout) -> jax.Array:
    """Returns the largest score of each query, [`size`], before the first tile of its context.

    A sink is a token before the context whose value is zero. So the running softmax of a query with
    a sink begins with the sink's score, and with a sum of weights of 1.

    Args:
        sinks: [`size`] in global memory; None: there are none, and the scores are minus infinity.
    """
    if sinks is None:
        return plgpu.layout_cast(jnp.full((size,), -jnp.inf, jnp.float32), layout)
    # JAX 0.10 has one more argument, and the kernels need JAX 0.11
    return plgpu.load(sinks, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def product(shape, a, b):
    """Returns a . b of two tiles in shared memory, as float32 in registers."""

    def multiply(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    sums = plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(multiply, sums)


def tokens_outside(start, tile: int, length, earliest, window: int | None):
    """Returns whether the tile from context token `start` has tokens that no query sees."""
    ends_in_tile = start + tile > length
    return ends_in_tile if window is None else ends_in_tile | (start < earliest)


def clear_outside(values, start, length, earliest, window: int | None) -> None:
    """Clears the values [tile, D] of tokens that no query sees, from context token `start`.

    They may be NaN, and 0 * NaN is not 0.
    """
    positions = index_along(values.shape, 0) + start
    if window is None:
        real = positions < length
    else:
        real = (positions >= earliest) & (positions < length)
    values[...] = jnp.where(real, values[...], jnp.zeros((), values.dtype))
    plgpu.commit_smem()


def store_run(rows_s, results, heads: tuple[Any, int], tokens: int, begin, skipped, count) -> None:
    """Writes the results of a run where they belong, and waits. Pieces are powers of two, so no other
    row's tokens are touched.

    Args:
        rows_s: [heads * tokens, D], of the run's tokens under the first head, then the next.
        results: [T, N, D].
        heads: the first head of the run in results, and the number of heads.
        tokens: of a whole run.
        begin, count: the run's first token in results, and how many it has.
        skipped: tokens of rows_s before the first one.
    """
    first_head, num_heads = heads

    def store(g, _):
        for size in (2**bit for bit in reversed(range(tokens.bit_length()))):
            before = count // (2 * size) * (2 * size)  # stored in larger pieces

            @pl.when(count - before >= size)
            def piece(size=size, before=before):
                row = g * tokens + skipped + before
                target = results.at[pl.ds(begin + before, size), first_head + g]
                plgpu.copy_smem_to_gmem(rows_s.at[pl.ds(row, size)], target)

    lax.fori_loop(0, num_heads, store, None)
    plgpu.wait_smem_to_gmem(0)


def index_along(shape, axis: int):
    """Returns int32 [shape] in a product's layout: each element's index along an axis."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
