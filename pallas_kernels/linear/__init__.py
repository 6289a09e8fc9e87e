"""Products of activations with weight matrices: one contract and several implementations, see `api`."""

from pallas_kernels.linear.api import IMPLS, linear
from pallas_kernels.linear.implementation import Implementation, Matrix, Norm

__all__ = ["IMPLS", "Implementation", "Matrix", "Norm", "linear"]
