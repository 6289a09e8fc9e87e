"""Products with weights of 16 bits, with what follows the sums: Pallas, Mosaic GPU, Hopper.

    tile       `rows` tokens by `outputs` outputs; of a gated weight, half of them gates and half the
               outputs that these multiply
    block      threads that compute tiles, one after the other; a cluster computes one tile together,
               a part of the inputs each, if there are few tiles
    producer   a warpgroup that copies slabs of SLAB inputs into a ring, and the tile's residual
    consumers  one or two warpgroups, with 64 tokens each

        y [64 tokens, outputs] += x [64 tokens, 64 inputs] . w^T [64 inputs, outputs]

Sums stay in registers, in float32. Activation and residual follow there; then the result is rounded,
once, and stored. While the consumers do so, the producer fetches the next tile's first slabs.

A weight with few outputs has its inputs in parts, whose sums are added in order. The number of parts
is the weight's alone (`dense_sizes.py`). A cluster exchanges the sums of its parts through shared
memory: each block gets those of some of the outputs, and finishes these. With many tokens a block
computes all parts itself, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear.pallas_gpu.dense_sizes import LANES, SLAB, STORES, Sizes

PRODUCER_REGISTERS = 40  # of a thread; with those of the consumers, they are what a block can have
CONSUMER_REGISTERS = 232
BAND = 16  # tiles of tokens that are computed before the next outputs
WGMMA = plgpu.Layout.WGMMA


def product(
    x: jax.Array,
    weight: jax.Array,
    sizes: Sizes,
    *,
    first: int,
    width: int,
    gates: Callable[[jax.Array], jax.Array] | None,
    residual: jax.Array | None,
    dtype: str,
) -> jax.Array:
    """Returns [T, width] of a dtype.

    Args:
        x: [T, K] of 16 bits, T a multiple of 8.
        weight: [M, K] of x's dtype.
        first: the output with which the result begins.
        width: of the result; M is twice as much with gates.
        gates: the activation of the first half of the outputs, which multiplies the other half.
        residual: [T, width] of x's dtype, which is added.
    """
    tokens, k = x.shape
    rows = sizes.rows
    columns = sizes.columns  # of a result's tile
    groups = sizes.groups
    stages = sizes.stages
    parts = sizes.parts
    shares = sizes.shares
    block_columns = sizes.block_columns
    piece = sizes.piece
    slabs = k // SLAB
    row_tiles = -(-tokens // rows)
    column_tiles = -(-width // columns)
    tiles = row_tiles * column_tiles
    blocks = tiles if sizes.is_shared else min(tiles, sizes.blocks)

    def dense_product(
        x_ref: Any,
        weight_ref: Any,
        *refs: Any,
        x_s: Any,
        weight_s: Any,
        y_s: Any,
        full: Any,
        free: Any,
        residual_s: Any = None,
        residual_full: Any = None,
        residual_free: Any = None,
        parts_s: Any = None,
        parts_full: Any = None,
    ) -> None:
        *residual_refs, y_ref = refs
        block = lax.axis_index("block")
        group = lax.axis_index("warpgroup")
        share = lax.axis_index("share") if shares > 1 else jnp.int32(0)
        own_tiles = pl.cdiv(tiles - block, blocks)
        begin = begin_of(share, slabs, shares)
        tile_slabs = begin_of(share + 1, slabs, shares) - begin
        total = own_tiles * tile_slabs

        def slot_of(i):
            return lax.rem(i, jnp.int32(stages))

        def place_of(i):
            """Returns the first token and the first column of the block's i-th tile."""
            row, column = tile_at(block + i * blocks, row_tiles, column_tiles)
            return row * rows, column * columns

        @pl.when(group == groups)
        def fetch_all():
            if groups > 1:  # with one consumer, all threads have enough
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def fetch_tile(i, _):
                row, column = place_of(i)

                def fetch(j, _):
                    step = i * tile_slabs + j
                    slot = slot_of(step)
                    pl.when(step >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    inputs = pl.ds((begin + j) * SLAB, SLAB)
                    tokens_of_tile = x_ref.at[pl.ds(row, rows), inputs]
                    plgpu.copy_gmem_to_smem(tokens_of_tile, x_s.at[slot], full.at[slot])
                    for half in range(1 + (gates is not None)):
                        outputs = pl.ds(first + half * width + column, columns)
                        into = weight_s.at[slot, pl.ds(half * columns, columns)]
                        plgpu.copy_gmem_to_smem(weight_ref.at[outputs, inputs], into, full.at[slot])

                lax.fori_loop(0, tile_slabs, fetch, None)
                for residual_ref in residual_refs:
                    pl.when(i > 0)(lambda: plgpu.barrier_wait(residual_free))
                    added = residual_ref.at[
                        pl.ds(row, rows), pl.ds(column + share * block_columns, block_columns)
                    ]
                    plgpu.copy_gmem_to_smem(added, residual_s, residual_full)

            lax.fori_loop(0, own_tiles, fetch_tile, None)

        @pl.when(group < groups)
        def consume_all():
            if groups > 1:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            lanes = pl.ds(group * LANES, LANES)

            def give_back(step):
                """Tells the producer that a slab is not needed, if it waits for that."""
                slot = slot_of(step)
                pl.when(step + stages < total)(lambda: plgpu.barrier_arrive(free.at[slot]))

            def sums_of(step, count):
                """Returns [64, outputs]: the sums of `count` slabs of the ring."""

                def multiply(sums):
                    def add_slab(j, _):
                        slot = slot_of(step + j)
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(sums, x_s.at[slot, lanes], weight_s.at[slot].transpose((1, 0)))
                        plgpu.wgmma_wait(1)
                        pl.when(j > 0)(lambda: give_back(step + j - 1))

                    lax.fori_loop(0, count, add_slab, None)
                    y = sums[...]
                    give_back(step + count - 1)
                    return y

                registers: Any = plgpu  # ACC is not exported by name
                return pl.run_scoped(multiply, registers.ACC((LANES, sizes.outputs), jnp.float32))

            def all_parts(step):
                """Returns the sums of a tile whose parts are all this block's."""

                def add_part(part, y):
                    start = begin_of(part, slabs, parts)
                    return y + sums_of(step + start, begin_of(part + 1, slabs, parts) - start)

                zeros = jnp.full((LANES, sizes.outputs), 0.0, jnp.float32)
                return lax.fori_loop(0, parts, add_part, plgpu.layout_cast(zeros, WGMMA))

            def exchanged(y):
                """Returns [64, block_columns]: the sums of all parts."""
                for peer in range(shares):
                    plgpu.async_store_smem(
                        y[:, peer * block_columns : (peer + 1) * block_columns],
                        parts_s.at[share, lanes],
                        parts_full.at[group],
                        cluster_idx=jnp.int32(peer),
                        cluster_dim="share",
                    )
                plgpu.barrier_wait(parts_full.at[group])
                zeros = jnp.full((LANES, block_columns), 0.0, jnp.float32)
                y = plgpu.layout_cast(zeros, WGMMA)
                for part in range(parts):
                    y = y + plgpu.layout_cast(parts_s[part, lanes], WGMMA)
                return y

            def consume_tile(i, _):
                row, column = place_of(i)
                step = i * tile_slabs
                y = all_parts(step) if parts > shares else sums_of(step, tile_slabs)
                if shares > 1:
                    y = exchanged(y)
                if gates is not None:
                    y = gates(y[:, :columns]) * y[:, columns:]
                if residual is not None:
                    plgpu.barrier_wait(residual_full)
                for start in range(0, block_columns, piece):
                    finished = y[:, start : start + piece]
                    if residual is not None:
                        added = residual_s[lanes, pl.ds(start, piece)]
                        finished = finished + plgpu.layout_cast(added, WGMMA).astype(jnp.float32)
                    slot = start // piece % STORES
                    # at the tile's first piece, the last one before may have had this slot
                    plgpu.wait_smem_to_gmem(STORES - 1 if start else 0, wait_read_only=True)
                    y_s[group, slot] = finished.astype(dtype)
                    plgpu.commit_smem()
                    into = pl.ds(column + share * block_columns + start, piece)
                    tokens_of_group = pl.ds(row + group * LANES, LANES)
                    plgpu.copy_smem_to_gmem(y_s.at[group, slot], y_ref.at[tokens_of_group, into])
                if residual is not None:
                    pl.when(i + 1 < own_tiles)(lambda: plgpu.barrier_arrive(residual_free))

            lax.fori_loop(0, own_tiles, consume_tile, None)
            plgpu.wait_smem_to_gmem(0)

    scratch = {
        "x_s": _swizzled((stages, rows, SLAB), x.dtype),
        "weight_s": _swizzled((stages, sizes.outputs, SLAB), x.dtype),
        "y_s": _swizzled((groups, STORES, LANES, piece), dtype),
        "full": plgpu.Barrier(num_arrivals=2 + (gates is not None), num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    }
    if residual is not None:
        scratch |= {
            "residual_s": _swizzled((rows, block_columns), x.dtype),
            "residual_full": plgpu.Barrier(),
            "residual_free": plgpu.Barrier(num_arrivals=groups),
        }
    cluster: dict[str, Any] = {}
    if shares > 1:
        scratch |= {
            "parts_s": _swizzled((parts, rows, block_columns), jnp.float32),
            "parts_full": plgpu.Barrier(num_arrivals=parts, num_barriers=groups),
        }
        cluster = {"cluster": (shares,), "cluster_names": ("share",)}
    kernel = plgpu.kernel(
        dense_product,
        out_type=jax.ShapeDtypeStruct((tokens, width), dtype),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=groups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **cluster,
    )
    return kernel(x, weight, *([] if residual is None else [residual]))


def begin_of(part: Any, slabs: int, parts: int) -> Any:
    """Returns the first slab of a part; parts are as equal as they can be."""
    return lax.div(part * slabs, jnp.int32(parts))


def tile_at(index: Any, row_tiles: int, column_tiles: int) -> tuple[Any, Any]:
    """Returns the row and the column of a tile, by its place in the order of tiles.

    BAND rows come before the next column, and all columns of these rows before the next rows.
    """
    of_band = BAND * column_tiles
    band = lax.div(index, jnp.int32(of_band))
    first_row = band * BAND
    band_rows = lax.min(row_tiles - first_row, jnp.int32(BAND))
    place = index - band * of_band
    column = lax.div(place, band_rows)
    return first_row + place - column * band_rows, column


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory in tiles of 8 rows of up to 128 bytes, as WGMMA and copies use them."""
    itemsize = jnp.dtype(dtype).itemsize
    row = next(size for size in (128, 64, 32) if shape[-1] * itemsize % size == 0)
    transforms = plgpu.TilingTransform((8, row // itemsize)), plgpu.SwizzleTransform(row)
    return plgpu.SMEM(shape, dtype, transforms=transforms)
