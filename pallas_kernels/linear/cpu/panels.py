"""The layout of a packed weight: panels of 32 outputs, which are beside each other for each input.

    float32     [P, K, 32]
    int8        [P, K, 32]
    bfloat16    [P, (K + 1) / 2, 32, 2]   pairs of inputs, for instructions that multiply pairs

The factors b [R, M] of products of low rank (`LowRank`) have the same outputs beside each other:
[2 P, R, 16].

A gated weight has 16 outputs of the gate in each panel, and behind them the 16 of `up` that they
are multiplied with. Outputs are padded to whole panels with zeros, and inputs to pairs. Rows of
several matrices are packed each by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.shared.cpu import huge_pages

PANEL = 32
DTYPES = ("float32", "bfloat16", "int8")


def pack(weight: np.ndarray, *, gated: bool = False, matrices: int = 1) -> np.ndarray:
    """Returns the panels of a weight [M, K]. matrices: that are one behind the other in M."""
    packed = panels_of(np, weight, gated=gated, matrices=matrices)
    out = huge_pages.empty(packed.shape, packed.dtype)
    np.copyto(out, packed)
    return out


def panels_of(xp: Any, weight: Any, *, gated: bool = False, matrices: int = 1) -> Any:
    """Returns the panels as an array of `xp`, numpy or jax.numpy; one of numpy may be a view."""
    rows = _with_padding(xp, weight.reshape(matrices, -1, weight.shape[1]), gated)
    e, m, k = rows.shape
    if gated:
        rows = rows.reshape(e, 2, m // PANEL, PANEL // 2, k).swapaxes(1, 2)
    panels = rows.reshape(e * m // PANEL, PANEL, k)
    pairs = panels.reshape(-1, PANEL, k // 2, 2) if weight.dtype.name == "bfloat16" else panels
    return pairs.swapaxes(1, 2)


def low_panels_of(xp: Any, b: Any, *, gated: bool = False) -> Any:
    """Returns b [S, R, M] as [S, halves of panels, R, 16], an array of `xp`.

    A half of a panel then reads its factors one after the other.
    """
    slots, rank, m = b.shape
    parts, half = (2, m // 2) if gated else (1, m)
    halves = -(-half // (PANEL // parts)) * 2 // parts  # of each part
    padded = xp.pad(
        b.reshape(slots, rank, parts, half),
        ((0, 0), (0, 0), (0, 0), (0, halves * PANEL // 2 - half)),
    )
    padded = padded.reshape(slots, rank, parts, halves, PANEL // 2).transpose(0, 3, 2, 1, 4)
    return padded.reshape(slots, halves * parts, rank, PANEL // 2)


def _with_padding(xp: Any, weights: Any, gated: bool) -> Any:
    """Returns the weights [E, M, K] with zeros, to whole panels of outputs and pairs of inputs."""
    e, m, k = weights.shape
    parts, outputs = (2, m // 2) if gated else (1, m)
    missing = -outputs % (PANEL // parts)
    missing_inputs = k % 2 if weights.dtype.name == "bfloat16" else 0
    if not missing and not missing_inputs:
        return weights
    padded = xp.pad(
        weights.reshape(e, parts, outputs, k), ((0, 0), (0, 0), (0, missing), (0, missing_inputs))
    )
    return padded.reshape(e, -1, k + missing_inputs)


def unpack(
    packed: np.ndarray, shape: tuple[int, int], *, gated: bool = False, matrices: int = 1
) -> np.ndarray:
    """The inverse of `pack`. shape: [M, K] of the weight."""
    m, k = shape
    panels = packed.swapaxes(1, 2).reshape(len(packed), PANEL, -1)  # of pairs: [P, 32, K / 2, 2]
    parts = 2 if gated else 1
    rows = panels.reshape(matrices, -1, parts, PANEL // parts, panels.shape[2]).swapaxes(1, 2)
    rows = rows.reshape(matrices, parts, -1, panels.shape[2])
    return np.ascontiguousarray(rows[:, :, : m // (matrices * parts), :k]).reshape(m, k)
