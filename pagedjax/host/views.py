"""Block tables with holes: which blocks a sequence has, where queries do not see all of it
(kv_policies.py).

`SchedulerConfig.views` has a `View` for each group of layers; () is one group that sees everything,
and then no table has holes. With G groups, `Seq.blocks` has G entries for each block of tokens, in
the order of the groups. The entry of a block that was given back, or that was never needed, is
HOLE.

Between two transitions a running sequence has exactly the blocks that the query of its next token
sees, and the later blocks that it was given (`check`). `commit` gives back the blocks that the next
query does not see any more (`drop`).

A sequence gets blocks for the tokens that the step computes, not for all its known tokens at once:
of a long prompt most blocks are given back before the last one is needed. So admission compares the
free blocks with the most blocks that the sequence has at one time until its known tokens are
computed (`peak_blocks`). The blocks that running sequences still need count as taken
(`promised_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby, takewhile
from typing import NamedTuple

from pagedjax.host import blocks
from pagedjax.host.blocks import BlockPool
from pagedjax.host.kv_policies import ALL, View
from pagedjax.host.types import HOLE, Request, Running, SchedulerConfig, Seq

Views = tuple[View, ...]


def check_config(config: SchedulerConfig) -> None:
    """Raises ValueError for an entry that is no `View`, or views beside a baseline, which keeps
    every block.
    """
    for view in config.views:
        if not isinstance(view, View) or not _has_valid_sizes(view):
            raise ValueError(f"a view is {view!r}; it must be a View(window, kept) of blocks")
        if view.window == 0:
            raise ValueError(f"a view is {view!r}; a window has at least 1 block")
    baseline = config.reservation != "none" or not config.chunked_prefill or not config.mixed_steps
    if config.views and baseline:
        raise ValueError(
            f"views are {config.views}, and a baseline keeps every block; give it no views"
        )


def _has_valid_sizes(view: View) -> bool:
    """Whether the sizes are integers of at least 0, and the kept blocks ascend."""
    sizes = (*view.kept, view.window or 1)
    if not all(type(size) is int and size >= 0 for size in sizes):
        return False
    return list(view.kept) == sorted(set(view.kept))


def views_of(config: SchedulerConfig, request: Request) -> Views:
    """The view of a request's queries for each group of layers. A request whose sampling reads its
    tokens needs all blocks.
    """
    if request.keeps_blocks:
        return (ALL,) * config.groups
    return config.views or (ALL,)


class Run(NamedTuple):
    """Neighbouring groups with one view, from `first` to before `end`. Their entries are holes at
    the same blocks.
    """

    view: View
    first: int
    end: int


@lru_cache(maxsize=64)
def runs_of(views: Views) -> tuple[Run, ...]:
    """The groups as runs: a model with states has many groups of one view."""
    runs: list[Run] = []
    first = 0
    for view, groups in groupby(views):
        end = first + len(list(groups))
        runs.append(Run(view, first, end))
        first = end
    return tuple(runs)


def held(table: Sequence[int]) -> int:
    """The number of blocks in a table, without holes."""
    return len(table) - table.count(HOLE)


def visible_table(
    views: Views, num_blocks: int, block_of: Callable[[int, int], int]
) -> tuple[int, ...]:
    """The table of a sequence's first blocks, with a hole for each that the next query does not
    see.

    Args:
        block_of: (number of a block, group) -> its block in the pool.
    """
    groups = len(views)
    table = [HOLE] * (num_blocks * groups)
    for group, view in enumerate(views):
        for number in (*view.outside(num_blocks), *range(view.first(num_blocks), num_blocks)):
            table[number * groups + group] = block_of(number, group)
    return tuple(table)


def num_shareable(views: Views, num_blocks: int, is_cached: Callable[[int, int], bool]) -> int:
    """The most first blocks that a sequence can share, such that all that the next query sees is
    cached.

    Args:
        num_blocks: how many it may share.
        is_cached: (block, group) -> whether it is in the cache.
    """
    for group, view in enumerate(views):
        if view.window is None:
            shared = (is_cached(block, group) for block in range(num_blocks))
            num_blocks = sum(1 for _ in takewhile(bool, shared))
    windows = [(group, view) for group, view in enumerate(views) if view.window is not None]
    # from the longest beginning down, because mostly that one fits
    for block in range(num_blocks, 0, -1):
        if all(
            is_cached(visible, group)
            for group, view in windows
            for visible in (*view.outside(block), *range(view.first(block), block))
        ):
            return block
    return 0


def peak_blocks(config: SchedulerConfig, request: Request, tokens: int, chunk: int) -> int:
    """The most blocks that a sequence has at one time until its first `tokens` tokens are computed.

    Args:
        chunk: the most tokens of a step.
    """
    per_group = blocks.needed(tokens, config.block_size)
    total = 0
    for view, first, end in runs_of(views_of(config, request)):
        peak = per_group
        if view.window is not None:
            outside = len(view.outside(per_group - 1)) if per_group else 0
            window = view.window + blocks.needed(chunk - 1, config.block_size)
            peak = min(per_group, outside + window)
        total += peak * (end - first)
    return total


def entry_need(config: SchedulerConfig, seq: Seq) -> int:
    """The number of blocks that must be free for a sequence to enter: `peak_blocks` of its known
    tokens, at most the whole pool.

    `submit` ensures that a pool of fewer blocks suffices for shorter chunks (`smallest_pool`).
    """
    # `submit` ensures that all beams of a request fit with chunks of one token
    chunk = 1 if seq.is_beam else config.max_num_batched_tokens
    return min(peak_blocks(config, seq.request, seq.length, chunk), config.num_blocks)


def smallest_pool(config: SchedulerConfig, request: Request, limit: int) -> int:
    """The blocks of the smallest pool in which a sequence grows to `limit` tokens, one token a
    step.

    A branch computes the last token of its prompt again, and the block of that token may have to be
    copied.
    """
    need = peak_blocks(config, request, limit, 1)
    if request.forks and not request.beams:
        full_table = config.groups * blocks.needed(limit, config.block_size)
        return min(need + config.groups, full_table)
    return need


def sequences_that_fit(config: SchedulerConfig) -> int:
    """The number of sequences of max_model_len tokens whose blocks fit into the pool at once."""
    length = config.max_model_len
    if config.views:
        longest = Request("", prompt_len=1, max_tokens=length)
        need = peak_blocks(config, longest, length, config.max_num_batched_tokens)
    else:
        need = blocks.needed(length, config.block_size)
    return config.num_blocks // need


def entry_blocks(
    config: SchedulerConfig, seq: Seq, cached: Sequence[int], free: int, budget: int
) -> tuple[int, int]:
    """The blocks of a sequence that enters -> (number of new blocks that it gets now, number of
    blocks that it still needs after that).

    Args:
        cached: its entries that need no new block: shared blocks and holes; of a swapped sequence,
            shared blocks alone.
        free: the number of blocks that it may have.
        budget: the number of tokens that it may compute.
    """
    size = config.block_size
    groups = config.groups
    if seq.blocks:
        entries = len(seq.blocks)
        computed = seq.computed
        new_blocks = held(seq.blocks) - len(cached)
    else:
        entries = len(cached)
        computed = entries // groups * size
        new_blocks = 0
    covered = (entries + free - new_blocks) // groups * size
    count = min(seq.length - computed, budget, covered - computed)
    new_blocks += max(0, blocks.needed(computed + count, size) * groups - entries)
    return new_blocks, max(0, entry_need(config, seq) - held(cached) - new_blocks)


def promised_blocks(config: SchedulerConfig, active: Running) -> int:
    """The number of blocks that running sequences still need until their known tokens are
    computed.
    """
    total = 0
    for seq, length, computed in zip(active.seqs, active.lengths, active.computed, strict=True):
        if length - computed > 1:
            need = entry_need(config, seq._replace(length=length))
            total += max(0, need - held(seq.blocks))
    return total


def coverable_tokens(config: SchedulerConfig, pool: BlockPool, table: Sequence[int]) -> int:
    """The number of tokens that a table covers if it gets all free blocks."""
    return (len(table) // config.groups + pool.num_free // config.groups) * config.block_size


def extend(
    config: SchedulerConfig, pool: BlockPool, table: tuple[int, ...], tokens: int
) -> tuple[BlockPool, tuple[int, ...]]:
    """Extends a table to its first `tokens` tokens; the pool has the blocks -> (pool, table).

    The table itself is returned if it covers these tokens.
    """
    need = blocks.needed(tokens, config.block_size) * config.groups - len(table)
    if need <= 0:
        return pool, table
    allocation = blocks.allocate(pool, need)
    assert allocation is not None, "the tokens were bounded by the free blocks"
    pool, new_blocks = allocation
    return pool, table + new_blocks


def grow(
    config: SchedulerConfig, pool: BlockPool, active: Running, first: int, budget: int
) -> tuple[BlockPool, Running, list[int]]:
    """Gives the sequences from `first` on their tokens of this step, and blocks for them, in order.

    A chunk is cut where no block is left for it. It has one token at least, because `make_room`
    came before.

    Returns:
        (pool, running sequences, tokens of each until the budget is used)
    """
    seqs = list(active.seqs)
    counts: list[int] = []
    for i in range(first, len(seqs)):
        if budget == 0:
            break
        seq = seqs[i]
        length = active.lengths[i]
        computed = active.computed[i]
        coverable = coverable_tokens(config, pool, seq.blocks)
        count = min(length - computed, budget, coverable - computed)
        pool, table = extend(config, pool, seq.blocks, computed + count)
        if table is not seq.blocks:
            seqs[i] = seq._replace(length=length, computed=computed, blocks=table)
        counts.append(count)
        budget -= count
    return pool, active._replace(seqs=tuple(seqs)), counts


def drop(config: SchedulerConfig, pool: BlockPool, active: Running) -> tuple[BlockPool, Running]:
    """Gives back the blocks of running sequences that no later query sees."""
    seqs = list(active.seqs)
    groups = config.groups
    runs = [run for run in runs_of(config.views) if run.view.window is not None]
    freed: list[int] = []
    for i, seq in enumerate(seqs):
        if seq.request.keeps_blocks:
            continue
        query_block = position(active.lengths[i], active.computed[i]) // config.block_size
        table: list[int] | None = None
        for view, first, end in runs:
            dropped: list[int] = []
            # before the last hole, all blocks that are not kept are holes
            for block in range(view.first(query_block) - 1, -1, -1):
                if block in view.kept:
                    continue
                if seq.blocks[block * groups + first] == HOLE:
                    break
                dropped.append(block)
            if not dropped:
                continue
            table = table or list(seq.blocks)
            # a block is of no use without that of another group, so these are evicted together
            for block in dropped:
                entries = slice(block * groups + first, block * groups + end)
                freed += table[entries]
                table[entries] = (HOLE,) * (end - first)
        if table:
            seqs[i] = seq._replace(
                length=active.lengths[i], computed=active.computed[i], blocks=tuple(table)
            )
    if not freed:
        return pool, active
    return blocks.release(pool, freed), active._replace(seqs=tuple(seqs))


def position(length: int, computed: int) -> int:
    """The position of a sequence's next query. A beam that waits for its siblings may compute its
    last token again.
    """
    return min(computed, length - 1)


def check(config: SchedulerConfig, seq: Seq) -> None:
    """Checks that a running sequence has the blocks that its next query sees, and no others before
    them. Raises AssertionError.
    """
    query_block = position(seq.length, seq.computed) // config.block_size
    for group, view in enumerate(views_of(config, seq.request)):
        first = view.first(query_block)
        outside = view.outside(query_block)
        for i, block in enumerate(seq.blocks[group :: config.groups]):
            assert (block == HOLE) == (i < first and i not in outside), (
                f"{seq.request_id}: block {i} of group {group}"
            )
