"""Products with stored weights on NVIDIA GPUs of the Hopper generation (sm_90a).

The kernel is in `kernel.py`, and the layout of weights in `layout.py`. Matrices without words
(`words.has_words`) are multiplied by `xla`, and so is all that comes before and after the sums.

No GPU has run this yet: it is interpreted on a CPU, and compiled by `pallas_kernels.aot`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from pallas_kernels.linear import words
from pallas_kernels.linear.implementation import Implementation, Matrix
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

    Args:
        tiles: those of a device; None takes the device's.
    """
    from pallas_kernels.linear.pallas_gpu.kernel import columns_of, product  # Mosaic GPU

    first, last = rows
    start = first // OUTPUTS
    of_tiles = start, -(-last // OUTPUTS)
    tiles = tiles or Tiles.of(device_kind())
    columns = columns_of(len(x))
    y = product(x, packed, layout_of(matrix), of_tiles, columns, tiles.multiprocessors)
    return y[:, first - start * OUTPUTS : last - start * OUTPUTS]


def sums_of_matrices(
    x: jax.Array,
    packed: jax.Array,
    matrix: Matrix,
    sizes: jax.Array,
    *,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Returns [T, M of one matrix] float32: the sums of the tokens of several matrices, for x [T, K]
    bfloat16 in the order of the matrices.

    sizes: [count] int32, the tokens of each. tiles: as in `sums`.
    """
    from pallas_kernels.linear.pallas_gpu.kernel import expert_columns, product  # Mosaic GPU

    layout = layout_of(matrix)
    columns = expert_columns(len(x), matrix.count)
    rows = words.dealt(x, sizes, columns)
    tiles = tiles or Tiles.of(device_kind())
    owners = rows.matrices, rows.used
    y = product(
        rows.x, packed, layout, (0, layout.tiles), columns, tiles.multiprocessors, owners=owners
    )
    return words.collected(y[:, : words.one_of(matrix).outputs], rows.places)


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


# `tiles` as in `sums`
multiply = partial(
    words.multiply,
    impl="pallas_gpu",
    obstacle=product_obstacle,
    sums=sums,
    sums_of_matrices=sums_of_matrices,
)
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
