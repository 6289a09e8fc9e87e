"""Static shapes, and checks of them, which run when a function is traced and cost nothing when it
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def shapes_of(tree: Any) -> Any:
    """The tree with the shape, dtype and sharding of each array in the place of the array, so that
    the tree keeps no device memory.
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def check_shape(name: str, array: Any, expected: Sequence[int | None]) -> None:
    """Check the shape of an array (or tracer, or jax.ShapeDtypeStruct); None is any length.

    Raises:
        ValueError: names the array and both shapes.
    """
    shape = tuple(array.shape)
    fits = len(shape) == len(expected) and all(
        size in (None, n) for n, size in zip(shape, expected, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if n is None else str(n) for n in expected)
        raise ValueError(f"{name} has shape {list(shape)}; it must be [{sizes}]")
