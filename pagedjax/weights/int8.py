"""Weights in 8 bits: a matrix [out, in] as int8 and a float32 scale for each of its rows, so that the largest number of
a row is 127 times its scale (symmetric, absmax).

A row's scale multiplies the product and not the weights, so a step converts integers and never rescales a matrix. That
is why this is not Qwix's: its product rescales the whole matrix in every call, and what is left of it are ten lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

SCALES = "_scales"  # the scales of "x.weight" are "x.weight_scales"
LARGEST = 127
ROWS = 1024  # rounded at a time: what is in between has four times the bytes


def has_scales(path: Sequence[str], shape: Sequence[int]) -> bool:
    """Matrices of products and the embedding. Not learned positions, and not what chooses between experts."""
    return len(shape) == 2 and path[-1] in ("weight", "embed", "up", "down") and "router" not in path


def rounded(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[out, in] -> (int8 [out, in], float32 [out]), off by at most half a scale.

    A row whose scale would be subnormal, which XLA takes for zero, becomes zeros with the scale 1.
    """
    numbers, scales = np.empty(matrix.shape, np.int8), np.ones(len(matrix), np.float32)
    for at in range(0, len(matrix), ROWS):
        rows = matrix[at : at + ROWS].astype(np.float32)
        largest = np.abs(rows).max(1)
        part = scales[at : at + ROWS]
        np.divide(largest, LARGEST, out=part, where=largest >= LARGEST * np.finfo(np.float32).tiny)
        numbers[at : at + ROWS] = np.rint(rows / part[:, None])
    return numbers, scales


def with_scales(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Parameters by name -> the same, where each matrix is rounded and has its scales beside it."""
    for name, x in params.items():
        if has_scales(name.split("."), np.shape(x)):
            numbers, scales = rounded(np.asarray(x))
            yield name, numbers
            yield name + SCALES, scales
        else:
            yield name, x
