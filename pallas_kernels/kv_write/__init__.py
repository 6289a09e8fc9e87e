"""Writing new keys and values into the pages of a cache.

`api.write` is the contract; each implementation has a module.
"""

from pallas_kernels.kv_write.api import IMPLS, write

__all__ = ["IMPLS", "write"]
