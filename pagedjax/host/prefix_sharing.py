"""Prefix caching: finding the blocks of a sequence's beginning, and publishing the blocks that a
step filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import compress

from pagedjax.host import blocks, checkpoints, views
from pagedjax.host.blocks import BlockPool
from pagedjax.host.types import HOLE, Running, SchedulerConfig, Seq


def block_keys(hashes: Sequence[str], groups: int) -> Sequence[str]:
    """The key of each entry of a block table in the prefix cache, for full blocks with these
    hashes.

    Groups of layers keep different content of the same tokens, so each group has a key of its own.
    """
    if groups == 1:
        return hashes
    return [_key_of(key, group) for key in hashes for group in range(groups)]


def _key_of(block_hash: str, group: int) -> str:
    return f"{block_hash}.{group}" if group else block_hash


def filling(
    active: Running, first: int, counts: Sequence[int], config: SchedulerConfig
) -> dict[str, int]:
    """The blocks that the prompt chunks of this step (rows `first` and later) fill, by their keys.

    A row may read what another row of the same step writes: in each layer all keys and values are
    written before any is read. (`SchedulerConfig.shares_filling` is false for models with states,
    which are read first.) So if many requests with one prefix arrive together, one request
    computes the prefix, and the others use it in the same step.
    """
    filling_now: dict[str, int] = {}
    for i in range(first, len(counts)):
        start = active.computed[i]
        add_filled(filling_now, active.seqs[i], start, start + counts[i], config)
    return filling_now


def add_filled(
    filling_now: dict[str, int], seq: Seq, start: int, stop: int, config: SchedulerConfig
) -> None:
    """Adds the blocks that tokens `start` to `stop` of a sequence fill, by their keys."""
    groups = config.groups
    first = start // config.block_size
    last = min(stop // config.block_size, len(seq.hashes))
    keys = block_keys(seq.hashes[first:last], groups)
    for key, block in zip(keys, seq.blocks[first * groups : last * groups], strict=True):
        filling_now.setdefault(key, block)


def find(
    pool: BlockPool, filling_now: Mapping[str, int], seq: Seq, config: SchedulerConfig
) -> tuple[int, ...]:
    """The blocks of the longest beginning of a sequence that was computed before. One token is left
    to compute.

    Args:
        filling_now: blocks that rows of this step fill, see `filling`.
    """
    hashes = seq.hashes[: (seq.length - 1) // config.block_size]
    if config.views:
        return _find_visible(pool, filling_now, seq, hashes, config)
    table = blocks.find(pool, hashes)
    for key in hashes[len(table) :]:
        block = pool.contents.get(key, filling_now.get(key))
        if block is None:
            break
        table = (*table, block)
    return table


def _find_visible(
    pool: BlockPool,
    filling_now: Mapping[str, int],
    seq: Seq,
    hashes: Sequence[str],
    config: SchedulerConfig,
) -> tuple[int, ...]:
    """`find` where queries do not see all blocks: those that the next query does not see are
    holes.
    """
    contents = pool.contents

    def block_of(number: int, group: int) -> int:
        key = _key_of(hashes[number], group)
        return contents.get(key) or filling_now.get(key, HOLE)

    views_of_groups = views.views_of(config, seq.request)
    num_blocks = views.num_shareable(
        views_of_groups, len(hashes), lambda number, group: block_of(number, group) != HOLE
    )
    return views.visible_table(views_of_groups, num_blocks, block_of)


def cached_tokens(pool: BlockPool, seq: Seq, config: SchedulerConfig) -> int:
    """The number of tokens of a waiting sequence whose keys and values are in the cache or in the
    swap space.
    """
    if seq.blocks:
        return seq.computed
    size = config.block_size
    if config.views:
        return len(find(pool, {}, seq, config)) // config.groups * size
    return size * len(blocks.find(pool, seq.hashes[: (seq.length - 1) // size]))


@lru_cache(maxsize=32)
def rows_at_boundary(computed: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The rows whose computed tokens fill all their blocks. Every transition of a step asks for
    them, and so does the prediction before, so the last answers are kept.
    """
    return tuple([i for i, count in enumerate(computed) if count % size == 0])


