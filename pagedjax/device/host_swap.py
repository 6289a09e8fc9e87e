"""The swap space: cache blocks in host memory, where the content of preempted sequences waits
(`preemption="swap"`).

The swap space is made of plain arrays beside the device's, also on a CPU. The operating system
allocates their memory when it is first written, so unused swap space costs nothing. Where the
device can copy from and to pinned memory, a batch of blocks passes through it. On a mesh there is
an array for each part that a device of this process has, so no process needs the heads of others.
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
# which part of an array a device has: start and end in each axis after that of the blocks
Part = tuple[tuple[int, int], ...]
# for each array of a cache, in the order of its leaves: the host array of each part
HostCache = tuple[dict[Part, np.ndarray], ...]


def host_cache(cache: KVCache, blocks: int) -> HostCache:
    """Host arrays for `blocks` blocks; ids run from 1, as on the device.

    Args:
        cache: the device's cache, or its shapes.
    """

    def arrays(pages: Any) -> dict[Part, np.ndarray]:
        indices = _sharding(pages).addressable_devices_indices_map(pages.shape)
        parts = {_part(index, pages.shape) for index in indices.values()}
        return {
            part: np.zeros((blocks + 1, *(end - start for start, end in part)), pages.dtype)
            for part in parts
        }

    return tuple(arrays(pages) for pages in jax.tree.leaves(cache))


class SwapPrograms:
    """The compiled programs that move blocks between a cache and a host cache, `batch` blocks at a
    time.

    Args:
        cache: the shapes of the device's cache (arrays or jax.ShapeDtypeStruct).
        pinned: pass through pinned host memory; None: do so on an accelerator that has such memory.
    """

    def __init__(self, cache: KVCache, batch: int, *, pinned: bool | None = None) -> None:
        device = jax.local_devices()[0]
        if pinned is None:
            kinds = [memory.kind for memory in device.addressable_memories()]
            pinned = device.platform != "cpu" and "pinned_host" in kinds
        self._batch = batch
        self._shardings = jax.tree.map(_sharding, cache)
        self._pinned = None
        if pinned:
            self._pinned = jax.tree.map(
                lambda sharding: sharding.with_memory_kind("pinned_host"), self._shardings
            )
        self._shapes = [(batch, *a.shape[1:]) for a in jax.tree.leaves(cache)]
        ids = np.zeros(batch, np.int32)
        pages = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype, sharding=a.sharding),
            cache,
        )
        self._read = out_of_cache.lower(cache, ids).compile()
        self._write = into_cache.lower(cache, ids, pages).compile()

    def out(self, cache: KVCache, host: HostCache, pairs: Pairs) -> None:
        """Copy (device block, host block) pairs into the host arrays, in place; then the device
        blocks are free.
        """
        for batch in _batches(pairs, self._batch):
            device_ids, host_ids = np.array(batch, np.int32).T
            pages = self._read(cache, _padded(device_ids, self._batch))
            pages = jax.device_put(pages, self._pinned) if self._pinned else pages
            for arrays, page in zip(host, jax.tree.leaves(pages), strict=True):
                # devices with copies of one part give that part once
                shards = {
                    _part(shard.index, page.shape): shard.data for shard in page.addressable_shards
                }
                for part, data in shards.items():
                    arrays[part][host_ids] = np.asarray(data)[: len(batch)]

    def back(self, cache: KVCache, host: HostCache, pairs: Pairs) -> KVCache:
        """Copy (host block, device block) pairs to the device. Returns the cache; the old one is
        donated.
        """
        for batch in _batches(pairs, self._batch):
            host_ids, device_ids = np.array(batch, np.int32).T
            ids = _padded(host_ids, self._batch)
            shardings = jax.tree.leaves(self._pinned or self._shardings)
            blocks = [
                _read(arrays, shape, sharding, ids)
                for arrays, shape, sharding in zip(host, self._shapes, shardings, strict=True)
            ]
            pages = jax.tree.unflatten(jax.tree.structure(cache), blocks)
            if self._pinned:
                pages = jax.device_put(jax.device_put(pages, self._pinned), self._shardings)
            cache = self._write(cache, _padded(device_ids, self._batch), pages)
        return cache


def _read(
    arrays: dict[Part, np.ndarray],
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    ids: np.ndarray,
) -> Any:
    """Blocks of one array, from the host arrays of its parts."""
    if len(arrays) == 1 and sharding.is_fully_addressable:
        # a program takes numpy arrays as they are, which is faster
        return next(iter(arrays.values()))[ids]
    return jax.make_array_from_callback(
        shape, sharding, lambda index: arrays[_part(index, shape)][ids]
    )


def _sharding(pages: Any) -> jax.sharding.Sharding:
    """Where pages are on the devices."""
    return pages.sharding or SingleDeviceSharding(jax.local_devices()[0])


def _part(index: Any, shape: Sequence[int]) -> Part:
    """The part that a device has, from its index in a sharding: a slice of each axis."""
    return tuple(axis.indices(size)[:2] for axis, size in zip(index[1:], shape[1:], strict=True))


def _batches(pairs: Pairs, size: int) -> list[Any]:
    return [pairs[i : i + size] for i in range(0, len(pairs), size)]


def _padded(ids: np.ndarray, size: int) -> np.ndarray:
    return np.pad(ids, (0, size - len(ids)))
