"""Products with stored weights on NVIDIA GPUs of the Hopper generation (sm_90a).

The kernel is in `kernel.py`, and the layout of weights in `layout.py`. Matrices without words
(`words.has_words`) are multiplied by `xla`, and so is all that comes before and after the sums.

No GPU has run this yet: it is interpreted on a CPU, and compiled by `pallas_kernels.aot`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.linear import words, xla
from pallas_kernels.linear.implementation import Epilogue, Implementation, Matrix, Norm
from pallas_kernels.linear.pallas_gpu.layout import (
    OUTPUTS,
    SMALLEST,
    gather,
    layout_of,
    pack,
    unpack,
)
from pallas_kernels.shared.device import device_kind
from pallas_kernels.shared.hopper import old_jax, wrong_device
from pallas_kernels.tiles import Tiles

DTYPE = "bfloat16"  # of activations


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
    tiles: Tiles | None = None,
) -> jax.Array:
    """See `api.linear`.

    Args:
        tiles: those of a device; None takes the device's.

    Raises:
        ValueError: `product_obstacle` gives a reason.
    """
    reason = product_obstacle(x.dtype.name)
    if reason:
        raise ValueError(f"impl 'pallas_gpu' {reason}; impl 'xla' has no such limit")
    if weight.dtype != jnp.int32:
        return xla.multiply(x, weight, matrix, norm, epilogue, rows, sizes, dtype)

    def sums_of(first: int, last: int) -> Any:
        return partial(sums, packed=weight, matrix=matrix, rows=(first, last), tiles=tiles)

    return xla.around(sums_of, x, matrix, norm, epilogue, rows, dtype)


def sums(
    x: jax.Array,
    packed: jax.Array,
    matrix: Matrix,
    rows: tuple[int, int],
    *,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Returns [T, last - first] float32: the sums of the outputs first : last, for x [T, K] bfloat16
    and a weight in words.
    """
    from pallas_kernels.linear.pallas_gpu.kernel import product  # it imports Mosaic GPU

    first, last = rows
    start = first // OUTPUTS
    of_tiles = start, -(-last // OUTPUTS)
    tiles = tiles or Tiles.of(device_kind())
    y = product(x, packed, layout_of(matrix), of_tiles, tiles.multiprocessors)
    return y[:, first - start * OUTPUTS : last - start * OUTPUTS]


def product_obstacle(dtype: str) -> str:
    """Returns why activations of a dtype cannot be multiplied here, as the rest of a sentence; empty
    if they can.
    """
    return old_jax() or ("" if dtype == DTYPE else f"multiplies {DTYPE} and not {dtype}")


def obstacle(
    device: Any, *, dtype: str, weight_dtype: str, mesh: bool, activation: str | None
) -> str:
    """See `Implementation`."""
    if mesh:
        return "is for a device without a mesh"
    return wrong_device(device) or product_obstacle(dtype)


IMPLEMENTATION = Implementation(
    "pallas_gpu",
    multiply,
    obstacle,
    model_obstacle=partial(words.model_obstacle, smallest=SMALLEST),
    pack=pack,
    unpack=unpack,
    gather=gather,
    low_rank=True,
    blocks=True,
)
