"""Paged attention on a CPU: code compiled by LLVM behind an XLA FFI call. Not Pallas.

`implementation.py` imports JAX alone. The other modules import llvmlite and numpy, and are loaded
when the kernel is first used.
"""
