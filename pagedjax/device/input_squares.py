"""The mean squares of the inputs of a model's matrices, over the tokens of its steps.

An implementation of products that multiplies as "xla" does, and gives the host the sums of squares.
A matrix is known by its first numbers, because a product does not know its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.device.linear import Implementation, Matrix, find
from pallas_kernels.linear.reference import rms_norm

NAME = f"{__name__}:IMPLEMENTATION"  # as a `linear_impl`
FIRST_NUMBERS = 64  # of the first row of a matrix
_sums: dict[
    bytes, tuple[np.ndarray, int]
] = {}  # by first numbers: sums [in], and of how many tokens


def _add(first: Any, squares: Any, tokens: Any) -> None:
    key = np.asarray(first).tobytes()
    sums, count = _sums.get(key, (np.zeros(1), 0))
    _sums[key] = sums + np.asarray(squares, np.float64), count + int(tokens)


def multiply(x, weight, matrix: Matrix, norm, epilogue, rows, sizes, dtype) -> jax.Array:
    """See `linear`."""
    inputs = rms_norm(x, norm).astype(jnp.float32)
    used = jnp.int32(len(x)) if sizes is None else sizes.sum()
    squares = jnp.where((jnp.arange(len(x)) < used)[:, None], inputs * inputs, 0).sum(0)
    jax.debug.callback(_add, weight[0, :FIRST_NUMBERS], squares, used)
    return find("xla").multiply(x, weight, matrix, norm, epilogue, rows, sizes, dtype)


IMPLEMENTATION = Implementation("input_squares", multiply)


@contextmanager
def recording() -> Iterator[None]:
    """Within it, models whose `linear_impl` is NAME add to the sums, which begin empty."""
    _sums.clear()
    try:
        yield
    finally:
        _sums.clear()


def mean_squares(matrices: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """The mean squares [in] float32 of the inputs of matrices [out, in] by name, of those that were
    multiplied since `recording` began.
    """
    jax.effects_barrier()  # until the host has all sums
    squares = {}
    for name, weight in matrices.items():
        sums, count = _sums.get(np.asarray(weight[0, :FIRST_NUMBERS]).tobytes(), (np.zeros(1), 0))
        if count:
            squares[name] = (sums / count).astype(np.float32)
    return squares
