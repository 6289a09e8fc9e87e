"""The layout of a packed weight: panels of 32 outputs, which are beside each other for each input.

    float32     [P, K, 32]
    int8        [P, K, 32]
    bfloat16    [P, (K + 1) / 2, 32, 2]   pairs of inputs, for instructions that multiply pairs

The factors b [R, M] of products of low rank (`LowRank`) have the same outputs beside each other: [2 P, R, 16].

A gated weight has 16 outputs of the gate in each panel, and behind them the 16 of `up` that they are multiplied with.
Outputs are padded to whole panels with zeros, and inputs to pairs. Rows of several matrices are packed each by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.shared.cpu import huge_pages

PANEL = 32
DTYPES = ("float32", "bfloat16", "int8")


def pack(weight: np.ndarray, *, gated: bool = False, matrices: int = 1) -> np.ndarray:
    """weight [M, K] -> panels. matrices: that are one behind the other in M."""
    packed = arranged(np, weight, gated=gated, matrices=matrices)
    out = huge_pages.empty(packed.shape, packed.dtype)
    np.copyto(out, packed)
    return out


def arranged(xp: Any, weight: Any, *, gated: bool = False, matrices: int = 1) -> Any:
    """The same as an array of `xp`, numpy or jax.numpy; one of numpy may be a view."""
    found = _padded(xp, weight.reshape(matrices, -1, weight.shape[1]), gated)
    e, m, k = found.shape
    if gated:
        found = found.reshape(e, 2, m // PANEL, PANEL // 2, k).swapaxes(1, 2)
    panels = found.reshape(e * m // PANEL, PANEL, k)
    pairs = panels.reshape(-1, PANEL, k // 2, 2) if weight.dtype.name == "bfloat16" else panels
    return pairs.swapaxes(1, 2)


def arranged_low(xp: Any, b: Any, *, gated: bool = False) -> Any:
    """b [S, R, M] -> [S, halves of panels, R, 16], of `xp`: a half reads its factors one after the other."""
    slots, rank, m = b.shape
    parts, half = (2, m // 2) if gated else (1, m)
    halves = -(-half // (PANEL // parts)) * 2 // parts  # of each part
    found = xp.pad(
        b.reshape(slots, rank, parts, half),
        ((0, 0), (0, 0), (0, 0), (0, halves * PANEL // 2 - half)),
    )
    found = found.reshape(slots, rank, parts, halves, PANEL // 2).transpose(0, 3, 2, 1, 4)
    return found.reshape(slots, halves * parts, rank, PANEL // 2)


def _padded(xp: Any, weights: Any, gated: bool) -> Any:
    e, m, k = weights.shape
    parts, outputs = (2, m // 2) if gated else (1, m)
    more = -outputs % (PANEL // parts)
    odd = k % 2 if weights.dtype.name == "bfloat16" else 0
    if not more and not odd:
        return weights
    found = xp.pad(weights.reshape(e, parts, outputs, k), ((0, 0), (0, 0), (0, more), (0, odd)))
    return found.reshape(e, -1, k + odd)


def unpack(
    packed: np.ndarray, shape: tuple[int, int], *, gated: bool = False, matrices: int = 1
) -> np.ndarray:
    """The inverse of `pack`. shape: [M, K] of the weight."""
    m, k = shape
    panels = packed.swapaxes(1, 2).reshape(len(packed), PANEL, -1)  # of pairs: [P, 32, K / 2, 2]
    parts = 2 if gated else 1
    found = panels.reshape(matrices, -1, parts, PANEL // parts, panels.shape[2]).swapaxes(1, 2)
    found = found.reshape(matrices, parts, -1, panels.shape[2])
    return np.ascontiguousarray(found[:, :, : m // (matrices * parts), :k]).reshape(m, k)
