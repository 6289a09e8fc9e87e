"""Facts about TPUs and their arrays that all TPU kernels use."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # numbers in a row of a TPU's registers and of its arrays in HBM


def row_size(head_size: int) -> int:
    """Returns L, the numbers in a row of a page as a TPU kernel reads it.

    It is 128, or the head size if that is larger.
    """
    return max(LANES, head_size)


def pinned(*pages: jax.Array, interpret: Any) -> list[jax.Array]:
    """Returns the arrays with the constraint that they stay in HBM.

    Without it, XLA would copy a small array to VMEM and back.
    """
    if interpret:
        return list(pages)
    return [pltpu.with_memory_space_constraint(a, pltpu.HBM) for a in pages]
