"""Facts about TPUs and their arrays that all TPU kernels use."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tiles import TpuTiles

LANES = 128  # numbers in a row of a TPU's registers and of its arrays in HBM


def row_size(head_size: int) -> int:
    """Returns L, the numbers in a row of a page as a TPU kernel reads it.

    It is 128, or the head size if that is larger.
    """
    return max(LANES, head_size)


def whole_rows(numbers: int) -> int:
    """Returns the least multiple of 128 that is not below `numbers`."""
    return -(-numbers // LANES) * LANES


def pinned(*pages: jax.Array, interpret: Any) -> list[jax.Array]:
    """Returns the arrays with the constraint that they stay in HBM.

    Without it, XLA would copy a small array to VMEM and back.
    """
    if interpret:
        return list(pages)
    return [pltpu.with_memory_space_constraint(a, pltpu.HBM) for a in pages]


def wrong_device(device: Any) -> str:
    """Returns why a device cannot run the kernels, as the rest of a sentence; empty if it can."""
    if device.platform != "tpu":
        return f"runs on platform 'tpu' and not on {device.platform!r}"
    if not TpuTiles.names(device.device_kind):
        return f"has no tile sizes for {device.device_kind!r}; add a file to pallas_kernels/tiles"
    return ""
