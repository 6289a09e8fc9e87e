"""The encodings of GGUF whose weights are kept as they are in a file: which format of blocks holds
the numbers of each, and how they become it. No number is rounded.

The layouts are those of llama.cpp's ggml-common.h (`block_q4_0` and its like) and of its functions
`dequantize_row_*`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pagedjax.device.formats import is_stored
from pagedjax.device.formats.blocks import Parts, recoded, rows_of_parts
from pagedjax.device.linear import BLOCKS
from pagedjax.device.models.param_table import ParamSource
from pagedjax.weights.checkpoint import Checkpoint, Tensor


class Encoding(NamedTuple):
    """An encoding of GGUF.

    blocks: the name of the format that holds its numbers.
    parts: (blocks of the file, [n, bytes]) -> their numbers [n, cells, inputs of a cell], scales
        and offsets [n, cells]. A cell is a block of the format.
    """

    blocks: str
    parts: Callable[[np.ndarray], Parts]


def _float16(cells: np.ndarray, start: int) -> np.ndarray:
    """The float16 number at a byte of each block, as float32: [n, 1]."""
    return np.ascontiguousarray(cells[:, start : start + 2]).view("<f2").astype(np.float32)


def _halves(cells: np.ndarray) -> np.ndarray:
    """The numbers of 4 bits [..., 2, n] of bytes [..., n]: the lower halves, then the upper ones."""
    return np.stack([cells & 15, cells >> 4], axis=-2)


def _parts(numbers: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None = None) -> Parts:
    shape = *scales.shape, -1
    return Parts(numbers.reshape(shape).astype(np.int8), scales, offsets)


def _q4_0(cells: np.ndarray) -> Parts:
    return _parts(_halves(cells[:, 2:]).astype(np.int8) - 8, _float16(cells, 0))


def _q4_1(cells: np.ndarray) -> Parts:
    return _parts(_halves(cells[:, 4:]), _float16(cells, 0), _float16(cells, 2))


def _with_fifth_bits(cells: np.ndarray, start: int) -> np.ndarray:
    """Numbers of 5 bits [n, 32]: 4 bytes have the highest bits, and 16 bytes the others."""
    fifth = np.unpackbits(cells[:, start : start + 4], axis=1, bitorder="little")
    return _halves(cells[:, start + 4 :]).reshape(len(cells), -1) | fifth << 4


def _q5_0(cells: np.ndarray) -> Parts:
    return _parts(_with_fifth_bits(cells, 2).astype(np.int8) - 16, _float16(cells, 0))


def _q5_1(cells: np.ndarray) -> Parts:
    return _parts(_with_fifth_bits(cells, 4), _float16(cells, 0), _float16(cells, 2))


def _q8_0(cells: np.ndarray) -> Parts:
    return _parts(np.ascontiguousarray(cells[:, 2:]).view(np.int8), _float16(cells, 0))


def _k_scales(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scales and offsets [n, 8] of Q4_K and Q5_K: two float16 numbers, times integers of 6 bits
    in 12 bytes. The first four scales and offsets are the lower bits of the first eight bytes,
    whose upper bits are also those of the last four; the lower bits of these are in four bytes more.
    """
    first = cells[:, 4:8]
    second = cells[:, 8:12]
    last = cells[:, 12:16]
    scales = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=1)
    offsets = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=1)
    return _float16(cells, 0) * scales.astype(np.float32), -(
        _float16(cells, 2) * offsets.astype(np.float32)
    )


def _q4_k(cells: np.ndarray) -> Parts:
    runs = cells[:, 16:].reshape(len(cells), 4, 32)  # of two cells each
    return _parts(_halves(runs), *_k_scales(cells))


def _q5_k(cells: np.ndarray) -> Parts:
    # bit i of a byte is of cell i
    fifth = np.unpackbits(cells[:, 16:48, None], axis=2, bitorder="little").swapaxes(1, 2)
    lower = _halves(cells[:, 48:].reshape(len(cells), 4, 32)).reshape(len(cells), 8, 32)
    return _parts(lower | fifth << 4, *_k_scales(cells))


