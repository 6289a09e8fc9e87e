"""Products with weights in words, of few tokens: Pallas, Mosaic GPU, Hopper.

    grid       (part of the inputs, tile of 64 outputs, tile of tokens)
    producer   a warpgroup that copies a slab into a ring: its words, its scales, and the tokens' numbers
    consumer   a warpgroup that widens the words in registers to bfloat16 weights in shared memory, and
               multiplies them

Tokens are columns, padded to 8, 16, 32 or 64:

        y [64 outputs, tokens] += w [64 outputs, 256 inputs] . x^T [256 inputs, tokens]

so that the long side of the product is the one of which WGMMA needs 64 rows, as in the attention of
decodes. A slab of 4 bits is two such products, and one of 8 bits is one. A weight is rounded to
bfloat16 once, after its scale and its offset.

The inputs of few outputs are split over the grid, so that the device is full; XLA adds the parts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear import words
from pallas_kernels.linear.blocks import Blocks
from pallas_kernels.linear.pallas_gpu.layout import OUTPUTS, WORDS, Layout

COLUMNS = 8  # WGMMA's smallest width
MAX_COLUMNS = 64  # tokens of a tile
CHUNKS = 4  # pieces of WORDS inputs of a product
SHARED = 233472  # bytes of shared memory of a multiprocessor
RESERVED = 1024  # of them, for each block of threads
WGMMA = plgpu.Layout.WGMMA


def columns_of(tokens: int) -> int:
    """Returns the columns of a product: a power of two, at most MAX_COLUMNS."""
    return min(MAX_COLUMNS, max(COLUMNS, 1 << (tokens - 1).bit_length()))


def expert_columns(tokens: int, matrices: int) -> int:
    """Returns the columns of a product with one of several matrices: twice the tokens that a matrix
    has on average, so that most have one tile.
    """
    return columns_of(-(-2 * tokens // matrices))


def stages_of(columns: int) -> int:
    """Returns the slabs in shared memory."""
    return 2 if columns > 32 else 3


def shared_bytes(layout: Layout, columns: int) -> int:
    """Returns the bytes of shared memory of one block of threads.

    Barriers and the compiler's scratch memory are not counted.
    """
    of_words = 4 * WORDS * (OUTPUTS + layout.slab_scales)
    of_tokens = 2 * columns * WORDS * layout.chunks
    weights = 2 * CHUNKS * OUTPUTS * WORDS
    return stages_of(columns) * (of_words + of_tokens) + weights + 4 * OUTPUTS * columns


def blocks_at_once(layout: Layout, columns: int, multiprocessors: int) -> int:
    """Returns the blocks of threads that the device holds at once: with few columns, two on each
    multiprocessor.
    """
    of_two = 2 * (shared_bytes(layout, columns) + RESERVED)
    return multiprocessors * (2 if of_two <= SHARED else 1)


def part_slabs(layout: Layout, blocks: int, places: int) -> int:
    """Returns the slabs of a part of the inputs, of which there are as many as fit on the device.

    blocks: of threads, for each part.
    places: blocks of threads that the device holds at once.
    """
    parts = max(1, min(layout.slabs, places // blocks))
    return -(-layout.slabs // parts)


def product(
    x: jax.Array,
    packed: jax.Array,
    layout: Layout,
    tiles: tuple[int, int],
    columns: int,
    multiprocessors: int,
    owners: tuple[jax.Array, jax.Array] | tuple[()] = (),
) -> jax.Array:
    """Returns [T, 64 (last - first)] float32: the sums of the outputs of the tiles first : last.

    Args:
        x: [T, K] bfloat16.
        packed: [tiles of outputs, rows, 64] int32 (`layout.py`), of one matrix or of several.
        tiles: (first, last), of one matrix.
        columns: tokens of a tile.
        owners: of several matrices, that of each tile of tokens, and the number of used tiles [1].
            Results of the others are zeros.
    """
    t, k = x.shape
    first_tile, last_tile = tiles
    num_tiles = last_tile - first_tile
    x_tiles = -(-t // columns)
    stages = stages_of(columns)
    chunks = layout.chunks
    places = blocks_at_once(layout, columns, multiprocessors)
    slabs = part_slabs(layout, num_tiles * x_tiles, places)
    parts = -(-layout.slabs // slabs)
    blocks = layout.blocks
    has_scales = blocks is not None

    def linear_words(x_ref, packed_ref, *refs):
        y_ref, x_s, words_s, *others = refs[len(owners) :]
        scales_s = others.pop(0) if has_scales else None
        weights_s, y_s, full, free = others
        part, tile, column = (lax.axis_index(name) for name in ("part", "tile", "column"))
        first = part * slabs
        count = lax.min(layout.slabs - first, jnp.int32(slabs))
        first_source = first_tile
        if owners:
            matrices_ref, used_ref = refs[: len(owners)]
            count = jnp.where(column < used_ref[0], count, 0)
            first_source = matrices_ref[column] * num_tiles

        @pl.when(lax.axis_index("warpgroup") == 1)
        def fetch_all():
            def fetch(i, _):
                slot = lax.rem(i, jnp.int32(stages))
                slab = first + i
                source = first_source + tile
                pl.when(i >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                rows = pl.ds(slab * OUTPUTS, OUTPUTS)
                of_slab = packed_ref.at[source, rows]
                plgpu.copy_gmem_to_smem(of_slab, words_s.at[slot], full.at[slot])
                if scales_s is not None:
                    start = layout.word_rows + slab * layout.slab_scales
                    rows = pl.ds(start, layout.slab_scales)
                    scales = packed_ref.at[source, rows]
                    plgpu.copy_gmem_to_smem(scales, scales_s.at[slot], full.at[slot])
                numbers = x_ref.at[pl.ds(slab * chunks, chunks), pl.ds(column * columns, columns)]
                plgpu.copy_gmem_to_smem(numbers, x_s.at[slot], full.at[slot])

            lax.fori_loop(0, count, fetch, None)

        @pl.when(lax.axis_index("warpgroup") == 0)
        def consume():
            def add_slab(i, y):
                slot = lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(full.at[slot])
                run = plgpu.layout_cast(words_s[slot], WGMMA)
                for begin in range(0, chunks, CHUNKS):
                    # a loop, and not four copies of it: they would take 168 registers, with which
                    # a multiprocessor holds one block of threads and not two
                    def widen(chunk, _, begin=begin):
                        weights = words.numbers_of(run, begin + chunk, blocks)
                        if scales_s is not None:
                            rows = scales_s.at[slot]
                            weights = _scaled(weights, rows, layout, begin + chunk)
                        weights_s[chunk] = weights.astype(jnp.bfloat16)

                    lax.fori_loop(0, CHUNKS, widen, None)
                    plgpu.commit_smem()
                    y = y + _product(weights_s, x_s, slot, begin, columns)
                pl.when(i + stages < count)(lambda: plgpu.barrier_arrive(free.at[slot]))
                return y

            y = plgpu.layout_cast(jnp.full((OUTPUTS, columns), 0.0, jnp.float32), WGMMA)
            y_s[...] = lax.fori_loop(0, count, add_slab, y)
            plgpu.commit_smem()
            outputs = pl.ds(tile * OUTPUTS, OUTPUTS)
            tokens = pl.ds(column * columns, columns)
            plgpu.copy_smem_to_gmem(y_s, y_ref.at[part, outputs, tokens])
            plgpu.wait_smem_to_gmem(0)

    scales_memory = ()
    if has_scales:
        scales_memory = (plgpu.SMEM((stages, layout.slab_scales, OUTPUTS), jnp.int32),)
    kernel = plgpu.kernel(
        linear_words,
        out_type=jax.ShapeDtypeStruct((parts, num_tiles * OUTPUTS, x_tiles * columns), jnp.float32),
        scratch_types=(
            _swizzled((stages, chunks, columns, WORDS), jnp.bfloat16),
            _swizzled((stages, OUTPUTS, WORDS), jnp.int32),
            *scales_memory,
            _swizzled((CHUNKS, OUTPUTS, WORDS), jnp.bfloat16),
            plgpu.SMEM((OUTPUTS, columns), jnp.float32),
            plgpu.Barrier(num_arrivals=2 + has_scales, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ),
        grid=(parts, num_tiles, x_tiles),
        grid_names=("part", "tile", "column"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    whole = jnp.pad(x, ((0, x_tiles * columns - t), (0, layout.inputs - k)))
    by_chunk = whole.reshape(x_tiles * columns, -1, WORDS).swapaxes(0, 1)
    return kernel(by_chunk, packed, *owners).sum(0).T[:t]


def _scaled(numbers: Any, scales_s: Any, layout: Layout, chunk: Any) -> Any:
    """Returns the weights [64 outputs, 64 inputs] float32 of the numbers of a piece of a slab.

    scales_s: [scales and offsets of the slab, 64 outputs] in shared memory.
    """
    blocks = layout.blocks
    assert blocks is not None
    in_word = words.scales_of_word(blocks)
    # of a word with the scales of more inputs than a piece has, those of the piece
    place = 0
    if blocks.inputs * in_word > WORDS and in_word > 1:
        place = lax.rem(chunk, jnp.int32(blocks.inputs * in_word // WORDS)) * 2

    def over_inputs(first: int) -> Any:
        """Of each number, its scale or offset, in the rows behind `first`."""
        row = first + chunk * WORDS // (blocks.inputs * in_word)
        scales = _over_columns(scales_s, row, place, blocks)
        if blocks.inputs >= WORDS:
            return scales
        # of the other block: in the next row, or in the same word
        is_apart = int(in_word == 1)
        others = _over_columns(scales_s, row + is_apart, place + 1 - is_apart, blocks)
        inputs = plgpu.broadcasted_iota(jnp.int32, scales.shape, 1, layout=WGMMA)
        return jnp.where(inputs < blocks.inputs, scales, others)

    weights = numbers * over_inputs(0)
    return weights + over_inputs(layout.part_rows) if blocks.offset else weights


def _over_columns(scales_s: Any, row: Any, place: Any, blocks: Blocks) -> Any:
    bits = plgpu.layout_cast(scales_s[row], WGMMA.reduce(1))
    return lax.broadcast_in_dim(words.scale_of(bits, place, blocks), (OUTPUTS, WORDS), [0])


def _product(weights_s: Any, x_s: Any, slot: Any, begin: int, columns: int) -> jax.Array:
    """Returns [64, columns] float32: weights times the inputs of CHUNKS pieces, from `begin`."""

    def multiply(acc):
        for chunk in range(CHUNKS):
            numbers = x_s.at[slot, begin + chunk].transpose((1, 0))
            plgpu.wgmma(acc, weights_s.at[chunk], numbers)
        return acc[...]

    sums = plgpu.ACC((OUTPUTS, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(multiply, sums)


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory in tiles of 8 rows of 128 bytes, as WGMMA reads them."""
    row = 128 // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((8, row)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)
