"""How `pagedjax convert --weights` rounds matrices, and the layout in which it writes them: that of
compressed-tensors, which other engines read.

    int4-g128  4 bits with a sign, a scale for 128 inputs; also g64 and g32
    int8       8 bits with a sign, a scale for each output
    fp8        float8_e4m3fn, a scale for each output

A stack of matrices, such as the experts of a GPT-OSS, is written as a stack: tensors with the names
of a matrix's have a dimension more, and the order of dimensions that its floats have.

Numbers are rounded to the nearest, and with 4 bits the scale of a group is the one of a few with the
least squared error (device/formats/blocks.py). Nothing is calibrated, unless the importance of inputs
is given: then an error counts by the mean square of the input that it is multiplied with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from pagedjax.device.formats.blocks import ROWS, float8, symmetric, weights_of
from pagedjax.weights.huggingface import np_dtype

WeightScheme = Literal["int4-g128", "int4-g64", "int4-g32", "int8", "fp8"]
PACKED = 8  # numbers of 4 bits in a word


class Scheme(NamedTuple):
    """How matrices are rounded and written.

    bits: of a number.
    group: inputs that share a scale; None: all.
    kind: of numbers, as compressed-tensors calls it: "int" or "float".
    format: its name of the layout.
    """

    bits: int
    group: int | None
    kind: Literal["int", "float"]
    format: str


SCHEMES: dict[WeightScheme, Scheme] = {
    "int4-g128": Scheme(4, 128, "int", "pack-quantized"),
    "int4-g64": Scheme(4, 64, "int", "pack-quantized"),
    "int4-g32": Scheme(4, 32, "int", "pack-quantized"),
    "int8": Scheme(8, None, "int", "int-quantized"),
    "fp8": Scheme(8, None, "float", "float-quantized"),
}


class Written(NamedTuple):
    """A tensor that a matrix becomes: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Rounded(NamedTuple):
    """A matrix that was rounded.

    arrays: its tensors, in the order of `tensors_of`.
    error: the sum of the squares of what rounding changed.
    size: the sum of the squares of the weights.
    """

    arrays: list[np.ndarray]
    error: float
    size: float


def config_of(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config`. ignore: the names of modules that stay floats."""
    by_group = {"strategy": "channel"}
    if scheme.group:
        by_group = {"strategy": "group", "group_size": scheme.group}
    weights = {
        "num_bits": scheme.bits,
        "type": scheme.kind,
        "symmetric": True,
        "dynamic": False,
        **by_group,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def tensors_of(
    scheme: Scheme, name: str, shape: tuple[int, ...], dtype: str, *, turned: bool = False
) -> list[Written]:
    """The tensors that a matrix of a model of `dtype` becomes, or a stack of matrices.

    Args:
        shape: [out, in] or [count, out, in].
        turned: a stack is [count, in, out], and so are its tensors.

    Raises:
        ValueError: its inputs are not whole groups.
    """
    *count, outputs, inputs = _upright(shape) if turned else shape
    group = scheme.group or inputs

    def with_columns(columns: int) -> tuple[int, ...]:
        upright = (*count, outputs, columns)
        return _upright(upright) if turned else upright

    if inputs % group:
        fit = [key for key, x in SCHEMES.items() if not x.group or inputs % x.group == 0]
        raise ValueError(
            f"{name} has {inputs} inputs, which are not whole groups of {group}; use one of "
            f"{', '.join(fit)}"
        )
    scales = Written(f"{name}_scale", with_columns(inputs // group), dtype)
    if scheme.bits == 4:
        return [
            Written(f"{name}_packed", with_columns(inputs // PACKED), "int32"),
            scales,
            Written(f"{name}_shape", (len(shape),), "int64"),
        ]
    numbers = "int8" if scheme.kind == "int" else "float8_e4m3fn"
    return [Written(name, shape, numbers), scales]


def _upright(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with its last two sizes in the other order."""
    return (*shape[:-2], shape[-1], shape[-2])


def rounded(
    scheme: Scheme,
    tensor: np.ndarray,
    dtype: str,
    importance: np.ndarray | None = None,
    *,
    turned: bool = False,
) -> Rounded:
    """Rounds a matrix [out, in] of float32, or a stack of matrices.

    Args:
        dtype: of scales.
        importance: of the inputs, [in], for 4 bits; None: all are equal.
        turned: as in `tensors_of`.
    """
    matrices = tensor.swapaxes(-1, -2) if turned else tensor
    weights = matrices.reshape(-1, matrices.shape[-1])
    group = scheme.group or weights.shape[1]
    of_cells = None if importance is None else importance.reshape(-1, group)
    parts = [
        _round_rows(scheme, weights[start : start + ROWS], group, dtype, of_cells)
        for start in range(0, len(weights), ROWS)
    ]
    numbers = np.concatenate([part.arrays[0] for part in parts])
    scales = np.concatenate([part.arrays[1] for part in parts])
    arrays = [_words(numbers) if scheme.bits == 4 else numbers, scales]
    arrays = [array.reshape(*matrices.shape[:-1], -1) for array in arrays]
    arrays = [array.swapaxes(-1, -2) if turned else array for array in arrays]
    if scheme.bits == 4:
        arrays.append(np.array(tensor.shape, np.int64))
    return Rounded(arrays, sum(part.error for part in parts), sum(part.size for part in parts))


def _round_rows(
    scheme: Scheme, rows: np.ndarray, group: int, dtype: str, importance: np.ndarray | None
) -> Rounded:
    """Rounds some rows [rows, in] of a matrix. The arrays are numbers [rows, in] and scales [rows,
    groups].

    Args:
        importance: of the inputs, by group.
    """
    scale_dtype = np_dtype(dtype)
    cells = rows.reshape(len(rows), -1, group)
    if scheme.kind == "float":
        parts = float8(cells, scale_dtype)
    else:
        parts = symmetric(cells, scheme.bits, scale_dtype, importance)
    differences = weights_of(parts) - rows
    return Rounded(
        arrays=[parts.numbers.reshape(rows.shape), parts.scales.astype(scale_dtype)],
        error=float(np.vdot(differences, differences)),
        size=float(np.vdot(rows, rows)),
    )


def _words(numbers: np.ndarray) -> np.ndarray:
    """int8 [out, in] of 4 bits -> int32 [out, in / 8]: 8 is added, the first one is the lowest."""
    digits = (numbers + 8).astype(np.uint8)
    pairs = digits[:, ::2] | digits[:, 1::2] << 4
    return np.ascontiguousarray(pairs).view("<i4")
