"""Writing new keys and values into the pages of a cache.

`api.write` is the contract; each implementation has a module. `pallas_gpu` has that of
`api.rotate_and_write`, which also rotates queries and keys.
"""

from pallas_kernels.kv_write.api import IMPLS, RotateAndWrite, rotate_and_write, write

__all__ = ["IMPLS", "RotateAndWrite", "rotate_and_write", "write"]
