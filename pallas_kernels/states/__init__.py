"""Recurrent states with decay (gated delta rule, Mamba 2) that a layer keeps in pages.

`api.py` has the contract and the list of implementations with a kernel; `pallas_tpu/` is Pallas.
"""

from pallas_kernels.states.api import (
    IMPLS,
    Implementation,
    Inputs,
    Memory,
    Part,
    Spans,
    StateShape,
)

__all__ = ["IMPLS", "Implementation", "Inputs", "Memory", "Part", "Spans", "StateShape"]
