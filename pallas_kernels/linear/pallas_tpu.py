"""Products with stored weights on TPUs: a Pallas kernel for Mosaic TPU.

    grid      (tile of tokens, tile of outputs, slab of inputs); the slabs of a tile are summed in float32
    copies    Pallas copies the next slab's words from HBM while one is multiplied
    a step    widens the words of a slab to bfloat16 in VMEM, 16 inputs of all outputs of the tile at a time;
              then one product of the matrix unit
    experts   the tokens of each begin a tile; scalar memory has the matrix of a tile

Words (`words.py`) have outputs in lanes and inputs in sublanes: [slabs, words and scales of a slab,
M]. So a digit of 16 words is 16 neighbouring inputs, which fill a register of bfloat16, and have one
scale, which is a row that is broadcast along sublanes. Nothing is moved between lanes.

A widened weight is rounded to bfloat16 once, after its scale and its offset, as `xla` does it. Matrices
without words (`words.has_words`) are multiplied by `xla`, and so is all that comes before and after
the sums. The numbers of int8 by row are exact in bfloat16, and their scales follow the sum.

No TPU has run this yet: it is interpreted on a CPU, and compiled by `pallas_kernels.aot`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.linear import words
from pallas_kernels.linear.blocks import Blocks
from pallas_kernels.linear.implementation import Implementation, Matrix, rows_of
from pallas_kernels.linear.words import Digits, round_up
from pallas_kernels.shared.device import device_kind
from pallas_kernels.shared.tpu import LANES, wrong_device
from pallas_kernels.tiles import TpuTiles

DTYPE = "bfloat16"  # of activations
TILE = 128  # inputs that are widened in one turn of the loop
PIECE = 16  # inputs of a piece of it: the sublanes of a register of bfloat16
FEWEST_TILES = 9  # of a slab, where a row has several
MOST_TILES = 16
WIDTH = 512  # outputs of a tile
TOKENS = 256  # of a tile, at most


class Layout(NamedTuple):
    """The sizes of a matrix in words.

    slabs: of the inputs.
    tiles: TILE inputs each, of a slab.
    outputs: M with padding.
    blocks: as in `Matrix`.
    """

    slabs: int
    tiles: int
    outputs: int
    blocks: Blocks | None

    @property
    def slab_inputs(self) -> int:
        return self.tiles * TILE

    @property
    def inputs(self) -> int:
        """K with padding."""
        return self.slabs * self.slab_inputs

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the packed weight."""
        return self.slabs, self.slab_rows, self.outputs

    @property
    def tile_words(self) -> int:
        """Words of the TILE inputs of an output: a run."""
        return TILE // words.digits_of_word(self.blocks)

    @property
    def slab_words(self) -> int:
        """Words of a slab's inputs of an output, without scales."""
        return self.tiles * self.tile_words

    @property
    def slab_blocks(self) -> int:
        """Blocks of a slab of an output."""
        return 0 if self.blocks is None else self.slab_inputs // self.blocks.inputs

    @property
    def slab_scales(self) -> int:
        """Words of the scales of a slab of an output; as many have its offsets."""
        return 0 if self.blocks is None else self.slab_blocks // words.scales_of_word(self.blocks)

    @property
    def slab_rows(self) -> int:
        """Words of a slab of an output, with scales and offsets."""
        parts = 0 if self.blocks is None else 1 + self.blocks.offset
        return self.slab_words + parts * self.slab_scales


