"""compressed-tensors, the layout of llm-compressor.

    pack-quantized   weight_packed [out, in * bits / 32] int32, of 4 or 8 bits; weight_shape [2];
                     weight_zero_point [out * bits / 32, groups] int32; weight_g_idx [in]
    int-quantized    weight [out, in] int8; weight_zero_point [out, groups] int8
    float-quantized  weight [out, in] float8_e4m3fn (fp8.py)
    all              weight_scale [out, groups], [out, 1] or [1]

Packed numbers have 2 ** (bits - 1) added, and a word has neighbouring ones from the lowest bits. A
matrix has zero points if its numbers are not symmetric, and weight_g_idx with act-order. Activations
are not rounded here, whatever the config says of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from pagedjax.weights.checkpoint import Tensor
from pagedjax.weights.quantized.fp8 import DTYPE as FLOAT8
from pagedjax.weights.quantized.fp8 import checked_block, float8_matrix
from pagedjax.weights.quantized.groups import (
    FLOATS,
    Piece,
    Pieces,
    Quantized,
    expect,
    group_index,
    integer_piece,
    neighbours,
    only,
    sibling,
    unpacked,
    with_suffix,
)

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
NUMBERS = {("int", 4), ("int", 8), ("float", 8)}  # type and num_bits
STRATEGIES = ("group", "channel", "tensor", "block")
OTHERS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


def check(config: Mapping[str, Any]) -> None:
    only(config, "quantization_status", ("compressed",))
    for value in (config, *_groups(config).values()):
        only(value, "format", (*FORMATS, None))
    only(config.get("sparsity_config") or {}, "format", ("dense",))
    if config.get("transform_config"):  # rotations that a model computes at run time
        raise ValueError(
            f"transform_config is {config['transform_config']!r:.60}; it must be empty"
        )
    for name, group in _groups(config).items():
        weights = group.get("weights") or {}
        numbers = weights.get("type", "int"), weights.get("num_bits", 8)
        if numbers not in NUMBERS:
            raise ValueError(
                f"the weights of {name} are of type {numbers[0]!r} with num_bits {numbers[1]!r}; "
                f"supported: {', '.join(f'{kind} {bits}' for kind, bits in sorted(NUMBERS))}"
            )
        only(weights, "strategy", (*STRATEGIES, None))
        checked_block(weights.get("block_structure"), "block_structure")
    _block(config)


def _groups(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("config_groups") or {}


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The rows and columns that share a scale, with the strategy "block"."""
    blocks = set()
    for group in _groups(config).values():
        weights = group.get("weights") or {}
        block = checked_block(weights.get("block_structure"), "block_structure")
        if block is not None:
            blocks.add(block)
    if len(blocks) > 1:
        raise ValueError(f"block_structure is {sorted(blocks)}; all groups must have the same")
    return next(iter(blocks), None)


def matrices(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Quantized]:
    for base in with_suffix(tensors, ".weight_packed"):
        yield _packed(tensors, base)
    for base in with_suffix(tensors, ".weight_scale"):
        numbers = tensors.get(f"{base}.weight")
        if numbers is None:
            continue
        if numbers.dtype.name == FLOAT8:
            yield float8_matrix(tensors, base, _block(config))
        elif numbers.dtype.name == "int8":
            yield _int8(tensors, base)


def _others(tensors: Mapping[str, Tensor], base: str) -> list[str]:
    """The names of what a module has for activations."""
    return [f"{base}.{name}" for name in OTHERS if f"{base}.{name}" in tensors]


def _group(scale: Tensor, outputs: int, inputs: int) -> int:
    """How many inputs share a scale. Raises ValueError for a scale of another shape."""
    groups = scale.shape[-1] if len(scale.shape) == 2 else 1
    if scale.shape not in ((), (1,), (outputs, groups), (1, 1)) or not groups or inputs % groups:
        raise ValueError(
            f"{scale.file}: {scale.name} has the shape {scale.shape}; a matrix {(outputs, inputs)} "
            f"has one scale, or {outputs} rows of scales for equal groups of inputs"
        )
    expect(scale, scale.shape, FLOATS)
    return inputs // groups


