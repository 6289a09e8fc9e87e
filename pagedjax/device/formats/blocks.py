"""Weights in blocks: each row is bytes, in which a few neighbouring inputs share a scale
(pallas_kernels/linear/blocks.py).

Matrices of GGUF files and of quantized checkpoints are loaded so with `weight_dtype="stored"`. The
rounding of floats to GGUF's formats is that of ggml (`quantize_row_q4_0_ref` and its like in
ggml-quants.c), so floats that are restored and rounded again are the same numbers, up to the order
of equal ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.device.formats.format import Array, Format
from pagedjax.device.linear import BLOCKS, Blocks, LowRank, Matrix, Norm, linear
from pallas_kernels.linear.blocks import (
    DOUBLED,
    FLOAT8,
    Parts,
    recoded,
    restored,
    rows_of_parts,
    weights_of,
)

__all__ = [
    "FORMATS",
    "ORDERED",
    "ROUNDED",
    "ROWS",
    "Parts",
    "float8",
    "pack",
    "recoded",
    "rows_of_parts",
    "symmetric",
    "weights_of",
]

ROWS = 1024  # that are rounded at a time: their float32 copy has up to eight times the bytes


def pack(blocks: Blocks, matrix: Any) -> tuple[np.ndarray]:
    """[out, in] floats -> (uint8 [out, bytes of a row]).

    Raises:
        ValueError: rows are not whole blocks, or floats are not rounded to this format.
    """
    if blocks.name not in ROUNDED:
        raise ValueError(
            f"floats are not rounded to {blocks.name} here, only to {', '.join(ROUNDED)}; give the "
            "matrix as it is stored, or load the model without weight_dtype"
        )
    matrix = np.asarray(matrix)
    rows = np.empty((len(matrix), blocks.row_bytes(matrix.shape[1])), np.uint8)
    for start in range(0, len(matrix), ROWS):
        part = matrix[start : start + ROWS].astype(np.float32)
        cells = part.reshape(len(part), -1, blocks.part.inputs)
        rows[start : start + ROWS] = rows_of_parts(ROUNDED[blocks.name](cells), blocks, np)
    return (rows,)


def _inverse(scales: np.ndarray) -> np.ndarray:
    """1 / scales, and 0 for 0."""
    return np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)


def _around_zero(cells: np.ndarray, bits: int = 4) -> Parts:
    """The number of largest magnitude in a block becomes the least one of so many bits: -8."""
    least = -(2 ** (bits - 1))
    places = np.abs(cells).argmax(-1, keepdims=True)
    scales = np.take_along_axis(cells, places, -1)[..., 0] / np.float32(least)
    digits = np.trunc(cells * _inverse(scales)[..., None] + np.float32(0.5 - least))
    numbers = digits.clip(0, 2**bits - 1) + least
    return Parts(numbers.astype(np.int8), scales, None)


def _above_offset(cells: np.ndarray, bits: int = 4) -> Parts:
    """The smallest number of a block becomes 0, and the largest that of so many bits: 15."""
    largest = 2**bits - 1
    offsets = cells.min(-1)
    scales = (cells.max(-1) - offsets) / np.float32(largest)
    steps = (cells - offsets[..., None]) * _inverse(scales)[..., None]
    numbers = np.trunc(steps + np.float32(0.5)).clip(0, largest)
    return Parts(numbers.astype(np.int8), scales, offsets)


def _by_factors(cells: np.ndarray, bits: int, parts: int) -> Parts:
    """As `_above_offset`, but scales and offsets are a float16 number for so many parts, times
    integers of which the largest is 63.
    """
    largest = 2**bits - 1
    offsets = _with_factors(cells.min(-1), parts)
    scales = _with_factors((cells.max(-1) - offsets) / np.float32(largest), parts)
    steps = (cells - offsets[..., None]) * _inverse(scales)[..., None]
    numbers = np.trunc(steps + np.float32(0.5)).clip(0, largest)
    return Parts(numbers.astype(np.int8), scales, offsets)


def _with_factors(numbers: np.ndarray, parts: int) -> np.ndarray:
    """The nearest products of a float16 number and an integer to numbers [..., n]. Each `parts`
    neighbours have one float16 number.
    """
    cells = numbers.reshape(*numbers.shape[:-1], -1, parts)
    units = (np.abs(cells).max(-1, keepdims=True) / np.float32(63)).astype(np.float16)
    units = units.astype(np.float32)
    factors = np.rint(cells * _inverse(units)).clip(-128, 127)
    return (factors * units).reshape(numbers.shape)


def _q8_0(cells: np.ndarray) -> Parts:
    """The number of largest magnitude in a block becomes 127 or -127."""
    scales = np.abs(cells).max(-1) / np.float32(127)
    steps = cells * _inverse(scales)[..., None]
    numbers = np.copysign(np.floor(np.abs(steps) + np.float32(0.5)), steps)
    return Parts(numbers.astype(np.int8), scales, None)


SHRINKS = np.linspace(0.6, 1, 17, dtype=np.float32)  # of the scale of the largest number


def _integers(cells: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """The integers that are nearest to numbers [..., n] / scales [...], float32."""
    limit = 2 ** (bits - 1)
    return np.rint(cells * _inverse(scales)[..., None]).clip(-limit, limit - 1)


def symmetric(
    cells: np.ndarray,
    bits: int,
    scale_dtype: Any = "float32",
    importance: np.ndarray | None = None,
) -> Parts:
    """Numbers to the nearest, in 4 or 8 bits with a sign, by the scale of a cell.

    With 8 bits the largest magnitude of a cell becomes 127. With 4 bits the scale is that of SHRINKS
    times absmax / 7 which has the least squared error: larger numbers are cut, and the others have
    smaller steps.

    Args:
        scale_dtype: scales are rounded to it before the numbers are.
        importance: what the squared error of a number is multiplied by, in the search of a scale of 4
            bits; None: all are equal.
    """
    largest = np.abs(cells).max(-1)
    roots = None if importance is None else np.sqrt(importance)
    if bits == 8:
        scales = (largest / np.float32(127)).astype(scale_dtype).astype(np.float32)
        return Parts(_integers(cells, scales, bits).astype(np.int8), scales, None)
    scales = np.zeros_like(largest)
    errors = np.full_like(largest, np.inf)
    for shrink in SHRINKS:
        tried = (largest / np.float32(7) * shrink).astype(scale_dtype).astype(np.float32)
        differences = _integers(cells, tried, bits) * tried[..., None] - cells
        if roots is not None:
            differences *= roots
        tried_errors = np.einsum("...n,...n->...", differences, differences)
        is_better = tried_errors < errors
        scales = np.where(is_better, tried, scales)
        errors = np.where(is_better, tried_errors, errors)
    return Parts(_integers(cells, scales, bits).astype(np.int8), scales, None)


def float8(cells: np.ndarray, scale_dtype: Any = "float32") -> Parts:
    """Numbers to the nearest float8_e4m3fn: the largest magnitude of a cell becomes 448."""
    largest = np.abs(cells).max(-1)
    scales = (largest / np.float32(FLOAT8_MAX)).astype(scale_dtype).astype(np.float32)
    numbers = (cells * _inverse(scales)[..., None]).clip(-FLOAT8_MAX, FLOAT8_MAX)
    return Parts(numbers.astype(FLOAT8), scales, None)


FLOAT8_MAX = 448
E2M1_MIDDLES = np.array([1, 3, 5, 7, 10, 14, 20], np.float32) / 4  # between neighbouring numbers
E2M1_EXPONENT = 2  # of the largest number


def _mxfp4(cells: np.ndarray) -> Parts:
    """The power of two follows from the largest magnitude (OCP Microscaling Formats, 2023). Ties go
    to the smaller number, and what is above 6 becomes 6.
    """
    largest = np.abs(cells).max(-1)
    exponents = np.frexp(largest)[1] - 1 - E2M1_EXPONENT
    exponents = np.where(largest > 0, exponents, 0).clip(-126, 127)
    steps = np.ldexp(cells, -exponents[..., None])
    doubled = np.array(DOUBLED, np.int8)[np.searchsorted(E2M1_MIDDLES, np.abs(steps))]
    halved = np.ldexp(np.float32(0.5), exponents).astype(np.float32)
    return Parts(np.where(steps < 0, -doubled, doubled).astype(np.int8), halved, None)


def _uint8(cells: np.ndarray) -> Parts:
    """The smallest number of a block becomes -128, and the largest 127."""
    smallest = cells.min(-1)
    scales = (cells.max(-1) - smallest) / np.float32(255)
    numbers = (
        np.rint((cells - smallest[..., None]) * _inverse(scales)[..., None]).clip(0, 255) - 128
    )
    return Parts(numbers.astype(np.int8), scales, smallest + np.float32(128) * scales)


# Formats to which floats are rounded
ROUNDED = {
    "q4_0": _around_zero,
    "q4_1": _above_offset,
    "q5_0": partial(_around_zero, bits=5),
    "q5_1": partial(_above_offset, bits=5),
    "q8_0": _q8_0,
    "q4_k": _above_offset,
    "q5_k": partial(_above_offset, bits=5),
    "q4_k_super": partial(_by_factors, bits=4, parts=8),
    "q5_k_super": partial(_by_factors, bits=5, parts=8),
    "uint4_128": _above_offset,
    "uint4_64": _above_offset,
    "uint8_128": _uint8,
    "mxfp4": _mxfp4,
    **dict.fromkeys(("int4_128", "int4_64", "int4_32"), partial(symmetric, bits=4)),
    **dict.fromkeys(("int8_128", "int8_32", "int8_16"), partial(symmetric, bits=8)),
    **dict.fromkeys(("fp8_128", "fp8_32"), float8),
}


def restore(blocks: Blocks, arrays: Sequence[np.ndarray]) -> np.ndarray:
    return restored(np.asarray(arrays[0]), blocks, np)


def multiply(
    x: jax.Array, arrays: Sequence[jax.Array], matrix: Matrix, **options: Any
) -> jax.Array:
    return linear(x, arrays[0], matrix, **options)


def rows(weights: jax.Array, arrays: Sequence[jax.Array], ids: jax.Array, dtype: str) -> jax.Array:
    return weights.astype(dtype)


def bytes_of(blocks: Blocks, matrix: Matrix) -> tuple[int, int]:
    return matrix.outputs, blocks.row_bytes(matrix.inputs)


FORMATS = {
    name: Format(
        arrays=(Array("", partial(bytes_of, blocks), "uint8", dims=2),),
        pack=partial(pack, blocks),
        restore=partial(restore, blocks),
        multiply=multiply,
        rows=rows,
        blocks=blocks,
    )
    for name, blocks in BLOCKS.items()
}

# --- inputs in an order of their own --------------------------------------------------------------

ORDERED = "_ordered"  # ends the name of such a format


def pack_ordered(blocks: Blocks, matrix: Any) -> tuple[np.ndarray, np.ndarray]:
    """Raises ValueError: the order is that of a file."""
    raise ValueError(
        f"floats are not rounded to {blocks.name} with an order of inputs (act-order) here; give "
        "the matrix as it is stored, or load the model without weight_dtype"
    )


def restore_ordered(blocks: Blocks, arrays: Sequence[np.ndarray]) -> np.ndarray:
    stored_rows, order = arrays
    weights = restored(np.asarray(stored_rows), blocks, np)
    inverse = np.argsort(np.asarray(order))
    return np.ascontiguousarray(weights[:, inverse])


def multiply_ordered(
    x: jax.Array,
    arrays: Sequence[jax.Array],
    matrix: Matrix,
    *,
    norm: Norm | None = None,
    low: LowRank | None = None,
    **options: Any,
) -> jax.Array:
    """The product with the inputs of x, of the norm's weight and of the adapters in the order of the
    matrix. It costs a gather of each.
    """
    stored_rows, order = arrays
    x = _in_order(x, order)
    if norm is not None:
        norm = norm._replace(weight=_in_order(norm.weight, order))
    if low is not None:  # behind the inputs are zeros
        low = low._replace(a=low.a.at[..., : matrix.inputs].set(_in_order(low.a, order)))
    return linear(x, stored_rows, matrix, norm=norm, low=low, **options)


def _in_order(x: jax.Array, order: jax.Array) -> jax.Array:
    return jnp.take(x, order, axis=-1, mode="clip")


def rows_ordered(
    weights: jax.Array, arrays: Sequence[jax.Array], ids: jax.Array, dtype: str
) -> jax.Array:
    _, order = arrays
    return _in_order(weights, jnp.argsort(order)).astype(dtype)


ORDER = Array("_order", lambda matrix: (matrix.inputs,), "int32", dims=0)
FORMATS |= {
    name + ORDERED: FORMATS[name]._replace(
        arrays=(*FORMATS[name].arrays, ORDER),
        pack=partial(pack_ordered, blocks),
        restore=partial(restore_ordered, blocks),
        multiply=multiply_ordered,
        rows=rows_ordered,
        ordered=True,
    )
    for name, blocks in BLOCKS.items()
}
