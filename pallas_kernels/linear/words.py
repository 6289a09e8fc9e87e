"""Weights as the Pallas kernels read them: int32 words of 4 numbers of 8 bits, or of 8 of 4 bits.
Numbers of 5 and 6 bits are widened to 8.

Words lie in runs. Digit d of word w of a run of R words is the number of the input d * R + w, so one
shift of a run gives R neighbouring inputs. Behind the words are the scales of blocks and their
offsets, as words too: the bits of a float32 number, of two neighbouring float16 ones, or of four
powers of two ("e8m0"), the first of which has the lowest bits.

A kernel has an order of its own for runs and scales. `has_words` says which matrices have words; they
are packed on the host, once. The others stay as they are stored. Of several matrices, such as the
experts of a mixture, the words of one lie behind those of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear import xla
from pallas_kernels.linear.blocks import (
    BLOCKS,
    FLOAT8,
    NUMBERS,
    Blocks,
    Parts,
    bytes_of_scales,
    digits_of_doubled,
    doubled_numbers,
    parts_of,
    rows_of_parts,
    scales_of,
    weights_of,
)
from pallas_kernels.linear.implementation import Epilogue, Matrix, Norm
from pallas_kernels.linear.reference import owners_of, result_of, rms_norm

WORD_BITS = 32
SCALES_OF_WORD = {"float32": 1, "float16": 2, "e8m0": 4}
MOST_OF_WORD = 128  # inputs whose scales are in one word, at most


class Digits(NamedTuple):
    """The numbers of a matrix, with what belongs to its blocks.

    digits: [M, K] uint8: an integer of 4 bits before its zero is subtracted, the bits of an "e2m1"
        number, or those of one of 8 bits, to which one of 5 or 6 is widened.
    scales: [M, blocks of a row] float32; None: int8 numbers by row, whose scales follow the product.
    offsets: as scales; None if blocks have none.
    """

    digits: Any
    scales: Any
    offsets: Any


def bits_of(blocks: Blocks | None) -> int:
    """Bits of a number in a word; None: int8 by row."""
    return 4 if blocks is not None and blocks.bits == 4 else 8


def digits_of_word(blocks: Blocks | None) -> int:
    return WORD_BITS // bits_of(blocks)


def has_words(matrix: Matrix, dtype: Any, smallest: int) -> bool:
    """Returns whether a matrix is stored in words: one of int8 numbers, or of blocks of `smallest`
    inputs or more.

    Args:
        dtype: of the stored numbers.
    """
    if matrix.blocks is None:
        return dtype == np.int8
    blocks = matrix.blocks.part
    scales = scales_of_word(blocks)
    return smallest <= blocks.inputs and (scales == 1 or scales * blocks.inputs <= MOST_OF_WORD)


def model_obstacle(weight_dtypes: Sequence[str], *, smallest: int) -> str:
    """See `Implementation.model_obstacle`. smallest: as in `has_words`."""
    for name in weight_dtypes:
        number = np.int8 if name == "int8" else None
        if has_words(Matrix(0, 0, blocks=BLOCKS.get(name)), number, smallest):
            return ""
    return (
        f"multiplies matrices in words, of int8 or of blocks of {smallest} inputs or more, and "
        f"the model's are {', '.join(sorted(set(weight_dtypes)))}"
    )


# --- on the host, and where rows of a matrix are gathered -----------------------------------------


def one_of(matrix: Matrix) -> Matrix:
    """Returns the shape of one of the matrices."""
    return matrix._replace(outputs=matrix.outputs // matrix.count, count=1)


def packed_matrices(
    pack: Callable[[np.ndarray, Matrix], np.ndarray], weight: np.ndarray, matrix: Matrix
) -> np.ndarray:
    """Returns the words of all matrices, from `pack` of one."""
    one = one_of(matrix)
    return np.concatenate([pack(rows, one) for rows in np.split(weight, matrix.count)])


def unpacked_matrices(
    unpack: Callable[[np.ndarray, Matrix], np.ndarray], packed: np.ndarray, matrix: Matrix
) -> np.ndarray:
    """Returns the rows of all matrices, from `unpack` of one."""
    one = one_of(matrix)
    return np.concatenate([unpack(words, one) for words in np.split(packed, matrix.count)])


def digits_of(weight: np.ndarray, blocks: Blocks | None) -> Digits:
    """Returns the digits of a weight [M, K] int8, or [M, bytes] of blocks."""
    if blocks is None:
        return Digits(weight.view(np.uint8), None, None)
    numbers, scales, offsets = parts_of(weight, blocks, np)
    if blocks.numbers == "e2m1":
        numbers = digits_of_doubled(numbers, np)
    elif blocks.bits == 4:
        numbers = numbers + np.int8(blocks.zero)
    return Digits(numbers.view(np.uint8).reshape(len(weight), -1), scales, offsets)


def numbers_by_block(digits: Digits, blocks: Blocks, xp: Any) -> Parts:
    """Returns the parts of rows of blocks, whose numbers are in `digits`, as arrays of `xp`."""
    blocks = blocks.part
    cells = digits.digits.reshape(*digits.scales.shape, blocks.inputs)
    if blocks.numbers == "e2m1":
        numbers = doubled_numbers(cells.astype("int8"), xp)
    elif blocks.bits == 4:
        numbers = cells.astype("int8") - xp.int8(blocks.zero)
    else:
        numbers = cells.view("int8" if blocks.numbers == NUMBERS[0] else FLOAT8)
    return Parts(numbers, digits.scales, digits.offsets)


def weight_of(digits: Digits, blocks: Blocks | None) -> np.ndarray:
    """Returns the weight as it is stored: the inverse of `digits_of`."""
    if blocks is None:
        return digits.digits.view(np.int8)
    return rows_of_parts(numbers_by_block(digits, blocks, np), blocks, np)


def rows_of_digits(digits: Digits, blocks: Blocks | None) -> jax.Array:
    """Returns rows as `Implementation.gather` does."""
    if blocks is None:
        return digits.digits.view("int8")
    return weights_of(numbers_by_block(digits, blocks, jnp))


def words_of(digits: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Returns [..., K / digits of a word] int32: runs of `run` words of digits [..., K] uint8."""
    pieces = digits.reshape(*digits.shape[:-1], -1, WORD_BITS // bits, run)
    if bits == 4:
        pieces = pieces[..., ::2, :] | pieces[..., 1::2, :] << 4
    in_bytes = np.ascontiguousarray(pieces.swapaxes(-1, -2))  # [..., runs, run, 4]
    return in_bytes.view("<i4").reshape(*digits.shape[:-1], -1)


def digits_in(words: Any, bits: int, run: int, xp: Any) -> Any:
    """Returns [..., K] uint8, the inverse of `words_of`."""
    in_bytes = words.reshape(-1).view("uint8")
    pieces = in_bytes.reshape(*words.shape[:-1], -1, run, 4).swapaxes(-1, -2)
    if bits == 4:
        pieces = xp.stack([pieces & 15, pieces >> 4], axis=-2)
    return pieces.reshape(*words.shape[:-1], -1)


def scales_of_word(blocks: Blocks) -> int:
    return SCALES_OF_WORD[blocks.scale]


def words_of_scales(scales: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Returns [..., words] int32 of scales or offsets [..., blocks] float32."""
    in_bytes = np.ascontiguousarray(bytes_of_scales(scales, blocks))
    return in_bytes.reshape(*scales.shape[:-1], -1).view("<i4")


def scales_in(words: Any, blocks: Blocks) -> Any:
    """Returns [..., blocks] float32, the inverse of `words_of_scales`."""
    if blocks.scale == "e8m0":
        in_bytes = words.reshape(-1).view("uint8").reshape(*words.shape[:-1], -1, 1)
        return scales_of(in_bytes, blocks)
    scales = words.reshape(-1).view(blocks.scale)
    return scales.reshape(*words.shape[:-1], -1).astype("float32")


def padded(array: np.ndarray, *shape: int) -> np.ndarray:
    """Returns the array with zeros behind it, in this shape."""
    return np.pad(array, [(0, to - size) for size, to in zip(array.shape, shape, strict=True)])


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# --- in kernels -----------------------------------------------------------------------------------


def numbers_of(words: jax.Array, digit: Any, blocks: Blocks | None) -> jax.Array:
    """Returns the numbers of a digit of each word, less their zero, as float32.

    digit: an integer, which may be traced.
    """
    if blocks is not None and blocks.bits == 4:
        digits = (words >> (4 * digit)) & 15
        if blocks.numbers == "e2m1":
            return _widened(digits, exponent=2, mantissa=1)
        return (digits - blocks.zero).astype(jnp.float32)
    if blocks is None or blocks.numbers == NUMBERS[0]:
        return ((words << (24 - 8 * digit)) >> 24).astype(jnp.float32)
    return _widened((words >> (8 * digit)) & 255, exponent=4, mantissa=3)


def scale_of(word: jax.Array, place: int, blocks: Blocks) -> jax.Array:
    """Returns one of the scales or offsets of words, as float32. place: which of them, an integer
    that may be traced.
    """
    if blocks.scale == "float32":
        return jax.lax.bitcast_convert_type(word, jnp.float32)
    if blocks.scale == "e8m0":
        return jax.lax.bitcast_convert_type(((word >> (8 * place)) & 255) << 23, jnp.float32)
    return _widened((word >> (16 * place)) & 0xFFFF, exponent=5, mantissa=10)


def _widened(bits: jax.Array, *, exponent: int, mantissa: int) -> jax.Array:
    """Returns finite small floats as float32, from their bits in int32.

    A number of the smallest exponent has no leading one: with the bias B it is f 2^(1 - B) where
    the bits in a float32 mean (1 + f) 2^-B. A float32 with a smaller exponent, which a TPU would
    read as 0, is never made.

    Args:
        exponent, mantissa: how many bits each has.
    """
    bias = 2 ** (exponent - 1) - 1
    sign = 1 << (exponent + mantissa)
    magnitude = bits & (sign - 1)
    above = (127 - bias) << 23
    wide = jax.lax.bitcast_convert_type((magnitude << (23 - mantissa)) + above, jnp.float32)
    wide = jnp.where(magnitude < 1 << mantissa, 2 * wide - 2 * 2.0**-bias, wide)
    signed = jax.lax.bitcast_convert_type(wide, jnp.int32)
    signed = signed | (bits & sign) << (31 - exponent - mantissa)
    return jax.lax.bitcast_convert_type(signed, jnp.float32)


# --- tokens of several matrices -------------------------------------------------------------------


class Dealt(NamedTuple):
    """Tokens in tiles, each of one matrix: those of a matrix begin a tile.

    x: [tiles * tokens of a tile, K], with zeros behind the tokens of a matrix.
    places: [T] the row of each token; behind the last one for padding.
    matrices: [tiles] int32; that of the last used tile for those behind it.
    used: [1] int32: the number of used tiles.
    """

    x: jax.Array
    places: jax.Array
    matrices: jax.Array
    used: jax.Array


def dealt(x: jax.Array, sizes: jax.Array, tile: int) -> Dealt:
    """Returns the tokens of `api.linear` in tiles. tile: tokens of one."""
    tokens = len(x)
    count = len(sizes)
    tiles = min(tokens, tokens // tile + count)  # a matrix has less than one tile of zeros
    ends = jnp.cumsum(-(-sizes // tile))
    used = ends[-1:]
    tile_index = jnp.minimum(jnp.arange(tiles, dtype=jnp.int32), jnp.maximum(used - 1, 0))
    matrices = jnp.minimum(jnp.searchsorted(ends, tile_index, side="right"), count - 1)
    owners = owners_of(sizes, tokens)
    # rows that are zeros before the tokens of a matrix
    shifts = tile * (ends - (-(-sizes // tile))) - (jnp.cumsum(sizes) - sizes)
    index = jnp.arange(tokens, dtype=jnp.int32)
    places = jnp.where(index < sizes.sum(), index + shifts[owners], tiles * tile)
    rows = jnp.zeros((tiles * tile, x.shape[1]), x.dtype).at[places].set(x, mode="drop")
    return Dealt(rows, places, matrices.astype(jnp.int32), used.astype(jnp.int32))


def collected(y: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the results of tokens [T, M] from those of `dealt` rows; zeros for padding."""
    return y.at[places].get(mode="fill", fill_value=0)


# --- what both kernels do -------------------------------------------------------------------------


def multiply(
    x: jax.Array,
    weight: jax.Array,
    matrix: Matrix,
    norm: Norm | None,
    epilogue: Epilogue,
    rows: tuple[int, int] | None,
    sizes: jax.Array | None,
    dtype: str,
    *,
    impl: str,
    obstacle: Callable[[str], str],
    sums: Callable[..., jax.Array],
    sums_of_matrices: Callable[..., jax.Array],
    **options: Any,
) -> jax.Array:
    """See `api.linear`. A matrix without words is multiplied by `xla`, and so is all that comes
    before and after the sums.

    Args:
        impl: the name of the implementation.
        obstacle: (dtype of x) -> why it cannot be multiplied; empty if it can.
        sums: (x, packed weight, matrix, (first, last), **options) -> [T, last - first] float32: the
            kernel's sums of these outputs.
        sums_of_matrices: (x, packed weight, matrix, sizes, **options) -> [T, outputs of one matrix]
            float32: the kernel's sums of tokens of several matrices.

    Raises:
        ValueError: `obstacle` gives a reason.
    """
    reason = obstacle(x.dtype.name)
    if reason:
        raise ValueError(f"impl {impl!r} {reason}; impl 'xla' has no such limit")
    if weight.dtype != jnp.int32:
        return xla.multiply(x, weight, matrix, norm, epilogue, rows, sizes, dtype)
    if matrix.count > 1:
        assert sizes is not None
        y = sums_of_matrices(rms_norm(x, norm), weight, matrix, sizes, **options)
        return result_of(y, epilogue, owners_of(sizes, len(x))).astype(dtype)

    def sums_of(first: int, last: int) -> Any:
        return partial(sums, packed=weight, matrix=matrix, rows=(first, last), **options)

    return xla.around(sums_of, x, matrix, norm, epilogue, rows, dtype)
