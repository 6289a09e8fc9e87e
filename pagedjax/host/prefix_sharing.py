"""Prefix caching: finding the blocks of a sequence's beginning, and publishing the blocks that a step filled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedjax.host import blocks
from pagedjax.host.blocks import BlockPool
from pagedjax.host.types import Running, Seq


def filling(active: Running, first: int, counts: Sequence[int], size: int) -> dict[str, int]:
    """Hashes of the blocks that the prompt chunks of this step, rows `first` and on, fill -> the blocks.

    A row may read what another row of the same step writes: in each layer all keys and values are written before any
    is read. So of many requests with one prefix that arrive together, one computes it and the others do not wait.
    """
    found: dict[str, int] = {}
    for i in range(first, len(counts)):
        seq, start = active.seqs[i], active.computed[i]
        fills(found, seq, start, start + counts[i], size)
    return found


def fills(found: dict[str, int], seq: Seq, start: int, stop: int, size: int) -> None:
    """Add to `found` the blocks that tokens `start` to `stop` of a sequence fill."""
    for j in range(start // size, min(stop // size, len(seq.hashes))):
        found.setdefault(seq.hashes[j], seq.blocks[j])


def find(pool: BlockPool, filling_now: Mapping[str, int], seq: Seq, size: int) -> tuple[int, ...]:
    """Blocks of the longest beginning of a sequence that was computed before; one token is left to compute.

    Args:
        filling_now: blocks that rows of this step fill, see `filling`.
    """
    keys = seq.hashes[: (seq.length - 1) // size]
    found = blocks.find(pool, keys)
    for key in keys[len(found) :]:
        block = pool.contents.get(key, filling_now.get(key))
        if block is None:
            break
        found = (*found, block)
    return found


def cached_tokens(pool: BlockPool, seq: Seq, size: int) -> int:
    """Tokens of a waiting sequence whose keys and values are in the cache, or in the swap space."""
    if seq.blocks:
        return seq.computed
    return size * len(blocks.find(pool, seq.hashes[: (seq.length - 1) // size]))


def publish(
    pool: BlockPool,
    seqs: tuple[Seq, ...],
    counts: Sequence[int],
    ends: Sequence[int],
    hashes: Mapping[str, tuple[str, ...]],
    size: int,
) -> tuple[BlockPool, tuple[Seq, ...]]:
    """Make the blocks that the rows of a step filled findable, now that the step has run."""
    full = [i for i, end in enumerate(ends) if end % size < counts[i]]
    if not full:
        return pool, seqs
    filled: list[tuple[int, str]] = []
    changed = list(seqs)
    for i in full:
        request, arrival, limit, length, computed, table, known, group = seqs[i]
        new = hashes.get(request.request_id)
        if new:
            known += new
            changed[i] = Seq(request, arrival, limit, length, computed, table, known, group)
        if not known:
            continue
        first, last = (ends[i] - counts[i]) // size, min(ends[i] // size, len(known))
        filled += zip(table[first:last], known[first:last], strict=True)
    return (blocks.publish(pool, filled) if filled else pool), tuple(changed)
