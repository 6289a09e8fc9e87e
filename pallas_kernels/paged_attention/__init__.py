"""Causal attention of packed query tokens over keys and values that lie in pages. See `api.paged_attention`."""

from pallas_kernels.paged_attention.api import IMPLS, paged_attention

__all__ = ["IMPLS", "paged_attention"]
