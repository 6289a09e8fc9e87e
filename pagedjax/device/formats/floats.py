"""Weights as floats of the model's dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pagedjax.device.formats.format import Array, Format, shape_of
from pagedjax.device.linear import Matrix, linear


def pack(matrix: Any) -> tuple[Any]:
    return (matrix,)


def restore(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.asarray(arrays[0], np.float32)


def multiply(
    x: jax.Array, arrays: Sequence[jax.Array], matrix: Matrix, **options: Any
) -> jax.Array:
    return linear(x, arrays[0], matrix, **options)


def rows(numbers: jax.Array, arrays: Sequence[jax.Array], ids: jax.Array, dtype: str) -> jax.Array:
    return numbers.astype(dtype)


FORMAT = Format((Array("", shape_of, None, dims=2),), pack, restore, multiply, rows)
