"""Weights of 8-bit floats with scales, in the layout of DeepSeek V3 and transformers' fine-grained
FP8, and in that of AutoFP8.

    weight [out, in] float8_e4m3fn, weight_scale_inv [out / n, in / k] of blocks n x k
    weight [out, in] float8_e4m3fn, weight_scale [], [1], [out] or [out, 1]
    float = weight * scale

Scales of blocks may be powers of two, float8_e8m0fnu.
Scales of activations are left out: activations are not rounded here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pagedjax.weights.checkpoint import Tensor
from pagedjax.weights.quantized.groups import FLOATS, Piece, Pieces, Quantized, expect, only

SCALES = ("_scale_inv", "_scale")  # behind the name of the numbers
OF_ACTIVATIONS = (".input_scale", ".activation_scale", ".output_scale")
DTYPE = "float8_e4m3fn"
POWERS = "float8_e8m0fnu"
NAN = 127  # the bits of a NaN without its sign


def check(config: Mapping[str, Any]) -> None:
    only(config, "fmt", ("e4m3", None))
    checked_block(config.get("weight_block_size"), "weight_block_size")


def checked_block(block: Any, key: str) -> tuple[int, int] | None:
    """The rows and columns of a block that shares a scale. Raises ValueError for other values."""
    if block is None:
        return None
    sizes = list(block) if isinstance(block, list | tuple) else []
    if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(f"{key} is {block!r:.60}; it must be two integers of at least 1, or null")
    return sizes[0], sizes[1]


def matrices(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Quantized]:
    block = checked_block(config.get("weight_block_size"), "weight_block_size")
    for name, tensor in tensors.items():
        if tensor.dtype.name == DTYPE and name.endswith(".weight"):
            yield float8_matrix(tensors, name, block)


def float8_matrix(
    tensors: Mapping[str, Tensor], name: str, block: tuple[int, int] | None
) -> Quantized:
    """The matrix `name` with float8 numbers.

    Args:
        block: rows and columns that share a scale, if those of neither the tensor nor a row do.

    Raises:
        ValueError: it has no scale, or one of another shape.
    """
    numbers = tensors[name]
    names = [name + suffix for suffix in SCALES if name + suffix in tensors]
    if not names:
        raise ValueError(
            f"{numbers.file}: {name} is {DTYPE}, and there is no "
            f"{' or '.join(name + x for x in SCALES)}; fetch the model again"
        )
    scale = tensors[names[0]]
    if len(numbers.shape) != 2:
        raise ValueError(
            f"{numbers.file}: {numbers.name} has the shape {numbers.shape}; a matrix [out, in] of "
            f"{DTYPE} is read"
        )
    outputs, inputs = numbers.shape
    by_tensor = scale.shape in ((), (1,), (1, 1))
    by_row = scale.shape in ((outputs,), (outputs, 1))
    if by_tensor or by_row:
        expect(scale, scale.shape, FLOATS)
        rows = outputs if by_tensor else 1
        columns = inputs
    elif block is None:
        raise ValueError(
            f"{scale.file}: {scale.name} has the shape {scale.shape}, and the config has no sizes of "
            f"blocks; a scale for all or for each of {outputs} rows is read"
        )
    else:
        rows, columns = block
        expect(scale, (-(-outputs // rows), -(-inputs // columns)), (*FLOATS, POWERS))
    base = name.removesuffix(".weight")
    of_activations = [base + suffix for suffix in OF_ACTIVATIONS if base + suffix in tensors]
    return Quantized(
        name,
        (outputs, inputs),
        "fp8",
        columns,
        numbers.file,
        (name, *names, *of_activations),
        _reader(numbers, scale, rows),
    )


def _reader(numbers: Tensor, scale: Tensor, rows_of_scale: int) -> Callable[[], Pieces]:
    def read() -> Pieces:
        values = numbers.read()
        scales = (
            scale.read().astype(np.float32).reshape(-1, scale.shape[1] if scale.shape[1:] else 1)
        )

        def piece(first: int, last: int) -> Piece:
            rows = values[first:last]
            if (rows.view(np.uint8) & NAN == NAN).any():
                raise ValueError(f"{numbers.file}: {numbers.name} has NaN; fetch it again")
            return Piece(rows, scales[np.arange(first, last) // rows_of_scale])

        return piece

    return read
