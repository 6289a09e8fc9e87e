"""The memory of the device: how many cache blocks fit, and a report of what uses it.

    total                   what a program may use of the device
      weights
      other                 what else is in use before the cache, with the inputs of a step
      free
        activations peak    measured: what the compiled step of the largest bucket needs
        KV cache            computed: (blocks + the trash block) * bytes of a block
        left

The number of blocks must be known before the cache exists, but the measured step takes a cache as
an argument. So the engine compiles the largest bucket from shapes alone. It assumes as many blocks
as would fit if a step needed no memory. The memory of a step does not depend on that number,
because the cache is updated in place. If the step fits beside those blocks, nothing is compiled
twice. This is the case when max_num_seqs, num_blocks or the limit of a CPU is reached before the
memory is full. Otherwise this one bucket is compiled again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax

GIB = 2**30
MIB = 2**20
GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
# the files of the two versions of control groups
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")
CPU_LIMIT = 4 * GIB  # largest default cache on a CPU, whose memory other programs need too


class DeviceMemory(NamedTuple):
    """Bytes of a device at one moment. total is 0 if the device does not report it."""

    name: str
    total: int
    free: int
    cache_limit: int | None = None  # largest cache if its size is not configured


class MemoryReport(NamedTuple):
    """What uses a device's memory, in bytes, and the size of the cache in blocks and tokens."""

    device: str
    total: int  # 0: the device does not report it
    free: int  # before the cache
    weights: int
    # of the step of the largest bucket, besides its arguments; None: not compiled yet
    activations: int | None
    # in use before the cache and not weights: other programs and engines, inputs of this engine's
    # steps
    other: int
    cache: int  # with its trash block
    block_size: int
    block_bytes: int
    device_blocks: int  # that sequences can own
    host_blocks: int  # of the swap space
    swap_space: int  # bytes of it in host memory
    tokens: int  # slots of the device's blocks
    max_model_len: int
    # of max_model_len that fit into the device's blocks at once; max_num_seqs may allow fewer
    sequences: int

    @property
    def left(self) -> int:
        """Free bytes that neither the step nor the cache uses."""
        return self.free - (self.activations or 0) - self.cache if self.total else 0

    def __str__(self) -> str:
        """A table to print."""
        blocks = f"of {self.block_size} tokens, {self.block_bytes / MIB:.5g} MiB each"
        swap = f"{size(self.swap_space)} of swap space"
        peak = ("unknown", "until the largest step is compiled")
        if self.activations is not None:
            peak = (size(self.activations), "of the largest step, as compiled")
        device = ("unknown", "")
        other_rows = []
        left_text = ""
        if self.total:
            device = (size(self.total), f"{size(self.free)} free before the cache")
            note = "in use before the cache and not weights; inputs of steps"
            other_rows = [("other", size(self.other), note)]
            left_text = f"; {size(self.left)} left"
        rows = [
            ("device", *device),
            ("weights", size(self.weights), ""),
            ("activations peak", *peak),
            *other_rows,
            ("KV cache", size(self.cache), f"with its trash block{left_text}"),
            ("device blocks", f"{self.device_blocks:,}", blocks),
            ("host blocks", f"{self.host_blocks:,}", swap),
            ("tokens", f"{self.tokens:,}", "in the device blocks"),
            ("sequences", f"{self.sequences:,}", f"of {self.max_model_len:,} tokens at once"),
        ]
        name_width = max(len(name) for name, _, _ in rows)
        value_width = max(len(value) for _, value, _ in rows)
        lines = [
            f"  {name:<{name_width}}  {value:>{value_width}}  {note}".rstrip()
            for name, value, note in rows
        ]
        return "\n".join([f"memory of {self.device}", *lines])


def size(nbytes: int) -> str:
    """Bytes as text, in GiB or MiB."""
    unit, name = (GIB, "GiB") if abs(nbytes) >= GIB else (MIB, "MiB")
    return f"{nbytes / unit:.2f} {name}"


def read(device: Any, devices: int = 1) -> DeviceMemory:
    """A jax device's memory now: what the device reports, or for a CPU the system's memory.

    Args:
        devices: how many an engine has. On a CPU they share the system's memory.
    """
    if device.platform == "cpu":
        name = f"the system's share of each of {devices} devices" if devices > 1 else "the system"
        total, free = _system()
        return DeviceMemory(name, total // devices, free // devices, CPU_LIMIT // devices)
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit", 0)
    return DeviceMemory(str(device), limit, max(limit - stats.get("bytes_in_use", 0), 0))


def _system() -> tuple[int, int]:
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):  # not Linux: half of the installed memory
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = total // 2
    for limit, limit_free in _limits():
        total = min(total, limit)
        free = min(free, limit_free)
    return total, free


