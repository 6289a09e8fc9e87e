"""The encodings of GGUF whose weights are kept as they are in a file: which format of blocks holds
the numbers of each, and how they become it. No number is rounded.

The layouts are those of llama.cpp's ggml-common.h (`block_q4_0` and its like) and of its functions
`dequantize_row_*`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedjax.device.formats.blocks import Parts, recoded, rows_of_parts
from pagedjax.device.linear import BLOCKS, Blocks


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


# (blocks of the file, [n, bytes]) -> their numbers [n, cells, inputs of a cell], scales and offsets
# [n, cells]. A cell is a block of the encoding's kind (`gguf_file.KINDS`).
PARTS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
# Bytes of a file's blocks that become another format at once
PIECE = 2**20


def rows_of(
    raw: np.ndarray,
    shape: Sequence[int],
    block_bytes: int,
    encoding: str,
    kind: str,
    blocks: Blocks,
) -> np.ndarray:
    """The bytes of a tensor [out, in], as rows of blocks: uint8 [out, bytes].

    Args:
        raw: the bytes of the file.
        block_bytes: of a block of the file.
        kind: of the encoding's numbers, as in `gguf_file.KINDS`.
        blocks: a format that holds the encoding's numbers.
    """
    file_blocks = BLOCKS[kind]
    cells = raw.reshape(-1, block_bytes)
    rows = np.empty((shape[0], file_blocks.row_bytes(shape[1])), np.uint8)
    out = rows.reshape(len(cells), -1)
    step = PIECE // block_bytes
    for start in range(0, len(cells), step):
        parts = PARTS[encoding](cells[start : start + step])
        out[start : start + step] = rows_of_parts(parts, file_blocks, np)
    return recoded(rows, file_blocks, blocks, np)
