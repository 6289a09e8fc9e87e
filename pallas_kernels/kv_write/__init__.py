"""Writing new keys and values into the pages of a cache: one contract (`api.write`), one module an implementation."""

from pallas_kernels.kv_write.api import IMPLS, write

__all__ = ["IMPLS", "write"]
