"""`Format`: how a matrix is stored, and how it is used as it is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pagedjax.device.linear import Blocks, Matrix


class Array(NamedTuple):
    """One of the arrays that store a matrix.

    suffix: of its name, after the name of the matrix.
    shape: of the matrix -> of the array.
    dtype: None is the dtype of the model.
    dims: how many of its first dimensions are those of the matrix. A mesh splits them alike.
    """

    suffix: str
    shape: Callable[[Matrix], tuple[int, ...]]
    dtype: str | None
    dims: int


class Format(NamedTuple):
    """How a matrix [out, in] is stored.

    arrays: those that store it. The first one has its numbers, in the layout of an implementation
        of products, and no suffix.
    pack: (floats [out, in] on the host) -> the arrays, on the host.
    restore: (the arrays, on the host) -> float32 [out, in].
    multiply: (x [T, in], the arrays, matrix, **options of `linear`) -> what `linear` returns.
    rows: (rows [T, in] of the numbers, the arrays, the indices [T] of the rows, dtype) -> the
        weights [T, in] of that dtype, as an embedding needs them. Rows of blocks are restored
        already.
    blocks: how rows are stored, if the first array has bytes of blocks.
    ordered: the inputs are stored in an order of the matrix's own.
    """

    arrays: tuple[Array, ...]
    pack: Callable[[Any], Sequence[Any]]
    restore: Callable[[Sequence[np.ndarray]], np.ndarray]
    multiply: Callable[..., jax.Array]
    rows: Callable[[jax.Array, Sequence[jax.Array], jax.Array, str], jax.Array]
    blocks: Blocks | None = None
    ordered: bool = False

    def numbers_dtype(self, dtype: str) -> str:
        """Returns the dtype of the numbers in a model of `dtype`, or the name of the blocks."""
        return self.blocks.name if self.blocks else self.arrays[0].dtype or dtype

    def names(self, name: str) -> list[str]:
        """Returns the names of the arrays of the matrix `name`."""
        return [name + array.suffix for array in self.arrays]


def shape_of(matrix: Matrix) -> tuple[int, int]:
    return matrix.outputs, matrix.inputs