def _q6_k(cells: np.ndarray) -> Parts:
    count = len(cells)
    lower = _halves(cells[:, :128].reshape(count, 2, 64)).reshape(count, 2, 4, 32)
    # two bits of a byte are of each of the four runs of 32 numbers
    pairs = cells[:, 128:192].reshape(count, 2, 1, 32)
    upper = pairs >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    numbers = (lower | upper << 4).astype(np.int8) - 32
    factors = np.ascontiguousarray(cells[:, 192:208]).view(np.int8).astype(np.float32)
    return _parts(numbers, _float16(cells, 208) * factors)


ENCODINGS = {
    "Q4_0": Encoding("q4_0", _q4_0),
    "Q4_1": Encoding("q4_1", _q4_1),
    "Q5_0": Encoding("q8_0", _q5_0),
    "Q5_1": Encoding("q5_k", _q5_1),
    "Q8_0": Encoding("q8_0", _q8_0),
    "Q4_K": Encoding("q4_k", _q4_k),
    "Q5_K": Encoding("q5_k", _q5_k),
    "Q6_K": Encoding("q6_k", _q6_k),
}
# Bytes of a file's blocks that become another format at once
PIECE = 2**20


def rows_of(raw: np.ndarray, shape: Sequence[int], block_bytes: int, encoding: str) -> np.ndarray:
    """The bytes of a tensor [out, in], as rows of the encoding's format: uint8 [out, bytes].

    Args:
        raw: the bytes of the file.
        block_bytes: of a block of the file.
    """
    blocks = BLOCKS[ENCODINGS[encoding].blocks]
    cells = raw.reshape(-1, block_bytes)
    rows = np.empty((shape[0], blocks.row_bytes(shape[1])), np.uint8)
    out = rows.reshape(len(cells), -1)
    step = PIECE // block_bytes
    for start in range(0, len(cells), step):
        parts = ENCODINGS[encoding].parts(cells[start : start + step])
        out[start : start + step] = rows_of_parts(parts, blocks, np)
    return rows


def formats_of(checkpoint: Checkpoint, table: Sequence[ParamSource]) -> tuple[tuple[str, str], ...]:
    """The formats of matrices whose numbers are kept, by the names of their parameters. A parameter
    of several tensors has the smallest format that holds all of them.

    Raises:
        ValueError: there are none.
    """
    names = {
        ".".join(entry.path): format_name
        for entry in table
        if (format_name := _format_of(checkpoint.tensors, entry)) is not None
    }
    if not names:
        encodings = sorted({tensor.encoding for tensor in checkpoint.tensors.values()})
        raise ValueError(
            f"weight_dtype is 'stored', and {checkpoint.path} has no matrix in one of the encodings "
            f"{', '.join(ENCODINGS)} of a GGUF file, only {', '.join(encodings)}; leave "
            "weight_dtype out"
        )
    return tuple(names.items())


def _format_of(tensors: Mapping[str, Tensor], entry: ParamSource) -> str | None:
    sources = [tensors[name] for name in entry.sources if name in tensors]
    if not sources or entry.transpose or not is_stored(entry.path, entry.shape):
        return None
    if any(t.load_blocks is None or t.encoding not in ENCODINGS for t in sources):
        return None
    formats = [BLOCKS[ENCODINGS[tensor.encoding].blocks] for tensor in sources]
    holding = [
        blocks for blocks in BLOCKS.values() if all(blocks.holds(other) for other in formats)
    ]
    return min(holding, key=lambda blocks: blocks.row_bytes(entry.shape[1])).name


def assembled(tensors: Mapping[str, Tensor], entry: ParamSource, format_name: str) -> np.ndarray:
    """The rows [out, bytes] of a matrix in a format that `formats_of` gave it."""
    blocks = BLOCKS[format_name]
    parts = []
    for name in entry.sources:
        tensor = tensors[name]
        assert tensor.load_blocks is not None, "`formats_of` names no other ones"
        own = BLOCKS[ENCODINGS[tensor.encoding].blocks]
        parts.append(recoded(tensor.load_blocks(), own, blocks, np))
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return rows[np.asarray(entry.order)] if entry.order else rows