def _limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes left) of each Linux control group of this process and of its parent groups.

    Cached file pages that were not read recently count as left: the kernel frees them when memory
    is needed.
    """
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    paths = {name: path.strip("/") for _, name, path in (line.split(":", 2) for line in lines)}
    for name, folder, files in (("", GROUPS, V2), ("memory", GROUPS / "memory", V1)):
        group = folder / paths.get(name, "")
        for place in (group, *group.parents):
            if not place.is_relative_to(folder):
                continue
            try:
                limit, used = (int((place / file).read_text()) for file in files)
                stat = dict(
                    line.split() for line in (place / "memory.stat").read_text().splitlines()
                )
            except (OSError, ValueError):  # no such group, or "max": no limit
                continue
            idle = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            yield limit, max(limit - used + idle, 0)


def activations_peak(compiled: Any) -> int:
    """Bytes that a compiled step needs besides its arguments: temporaries, and outputs other than
    the donated cache.

    XLA plans its buffers at compile time, so this is known before the step runs. 0 if a backend
    does not report it.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return 0
    return stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes


def nbytes(tree: Any) -> int:
    """Bytes of all arrays on one device."""
    return sum(_on_one_device(array) for array in jax.tree.leaves(tree))


def _on_one_device(array: Any) -> int:
    place = getattr(array, "sharding", None)
    return prod(place.shard_shape(array.shape) if place else array.shape) * array.dtype.itemsize


def whole_blocks(nbytes: float, block_bytes: int) -> int:
    """Number of whole blocks in `nbytes`."""
    return int(nbytes // block_bytes)


def host_blocks(swap_space_gib: float, block_bytes: int) -> int:
    """Number of blocks of the swap space on the host. It needs no trash block, because copies to it
    are not padded.
    """
    return whole_blocks(swap_space_gib * GIB, block_bytes)


def blocks_that_fit(
    block_bytes: int, fraction: float, device: DeviceMemory, activations: int = 0
) -> int:
    """Number of blocks in `fraction` of the free memory minus the memory of a step, without the
    trash block.

    Raises:
        ValueError: no block fits, or the device does not report its free memory.
    """
    if not device.total:
        raise ValueError(f"{device.name} does not report its memory; set num_blocks")
    room = int(device.free * fraction) - activations
    if device.cache_limit is not None:
        room = min(room, device.cache_limit)
    blocks = whole_blocks(room, block_bytes) - 1
    if blocks < 1:
        raise ValueError(
            f"a block takes {block_bytes / MIB:.2f} MiB and a step {size(activations)}; "
            f"memory_fraction {fraction} of the {device.free / GIB:.2f} GiB free is too small for "
            "the step and two blocks; free some memory, raise memory_fraction or lower block_size "
            "or max_num_batched_tokens"
        )
    return blocks


def check_fit(
    num_blocks: int, block_bytes: int, device: DeviceMemory, activations: int = 0
) -> None:
    """Check that a number of blocks fits into the free memory, if the device reports it.

    Raises:
        ValueError: they do not fit; names the largest number that fits.
    """
    cache = (num_blocks + 1) * block_bytes
    if device.total and cache + activations > device.free:
        fit = whole_blocks(device.free - activations, block_bytes) - 1
        lower = f"lower num_blocks to at most {fit}, " if fit > 0 else ""
        raise ValueError(
            f"num_blocks is {num_blocks}: its cache takes {size(cache)} and a step "
            f"{size(activations)}, but {device.name} has {size(device.free)} free; {lower}free "
            "some memory, or lower max_num_batched_tokens"
        )


def report(
    device: DeviceMemory,
    *,
    weights: int,
    activations: int | None,
    num_blocks: int,
    block_size: int,
    block_bytes: int,
    max_model_len: int,
    swap_space_gib: float,
    host_block_bytes: int | None = None,
    sequences: int | None = None,
) -> MemoryReport:
    """The report of `device` as it was before the cache. Measures nothing.

    Args:
        host_block_bytes: bytes of a block with the heads of all devices; None: there is one device,
            so they are block_bytes.
        sequences: how many of max_model_len tokens fit at once; None: a sequence needs blocks for
            all of its tokens.
    """
    host_block_bytes = block_bytes if host_block_bytes is None else host_block_bytes
    swapped = host_blocks(swap_space_gib, host_block_bytes)
    # weights in a mapped file count as free memory; `other` is then 0 and not negative
    other = max(device.total - device.free - weights, 0) if device.total else 0
    if sequences is None:
        blocks_of_sequence = -(-max_model_len // block_size)
        sequences = num_blocks // blocks_of_sequence
    return MemoryReport(
        device=device.name,
        total=device.total,
        free=device.free,
        weights=weights,
        activations=activations,
        other=other,
        cache=(num_blocks + 1) * block_bytes,
        block_size=block_size,
        block_bytes=block_bytes,
        device_blocks=num_blocks,
        host_blocks=swapped,
        swap_space=swapped * host_block_bytes,
        tokens=num_blocks * block_size,
        max_model_len=max_model_len,
        sequences=sequences,
    )
