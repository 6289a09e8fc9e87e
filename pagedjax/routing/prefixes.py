"""The prefixes that one replica knows: hashes of blocks (engine/block_hashes.py).

The least recently used hash is evicted first.

A hash stands for its block and for all blocks before it. Whenever a hash is known, the hashes of
the blocks before it are known: `learned` makes the first block of a prefix the most recent one, so
the last block is evicted first. `depth` can therefore search by halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from immutables import Map


class Prefixes(NamedTuple):
    limit: int  # hashes at most
    stamps: Map[str, int] = Map()  # hash -> when it was last used
    hashes: Map[int, str] = Map()  # the inverse of `stamps`
    oldest: int = 0  # no stamp is lower
    newest: int = 0  # the next stamp


def depth(prefixes: Prefixes, hashes: Sequence[str]) -> int:
    """How many of the first `hashes` are known. They are the hashes of a prompt's full blocks."""
    stamps = prefixes.stamps
    if not hashes or hashes[0] not in stamps:
        return 0
    low = 0
    high = len(hashes)
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in stamps:
            low = middle + 1
        else:
            high = middle
    return low


def learned(prefixes: Prefixes, hashes: Sequence[str]) -> Prefixes:
    """The prefixes after a prompt, whose hashes are now the most recent ones.

    Of a prompt with more than `limit` hashes, only the first ones are added.
    """
    limit = prefixes.limit
    oldest = prefixes.oldest
    newest = prefixes.newest
    stamps = prefixes.stamps.mutate()
    by_stamp = prefixes.hashes.mutate()
    for key in reversed(hashes[:limit]):
        old_stamp = stamps.get(key)
        if old_stamp is not None:
            del by_stamp[old_stamp]
        stamps[key] = newest
        by_stamp[newest] = key
        newest += 1
    while len(stamps) > limit:
        key = by_stamp.pop(oldest, None)
        if key is not None:
            del stamps[key]
        oldest += 1
    return Prefixes(limit, stamps.finish(), by_stamp.finish(), oldest, newest)
