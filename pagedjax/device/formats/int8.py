"""Weights in 8 bits: a matrix [out, in] is stored as int8 with one float32 scale a row (symmetric,
absmax).

The largest absolute value of a row is 127 times its scale. The scale multiplies the product and not
the weights, so a step converts integers and never rescales a matrix. Qwix is not used because it
rescales the whole matrix in every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pagedjax.device.formats.format import Array, Format, shape_of
from pagedjax.device.linear import Matrix, linear

MAX_INT8 = 127
ROWS = 1024  # that are rounded at a time: their float32 copy has four times the bytes


def pack(matrix: Any) -> tuple[np.ndarray, np.ndarray]:
    """[out, in] -> (int8 [out, in], float32 [out]). The error is at most half a scale.

    XLA treats subnormal numbers as zero. So a row whose scale would be subnormal becomes zeros with
    the scale 1.
    """
    matrix = np.asarray(matrix)
    numbers = np.empty(matrix.shape, np.int8)
    scales = np.ones(len(matrix), np.float32)
    for start in range(0, len(matrix), ROWS):
        rows = matrix[start : start + ROWS].astype(np.float32)
        largest = np.abs(rows).max(1)
        part = scales[start : start + ROWS]
        tiny = np.finfo(np.float32).tiny
        np.divide(largest, MAX_INT8, out=part, where=largest >= MAX_INT8 * tiny)
        numbers[start : start + ROWS] = np.rint(rows / part[:, None])
    return numbers, scales


def restore(arrays: Sequence[np.ndarray]) -> np.ndarray:
    numbers, scales = arrays
    return np.asarray(numbers, np.float32) * np.asarray(scales)[:, None]


def multiply(
    x: jax.Array, arrays: Sequence[jax.Array], matrix: Matrix, **options: Any
) -> jax.Array:
    numbers, scales = arrays
    return linear(x, numbers, matrix, scales=scales, **options)


def rows(numbers: jax.Array, arrays: Sequence[jax.Array], ids: jax.Array, dtype: str) -> jax.Array:
    _, scales = arrays
    return (numbers.astype(dtype) * scales[ids][:, None]).astype(dtype)


FORMAT = Format(
    arrays=(
        Array("", shape_of, "int8", dims=2),
        Array("_scales", lambda matrix: (matrix.outputs,), "float32", dims=1),
    ),
    pack=pack,
    restore=restore,
    multiply=multiply,
    rows=rows,
)
