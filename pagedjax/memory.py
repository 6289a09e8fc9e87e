"""How much memory there is for cache blocks."""

from __future__ import annotations

import os
from typing import Any

GIB = 2**30
CPU_LIMIT = 4 * GIB  # a laptop's memory belongs to its owner: a CPU's default cache never exceeds this


def free_bytes(device: Any) -> int:
    """Bytes that a program may still take on a jax device: its own count, or for a CPU the system's free memory."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        raise ValueError(f"{device} does not say how much memory it has; set num_blocks")
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: half of what is installed
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def blocks_that_fit(block_bytes: int, fraction: float, device: Any) -> int:
    """Blocks in `fraction` of the free memory, the trash block not counted.

    Raises:
        ValueError: not even one fits.
    """
    free = free_bytes(device)
    room = int(free * fraction)
    if device.platform == "cpu":
        room = min(room, CPU_LIMIT)
    blocks = room // block_bytes - 1
    if blocks < 1:
        raise ValueError(
            f"a block takes {block_bytes / 2**20:.2f} MiB, and memory_fraction {fraction} of the {free / GIB:.2f} GiB "
            "free does not hold two; free some memory, raise memory_fraction or lower block_size"
        )
    return blocks
