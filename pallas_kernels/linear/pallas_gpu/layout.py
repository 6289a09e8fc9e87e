"""Weights in words, as the kernel for Hopper GPUs reads them: [tiles of outputs, rows, 64] int32.

A tile is OUTPUTS outputs, the rows of a WGMMA. A slab is the inputs of WORDS words: 512 of 4 bits, or
256 of 8.

    row s * OUTPUTS + m          the words of slab s of the tile's output m, a run
    behind the rows of all slabs, for each slab: the scales of its blocks, then the offsets; a row
                                 for each word of an output's, with the words of all outputs
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear import words
from pallas_kernels.linear.blocks import Blocks
from pallas_kernels.linear.implementation import Matrix, rows_of
from pallas_kernels.linear.words import Digits, round_up

OUTPUTS = 64  # of a tile
WORDS = 64  # of a run; a digit of them is WORDS inputs
SMALLEST = 32  # inputs of a block, at least
EIGHT = 8  # rows of a tile of swizzled memory, of which a copy needs whole ones


class Layout(NamedTuple):
    """The sizes of a matrix in words.

    slabs: of the inputs.
    tiles: of the outputs.
    blocks: as in `Matrix`.
    """

    slabs: int
    tiles: int
    blocks: Blocks | None

    @property
    def chunks(self) -> int:
        """Pieces of WORDS inputs of a slab: the digits of a word."""
        return words.digits_of_word(self.blocks)

    @property
    def inputs(self) -> int:
        """K with padding."""
        return self.slabs * self.chunks * WORDS

    @property
    def slab_blocks(self) -> int:
        """Blocks of a slab of an output."""
        return 0 if self.blocks is None else self.chunks * WORDS // self.blocks.inputs

    @property
    def part_rows(self) -> int:
        """Rows of the scales of a slab; as many have its offsets."""
        return 0 if self.blocks is None else self.slab_blocks // words.scales_of_word(self.blocks)

    @property
    def slab_scales(self) -> int:
        """Rows of scales and offsets of a slab."""
        return 0 if self.blocks is None else self.part_rows * (1 + self.blocks.offset)

    @property
    def word_rows(self) -> int:
        return self.slabs * OUTPUTS

    @property
    def rows(self) -> int:
        """Of a tile, with padding."""
        return self.word_rows + round_up(self.slabs * self.slab_scales, EIGHT)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the packed weight."""
        return self.tiles, self.rows, WORDS


def layout_of(matrix: Matrix) -> Layout:
    """Returns the sizes of one matrix."""
    slab_inputs = WORDS * words.digits_of_word(matrix.blocks)
    outputs = words.one_of(matrix).outputs
    return Layout(-(-matrix.inputs // slab_inputs), -(-outputs // OUTPUTS), matrix.cells)


def pack(weight: np.ndarray, matrix: Matrix) -> np.ndarray:
    """Returns [tiles of outputs of all matrices, rows, 64] int32; the weight itself if it has no
    words.
    """
    if not words.has_words(matrix, weight.dtype, SMALLEST):
        return weight
    if matrix.count > 1:
        return words.packed_matrices(pack, weight, matrix)
    layout = layout_of(matrix)
    digits, scales, offsets = words.digits_of(weight, matrix.blocks)
    whole = words.padded(digits, layout.tiles * OUTPUTS, layout.inputs)
    runs = words.words_of(whole, words.bits_of(matrix.blocks), WORDS)
    packed = np.zeros(layout.shape, np.int32)
    by_slab = runs.reshape(layout.tiles, OUTPUTS, layout.slabs, WORDS).swapaxes(1, 2)
    packed[:, : layout.word_rows] = by_slab.reshape(layout.tiles, -1, WORDS)
    parts = []
    for array in (scales, offsets):
        if array is not None and matrix.cells is not None:
            blocks = layout.slabs * layout.slab_blocks
            whole = words.padded(array, layout.tiles * OUTPUTS, blocks)
            part = words.words_of_scales(whole, matrix.cells)
            parts.append(part.reshape(layout.tiles, OUTPUTS, layout.slabs, layout.part_rows))
    if parts:
        by_slab = np.concatenate(parts, axis=3).transpose(0, 2, 3, 1)
        last = layout.word_rows + layout.slabs * layout.slab_scales
        packed[:, layout.word_rows : last] = by_slab.reshape(layout.tiles, -1, OUTPUTS)
    return packed


def _digits(packed: Any, matrix: Matrix, ids: Any, xp: Any) -> Digits:
    """Returns the digits of the outputs `ids`."""
    layout = layout_of(matrix)
    tile = ids[:, None] // OUTPUTS
    output = ids[:, None] % OUTPUTS
    runs = packed[tile, OUTPUTS * xp.arange(layout.slabs) + output]
    digits = words.digits_in(runs, words.bits_of(matrix.blocks), WORDS, xp)
    digits = digits.reshape(len(ids), -1)[:, : matrix.inputs]
    if matrix.cells is None:
        return Digits(digits, None, None)
    rows = layout.word_rows + xp.arange(layout.slabs * layout.slab_scales)
    of_slabs = packed[tile, rows, output]
    by_part = of_slabs.reshape(len(ids), layout.slabs, -1, layout.part_rows).swapaxes(1, 2)
    in_words = by_part.reshape(len(ids), -1, layout.slabs * layout.part_rows)
    parts = words.scales_in(in_words, matrix.cells)[..., : matrix.inputs // matrix.cells.inputs]
    return Digits(digits, parts[:, 0], parts[:, 1] if matrix.cells.offset else None)


def unpack(packed: Any, matrix: Matrix) -> Any:
    if packed.dtype != np.int32:
        return packed
    if matrix.count > 1:
        return words.unpacked_matrices(unpack, np.asarray(packed), matrix)
    digits = _digits(np.asarray(packed), matrix, np.arange(matrix.outputs), np)
    return words.weight_of(digits, matrix.blocks)


def gather(packed: jax.Array, matrix: Matrix, ids: jax.Array) -> jax.Array:
    if packed.dtype != jnp.int32:
        return rows_of(packed, matrix, ids)
    return words.rows_of_digits(_digits(packed, matrix, ids, jnp), matrix.blocks)
