"""Block tables with holes: which blocks a sequence has, where queries do not see all of it
(kv_policies.py).

`SchedulerConfig.views` has a `View` for each group of layers; () is one group that sees everything,
and then nothing of this file is used. With G groups, `Seq.blocks` has G entries for each block of
tokens, in the order of the groups. The entry of a block that was given back, or that was never
needed, is HOLE.

Between two transitions a running sequence has exactly the blocks that the query of its next token
sees, and those behind them that it was given (`check`). `commit` gives back what went out of sight
(`drop`).

A sequence gets blocks for the tokens that the step computes, not for all its known tokens at once:
of a long prompt most blocks are given back before the last one is needed. So admission compares
with the blocks that it has at most at one time until its known tokens are computed (`most_held`),
and counts what running sequences still need of theirs as taken (`promised`).
"""

from __future__ import annotations

from collections.abc import Sequence

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
        sizes = (*view.kept, view.window or 1) if isinstance(view, View) else ("",)
        if not all(type(size) is int and size >= 0 for size in sizes) or list(view.kept) != sorted(
            set(view.kept)
        ):
            raise ValueError(f"a view is {view!r}; it must be a View(window, kept) of blocks")
        if view.window == 0:
            raise ValueError(f"a view is {view!r}; a window has at least 1 block")
    if config.views and (
        config.reservation != "none" or not (config.chunked_prefill and config.mixed_steps)
    ):
        raise ValueError(
            f"views are {config.views}, and a baseline keeps every block; give it no views"
        )


def views_of(config: SchedulerConfig, request: Request) -> Views:
    """What the queries of a request need, by group. A request whose sampling reads its tokens needs
    all blocks.
    """
    return (ALL,) * config.groups if request.keeps_blocks else config.views or (ALL,)


def held(table: Sequence[int]) -> int:
    """The blocks of a table that are no holes."""
    return len(table) - table.count(HOLE)


def seen(views: Views, found: Sequence[int]) -> tuple[int, ...]:
    """A table of full blocks without those that the query behind them does not see.

    Args:
        found: the entries of a sequence's first blocks.
    """
    table, groups = list(found), len(views)
    at = len(found) // groups
    for group, view in enumerate(views):
        kept = view.outside(at)
        for i in range(view.first(at)):
            if i not in kept:
                table[i * groups + group] = HOLE
    return tuple(table)


def usable(views: Views, present: Sequence[Sequence[bool]]) -> int:
    """The most blocks of a beginning that can be shared: all that the query behind them sees is
    there.

    Args:
        present: of each group and block, whether it is found.
    """
    most = min((len(one) for one in present), default=0)
    fits = [True] * (most + 1)
    for view, found in zip(views, present, strict=True):
        run, kept_missing, kept = 0, False, frozenset(view.kept)
        for at in range(most + 1):  # a query in block `at`, behind the blocks before it
            needed = at - view.first(at)
            fits[at] = fits[at] and run >= needed and not (kept_missing and view.first(at) > 0)
            if at < most:
                run = run + 1 if found[at] else 0
                kept_missing = kept_missing or (at in kept and not found[at])
    return max(at for at in range(most + 1) if fits[at])


def most_held(config: SchedulerConfig, request: Request, tokens: int, chunk: int) -> int:
    """Blocks that a sequence has at most at one time until its first `tokens` tokens are computed.

    Args:
        chunk: tokens of a step at most.
    """
    whole, total = blocks.needed(tokens, config.block_size), 0
    for view in views_of(config, request):
        if view.window is None:
            total += whole
        else:
            kept = len(view.outside(whole - 1)) if whole else 0
            total += min(whole, kept + view.window + blocks.needed(chunk - 1, config.block_size))
    return total


def wanted(config: SchedulerConfig, seq: Seq) -> int:
    """Blocks that must be free for a sequence to enter: `most_held` of its known tokens, at most
    the whole pool.

    `submit` ensures that a pool of fewer blocks suffices for shorter chunks (`fewest`).
    """
    # `submit` ensures that all beams fit so
    chunk = 1 if seq.is_beam else config.max_num_batched_tokens
    return min(most_held(config, seq.request, seq.length, chunk), config.num_blocks)


def fewest(config: SchedulerConfig, request: Request, limit: int) -> int:
    """Blocks of the smallest pool in which a sequence of `limit` tokens ends, one token a step.

    A branch computes the last token of its prompt again, and the block of that token may have to be
    copied.
    """
    need = most_held(config, request, limit, 1)
    whole = config.groups * blocks.needed(limit, config.block_size)
    return min(need + config.groups, whole) if request.forks and not request.beams else need


def sequences_that_fit(config: SchedulerConfig) -> int:
    """Sequences of max_model_len tokens whose blocks fit into the pool at once."""
    whole = blocks.needed(config.max_model_len, config.block_size) * config.groups
    longest = Request("", 1, config.max_model_len)
    each = (
        most_held(config, longest, config.max_model_len, config.max_num_batched_tokens)
        if config.views
        else whole
    )
    return config.num_blocks // each


