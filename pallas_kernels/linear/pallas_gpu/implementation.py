"""Products with weights on NVIDIA GPUs of the Hopper generation (sm_90a).

There are two kernels. `kernel.py` multiplies matrices in words (`words.has_words`), whose layout is
in `layout.py`. `dense.py` multiplies floats of 16 bits, and computes activation and residual too.
Matrices of neither kind are multiplied by `xla`, and so is all that a kernel leaves before and after
the sums.

No GPU has run this yet: it is interpreted on a CPU, and compiled by `pallas_kernels.aot`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.linear import words, xla
from pallas_kernels.linear.implementation import Epilogue, Implementation, Matrix, Norm
from pallas_kernels.linear.pallas_gpu.dense_sizes import (
    LANES,
    SLAB,
    Product,
    Sizes,
    parts_of,
    sizes_of,
)
from pallas_kernels.linear.pallas_gpu.layout import (
    EIGHT,
    OUTPUTS,
    SMALLEST,
    gather,
    layout_of,
    pack,
    unpack,
)
from pallas_kernels.linear.reference import rms_norm
from pallas_kernels.shared.device import device_kind
from pallas_kernels.shared.hopper import old_jax, wrong_device
from pallas_kernels.tiles import Tiles

DTYPE = "bfloat16"  # of activations, for weights in words
FLOATS = "bfloat16", "float16"  # of weights in floats, and of their activations


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


def silu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """As tanh is one sigmoid: (1 + tanh(u)) / 2 is the sigmoid of 2 u."""
    return x * jax.nn.sigmoid(2 * (2 / jnp.pi) ** 0.5 * (x + 0.044715 * x * x * x))


# those of gates that the kernel for floats computes; the others are left to XLA
GATES: dict[str | None, Callable[[jax.Array], jax.Array]] = {"silu": silu, "gelu_tanh": gelu_tanh}


def dense(
    x: jax.Array,
    weight: jax.Array,
    matrix: Matrix,
    *,
    rows: tuple[int, int] | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    dtype: str,
    tiles: Tiles | None = None,
    sizes: Sizes | None = None,
) -> jax.Array:
    """Returns [T, width]: the product of floats, and what the kernel computes behind it.

    Args:
        x: [T, K]. weight: [M, K] of x's dtype. matrix: one for which `is_dense`.
        activation: one of GATES, for a gated matrix; None leaves gates as they are.
        tiles: those of a device; None takes the device's.
        sizes: None chooses them.
    """
    from pallas_kernels.linear.pallas_gpu import dense as kernel  # Mosaic GPU

    tiles = tiles or Tiles.of(device_kind())
    is_gated = activation is not None
    first, last = rows or (0, matrix.outputs // (1 + is_gated))
    tokens = len(x)
    if sizes is None:
        shape = product_of(
            matrix,
            tokens,
            (first, last),
            is_gated=is_gated,
            has_residual=residual is not None,
            dtype=dtype,
            tiles=tiles,
        )
        sizes = sizes_of(shape, tiles.multiprocessors)
    padding = [(0, -tokens % EIGHT), (0, 0)]  # copies to swizzled memory are of eight rows
    y = kernel.product(
        jnp.pad(x, padding),
        weight,
        sizes,
        first=first,
        width=last - first,
        gates=GATES[activation] if is_gated else None,
        residual=None if residual is None else jnp.pad(residual, padding),
        dtype=dtype,
    )
    return y[:tokens]


def product_of(
    matrix: Matrix,
    tokens: int,
    rows: tuple[int, int],
    *,
    is_gated: bool,
    has_residual: bool,
    dtype: str,
    tiles: Tiles,
) -> Product:
    """Returns what the sizes of `dense` depend on. rows: the outputs of the result."""
    return Product(
        tokens=tokens,
        inputs=matrix.inputs,
        width=rows[1] - rows[0],
        gated=is_gated,
        parts=1 if is_gated else parts_of(matrix.outputs, matrix.inputs, tiles),
        residual=has_residual,
        itemsize=jnp.dtype(dtype).itemsize,
    )


def is_dense(x: jax.Array, weight: jax.Array, matrix: Matrix, rows: tuple[int, int]) -> bool:
    """Returns whether the kernel for floats multiplies these outputs: of one matrix, and in whole
    rows of 128 bytes.
    """
    first, last = rows
    return (
        matrix.count == 1
        and weight.dtype == x.dtype
        and x.dtype.name in FLOATS
        and matrix.inputs % SLAB == 0
        and matrix.outputs % EIGHT == 0
        and first % EIGHT == 0
        and (last - first) % LANES == 0
    )


def _dense_multiply(
    x: jax.Array,
    weight: jax.Array,
    matrix: Matrix,
    norm: Norm | None,
    epilogue: Epilogue,
    rows: tuple[int, int] | None,
    dtype: str,
    tiles: Tiles | None,
) -> jax.Array:
    """Returns the result of a matrix of floats. Its epilogue is the kernel's, or else XLA's over
    sums in float32.
    """
    before_activation = epilogue.scales, epilogue.bias, epilogue.low
    is_in_kernel = all(part is None for part in before_activation)
    if is_in_kernel and epilogue.activation in (None, *GATES):
        return dense(
            rms_norm(x, norm),
            weight,
            matrix,
            rows=rows,
            activation=epilogue.activation,
            residual=epilogue.residual,
            dtype=dtype,
            tiles=tiles,
        )

    def sums_of(first: int, last: int) -> Callable[[jax.Array], jax.Array]:
        return partial(
            dense,
            weight=weight,
            matrix=matrix._replace(gated=False),
            rows=(first, last),
            dtype="float32",
            tiles=tiles,
        )

    return xla.around(sums_of, x, matrix, norm, epilogue, rows, dtype)


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
    """See `api.linear`. tiles: as in `sums`."""
    if not old_jax() and is_dense(x, weight, matrix, rows or (0, matrix.width)):
        return _dense_multiply(x, weight, matrix, norm, epilogue, rows, dtype, tiles)
    return words.multiply(
        x,
        weight,
        matrix,
        norm,
        epilogue,
        rows,
        sizes,
        dtype,
        impl="pallas_gpu",
        obstacle=partial(product_obstacle, weight_dtype=weight.dtype.name),
        sums=sums,
        sums_of_matrices=sums_of_matrices,
        tiles=tiles,
    )


def product_obstacle(dtype: str, weight_dtype: str) -> str:
    """Returns why activations of a dtype cannot be multiplied here with weights of another, as the
    rest of a sentence; empty if they can.
    """
    if old := old_jax():
        return old
    allowed = FLOATS if weight_dtype in FLOATS else (DTYPE,)
    return "" if dtype in allowed else f"multiplies {' and '.join(allowed)} and not {dtype}"


def obstacle(
    device: Any, *, dtype: str, weight_dtype: str, mesh: bool, activation: str | None
) -> str:
    """See `Implementation`."""
    if mesh:
        return "is for a device without a mesh"
    return wrong_device(device) or product_obstacle(dtype, weight_dtype)


def model_obstacle(weight_dtypes: Sequence[str]) -> str:
    """See `Implementation`."""
    if set(weight_dtypes) <= set(FLOATS):
        return ""
    return words.model_obstacle(weight_dtypes, smallest=SMALLEST)


IMPLEMENTATION = Implementation(
    "pallas_gpu",
    multiply,
    obstacle,
    model_obstacle=model_obstacle,
    pack=pack,
    unpack=unpack,
    gather=gather,
    low_rank=True,
    blocks=True,
)
