"""Prefix caching: finding the blocks of a sequence's beginning, and publishing the blocks that a
step filled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedjax.host import blocks, views
from pagedjax.host.blocks import BlockPool
from pagedjax.host.types import HOLE, Running, SchedulerConfig, Seq


def named(key: str, group: int) -> str:
    """The hash of a block of a group of layers: other groups keep other content of the same tokens."""
    return f"{key}.{group}" if group else key


def filling(
    active: Running, first: int, counts: Sequence[int], config: SchedulerConfig
) -> dict[str, int]:
    """Hashes of the blocks that the prompt chunks of this step, rows `first` and on, fill -> the
    blocks.

    A row may read what another row of the same step writes: in each layer all keys and values are
    written before any is read. So of many requests with one prefix that arrive together, one
    computes it and the others do not wait.
    """
    found: dict[str, int] = {}
    for i in range(first, len(counts)):
        seq, start = active.seqs[i], active.computed[i]
        fills(found, seq, start, start + counts[i], config)
    return found


def fills(found: dict[str, int], seq: Seq, start: int, stop: int, config: SchedulerConfig) -> None:
    """Add to `found` the blocks that tokens `start` to `stop` of a sequence fill."""
    size, groups = config.block_size, config.groups
    for j in range(start // size, min(stop // size, len(seq.hashes))):
        for group in range(groups):
            found.setdefault(named(seq.hashes[j], group), seq.blocks[j * groups + group])


def find(
    pool: BlockPool, filling_now: Mapping[str, int], seq: Seq, config: SchedulerConfig
) -> tuple[int, ...]:
    """Blocks of the longest beginning of a sequence that was computed before; one token is left to
    compute.

    Args:
        filling_now: blocks that rows of this step fill, see `filling`.
    """
    keys = seq.hashes[: (seq.length - 1) // config.block_size]
    if config.views:
        return _find_seen(pool, filling_now, seq, keys, config)
    found = blocks.find(pool, keys)
    for key in keys[len(found) :]:
        block = pool.contents.get(key, filling_now.get(key))
        if block is None:
            break
        found = (*found, block)
    return found


def _find_seen(
    pool: BlockPool,
    filling_now: Mapping[str, int],
    seq: Seq,
    keys: Sequence[str],
    config: SchedulerConfig,
) -> tuple[int, ...]:
    """The same where queries do not see all blocks: those that the next query does not see are
    holes.
    """
    groups, contents, found = config.groups, pool.contents, []
    for key in keys:
        for group in range(groups):
            name = named(key, group)
            found.append(contents.get(name) or filling_now.get(name, HOLE))
    of_request = views.views_of(config, seq.request)
    at = views.usable(
        of_request, [[block != HOLE for block in found[group::groups]] for group in range(groups)]
    )
    return views.seen(of_request, found[: at * groups])


def cached_tokens(pool: BlockPool, seq: Seq, config: SchedulerConfig) -> int:
    """Tokens of a waiting sequence whose keys and values are in the cache, or in the swap space."""
    if seq.blocks:
        return seq.computed
    size = config.block_size
    if config.views:
        return len(find(pool, {}, seq, config)) // config.groups * size
    return size * len(blocks.find(pool, seq.hashes[: (seq.length - 1) // size]))


def rows_that_fill(starts: Sequence[int], counts: Sequence[int], size: int) -> list[int]:
    """The rows of a step whose tokens fill a block: `counts` tokens from `starts` on."""
    return [
        i
        for i, (start, count) in enumerate(zip(starts, counts, strict=True))
        if start % size + count >= size
    ]


def publish(
    pool: BlockPool,
    seqs: tuple[Seq, ...],
    counts: Sequence[int],
    ends: Sequence[int],
    hashes: Mapping[str, tuple[str, ...]],
    config: SchedulerConfig,
) -> tuple[BlockPool, tuple[Seq, ...]]:
    """Make the blocks that the rows of a step filled findable, now that the step has run."""
    size, groups = config.block_size, config.groups
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
        for group in range(groups):
            keys = (
                known[first:last] if not group else [named(key, group) for key in known[first:last]]
            )
            filled += zip(table[first * groups + group : last * groups : groups], keys, strict=True)
    return (blocks.publish(pool, filled) if filled else pool), tuple(changed)
