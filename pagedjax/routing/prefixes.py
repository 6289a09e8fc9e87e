"""The prefixes that one replica knows: hashes of blocks (engine/block_hashes.py), the least
recently used one evicted.

A hash stands for its block and for all blocks before it. Whenever a hash is known, those before it
are: `learned` makes the first block of a prefix the most recent one, so the last block is evicted
first. `depth` can therefore search by halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from immutables import Map


class Prefixes(NamedTuple):
    most: int  # hashes that are kept
    stamps: Map[str, int] = Map()  # hash -> when it was last used
    hashes: Map[int, str] = Map()  # the inverse of `stamps`
    oldest: int = 0  # no stamp is lower
    newest: int = 0  # the next stamp


def depth(known: Prefixes, hashes: Sequence[str]) -> int:
    """How many of the first `hashes`, those of a prompt's full blocks, are known."""
    stamps, low, high = known.stamps, 0, len(hashes)
    if not high or hashes[0] not in stamps:
        return 0
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in stamps:
            low = middle + 1
        else:
            high = middle
    return low


def learned(known: Prefixes, hashes: Sequence[str]) -> Prefixes:
    """The prefixes with a prompt's, now the most recent. Of a prompt with more than `most` hashes,
    the first ones."""
    most, _, _, oldest, newest = known
    stamps, names = known.stamps.mutate(), known.hashes.mutate()
    for key in reversed(hashes[:most]):
        before = stamps.get(key)
        if before is not None:
            del names[before]
        stamps[key], names[newest] = newest, key
        newest += 1
    while len(stamps) > most:
        key = names.pop(oldest, None)
        if key is not None:
            del stamps[key]
        oldest += 1
    return Prefixes(most, stamps.finish(), names.finish(), oldest, newest)
