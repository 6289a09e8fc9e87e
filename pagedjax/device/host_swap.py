"""The swap space: cache blocks in host memory, where the content of preempted sequences waits (`preemption="swap"`).

The swap space is made of plain arrays beside the device's, also on a CPU. The operating system allocates their memory
when it is first written, so unused swap space costs nothing. Where the device can copy from and to pinned memory, a
batch of blocks passes through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pagedjax.device.cache import KVCache
from pagedjax.device.step import into_cache, out_of_cache

Pairs = Sequence[tuple[int, int]]


def host_cache(cache: KVCache, blocks: int) -> KVCache:
    """Host arrays for `blocks` blocks; ids run from 1, as on the device.

    Args:
        cache: the device's cache, or its shapes.
    """
    return jax.tree.map(lambda a: np.zeros((blocks + 1, *a.shape[1:]), a.dtype), cache)


class SwapPrograms:
    """The compiled programs that move blocks between a cache and a host cache, `batch` blocks at a time.

    Args:
        cache: the shapes of the device's cache (arrays or jax.ShapeDtypeStruct).
        pinned: pass through pinned memory; None is yes on an accelerator that has a kind of memory of that name.
    """

    def __init__(self, cache: KVCache, batch: int, *, pinned: bool | None = None) -> None:
        device = jax.devices()[0]
        if pinned is None:
            kinds = [memory.kind for memory in device.addressable_memories()]
            pinned = device.platform != "cpu" and "pinned_host" in kinds
        self._batch = batch
        self._near = jax.tree.map(lambda a: a.sharding or SingleDeviceSharding(device), cache)
        self._far = jax.tree.map(lambda near: near.with_memory_kind("pinned_host"), self._near) if pinned else None
        ids = np.zeros(batch, np.int32)
        pages = jax.tree.map(lambda a: jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype, sharding=a.sharding), cache)
        self._read = out_of_cache.lower(cache, ids).compile()
        self._write = into_cache.lower(cache, ids, pages).compile()

    def out(self, cache: KVCache, host: KVCache, pairs: Pairs) -> None:
        """Copy (device block, host block) pairs into the host arrays, in place; then the device blocks are free."""
        for part in _parts(pairs, self._batch):
            near, far = np.array(part, np.int32).T
            pages = self._read(cache, _padded(near, self._batch))
            pages = jax.device_put(pages, self._far) if self._far else pages
            for mine, page in zip(jax.tree.leaves(host), jax.tree.leaves(pages), strict=True):
                mine[far] = np.asarray(page)[: len(part)]

    def back(self, cache: KVCache, host: KVCache, pairs: Pairs) -> KVCache:
        """Copy (host block, device block) pairs to the device. Returns the cache; the old one is donated."""
        for part in _parts(pairs, self._batch):
            far, near = np.array(part, np.int32).T
            ids = _padded(far, self._batch)
            pages = jax.tree.map(lambda a, i=ids: a[i], host)
            pages = jax.device_put(jax.device_put(pages, self._far), self._near) if self._far else pages
            cache = self._write(cache, _padded(near, self._batch), pages)
        return cache


def _parts(pairs: Pairs, size: int) -> list[Any]:
    return [pairs[i : i + size] for i in range(0, len(pairs), size)]


def _padded(ids: np.ndarray, size: int) -> np.ndarray:
    return np.pad(ids, (0, size - len(ids)))
