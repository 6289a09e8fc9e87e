"""Paged attention on a CPU: code compiled by numba behind an XLA FFI call. Not Pallas.

`implementation.py` imports JAX alone. The other modules import numba, llvmlite and numpy, and are loaded when the
kernel is first used.
"""
