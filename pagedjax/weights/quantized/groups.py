"""Matrices whose inputs share scales in groups: what the methods of quantization have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pagedjax.weights.checkpoint import Rows, Tensor

if TYPE_CHECKING:
    from pagedjax.device.linear import Blocks

PIECE = 2**20  # numbers that are unpacked at a time
PIECE_ROWS = 32  # a piece has a multiple of so many rows: those of a packed word at least


class Piece(NamedTuple):
    """Some rows of a matrix: weight = scale * number + offset.

    numbers: [rows, in] int8 or float8_e4m3fn.
    scales: [rows, groups] float32.
    offsets: [rows, groups] float32; None: there are none.
    """

    numbers: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None


Pieces = Callable[[int, int], Piece]  # (first row, last + 1) -> these rows


def neighbours() -> None:
    """The `groups` of a matrix whose groups are neighbouring inputs."""


@dataclass(frozen=True)
class Quantized:
    """A matrix [out, in] that several tensors of a file make.

    name: of the matrix in a checkpoint of floats.
    kind: of its numbers: a name of `stored_rows.KINDS`.
    group: how many inputs share a scale; the last group may have fewer.
    file: of the numbers.
    sources: the names of the tensors.
    read: reads the tensors.
    groups: reads the group of each input [in], where they are not neighbours; None: they are.
    stacked: the rows are those of so many matrices, whose floats are [stacked, out, in]; 0: it is
        one matrix.
    turned: the floats of such matrices are [stacked, in, out].
    """

    name: str
    shape: tuple[int, int]
    kind: str
    group: int
    file: Path
    sources: tuple[str, ...]
    read: Callable[[], Pieces]
    groups: Callable[[], np.ndarray | None] = neighbours
    stacked: int = 0
    turned: bool = False


def as_tensor(matrix: Quantized, method: str) -> Tensor:
    """The matrix as a tensor of floats, which may also be read as rows of blocks."""
    outputs, inputs = matrix.shape
    shape = matrix.shape
    if matrix.stacked:
        of_one = outputs // matrix.stacked, inputs
        shape = matrix.stacked, *(of_one[::-1] if matrix.turned else of_one)
    rows = Rows(matrix.kind, matrix.group, partial(_rows, matrix), cache(partial(_order, matrix)))
    return Tensor(
        matrix.name,
        shape,
        np.dtype(np.float32),
        matrix.file,
        f"{method} {matrix.kind}",
        partial(_floats, matrix, shape),
        rows,
    )


def _cuts(matrix: Quantized) -> list[tuple[int, int]]:
    """(first row, last + 1) of the pieces."""
    outputs, inputs = matrix.shape
    step = max(1, PIECE // (inputs * PIECE_ROWS)) * PIECE_ROWS
    return [(first, min(first + step, outputs)) for first in range(0, outputs, step)]


def _checked(matrix: Quantized, piece: Piece) -> Piece:
    for array in (piece.scales, piece.offsets):
        if array is not None and not np.isfinite(array).all():
            raise ValueError(
                f"{matrix.file}: {matrix.name} has a scale that is not a finite number; "
                "fetch it again"
            )
    return piece


def _floats(matrix: Quantized, shape: tuple[int, ...]) -> np.ndarray:
    values = np.empty(matrix.shape, np.float32)
    pieces = matrix.read()
    groups = matrix.groups()
    if groups is None:
        groups = np.arange(matrix.shape[1]) // matrix.group
    for first, last in _cuts(matrix):
        numbers, scales, offsets = _checked(matrix, pieces(first, last))
        rows = values[first:last]
        np.multiply(numbers.astype(np.float32), scales[:, groups], out=rows)
        if offsets is not None:
            rows += offsets[:, groups]
    if not matrix.stacked:
        return values
    stack = values.reshape(matrix.stacked, -1, matrix.shape[1])
    return stack.swapaxes(1, 2) if matrix.turned else stack


def _order(matrix: Quantized) -> np.ndarray | None:
    """The inputs [in] in the order of their groups; None: they are in it.

    Raises:
        ValueError: a group has another size.
    """
    groups = matrix.groups()
    if groups is None:
        return None
    order = np.argsort(groups, kind="stable").astype(np.int32)
    inputs = np.arange(len(groups))
    if not np.array_equal(groups[order], inputs // matrix.group):
        raise ValueError(
            f"{matrix.file}: the groups of {matrix.name} have other sizes than "
            f"{matrix.group} inputs; load the model without weight_dtype"
        )
    return None if np.array_equal(order, inputs) else order


def _rows(matrix: Quantized, blocks: Blocks) -> np.ndarray:
    """The rows [out, bytes] in a format of blocks whose inputs divide those of a group."""
    from pagedjax.device.formats.blocks import Parts, rows_of_parts

    outputs, inputs = matrix.shape
    rows = np.empty((outputs, blocks.row_bytes(inputs)), np.uint8)
    pieces = matrix.read()
    order = _order(matrix)
    groups = np.arange(0, inputs, blocks.inputs) // matrix.group
    for first, last in _cuts(matrix):
        numbers, scales, offsets = _checked(matrix, pieces(first, last))
        if order is not None:
            numbers = numbers[:, order]
        numbers = numbers.reshape(last - first, -1, blocks.inputs)
        offsets = None if offsets is None else offsets[:, groups]
        rows[first:last] = rows_of_parts(Parts(numbers, scales[:, groups], offsets), blocks, np)
    return rows


# --- what the methods use -------------------------------------------------------------------------


def only(config: Mapping[str, Any], key: str, supported: Sequence[Any]) -> None:
    """Raises ValueError if a key of the config has another value than these. The first one is meant
    if the key is missing.
    """
    value = config.get(key, supported[0])
    if value not in supported:
        names = ", ".join(repr(x) for x in supported)
        raise ValueError(f"{key} is {value!r:.60}; supported: {names}")


def positive(config: Mapping[str, Any], key: str, default: int) -> None:
    """Raises ValueError if a size is not at least 1, or -1 for all inputs."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise ValueError(f"{key} is {value!r:.60}; it must be an integer of at least 1, or -1")