def _rows(tensor: Tensor, outputs: int) -> np.ndarray:
    """Scales or zero points [out, groups] float32, from one number or a row of them for each
    output.
    """
    values = tensor.read().astype(np.float32)
    values = values.reshape(-1, values.shape[-1] if values.ndim else 1)
    return np.broadcast_to(values, (outputs, values.shape[1]))


def _packed(tensors: Mapping[str, Tensor], base: str) -> Quantized:
    words = tensors[f"{base}.weight_packed"]
    shape = sibling(tensors, f"{base}.weight_shape", words.name)
    scale = sibling(tensors, f"{base}.weight_scale", words.name)
    expect(shape, (2,), ("int64", "int32"))
    outputs, inputs = (int(size) for size in shape.read())
    bits = 4 if words.shape == (outputs, -(-inputs // 8)) else 8
    expect(words, (outputs, -(-inputs * bits // 32)), ("int32",))
    group = _group(scale, outputs, inputs)
    names = [f"{base}.weight_packed", f"{base}.weight_shape", f"{base}.weight_scale"]
    zeros = tensors.get(f"{base}.weight_zero_point")
    if zeros is not None:
        expect(zeros, (-(-outputs * bits // 32), inputs // group), ("int32",))
        names.append(f"{base}.weight_zero_point")
    groups: Callable[[], np.ndarray | None] = neighbours
    if f"{base}.weight_g_idx" in tensors:
        index = tensors[f"{base}.weight_g_idx"]
        expect(index, (inputs,), ("int32", "int64"))
        names.append(f"{base}.weight_g_idx")
        groups = cache(group_index(index, group, inputs // group))

    def read() -> Pieces:
        all_words = words.read()
        scales = _rows(scale, outputs)
        all_zeros = None if zeros is None else unpacked(zeros.read(), bits, 0)

        def piece(first: int, last: int) -> Piece:
            digits = unpacked(all_words[first:last], bits, 1)[:, :inputs]
            row_zeros = None if all_zeros is None else all_zeros[first:last]
            return integer_piece(digits, scales[first:last], row_zeros, bits)

        return piece

    return Quantized(
        f"{base}.weight",
        (outputs, inputs),
        f"{'int' if zeros is None else 'uint'}{bits}",
        group,
        words.file,
        (*names, *_others(tensors, base)),
        read,
        groups,
    )


def _int8(tensors: Mapping[str, Tensor], base: str) -> Quantized:
    numbers = tensors[f"{base}.weight"]
    scale = tensors[f"{base}.weight_scale"]
    if len(numbers.shape) != 2:
        raise ValueError(
            f"{numbers.file}: {numbers.name} has the shape {numbers.shape}; a matrix [out, in] of "
            "int8 is read"
        )
    outputs, inputs = numbers.shape
    group = _group(scale, outputs, inputs)
    names = [f"{base}.weight", f"{base}.weight_scale"]
    zeros = tensors.get(f"{base}.weight_zero_point")
    if zeros is not None:
        expect(zeros, scale.shape, ("int8",))
        names.append(f"{base}.weight_zero_point")

    def read() -> Pieces:
        values = numbers.read()
        scales = _rows(scale, outputs)
        offsets = None if zeros is None else -scales * _rows(zeros, outputs)

        def piece(first: int, last: int) -> Piece:
            row_offsets = None if offsets is None else offsets[first:last]
            return Piece(values[first:last], scales[first:last], row_offsets)

        return piece

    return Quantized(
        f"{base}.weight",
        (outputs, inputs),
        "int8" if zeros is None else "uint8",
        group,
        numbers.file,
        (*names, *_others(tensors, base)),
        read,
    )
