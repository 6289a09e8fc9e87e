"""compressed-tensors, the layout of llm-compressor.

    pack-quantized   weight_packed [out, in * bits / 32] int32, of 4 or 8 bits; weight_shape [2];
                     weight_zero_point [out * bits / 32, groups] int32; weight_g_idx [in]
    int-quantized    weight [out, in] int8; weight_zero_point [out, groups] int8
    float-quantized  weight [out, in] float8_e4m3fn (fp8.py)
    all              weight_scale [out, groups], [out, 1] or [1]

A stack of matrices, such as all experts of a layer, has tensors of these names with one dimension
more, [count, out, ...]. They are [count, ..., out] where its floats are [count, in, out].

Packed numbers have 2 ** (bits - 1) added, and a word has neighbouring ones from the lowest bits. A
matrix has zero points if its numbers are not symmetric, and weight_g_idx with act-order. Activations
are not rounded here, whatever the config says of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
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
    for name in with_suffix(tensors, "_packed"):
        yield _matrix(tensors, name, f"{name}_packed", _packed)
    float8 = partial(float8_matrix, block=_block(config))
    for name in with_suffix(tensors, "_scale"):
        numbers = tensors.get(name)
        if numbers is None:
            continue
        if numbers.dtype.name == FLOAT8:
            yield _matrix(tensors, name, name, float8)
        elif numbers.dtype.name == "int8":
            yield _matrix(tensors, name, name, _int8)


def _matrix(
    tensors: Mapping[str, Tensor],
    name: str,
    numbers_name: str,
    matrix_of: Callable[[Mapping[str, Tensor], str], Quantized],
) -> Quantized:
    """The matrix `name`, or all matrices of a stack as one.

    Args:
        matrix_of: (tensors, name) -> one matrix.
    """
    numbers = tensors[numbers_name]
    if len(numbers.shape) != 3:
        return matrix_of(tensors, name)
    if f"{name}_g_idx" in tensors:
        raise ValueError(
            f"{numbers.file}: {name} is a stack of matrices with inputs in orders of their own "
            "(act-order), which is not read"
        )
    scale = sibling(tensors, f"{name}_scale", numbers_name)
    # a scale is of an output, and of some inputs
    turned = len(scale.shape) != 3 or scale.shape[1] != numbers.shape[1]
    names = [name + suffix for suffix in ("", "_packed", "_scale", "_zero_point")]
    flat = {x: _flat(tensors[x], turned) for x in names if x in tensors}
    if f"{name}_shape" in tensors:
        flat[f"{name}_shape"] = _flat_shape(tensors[f"{name}_shape"], turned)
    return replace(matrix_of(flat, name), stacked=numbers.shape[0], turned=turned)


def _flat(tensor: Tensor, turned: bool) -> Tensor:
    """The matrices of a stack as one, whose rows are theirs, one after the other.

    Raises:
        ValueError: it is no stack.
    """
    if len(tensor.shape) != 3:
        raise ValueError(
            f"{tensor.file}: {tensor.name} has the shape {tensor.shape}; what belongs to a stack "
            "of matrices has three dimensions"
        )
    count, rows, columns = tensor.shape
    if turned:
        rows, columns = columns, rows

    def load() -> np.ndarray:
        values = tensor.read()
        upright = values.swapaxes(1, 2) if turned else values
        return upright.reshape(count * rows, columns)

    return replace(tensor, shape=(count * rows, columns), load=load)


def _flat_shape(shape: Tensor, turned: bool) -> Tensor:
    """The shape of `_flat`, from the stored shape of a stack."""
    expect(shape, (3,), ("int64", "int32"))

    def load() -> np.ndarray:
        count, rows, columns = shape.read()
        return np.array([count * columns, rows] if turned else [count * rows, columns])

    return replace(shape, shape=(2,), load=load)


def _others(tensors: Mapping[str, Tensor], name: str) -> list[str]:
    """The names of what the module of a matrix has for activations."""
    base = name.removesuffix(".weight")
    return [f"{base}.{other}" for other in OTHERS if f"{base}.{other}" in tensors]


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


def _packed(tensors: Mapping[str, Tensor], name: str) -> Quantized:
    words = tensors[f"{name}_packed"]
    shape = sibling(tensors, f"{name}_shape", words.name)
    scale = sibling(tensors, f"{name}_scale", words.name)
    expect(shape, (2,), ("int64", "int32"))
    outputs, inputs = (int(size) for size in shape.read())
    bits = 4 if words.shape == (outputs, -(-inputs // 8)) else 8
    expect(words, (outputs, -(-inputs * bits // 32)), ("int32",))
    group = _group(scale, outputs, inputs)
    names = [words.name, shape.name, scale.name]
    zeros = tensors.get(f"{name}_zero_point")
    if zeros is not None:
        expect(zeros, (-(-outputs * bits // 32), inputs // group), ("int32",))
        names.append(zeros.name)
    groups: Callable[[], np.ndarray | None] = neighbours
    if f"{name}_g_idx" in tensors:
        index = tensors[f"{name}_g_idx"]
        expect(index, (inputs,), ("int32", "int64"))
        names.append(index.name)
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
        name,
        (outputs, inputs),
        f"{'int' if zeros is None else 'uint'}{bits}",
        group,
        words.file,
        (*names, *_others(tensors, name)),
        read,
        groups,
    )


def _int8(tensors: Mapping[str, Tensor], name: str) -> Quantized:
    numbers = tensors[name]
    scale = tensors[f"{name}_scale"]
    if len(numbers.shape) != 2:
        raise ValueError(
            f"{numbers.file}: {numbers.name} has the shape {numbers.shape}; a matrix [out, in] of "
            "int8 is read"
        )
    outputs, inputs = numbers.shape
    group = _group(scale, outputs, inputs)
    names = [name, scale.name]
    zeros = tensors.get(f"{name}_zero_point")
    if zeros is not None:
        expect(zeros, scale.shape, ("int8",))
        names.append(zeros.name)

    def read() -> Pieces:
        values = numbers.read()
        scales = _rows(scale, outputs)
        offsets = None if zeros is None else -scales * _rows(zeros, outputs)

        def piece(first: int, last: int) -> Piece:
            row_offsets = None if offsets is None else offsets[first:last]
            return Piece(values[first:last], scales[first:last], row_offsets)

        return piece

    return Quantized(
        name,
        (outputs, inputs),
        "int8" if zeros is None else "uint8",
        group,
        numbers.file,
        (*names, *_others(tensors, name)),
        read,
    )