def with_suffix(tensors: Mapping[str, Tensor], suffix: str) -> list[str]:
    """The names of tensors with this suffix, without it."""
    return [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]


def sibling(tensors: Mapping[str, Tensor], name: str, weight: str) -> Tensor:
    """The tensor `name`, which a quantized `weight` needs. Raises ValueError if it is not there."""
    if name not in tensors:
        file = tensors[weight].file
        raise ValueError(
            f"{file}: {weight} is quantized, and {name} is missing; fetch the model again"
        )
    return tensors[name]


def expect(tensor: Tensor, shape: Sequence[int], dtypes: Sequence[str]) -> None:
    """Raises ValueError if a tensor has another shape or dtype than those given."""
    if tensor.shape != tuple(shape) or tensor.dtype.name not in dtypes:
        raise ValueError(
            f"{tensor.file}: {tensor.name} is {tensor.dtype.name} {tensor.shape}, and the "
            f"quantization needs {' or '.join(dtypes)} {tuple(shape)}; is it the config of another "
            "model?"
        )


def unpacked(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The numbers of `bits` bits of int32 words, the lowest bits first: uint8, with 32 / bits as
    many along the axis.
    """
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = np.moveaxis(words.view(np.uint32), axis, -1)
    numbers = (words[..., None] >> shifts & np.uint32(2**bits - 1)).astype(np.uint8)
    return np.moveaxis(numbers.reshape(*words.shape[:-1], -1), -1, axis)


def group_index(index: Tensor, group: int, groups: int) -> Callable[[], np.ndarray | None]:
    """Returns the `groups` of a matrix, from the tensor that has the group of each input.

    Args:
        group: inputs of a group.
        groups: their number.
    """

    def read() -> np.ndarray | None:
        values = index.read()
        for value in (int(values.min()), int(values.max())):
            if not 0 <= value < groups:
                raise ValueError(
                    f"{index.file}: {index.name} has the group {value}, and there are {groups}; "
                    "fetch it again"
                )
        in_turn = np.array_equal(values, np.arange(len(values)) // group)
        return None if in_turn else values

    return read


FLOATS = ("float16", "bfloat16", "float32")  # of scales


def integer_piece(
    digits: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, bits: int
) -> Piece:
    """scale * (digit - zero), as numbers with a sign, scales and offsets. Each product of a scale of
    16 bits is exact.

    Args:
        digits: [rows, in] uint8 of `bits` bits.
        scales: [rows, groups] float32.
        zeros: [rows, groups] integers; None: all are 2 ** (bits - 1).
    """
    middle = 2 ** (bits - 1)
    if zeros is None:
        return Piece((digits.astype(np.int16) - middle).astype(np.int8), scales)
    start = 0 if bits == 4 else middle  # 4 bits are kept as they are, and 8 bits have a sign
    numbers = (digits.astype(np.int16) - start).astype(np.int8)
    return Piece(numbers, scales, scales * (start - zeros.astype(np.int16)).astype(np.float32))
