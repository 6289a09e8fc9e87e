"""The layout of a packed weight: panels of 32 outputs, which are beside each other for each input.

Here M are the outputs, K the inputs, P the panels and R the rank; S are adapter slots.

    float32     [P, K, 32]
    int8        [P, K, 32]
    bfloat16    [P, (K + 1) / 2, 32, 2]   pairs of inputs, for instructions that multiply pairs
    blocks      [P, blocks, bytes]        of 32 outputs: scales, offsets, then four inputs of 8 bits or
                                          eight of 4 in a word, [32] words of each; or input by input,
                                          if they are small floats of 8 bits. Behind digits of 4 bits
                                          are words of the bits that are apart

The factors b [R, M] of products of low rank (`LowRank`) have the same outputs beside each other:
[2 P, R, 16].

Each panel of a gated weight has 16 gates, and behind them the 16 outputs of `up` with which the
gates are multiplied. Outputs are padded to whole panels with zeros, and inputs to pairs. If M holds
several matrices, each is packed by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.linear.blocks import Blocks
from pallas_kernels.shared.cpu import huge_pages

PANEL = 32  # outputs of a panel
DTYPES = ("float32", "bfloat16", "int8")


def pack(
    weight: np.ndarray, *, gated: bool = False, matrices: int = 1, blocks: Blocks | None = None
) -> np.ndarray:
    """Returns the panels of a weight.

    Args:
        weight: [M, K], or [M, bytes] of blocks.
        matrices: the number of matrices in M.
    """
    if blocks is None:
        packed = panels_of(np, weight, gated=gated, matrices=matrices)
    else:
        packed = _block_panels(_outputs_of_panels(np, weight, gated, matrices), blocks)
    out = huge_pages.empty(packed.shape, packed.dtype)
    np.copyto(out, packed)
    return out


def panels_of(xp: Any, weight: Any, *, gated: bool = False, matrices: int = 1) -> Any:
    """Returns the panels as an array of `xp`, numpy or jax.numpy. In numpy it may be a view."""
    panels = _outputs_of_panels(xp, weight, gated, matrices)
    if weight.dtype.name == "bfloat16":
        panels = panels.reshape(-1, PANEL, panels.shape[2] // 2, 2)
    return panels.swapaxes(1, 2)


def _outputs_of_panels(xp: Any, weight: Any, gated: bool, matrices: int) -> Any:
    """Returns the rows of a weight by panels, with padding: [P, 32, K]."""
    rows = _with_padding(xp, weight.reshape(matrices, -1, weight.shape[1]), gated)
    _, m, k = rows.shape  # m: outputs of one matrix
    if gated:
        rows = rows.reshape(matrices, 2, m // PANEL, PANEL // 2, k).swapaxes(1, 2)
    return rows.reshape(matrices * m // PANEL, PANEL, k)


def _block_panels(panels: np.ndarray, blocks: Blocks) -> np.ndarray:
    """[P, 32, bytes of a row] -> [P, blocks, bytes of 32 blocks]."""
    cells = panels.reshape(len(panels), PANEL, -1, blocks.bytes)
    parts = []
    start = 0
    for size, unit in blocks.segments:
        units = cells[..., start : start + size].reshape(*cells.shape[:3], -1, unit)
        parts.append(units.transpose(0, 2, 3, 1, 4).reshape(*units.shape[:1], units.shape[2], -1))
        start += size
    return np.concatenate(parts, axis=2)


def rows_in_panels(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Returns (places, strides) [bytes of a block]: byte i of the block of output o of a panel is
    at places[i] + o * strides[i] of the panel's blocks.
    """
    places = []
    strides = []
    start = 0
    for size, unit in blocks.segments:
        for byte in range(size):
            places.append(PANEL * (start + byte - byte % unit) + byte % unit)
            strides.append(unit)
        start += size
    return np.array(places, np.int32), np.array(strides, np.int32)


def low_panels_of(xp: Any, b: Any, *, gated: bool = False) -> Any:
    """Returns b [S, R, M] as [S, halves of panels, R, 16], an array of `xp`.

    A half of a panel then reads its factors one after the other.
    """
    slots, rank, m = b.shape
    parts = 2 if gated else 1  # the gates and `up`
    outputs = m // parts
    num_panels = -(-outputs // (PANEL // parts))
    halves = num_panels * 2 // parts  # groups of 16 outputs of each part
    padded = xp.pad(
        b.reshape(slots, rank, parts, outputs),
        ((0, 0), (0, 0), (0, 0), (0, halves * PANEL // 2 - outputs)),
    )
    padded = padded.reshape(slots, rank, parts, halves, PANEL // 2).transpose(0, 3, 2, 1, 4)
    return padded.reshape(slots, halves * parts, rank, PANEL // 2)


def _with_padding(xp: Any, weights: Any, gated: bool) -> Any:
    """Returns the weights [matrices, M, K] with zeros, to whole panels and pairs of inputs."""
    matrices, m, k = weights.shape
    parts = 2 if gated else 1  # the gates and `up`
    outputs = m // parts
    missing = -outputs % (PANEL // parts)
    missing_inputs = k % 2 if weights.dtype.name == "bfloat16" else 0
    if not missing and not missing_inputs:
        return weights
    padded = xp.pad(
        weights.reshape(matrices, parts, outputs, k),
        ((0, 0), (0, 0), (0, missing), (0, missing_inputs)),
    )
    return padded.reshape(matrices, -1, k + missing_inputs)


def unpack(
    packed: np.ndarray,
    shape: tuple[int, int],
    *,
    gated: bool = False,
    matrices: int = 1,
    blocks: Blocks | None = None,
) -> np.ndarray:
    """The inverse of `pack`. shape: [M, K] of the weight, or [M, bytes] of blocks."""
    m, k = shape
    if blocks is None:
        panels = packed.swapaxes(1, 2)
    else:
        places, strides = rows_in_panels(blocks)
        bytes_of_outputs = places + strides * np.arange(PANEL)[:, None]
        panels = packed[:, :, bytes_of_outputs].swapaxes(1, 2)
    panels = panels.reshape(len(packed), PANEL, -1)  # of pairs: [P, 32, K / 2, 2]
    parts = 2 if gated else 1
    rows = panels.reshape(matrices, -1, parts, PANEL // parts, panels.shape[2]).swapaxes(1, 2)
    rows = rows.reshape(matrices, parts, -1, panels.shape[2])
    return np.ascontiguousarray(rows[:, :, : m // (matrices * parts), :k]).reshape(m, k)