def layout_of(matrix: Matrix) -> Layout:
    """Returns the sizes in which one matrix has the least padding; of those, the largest slabs."""
    tiles = -(-matrix.inputs // TILE)
    slab = tiles
    if tiles > MOST_TILES:
        slab = min(range(MOST_TILES, FEWEST_TILES - 1, -1), key=lambda size: round_up(tiles, size))
    outputs = round_up(words.one_of(matrix).outputs, LANES)
    return Layout(-(-tiles // slab), slab, outputs, matrix.cells)


# --- the layout -----------------------------------------------------------------------------------


def pack(weight: np.ndarray, matrix: Matrix) -> np.ndarray:
    """Returns [slabs of all matrices, rows of a slab, M with padding] int32; the weight itself if it
    has no words.
    """
    if not words.has_words(matrix, weight.dtype, PIECE):
        return weight
    if matrix.count > 1:
        return words.packed_matrices(pack, weight, matrix)
    layout = layout_of(matrix)
    digits, scales, offsets = words.digits_of(weight, matrix.blocks)
    bits = words.bits_of(matrix.blocks)
    whole = words.padded(digits, layout.outputs, layout.inputs)
    arrays = [words.words_of(whole, bits, layout.tile_words)]
    for array in (scales, offsets):
        if array is not None and matrix.cells is not None:
            whole = words.padded(array, layout.outputs, layout.slabs * layout.slab_blocks)
            arrays.append(words.words_of_scales(whole, matrix.cells))
    by_slab = [array.reshape(layout.outputs, layout.slabs, -1) for array in arrays]
    return np.ascontiguousarray(np.concatenate(by_slab, axis=2).transpose(1, 2, 0))


def _digits(columns: Any, matrix: Matrix, xp: Any) -> Digits:
    """Returns the digits of outputs, from their columns [slabs, rows of a slab, M] of words."""
    layout = layout_of(matrix)
    rows = columns.transpose(2, 0, 1)
    first = layout.slab_words
    bits = words.bits_of(matrix.blocks)
    digits = words.digits_in(rows[..., :first], bits, layout.tile_words, xp)
    digits = digits.reshape(len(rows), -1)[:, : matrix.inputs]
    if matrix.cells is None:
        return Digits(digits, None, None)
    parts = []
    for _ in range(1 + matrix.cells.offset):
        part = rows[..., first : first + layout.slab_scales].reshape(len(rows), -1)
        scales = words.scales_in(part, matrix.cells)
        parts.append(scales[:, : matrix.inputs // matrix.cells.inputs])
        first += layout.slab_scales
    return Digits(digits, parts[0], parts[1] if matrix.cells.offset else None)


def unpack(packed: Any, matrix: Matrix) -> Any:
    if packed.dtype != np.int32:
        return packed
    if matrix.count > 1:
        return words.unpacked_matrices(unpack, np.asarray(packed), matrix)
    digits = _digits(np.asarray(packed)[..., : matrix.outputs], matrix, np)
    return words.weight_of(digits, matrix.blocks)


def gather(packed: jax.Array, matrix: Matrix, ids: jax.Array) -> jax.Array:
    if packed.dtype != jnp.int32:
        return rows_of(packed, matrix, ids)
    return words.rows_of_digits(_digits(packed[..., ids], matrix, jnp), matrix.blocks)


# --- the product ----------------------------------------------------------------------------------


def sums(
    x: jax.Array,
    packed: jax.Array,
    matrix: Matrix,
    rows: tuple[int, int],
    *,
    interpret: Any = False,
) -> jax.Array:
    """Returns [T, last - first] float32: the sums of the outputs first : last, for x [T, K] bfloat16
    and a weight in words.

    Args:
        interpret: False compiles; True or pltpu.InterpretParams runs it on a CPU.
    """
    first, last = rows
    layout = layout_of(matrix)
    tokens = token_tile(len(x))
    x_tiles = -(-len(x) // tokens)
    width = min(WIDTH, layout.outputs)
    start = first // width  # tiles of outputs before the first one
    w_tiles = -(-last // width) - start
    padding = ((0, x_tiles * tokens - len(x)), (0, layout.inputs - matrix.inputs))
    name = "int8" if matrix.blocks is None else matrix.blocks.name
    call = pl.pallas_call(
        partial(_kernel, layout),
        grid=(x_tiles, w_tiles, layout.slabs),
        in_specs=[
            pl.BlockSpec((tokens, layout.slab_inputs), lambda i, j, k: (i, k)),
            pl.BlockSpec((1, layout.slab_rows, width), lambda i, j, k: (k, 0, start + j)),
        ],
        out_specs=pl.BlockSpec((tokens, width), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((x_tiles * tokens, w_tiles * width), jnp.float32),
        scratch_shapes=[pltpu.VMEM((layout.slab_inputs, width), jnp.bfloat16)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=TpuTiles.of(device_kind()).vmem_limit,
        ),
        interpret=interpret,
        name=f"linear_{name}",
    )
    y = call(jnp.pad(x, padding), packed)
    return y[: len(x), first - start * width : last - start * width]


def sums_of_matrices(
    x: jax.Array, packed: jax.Array, matrix: Matrix, sizes: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """Returns [T, M of one matrix] float32: the sums of the tokens of several matrices, for x [T, K]
    bfloat16 in the order of the matrices.

    sizes: [count] int32, the tokens of each. interpret: as in `sums`.
    """
    layout = layout_of(matrix)
    tokens = expert_tile(len(x), matrix.count)
    outputs = words.one_of(matrix).outputs
    width = min(WIDTH, layout.outputs)
    rows = words.dealt(x, sizes, tokens)
    tiles = len(rows.matrices)
    w_tiles = -(-layout.outputs // width)

    # Tiles that are not used stay where the last step of the used ones was, so they copy nothing

    def tokens_at(i: Any, j: Any, k: Any, matrices: Any, used: Any) -> Any:
        slab = jnp.where(i < used[0], k, layout.slabs - 1)
        return jnp.minimum(i, jnp.maximum(used[0] - 1, 0)), slab

    def words_at(i: Any, j: Any, k: Any, matrices: Any, used: Any) -> Any:
        slab = jnp.where(i < used[0], k, layout.slabs - 1)
        return layout.slabs * matrices[i] + slab, 0, jnp.where(i < used[0], j, w_tiles - 1)

    name = "int8" if matrix.blocks is None else matrix.blocks.name
    call = pl.pallas_call(
        partial(_kernel_of_matrices, layout),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(tiles, w_tiles, layout.slabs),
            in_specs=[
                pl.BlockSpec((tokens, layout.slab_inputs), tokens_at),
                pl.BlockSpec((1, layout.slab_rows, width), words_at),
            ],
            out_specs=pl.BlockSpec((tokens, width), lambda i, j, k, *_: (i, j)),
            scratch_shapes=[pltpu.VMEM((layout.slab_inputs, width), jnp.bfloat16)],
        ),
        out_shape=jax.ShapeDtypeStruct((tiles * tokens, w_tiles * width), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=TpuTiles.of(device_kind()).vmem_limit,
        ),
        interpret=interpret,
        name=f"linear_experts_{name}",
    )
    padding = ((0, 0), (0, layout.inputs - matrix.inputs))
    y = call(rows.matrices, rows.used, jnp.pad(rows.x, padding), packed)
    return words.collected(y[:, :outputs], rows.places)


def expert_tile(tokens: int, matrices: int) -> int:
    """Returns the tokens of a tile of one of several matrices: twice what a matrix has on average,
    so that most have one tile.
    """
    return min(TOKENS, round_up(-(-2 * tokens // matrices), 16))


def token_tile(tokens: int) -> int:
    """Returns the tokens of a tile: as equal as can be, in whole registers of 16 rows."""
    tiles = -(-tokens // TOKENS)
    return round_up(-(-tokens // tiles), 16)


def _kernel(layout: Layout, x_ref, words_ref, y_ref, weights_ref) -> None:
    """Adds the product of a slab. words_ref: [1, rows of a slab, width]; weights_ref: the slab's
    weights [inputs, width] in bfloat16.
    """

    @pl.when(pl.program_id(2) == 0)
    def begin():
        y_ref[...] = jnp.zeros_like(y_ref)

    _add_slab(layout, x_ref, words_ref, y_ref, weights_ref)


def _kernel_of_matrices(layout: Layout, matrices_ref, used_ref, *refs) -> None:
    """As `_kernel`, for a tile of tokens of one of several matrices. Results of tiles that are not
    used are undefined.
    """
    is_used = pl.program_id(0) < used_ref[0]

    @pl.when(is_used & (pl.program_id(2) == 0))
    def begin():
        y_ref = refs[2]
        y_ref[...] = jnp.zeros_like(y_ref)

    @pl.when(is_used)
    def add():
        _add_slab(layout, *refs)


def _add_slab(layout: Layout, x_ref, words_ref, y_ref, weights_ref) -> None:
    lax.fori_loop(
        0, layout.tiles, lambda tile, _: _widen(layout, words_ref, weights_ref, tile), None
    )
    y_ref[...] += lax.dot_general(
        x_ref[...], weights_ref[...], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )


def _widen(layout: Layout, words_ref, weights_ref, tile) -> None:
    """Writes the weights of a tile of the slab."""
    blocks = layout.blocks
    rows = layout.tile_words
    run = words_ref[0, pl.ds(pl.multiple_of(tile * rows, rows), rows)]
    parts: dict[tuple[int, int], Any] = {}

    def row_of(part: int, block: int) -> Any:
        """The scales (part 0) or the offsets (part 1) of a block of the tile, [1, width]."""
        if (part, block) not in parts:
            assert blocks is not None
            word, place = divmod(block, words.scales_of_word(blocks))
            per_tile = layout.slab_scales // layout.tiles
            first = layout.slab_words + part * layout.slab_scales
            row = words_ref[0, pl.ds(first + tile * per_tile + word, 1)]
            parts[part, block] = words.scale_of(row, place, blocks)
        return parts[part, block]

    for first in range(0, TILE, PIECE):
        digit = first // rows
        start = first % rows
        weights = words.numbers_of(run[start : start + PIECE], digit, blocks)
        if blocks is not None:
            block = first // blocks.inputs
            weights = weights * row_of(0, block)
            if blocks.offset:
                weights = weights + row_of(1, block)
        place = pl.ds(pl.multiple_of(tile * TILE + first, PIECE), PIECE)
        weights_ref[place] = weights.astype(weights_ref.dtype)


def vmem_bytes(layout: Layout, tokens: int) -> int:
    """Returns the bytes of VMEM of a step: activations, words and sums twice, because Pallas copies
    those of the next step, and the widened weights.
    """
    width = min(WIDTH, layout.outputs)
    copied = tokens * layout.slab_inputs * 2 + layout.slab_rows * width * 4 + tokens * width * 4
    return 2 * copied + layout.slab_inputs * width * 2


# --- limits ---------------------------------------------------------------------------------------


def dtype_obstacle(dtype: str) -> str:
    """Returns why activations of a dtype cannot be multiplied; empty if they can."""
    return "" if dtype == DTYPE else f"multiplies {DTYPE} and not {dtype}"


def obstacle(
    device: Any, *, dtype: str, weight_dtype: str, mesh: bool, activation: str | None
) -> str:
    """See `Implementation`."""
    if mesh:
        return "is for a device without a mesh"
    return wrong_device(device) or dtype_obstacle(dtype)


# `interpret` as in `sums`
multiply = partial(
    words.multiply,
    impl="pallas_tpu",
    obstacle=dtype_obstacle,
    sums=sums,
    sums_of_matrices=sums_of_matrices,
)
IMPLEMENTATION = Implementation(
    "pallas_tpu",
    multiply,
    obstacle,
    model_obstacle=partial(words.model_obstacle, smallest=PIECE),
    pack=pack,
    unpack=unpack,
    gather=gather,
    low_rank=True,
    blocks=True,
)
