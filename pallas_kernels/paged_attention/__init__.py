"""Causal attention of packed query tokens over keys and values in pages.

`api.py` has the contract and the list of implementations; `implementation.py` has the record that
each implementation ends in. `reference.py` and `xla.py` are plain JAX, `pallas_gpu/` and
`pallas_tpu/` are Pallas, and `cpu/` is compiled CPU code.
"""

from pallas_kernels.paged_attention.api import IMPLS, latent_attention, paged_attention
from pallas_kernels.paged_attention.implementation import Implementation

__all__ = ["IMPLS", "Implementation", "latent_attention", "paged_attention"]
