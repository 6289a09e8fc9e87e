"""Code compiled by LLVM behind an XLA FFI call, not Pallas: for every operation with a CPU kernel.

`handler.py` and `huge_pages.py` import JAX and numpy alone. The other modules import llvmlite and
numpy, and are loaded when a kernel is first used.
"""