def rows_that_fill(starts: Sequence[int], counts: Sequence[int], size: int) -> list[int]:
    """The rows of a step whose tokens fill a block: `counts` tokens from `starts` on."""
    if counts.count(1) == len(counts):  # as in most steps, in less than half of the time
        last = size - 1
        return [i for i, start in enumerate(starts) if start % size == last]
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
    """Publishes the blocks that the rows of a step filled, now that the step has run -> (pool, rows
    with their new hashes).

    Args:
        counts: the tokens that the step computed of each row.
        ends: the tokens of each row that are computed now.
        hashes: by request id, the new hashes of its blocks, see `scheduler.commit`.
    """
    size = config.block_size
    groups = config.groups
    if counts.count(1) == len(counts):
        rows = rows_at_boundary(tuple(ends), size)  # those that filled a block
    else:
        rows = [i for i, end in enumerate(ends) if end % size < counts[i]]
    if not rows:
        return pool, seqs
    filled: list[tuple[int, str]] = []
    updated = list(seqs)
    for i in rows:
        seq = seqs[i]
        new_hashes = hashes.get(seq.request.request_id)
        if new_hashes:
            seq = _with_hashes(seq, seq.hashes + new_hashes)
            updated[i] = seq
        if not seq.hashes:
            continue
        first = (ends[i] - counts[i]) // size
        last = min(ends[i] // size, len(seq.hashes))
        keys = block_keys(seq.hashes[first:last], groups)
        entries = zip(seq.blocks[first * groups : last * groups], keys, strict=True)
        if config.prefix_checkpoints is not None:
            entries = compress(entries, checkpoints.kept_entries(config, seq, first, last))
        filled += entries
    return (blocks.publish(pool, filled) if filled else pool), tuple(updated)


def publish_ends(
    pool: BlockPool, texts: Iterable[tuple[Seq, int]], config: SchedulerConfig
) -> BlockPool:
    """Publishes what a query behind the last full block of a text reads of groups with a window, if
    texts are checkpoints (checkpoints.py). Their blocks are given back next.

    Args:
        texts: sequences that stop running, and the computed tokens of each.
    """
    policy = config.prefix_checkpoints
    if policy is None or not policy.texts:
        return pool
    filled: list[tuple[int, str]] = []
    groups = config.groups
    for seq, computed in texts:
        boundary = computed // config.block_size
        if len(seq.hashes) < boundary:
            continue
        for group, view in enumerate(config.views):
            if view.window is None:
                continue
            for i in range(view.first(boundary), boundary):
                block = seq.blocks[i * groups + group]
                if block != HOLE:
                    filled.append((block, _key_of(seq.hashes[i], group)))
    return blocks.publish(pool, filled)


def junction(pool: BlockPool, seq: Seq, config: SchedulerConfig, num_shared: int) -> int:
    """The number of first blocks of a sequence that are in the cache in all groups that see
    everything, if that is more than the `num_shared` blocks that it can share; else 0.
    """
    policy = config.prefix_checkpoints
    full_groups = [group for group, view in enumerate(config.views) if view.window is None]
    if policy is None or not policy.junctions or not full_groups:
        return 0
    boundary = num_shared
    for block_hash in seq.hashes[num_shared : (seq.length - 1) // config.block_size]:
        keys = [_key_of(block_hash, group) for group in full_groups]
        if not all([key in pool.contents for key in keys]):
            break
        boundary += 1
    return boundary if boundary > num_shared else 0


def _with_hashes(seq: Seq, hashes: tuple[str, ...]) -> Seq:
    """The sequence with other hashes; `_replace` takes three times as long."""
    request, arrival, limit, length, computed, table, _, group, junction = seq
    return Seq(request, arrival, limit, length, computed, table, hashes, group, junction)
