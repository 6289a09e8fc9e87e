"""GPTQ (Frantar et al. 2022, arXiv 2210.17323), the layout of AutoGPTQ and GPTQModel: 4 or 8 bits.

    qweight [in * bits / 32, out] int32, qzeros [groups, out * bits / 32] int32,
    scales [groups, out] float16, g_idx [in] int32
    weight[o, i] = scales[g_idx[i], o] * (q[i, o] - zero[g_idx[i], o])

A word has neighbouring inputs (zeros: outputs) from the lowest bits. A zero of the format "gptq" is
stored less 1, and that of "gptq_v2" as it is. With act-order (`desc_act`) g_idx is any order of the
inputs; else it is input / group, and may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from pagedjax.weights.checkpoint import Tensor
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
    positive,
    sibling,
    unpacked,
    with_suffix,
)


def check(config: Mapping[str, Any]) -> None:
    only(config, "bits", (4, 8))
    only(config, "checkpoint_format", ("gptq", "gptq_v2"))
    only(config, "sym", (True, False))
    only(config, "desc_act", (False, True))
    positive(config, "group_size", 128)
    if config.get("dynamic"):  # other bits for some modules
        raise ValueError(f"dynamic is {config['dynamic']!r:.60}; it must be empty")


def matrices(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Quantized]:
    bits = config.get("bits", 4)
    added = 1 if config.get("checkpoint_format", "gptq") == "gptq" else 0
    is_symmetric = config.get("sym", True)
    in_word = 32 // bits
    for base in with_suffix(tensors, ".qweight"):
        words = tensors[f"{base}.qweight"]
        zeros = sibling(tensors, f"{base}.qzeros", words.name)
        scales = sibling(tensors, f"{base}.scales", words.name)
        outputs = words.shape[-1]
        inputs = words.shape[0] * in_word
        group = config.get("group_size", 128)
        group = inputs if group == -1 else group
        groups = -(-inputs // group)
        expect(words, (inputs // in_word, outputs), ("int32",))
        expect(zeros, (groups, outputs // in_word), ("int32",))
        expect(scales, (groups, outputs), FLOATS)
        names = [f"{base}.{name}" for name in ("qweight", "qzeros", "scales")]
        read_groups: Callable[[], np.ndarray | None] = neighbours
        if f"{base}.g_idx" in tensors:
            index = tensors[f"{base}.g_idx"]
            expect(index, (inputs,), ("int32", "int64"))
            names.append(f"{base}.g_idx")
            read_groups = cache(group_index(index, group, groups))
        yield Quantized(
            f"{base}.weight",
            (outputs, inputs),
            f"{'' if is_symmetric else 'u'}int{bits}",
            group,
            words.file,
            tuple(names),
            _reader(words, zeros, scales, bits, added, is_symmetric),
            read_groups,
        )


def _reader(
    words: Tensor, zeros: Tensor, scales: Tensor, bits: int, added: int, is_symmetric: bool
) -> Callable[[], Pieces]:
    def read() -> Pieces:
        all_words = words.read()
        all_zeros = unpacked(zeros.read(), bits, 1).astype(np.int16) + added
        all_scales = scales.read().astype(np.float32)
        if is_symmetric and (all_zeros != 2 ** (bits - 1)).any():
            raise ValueError(
                f"{zeros.file}: sym is true and {zeros.name} has other zero points than "
                f"{2 ** (bits - 1)}; set sym to false in config.json if they are meant"
            )

        def piece(first: int, last: int) -> Piece:
            rows = slice(first, last)
            digits = unpacked(np.ascontiguousarray(all_words[:, rows]), bits, 0)
            row_zeros = None if is_symmetric else all_zeros[:, rows].T
            return integer_piece(digits.T, all_scales[:, rows].T, row_zeros, bits)

        return piece

    return read
