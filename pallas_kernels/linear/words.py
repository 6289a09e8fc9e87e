"""Weights as the Pallas kernels read them: int32 words of 4 numbers of 8 bits, or of 8 of 4 bits.

Words lie in runs. Digit d of word w of a run of R words is the number of the input d * R + w, so one
shift of a run gives R neighbouring inputs. Behind the words are the scales of blocks and their
offsets, as words too: the bits of float32 numbers.

A kernel has an order of its own for runs and scales. `has_words` says which matrices have words; they
are packed on the host, once. The others stay as they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear.blocks import (
    BLOCKS,
    FLOAT8,
    NUMBERS,
    Blocks,
    Parts,
    parts_of,
    rows_of_parts,
    weights_of,
)
from pallas_kernels.linear.implementation import Matrix

WORD_BITS = 32
# What is added to the exponent of a small float to make that of a float32, and the float32 that its
# exponent 0 then means
E4M3_EXPONENT = 127 - 7
E4M3_SMALLEST = 2.0**-7


class Digits(NamedTuple):
    """The numbers of a matrix, with what belongs to its blocks.

    digits: [M, K] uint8: a number of 4 bits before its zero is subtracted, or the bits of one of 8.
    scales: [M, blocks of a row] float32; None: int8 numbers by row, whose scales follow the product.
    offsets: as scales; None if blocks have none.
    """

    digits: Any
    scales: Any
    offsets: Any


def bits_of(blocks: Blocks | None) -> int:
    """Bits of a number; None: int8 by row."""
    return 8 if blocks is None else blocks.bits


def digits_of_word(blocks: Blocks | None) -> int:
    return WORD_BITS // bits_of(blocks)


def has_words(matrix: Matrix, dtype: Any, smallest: int) -> bool:
    """Returns whether a matrix is stored in words: one matrix of int8 numbers, or of blocks of
    `smallest` inputs or more with float32 scales.

    Scales of fewer bits would take more room in words than they do in blocks.

    Args:
        dtype: of the stored numbers.
    """
    if matrix.count > 1:
        return False
    if matrix.blocks is None:
        return dtype == np.int8
    blocks = matrix.blocks
    are_known = blocks.bits == 8 or blocks.numbers == NUMBERS[0]
    return are_known and blocks.scale == "float32" and blocks.inputs >= smallest


def model_obstacle(weight_dtypes: Sequence[str], *, smallest: int) -> str:
    """See `Implementation.model_obstacle`. smallest: as in `has_words`."""
    for name in weight_dtypes:
        number = np.int8 if name == "int8" else None
        if has_words(Matrix(0, 0, blocks=BLOCKS.get(name)), number, smallest):
            return ""
    return (
        "multiplies matrices in words, of int8 or of blocks with float32 scales, and the model's "
        f"are {', '.join(sorted(set(weight_dtypes)))}"
    )


# --- on the host, and where rows of a matrix are gathered -----------------------------------------


def digits_of(weight: np.ndarray, blocks: Blocks | None) -> Digits:
    """Returns the digits of a weight [M, K] int8, or [M, bytes] of blocks."""
    if blocks is None:
        return Digits(weight.view(np.uint8), None, None)
    numbers, scales, offsets = parts_of(weight, blocks, np)
    if blocks.bits == 4:
        numbers = numbers + np.int8(blocks.zero)
    return Digits(numbers.view(np.uint8).reshape(len(weight), -1), scales, offsets)


def numbers_by_block(digits: Digits, blocks: Blocks, xp: Any) -> Parts:
    """Returns the parts of rows of blocks, whose numbers are in `digits`, as arrays of `xp`."""
    cells = digits.digits.reshape(*digits.scales.shape, blocks.inputs)
    if blocks.bits == 4:
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
    if bits_of(blocks) == 4:
        assert blocks is not None
        return (((words >> (4 * digit)) & 15) - blocks.zero).astype(jnp.float32)
    if blocks is None or blocks.numbers == NUMBERS[0]:
        return ((words << (24 - 8 * digit)) >> 24).astype(jnp.float32)
    return _e4m3((words >> (8 * digit)) & 255)


def _e4m3(byte: jax.Array) -> jax.Array:
    """Returns float8_e4m3fn numbers as float32, from their bits in int32.

    A number of the smallest exponent has no leading one: it is m 2^-9 where the bits in a float32
    mean (1 + m / 8) 2^-7. A float32 with a smaller exponent, which a TPU would read as 0, is never
    made.
    """
    magnitude = byte & 127
    wide = jax.lax.bitcast_convert_type((magnitude << 20) + (E4M3_EXPONENT << 23), jnp.float32)
    wide = jnp.where(magnitude < 8, 2 * wide - 2 * E4M3_SMALLEST, wide)
    signed = jax.lax.bitcast_convert_type(wide, jnp.int32) | (byte & 128) << 24
    return jax.lax.bitcast_convert_type(signed, jnp.float32)
