"""AWQ (Lin et al. 2023, arXiv 2306.00978), the layout "gemm" of AutoAWQ: 4 bits, with a zero point
and a scale for a group of inputs.

    qweight [in, out / 8] int32, qzeros [groups, out / 8] int32, scales [groups, out] float16
    weight[o, i] = scales[i / group, o] * (q[i, o] - zero[i / group, o])

A word has the numbers of eight outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pagedjax.weights.checkpoint import Tensor
from pagedjax.weights.quantized.groups import (
    FLOATS,
    Piece,
    Pieces,
    Quantized,
    expect,
    integer_piece,
    only,
    positive,
    sibling,
    unpacked,
    with_suffix,
)

BITS = 4
OUTPUTS = 32 // BITS  # of a word
PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # of each output in a word


def _group_size(config: Mapping[str, Any]) -> int:
    return config.get("group_size", config.get("q_group_size", 128))


def check(config: Mapping[str, Any]) -> None:
    only({"bits": config.get("bits", config.get("w_bit", BITS))}, "bits", (BITS,))
    only(config, "version", ("gemm", "GEMM"))
    only(config, "zero_point", (True,))
    positive({"group_size": _group_size(config)}, "group_size", 128)


def matrices(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Quantized]:
    for base in with_suffix(tensors, ".qweight"):
        words = tensors[f"{base}.qweight"]
        zeros = sibling(tensors, f"{base}.qzeros", words.name)
        scales = sibling(tensors, f"{base}.scales", words.name)
        inputs = words.shape[0]
        group = _group_size(config)
        group = inputs if group == -1 else group
        groups = -(-inputs // group)
        outputs = words.shape[-1] * OUTPUTS
        expect(words, (inputs, outputs // OUTPUTS), ("int32",))
        expect(zeros, (groups, outputs // OUTPUTS), ("int32",))
        expect(scales, (groups, outputs), FLOATS)
        yield Quantized(
            f"{base}.weight",
            (outputs, inputs),
            "uint4",
            group,
            words.file,
            tuple([f"{base}.{name}" for name in ("qweight", "qzeros", "scales")]),
            _reader(words, zeros, scales),
        )


def _digits(words: np.ndarray) -> np.ndarray:
    """[n, words] -> [n, outputs] uint8."""
    digits = unpacked(words, BITS, 1)
    return digits.reshape(len(words), -1, OUTPUTS)[:, :, PLACES].reshape(len(words), -1)


def _reader(words: Tensor, zeros: Tensor, scales: Tensor) -> Any:
    def read() -> Pieces:
        all_words = words.read()
        all_zeros = _digits(zeros.read())
        all_scales = scales.read().astype(np.float32)

        def piece(first: int, last: int) -> Piece:
            digits = _digits(all_words[:, first // OUTPUTS : -(-last // OUTPUTS)])
            rows = slice(first, last)
            return integer_piece(digits.T, all_scales[:, rows].T, all_zeros[:, rows].T, BITS)

        return piece

    return read
