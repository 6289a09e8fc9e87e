"""The block pool: who owns which cache block. Pure: every transition returns a new pool and leaves the old one whole.

Ids run from 1 to num_blocks; block 0 is the trash block and never in the pool. A block is free, or has one or more
owners (a block table that lists it). Costs are per block touched, never per block of the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from immutables import Map


class BlockPool(NamedTuple):
    num_blocks: int
    num_free: int
    fresh: int  # ids from here to num_blocks have never been handed out
    returned: Any  # free ids below `fresh`, as a list of pairs: None | (id, rest); the last returned comes first
    owners: Map[int, int]  # id -> number of owners, for owned blocks only

    # The list of pairs nests as deep as it is long: compared, printed or pickled as a tuple it would exhaust the stack.
    # (A Map as the stack would not, but costs 6 % of a step with arrivals, and collections of garbage.)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockPool) and _flat(self) == _flat(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_flat(self))

    def __repr__(self) -> str:
        return f"BlockPool({self.num_free} of {self.num_blocks} free)"

    def __reduce__(self) -> tuple[Any, ...]:
        return _pile_up, _flat(self)


def _flat(pool: BlockPool) -> tuple[int, tuple[int, ...], Map[int, int]]:
    """The pool with its free blocks in a row."""
    return pool.num_blocks, free_ids(pool)[: pool.num_free - pool.num_blocks + pool.fresh - 1], pool.owners


def _pile_up(num_blocks: int, returned: tuple[int, ...], owners: Map[int, int]) -> BlockPool:
    pile = None
    for block in reversed(returned):
        pile = (block, pile)
    fresh = len(returned) + len(owners) + 1
    return BlockPool(num_blocks, num_blocks - len(owners), fresh, pile, owners)


def init(num_blocks: int) -> BlockPool:
    if num_blocks < 1:
        raise ValueError(f"num_blocks is {num_blocks}; the pool needs at least 1")
    return BlockPool(num_blocks, num_blocks, 1, None, Map())


def allocate(pool: BlockPool, n: int) -> tuple[BlockPool, tuple[int, ...]] | None:
    """Take n free blocks, one owner each -> (pool, ids); None when there is no room (the pool is untouched)."""
    if n > pool.num_free:
        return None
    ids, returned, fresh = [], pool.returned, pool.fresh
    while returned is not None and len(ids) < n:
        block, returned = returned
        ids.append(block)
    rest = n - len(ids)
    ids.extend(range(fresh, fresh + rest))
    owners = pool.owners.mutate()
    for block in ids:
        owners[block] = 1
    return BlockPool(pool.num_blocks, pool.num_free - n, fresh + rest, returned, owners.finish()), tuple(ids)


def share(pool: BlockPool, ids: Iterable[int]) -> BlockPool:
    """One more owner for each block. Raises ValueError for a block that nobody owns."""
    owners = pool.owners.mutate()
    for block in ids:
        owners[block] = _owned(owners, block) + 1
    return pool._replace(owners=owners.finish())


def release(pool: BlockPool, ids: Iterable[int]) -> BlockPool:
    """One owner less for each block; without owners it is free. Raises ValueError for a block that nobody owns."""
    owners, returned, num_free = pool.owners.mutate(), pool.returned, pool.num_free
    for block in ids:
        count = _owned(owners, block)
        if count > 1:
            owners[block] = count - 1
        else:
            del owners[block]
            returned, num_free = (block, returned), num_free + 1
    return BlockPool(pool.num_blocks, num_free, pool.fresh, returned, owners.finish())


def _owned(owners: Any, block: int) -> int:
    count = owners.get(block)
    if count is None:
        raise ValueError(f"block {block} has no owner; it was released twice or never allocated")
    return count


def free_ids(pool: BlockPool) -> tuple[int, ...]:
    """The free blocks in the order in which `allocate` hands them out."""
    ids, returned = [], pool.returned
    while returned is not None:
        block, returned = returned
        ids.append(block)
    return (*ids, *range(pool.fresh, pool.num_blocks + 1))


def check(pool: BlockPool, tables: Iterable[Sequence[int]]) -> None:
    """The pool's invariants against the block tables in use.

    Raises:
        AssertionError: a block both free and owned, a leaked one, or a count that differs from its occurrences.
    """
    free = free_ids(pool)
    assert len(free) == len(set(free)) == pool.num_free, "the free list repeats a block or its count is off"
    used = Counter(block for table in tables for block in table)
    assert dict(pool.owners) == dict(used), "owner counts differ from occurrences in block tables"
    assert not set(free) & set(used), "a block is free and owned"
    assert set(free) | set(used) == set(range(1, pool.num_blocks + 1)), "a block leaked, or an id is out of range"
