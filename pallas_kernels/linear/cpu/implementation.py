"""Products on a CPU by a compiled kernel, over weights that are packed once into panels."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear.blocks import BLOCKS, Parts, parts_of, restored, rows_of_parts
from pallas_kernels.linear.cpu import groups, panels
from pallas_kernels.linear.implementation import Epilogue, Implementation, LowRank, Matrix, Norm
from pallas_kernels.shared.cpu.handler import Handler

# Programs on disk contain the target: a handler that takes other arguments needs another number.
TARGET = "pallas_kernels.linear.cpu.5"
DTYPES = ("float32", "bfloat16")
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2}
LANES = 16  # of a vector
# Tokens of a full tile (its columns), which the machine decides: 6 without AVX-512, 12 with it
MIN_COLUMNS = 6
MAX_COLUMNS = 12


def _handler(dtype: str, weight_dtype: str, low_rank: bool, rounds: bool) -> Handler:
    """Makes the handler of a variant, such as "bfloat16_int8_low_rank".

    weight_dtype: also the name of blocks. rounds: whether x is rounded to 8 bits.
    """
    words = [dtype]
    if weight_dtype in BLOCKS:  # with what the code depends on, for the file that keeps it
        words.append(f"{weight_dtype}_{BLOCKS[weight_dtype].code:x}")
    elif weight_dtype != dtype:
        words.append(weight_dtype)
    if low_rank:
        words.append("low_rank")
    if rounds:
        words.append("rounded")
    variant = "_".join(words)
    options = {"x_size": BYTES[dtype], "low_rank": int(low_rank), "rounded_words": 0, "widens": 0}
    if weight_dtype in BLOCKS:
        blocks = BLOCKS[weight_dtype]
        options["kind"] = blocks.code
        options["step_inputs"] = blocks.inputs
        options["step_bytes"] = panels.PANEL * blocks.bytes
        options["widens"] = int(not rounds)
        if rounds:
            options["rounded_words"] = groups.block_words(blocks)
    else:
        options["kind"] = BYTES[weight_dtype]
        options["step_inputs"] = 1
        options["step_bytes"] = panels.PANEL * (1 if weight_dtype == "int8" else 4)
    folder = Path(__file__).parent
    return Handler(f"linear_{variant}", f"{TARGET}.{variant}.", __package__ or "", folder, options)


def _rounds_for(weight_dtype: str) -> bool:
    """Returns whether x can be rounded to 8 bits for products with weights of this dtype."""
    return weight_dtype in BLOCKS and BLOCKS[weight_dtype].integers


# By the dtypes of x and of the weight, whether products of low rank are added, and whether x is
# rounded
HANDLERS = {
    (dtype, weight_dtype, low_rank, rounds): _handler(dtype, weight_dtype, low_rank, rounds)
    for dtype in DTYPES
    for weight_dtype in (dtype, "int8", *BLOCKS)
    for low_rank in (False, True)
    for rounds in (False, True)[: 1 + _rounds_for(weight_dtype)]
}


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
    rounds: bool = False,
) -> jax.Array:
    """See `api.linear`.

    rounds: whether x is rounded to 8 bits where the weight is in blocks of integers.

    Raises:
        ValueError: `product_obstacle` gives a reason.
    """
    if rounds:
        matrix = _with_blocks(matrix, weight.dtype, np.uint8)
    weight_dtype = weight.dtype.name if matrix.blocks is None else matrix.blocks.name
    reason = product_obstacle(
        jax.default_backend(), x.dtype.name, weight_dtype, epilogue.activation
    )
    if reason:
        raise ValueError(
            f"impl {'cpu_int8' if rounds else 'cpu'!r} {reason}; impl 'xla' has no such limit"
        )
    rounds = rounds and _rounds_for(weight_dtype)
    handler = HANDLERS[x.dtype.name, weight_dtype, epilogue.low is not None, rounds]
    handler.register()
    matrix_outputs = matrix.outputs // matrix.count
    first, last = rows or (0, matrix_outputs)
    start = first - first % (panels.PANEL // 2)  # the kernel computes whole halves of panels
    missing = jnp.zeros(0, x.dtype)
    scales, bias, low, activation, residual = epilogue
    if residual is not None and start < first:
        residual = jnp.pad(residual, ((0, 0), (first - start, 0)))
    norm_kind = 0
    if norm is not None:
        norm_kind = 2 if norm.plus_one else 1  # RMS_PLUS_ONE and RMS of job.py
    options = np.array([matrix_outputs, start, last, ACTIVATIONS[activation], norm_kind], np.int32)
    norm_weight = None if norm is None else norm.weight
    arrays = (x, weight, scales, bias, norm_weight, residual, sizes)
    operands = [missing if array is None else array for array in arrays]
    width = matrix.width if rows is None else last - start
    result = jax.ShapeDtypeStruct((len(x), width), dtype)
    eps = np.full(1, norm.eps if norm else 0, np.float32)
    low_operands = () if low is None else (low.a, low.b, low.slots, _ranks(matrix, low))
    call = jax.ffi.ffi_call(handler.target, (result, _scratch(len(x), matrix)))
    y, _ = call(*operands, options, eps, *low_operands)
    return y[:, first - start :]


def _ranks(matrix: Matrix, low: LowRank) -> np.ndarray:
    """Returns [halves of panels, 2]: the first and the last + 1 row of `low.a` for 16 outputs."""
    num_parts = 2 if matrix.gated else 1  # a panel has 16 gates, and the 16 outputs of their `up`
    part_outputs = matrix.outputs // num_parts
    ranks = []
    for first in range(0, part_outputs, LANES):
        last = min(first + LANES, part_outputs)
        for part in range(num_parts):
            part_start = part * part_outputs
            ranks.append(low.ranks(part_start + first, part_start + last))
    return np.array(ranks, np.int32)


def _scratch(tokens: int, matrix: Matrix) -> Any:
    """Returns the shape of the memory for the packed tokens, in tiles.

    The last tile of a matrix has the room of a full tile, even if it has fewer tokens. Behind the
    tokens of a tile is room for two vectors (TILE_BYTES in job.py).
    """
    columns = tokens + MAX_COLUMNS * matrix.count
    tiles = tokens // MIN_COLUMNS + matrix.count + 1
    inputs = -(-matrix.inputs // LANES) * LANES
    words = columns * inputs + 2 * LANES * tiles
    return jax.ShapeDtypeStruct((4 * words,), jnp.uint8)


def product_obstacle(platform: str, dtype: str, weight_dtype: str, activation: str | None) -> str:
    """Returns why this implementation cannot compute such products; empty if it can.

    The reason is the rest of a sentence.
    """
    if platform != "cpu":
        return f"runs on platform 'cpu' and not on {platform!r}"
    if sys.platform == "win32":
        return "calls POSIX functions, which Windows does not have"
    if dtype not in DTYPES:
        return f"multiplies {' and '.join(DTYPES)} and not {dtype}"
    if weight_dtype not in (dtype, "int8", *BLOCKS):
        return (
            f"needs weights of int8 or of the activations' dtype {dtype}, "
            f"and they are {weight_dtype}"
        )
    if activation not in ACTIVATIONS:
        return f"has the gates {', '.join(filter(None, ACTIVATIONS))} and not {activation!r}"
    if importlib.util.find_spec("llvmlite") is None:
        return "needs llvmlite, which is not installed (pip install 'pagedjax[cpu]')"
    return ""


def obstacle(
    device: Any, *, dtype: str, weight_dtype: str, mesh: bool, activation: str | None
) -> str:
    """See `Implementation`."""
    if mesh:
        return "is for a device without a mesh"
    return product_obstacle(device.platform, dtype, weight_dtype, activation)


def rounding_obstacle(weight_dtypes: Sequence[str]) -> str:
    """See `Implementation.model_obstacle`."""
    if "int8" in weight_dtypes or any(map(_rounds_for, weight_dtypes)):
        return ""
    return (
        "rounds tokens for products with matrices of integers, and the model's are "
        f"{', '.join(sorted(set(weight_dtypes)))} (weight_dtype='stored' keeps those of a "
        "quantized checkpoint, and weight_dtype='int8' rounds those of any)"
    )


def prepare(*, dtype: str, weight_dtype: str, low_rank: bool, rounds: bool = False) -> None:
    """Loads or compiles in threads what such products need, if it can serve here.

    See `Implementation`.
    """
    if product_obstacle(jax.default_backend(), dtype, weight_dtype, None):
        return
    if rounds and weight_dtype == "int8":
        weight_dtype = BY_ROW[0].name
    rounds = rounds and _rounds_for(weight_dtype)
    HANDLERS[dtype, weight_dtype, False, rounds].start()
    if low_rank:
        HANDLERS[dtype, weight_dtype, True, rounds].start()


def gather(packed: jax.Array, matrix: Matrix, ids: jax.Array) -> jax.Array:
    """Returns [T, K]: rows of a matrix, each of its K inputs.

    The numbers of a row are not beside each other in memory. So it is slow: 64 rows of 576 numbers
    take 0.2 ms.
    """
    panel = ids // panels.PANEL
    output = ids % panels.PANEL
    if matrix.blocks is not None:
        places, strides = panels.rows_in_panels(matrix.blocks)
        block = jnp.arange(packed.shape[1])[:, None]
        place = (places + strides * output[:, None])[:, None]
        rows = packed.at[panel[:, None, None], block, place].get(mode="promise_in_bounds")
        return restored(rows.reshape(len(ids), -1), matrix.blocks, jnp)
    rows = packed.at[panel, :, output].get(mode="promise_in_bounds")
    return rows.reshape(len(ids), -1)[:, : matrix.inputs]


def pack(weight: np.ndarray, matrix: Matrix) -> np.ndarray:
    return panels.pack(weight, gated=matrix.gated, matrices=matrix.count, blocks=matrix.blocks)


def unpack(packed: Any, matrix: Matrix) -> np.ndarray:
    columns = matrix.inputs
    if matrix.blocks is not None:
        columns = matrix.blocks.row_bytes(columns)
    return panels.unpack(
        np.asarray(packed),
        (matrix.outputs, columns),
        gated=matrix.gated,
        matrices=matrix.count,
        blocks=matrix.blocks,
    )


def pack_low(b: Any, matrix: Matrix) -> Any:
    return panels.low_panels_of(jnp if isinstance(b, jax.Array) else np, b, gated=matrix.gated)


IMPLEMENTATION = Implementation(
    "cpu",
    multiply,
    obstacle,
    pack=pack,
    unpack=unpack,
    gather=gather,
    prepare=prepare,
    invariant=True,
    low_rank=True,
    blocks=True,
    pack_low=pack_low,
)

# --- tokens that are rounded to 8 bits ------------------------------------------------------------

# int8 numbers with a scale for each row are blocks with scales of 1, if the inputs are whole ones;
# the scales of the rows follow the sums
BY_ROW = BLOCKS["int8_128"], BLOCKS["int8_32"]


def _with_blocks(matrix: Matrix, dtype: Any, by_row: Any) -> Matrix:
    """Returns the matrix with the blocks that int8 numbers by row become.

    dtype: of its numbers. by_row: the dtype that such numbers have here, as they are stored or
        packed. Another matrix is returned as it is.
    """
    fitting = [blocks for blocks in BY_ROW if matrix.inputs % blocks.inputs == 0]
    if matrix.blocks is not None or dtype != by_row or not fitting:
        return matrix
    return matrix._replace(blocks=fitting[0])


def pack_rounded(weight: np.ndarray, matrix: Matrix) -> np.ndarray:
    blocks = _with_blocks(matrix, weight.dtype, np.int8).blocks
    if matrix.blocks is None and blocks is not None:
        numbers = weight.reshape(len(weight), -1, blocks.inputs)
        scales = np.ones(numbers.shape[:-1], np.float32)
        weight = rows_of_parts(Parts(numbers, scales, None), blocks, np)
        matrix = matrix._replace(blocks=blocks)
    return pack(weight, matrix)


def unpack_rounded(packed: Any, matrix: Matrix) -> np.ndarray:
    blocks = _with_blocks(matrix, packed.dtype, np.uint8).blocks
    if matrix.blocks is not None or blocks is None:
        return unpack(packed, matrix)
    rows = unpack(packed, matrix._replace(blocks=blocks))
    return parts_of(rows, blocks, np).numbers.reshape(len(rows), -1)


def gather_rounded(packed: jax.Array, matrix: Matrix, ids: jax.Array) -> jax.Array:
    return gather(packed, _with_blocks(matrix, packed.dtype, np.uint8), ids)


# Before a product with integers each number of a token becomes a multiple of max |x| / 127, of its
# group of 32 inputs (16 in blocks of 16). Products with other weights are those of "cpu".
ROUNDED = IMPLEMENTATION._replace(
    name="cpu_int8",
    multiply=partial(multiply, rounds=True),
    model_obstacle=rounding_obstacle,
    pack=pack_rounded,
    unpack=unpack_rounded,
    gather=gather_rounded,
    prepare=partial(prepare, rounds=True),
)
