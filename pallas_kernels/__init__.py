"""Attention kernels over a paged KV cache. Imports jax alone and is useful without pagedjax."""
