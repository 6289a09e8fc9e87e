"""Products of activations with weight matrices: one contract (`api`), several implementations."""

from pallas_kernels.linear.api import IMPLS, linear
from pallas_kernels.linear.blocks import BLOCKS, Blocks
from pallas_kernels.linear.implementation import Implementation, LowRank, Matrix, Norm

__all__ = [
    "BLOCKS",
    "IMPLS",
    "Blocks",
    "Implementation",
    "LowRank",
    "Matrix",
    "Norm",
    "linear",
]
