"""MXFP4 (OCP Microscaling Formats, 2023), as the experts of GPT-OSS have it: floats of 4 bits, and a
power of two for 32 of them.

    gate_up_proj_blocks [experts, out, in / 32, 16] uint8, gate_up_proj_scales [experts, out, in / 32]
    float = number * 2 ** (scale - 127)

A byte has two neighbouring inputs, the first one in the lower half. A checkpoint of floats has
[experts, in, out].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pagedjax.weights.checkpoint import Tensor
from pagedjax.weights.quantized.groups import Piece, Pieces, Quantized, expect, sibling, with_suffix

INPUTS = 32  # of a scale
# twice the number of each digit
DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
HALF = -128  # the exponent of a scale, which is halved because numbers are doubled
NAN = 255


def check(config: Mapping[str, Any]) -> None:
    """The layout has no options."""


def matrices(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Quantized]:
    for name in with_suffix(tensors, "_blocks"):
        blocks = tensors[f"{name}_blocks"]
        scales = sibling(tensors, f"{name}_scales", blocks.name)
        experts, outputs, cells = (*blocks.shape, 0, 0, 0)[:3]
        expect(blocks, (experts, outputs, cells, INPUTS // 2), ("uint8",))
        expect(scales, (experts, outputs, cells), ("uint8",))
        yield Quantized(
            name,
            (experts * outputs, cells * INPUTS),
            "mxfp4",
            INPUTS,
            blocks.file,
            (f"{name}_blocks", f"{name}_scales"),
            _reader(blocks, scales),
            stacked=experts,
            turned=True,
        )


def _reader(blocks: Tensor, scales: Tensor) -> Callable[[], Pieces]:
    def read() -> Pieces:
        cells = scales.shape[-1]
        all_bytes = blocks.read().reshape(-1, cells * INPUTS // 2)
        exponents = scales.read().reshape(-1, cells)
        if (exponents == NAN).any():
            raise ValueError(f"{scales.file}: {scales.name} has NaN (255); fetch it again")

        def piece(first: int, last: int) -> Piece:
            pairs = all_bytes[first:last]
            digits = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(last - first, -1)
            powers = np.ldexp(np.float32(1), exponents[first:last].astype(np.int32) + HALF)
            return Piece(DOUBLED[digits], powers.astype(np.float32))

        return piece

    return read