def entering(
    config: SchedulerConfig, seq: Seq, found: Sequence[int], free: int, budget: int
) -> tuple[int, int]:
    """Of a sequence that enters: (new blocks that it gets now, blocks that it still needs after
    that).

    Args:
        found: its blocks that need no new one: shared ones and holes; of a swapped one, shared ones
            alone.
        free: blocks that it may have.
        budget: tokens that it may compute.
    """
    size, groups = config.block_size, config.groups
    if seq.blocks:
        had, computed = len(seq.blocks), seq.computed
        new = held(seq.blocks) - len(found)
    else:
        had, computed, new = len(found), len(found) // groups * size, 0
    count = min(seq.length - computed, budget, (had + free - new) // groups * size - computed)
    new += max(0, blocks.needed(computed + count, size) * groups - had)
    return new, max(0, wanted(config, seq) - held(found) - new)


def promised(config: SchedulerConfig, active: Running) -> int:
    """Blocks that running sequences still need until their known tokens are computed."""
    total = 0
    for seq, length, computed in zip(active.seqs, active.lengths, active.computed, strict=True):
        if length - computed > 1:
            total += max(0, wanted(config, seq._replace(length=length)) - held(seq.blocks))
    return total


def room(config: SchedulerConfig, pool: BlockPool, table: Sequence[int]) -> int:
    """Tokens that a table can cover if it gets all free blocks."""
    return (len(table) // config.groups + pool.num_free // config.groups) * config.block_size


def extended(config: SchedulerConfig, pool: BlockPool, table: tuple[int, ...], tokens: int):
    """A table with blocks for its first `tokens` tokens; the pool has them. -> (pool, table)"""
    more = blocks.needed(tokens, config.block_size) * config.groups - len(table)
    if more <= 0:
        return pool, table
    taken = blocks.allocate(pool, more)
    assert taken is not None, "the tokens were bounded by the free blocks"
    return taken[0], table + taken[1]


def grow(
    config: SchedulerConfig, pool: BlockPool, active: Running, first: int, budget: int
) -> tuple[BlockPool, Running, list[int]]:
    """Give the sequences from `first` on their tokens of this step, and blocks for them, in order.

    A chunk is cut where no block is left for it. It has one token at least, because `make_room`
    came before.

    Returns:
        (pool, running sequences, tokens of each until the budget is used)
    """
    seqs, counts = list(active.seqs), []
    for i in range(first, len(seqs)):
        if budget == 0:
            break
        seq, length, computed = seqs[i], active.lengths[i], active.computed[i]
        count = min(length - computed, budget, room(config, pool, seq.blocks) - computed)
        pool, table = extended(config, pool, seq.blocks, computed + count)
        if table is not seq.blocks:
            seqs[i] = seq._replace(length=length, computed=computed, blocks=table)
        counts.append(count)
        budget -= count
    return pool, active._replace(seqs=tuple(seqs)), counts


def drop(config: SchedulerConfig, pool: BlockPool, active: Running) -> tuple[BlockPool, Running]:
    """Give back the blocks of running sequences that no later query sees."""
    seqs, groups, size, freed = list(active.seqs), config.groups, config.block_size, []
    for i, seq in enumerate(seqs):
        at = position(active.lengths[i], active.computed[i]) // size
        table: list[int] | None = None
        for group, view in enumerate(views_of(config, seq.request)):
            block = view.first(at) - 1
            while block >= 0:  # below the first hole that is not kept, all others are holes
                entry = block * groups + group
                if block not in view.kept:
                    if seq.blocks[entry] == HOLE:
                        break
                    table = table or list(seq.blocks)
                    freed.append(table[entry])
                    table[entry] = HOLE
                block -= 1
        if table:
            length, computed = active.lengths[i], active.computed[i]
            seqs[i] = seq._replace(length=length, computed=computed, blocks=tuple(table))
    if not freed:
        return pool, active
    return blocks.release(pool, freed), active._replace(seqs=tuple(seqs))


def position(length: int, computed: int) -> int:
    """The position of a sequence's next query. A beam that waits for its siblings may compute its
    last token again.
    """
    return min(computed, length - 1)


def check(config: SchedulerConfig, seq: Seq) -> None:
    """A running sequence has the blocks that its next query sees, and no others before them. Raises
    AssertionError.
    """
    at = position(seq.length, seq.computed) // config.block_size
    for group, view in enumerate(views_of(config, seq.request)):
        first, kept = view.first(at), view.outside(at)
        for i, block in enumerate(seq.blocks[group :: config.groups]):
            assert (block == HOLE) == (i < first and i not in kept), (
                f"{seq.request_id}: block {i} of group {group}"
            )
