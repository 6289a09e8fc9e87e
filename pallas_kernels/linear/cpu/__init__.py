"""Products with packed weights on a CPU: code compiled by LLVM behind an XLA FFI call. Not Pallas.

`implementation.py` and `panels.py` import JAX and numpy alone. The other modules import llvmlite,
and are loaded when the kernel is first used.
"""
