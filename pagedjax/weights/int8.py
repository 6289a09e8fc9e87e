"""Weights in 8 bits: a matrix [out, in] is stored as int8 with one float32 scale a row (symmetric,
absmax).

The largest absolute value of a row is 127 times its scale. The scale multiplies the product and not
the weights, so a step converts integers and never rescales a matrix. Qwix is not used because it
rescales the whole matrix in every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

SCALES = "_scales"  # the scales of "x.weight" are "x.weight_scales"
LARGEST = 127
ROWS = 1024  # rounded at a time: the float32 copy has four times the bytes


def has_scales(path: Sequence[str], shape: Sequence[int]) -> bool:
    """Whether a parameter has scales: matrices of products and the embedding, but not learned
    positions or routers.
    """
    return (
        len(shape) == 2 and path[-1] in ("weight", "embed", "up", "down") and "router" not in path
    )


def rounded(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[out, in] -> (int8 [out, in], float32 [out]). The error is at most half a scale.

    XLA treats subnormal numbers as zero. So a row whose scale would be subnormal becomes zeros with
    the scale 1.
    """
    numbers = np.empty(matrix.shape, np.int8)
    scales = np.ones(len(matrix), np.float32)
    for start in range(0, len(matrix), ROWS):
        rows = matrix[start : start + ROWS].astype(np.float32)
        largest = np.abs(rows).max(1)
        part = scales[start : start + ROWS]
        np.divide(largest, LARGEST, out=part, where=largest >= LARGEST * np.finfo(np.float32).tiny)
        numbers[start : start + ROWS] = np.rint(rows / part[:, None])
    return numbers, scales


def with_scales(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Parameters by name -> the same parameters, with each matrix rounded and followed by its
    scales.
    """
    for name, x in params.items():
        if has_scales(name.split("."), np.shape(x)):
            numbers, scales = rounded(np.asarray(x))
            yield name, numbers
            yield name + SCALES, scales
        else:
            yield name, x
