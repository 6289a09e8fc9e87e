"""The block pool: who owns which cache block, and what the blocks hold. Pure: every transition returns a new pool and
leaves the old one whole.

Ids run from 1 to num_blocks; block 0 is the trash block and never in the pool. A block is in one of three states:

    empty --allocate--> owned (one or more block tables list it) --release--> empty, or, if its content was
      ^                   ^                                                   published, idle
      |                   +---------------------- share ----------------------- |
      +------------------------- evicted by `allocate`, oldest first -----------+

`publish` says what an owned block holds: a hash that stands for its tokens and everything before them (prefix.py).
`find` gives the blocks of a chain of hashes. An idle block keeps its content until nothing empty is left. Costs are
per block touched, never per block of the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from immutables import Map


class BlockPool(NamedTuple):
    num_blocks: int
    num_free: int  # blocks without an owner: empty or idle
    fresh: int  # ids from here to num_blocks have never been handed out
    returned: Any  # empty ids below `fresh`, as a list of pairs: None | (id, rest); the last returned comes first
    owners: Map[int, int]  # id -> number of owners, for owned blocks only
    contents: Map[str, int] = Map()  # hash -> the block that holds it
    hashes: Map[int, str] = Map()  # the same, the other way round
    idle: Map[int, int] = Map()  # stamp -> published block without an owner; the lowest stamp was let go first
    stamps: Map[int, int] = Map()  # the same, the other way round
    oldest: int = 0  # no stamp in `idle` is lower
    newest: int = 0  # the next stamp

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


def _flat(pool: BlockPool) -> tuple[Any, ...]:
    """The pool with its free blocks in a row."""
    return pool.num_blocks, _returned(pool), pool.owners, pool.contents, idle_ids(pool)


def _pile_up(
    num_blocks: int, returned: tuple[int, ...], owners: Map[int, int], contents: Map[str, int], idle: tuple[int, ...]
) -> BlockPool:
    pile = None
    for block in reversed(returned):
        pile = (block, pile)
    fresh = len(returned) + len(owners) + len(idle) + 1
    hashes = Map((block, key) for key, block in contents.items())
    stamped, stamps = Map(enumerate(idle)), Map((block, stamp) for stamp, block in enumerate(idle))
    free = num_blocks - len(owners)
    return BlockPool(num_blocks, free, fresh, pile, owners, contents, hashes, stamped, stamps, 0, len(idle))


def init(num_blocks: int) -> BlockPool:
    if num_blocks < 1:
        raise ValueError(f"num_blocks is {num_blocks}; the pool needs at least 1")
    return BlockPool(num_blocks, num_blocks, 1, None, Map())


def needed(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // block_size)


def allocate(pool: BlockPool, n: int) -> tuple[BlockPool, tuple[int, ...]] | None:
    """Take n free blocks, one owner each -> (pool, ids); None when there is no room (the pool is untouched).

    Empty blocks go first, then idle ones, whose content is lost, least recently used first.
    """
    if n > pool.num_free:
        return None
    ids, returned, fresh = [], pool.returned, pool.fresh
    while returned is not None and len(ids) < n:
        block, returned = returned
        ids.append(block)
    new = min(n - len(ids), pool.num_blocks + 1 - fresh)
    ids.extend(range(fresh, fresh + new))
    if len(ids) < n:
        pool, evicted = _evict(pool, n - len(ids))
        ids += evicted
    owners = pool.owners.mutate()
    for block in ids:
        owners[block] = 1
    free = pool.num_free - n
    pool = pool._replace(num_free=free, fresh=fresh + new, returned=returned, owners=owners.finish())
    return pool, tuple(ids)


def allocate_run(pool: BlockPool, n: int) -> tuple[BlockPool, tuple[int, ...]] | None:
    """Take n free blocks in a row, n a power of two, the first at a multiple of n -> (pool, ids); None without one.

    As from a buddy allocator (Knowlton 1965): of the free pieces that are large enough the smallest is split, and
    pieces that are free together are whole again. Costs go by the pool's blocks: this is a baseline (reservation.py).

    Raises:
        ValueError: n is no power of two, or blocks have been published, whose content it would not see.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"n is {n}; a run is a power of two of blocks")
    if pool.hashes:
        raise ValueError("runs come from pools that share nothing, and this one has published blocks")
    used = list(accumulate((block in pool.owners for block in range(1, pool.num_blocks + 1)), initial=0))
    start = _smallest_piece(used, n)
    if start is None:
        return None
    ids = tuple(range(start + 1, start + n + 1))
    owners = pool.owners.update(dict.fromkeys(ids, 1))
    returned = None
    for block in reversed(free_ids(pool)):
        returned = returned if block in owners else (block, returned)
    end = pool.num_blocks + 1
    return pool._replace(num_free=pool.num_free - n, fresh=end, returned=returned, owners=owners), ids


def _smallest_piece(used: Sequence[int], n: int) -> int | None:
    """Where the smallest free piece of at least n blocks begins. `used` counts the owned ones before each."""
    blocks, size = len(used) - 1, n
    while size <= blocks:
        for start in range(0, blocks - size + 1, size):
            twin = start ^ size
            merged = twin + size <= blocks and used[twin + size] == used[twin]
            if used[start + size] == used[start] and not merged:
                return start
        size *= 2
    return None


def _evict(pool: BlockPool, n: int) -> tuple[BlockPool, list[int]]:
    """Forget the content of the n blocks that have been idle for longest -> (pool without them, their ids)."""
    contents, hashes = pool.contents.mutate(), pool.hashes.mutate()
    idle, stamps = pool.idle.mutate(), pool.stamps.mutate()
    ids, oldest = [], pool.oldest
    while len(ids) < n:
        block = idle.pop(oldest, None)  # a gap is a block that found an owner again
        oldest += 1
        if block is not None:
            ids.append(block)
            del stamps[block], contents[hashes.pop(block)]
    pool = pool._replace(
        contents=contents.finish(), hashes=hashes.finish(), idle=idle.finish(), stamps=stamps.finish(), oldest=oldest
    )
    return pool, ids


def share(pool: BlockPool, ids: Iterable[int]) -> BlockPool:
    """One more owner for each block, owned or idle. Raises ValueError for an empty one."""
    owners, revived = pool.owners.mutate(), 0
    idle, stamps = pool.idle.mutate(), pool.stamps.mutate()
    for block in ids:
        stamp = stamps.pop(block, None)
        if stamp is None:
            owners[block] = _owned(owners, block) + 1
        else:
            del idle[stamp]
            owners[block] = 1
            revived += 1
    free, owners = pool.num_free - revived, owners.finish()
    if not revived:
        return pool._replace(owners=owners)
    return pool._replace(num_free=free, owners=owners, idle=idle.finish(), stamps=stamps.finish())


def release(pool: BlockPool, ids: Iterable[int]) -> BlockPool:
    """One owner less for each block; without owners it is free: idle if published, else empty.

    Of blocks that go idle those earlier in `ids` are evicted earlier: give a table's last block first, because a
    prefix without its end can still be used, an end without its beginning cannot.

    Raises:
        ValueError: a block that nobody owns.
    """
    owners, returned, freed = pool.owners.mutate(), pool.returned, 0
    idle, stamps, newest, hashes = pool.idle.mutate(), pool.stamps.mutate(), pool.newest, pool.hashes
    for block in ids:
        count = _owned(owners, block)
        if count > 1:
            owners[block] = count - 1
            continue
        del owners[block]
        freed += 1
        if hashes and block in hashes:
            idle[newest] = block
            stamps[block] = newest
            newest += 1
        else:
            returned = (block, returned)
    pool = pool._replace(num_free=pool.num_free + freed, returned=returned, owners=owners.finish())
    if newest == pool.newest:
        return pool
    return pool._replace(idle=idle.finish(), stamps=stamps.finish(), newest=newest)


def publish(pool: BlockPool, filled: Iterable[tuple[int, str]]) -> BlockPool:
    """Owned blocks and what they hold now, so that `find` gives them. A hash that is already held stays where it is.

    Raises:
        ValueError: a block that nobody owns, or that holds something else.
    """
    contents, hashes = pool.contents.mutate(), pool.hashes.mutate()
    for block, key in filled:
        _owned(pool.owners, block)
        if hashes.get(block, key) != key:
            raise ValueError(f"block {block} holds {hashes[block]}; it cannot hold {key} as well")
        if key not in contents:
            contents[key], hashes[block] = block, key
    return pool._replace(contents=contents.finish(), hashes=hashes.finish())


def find(pool: BlockPool, keys: Iterable[str]) -> tuple[int, ...]:
    """The blocks that hold the longest known beginning of a chain of hashes. They are owned or idle: `share` them."""
    ids = []
    for key in keys:
        block = pool.contents.get(key)
        if block is None:
            break
        ids.append(block)
    return tuple(ids)


def forget(pool: BlockPool) -> BlockPool:
    """Nothing is published any more: idle blocks become empty, owned ones stay with their owners."""
    returned = pool.returned
    for block in reversed(idle_ids(pool)):
        returned = (block, returned)
    return BlockPool(pool.num_blocks, pool.num_free, pool.fresh, returned, pool.owners)


def _owned(owners: Any, block: int) -> int:
    count = owners.get(block)
    if count is None:
        raise ValueError(f"block {block} has no owner; it was released twice or never allocated")
    return count


def free_ids(pool: BlockPool) -> tuple[int, ...]:
    """The free blocks in the order in which `allocate` hands them out."""
    return (*_returned(pool), *range(pool.fresh, pool.num_blocks + 1), *idle_ids(pool))


def idle_ids(pool: BlockPool) -> tuple[int, ...]:
    """Published blocks without an owner, in the order of eviction."""
    return tuple([block for _, block in sorted(pool.idle.items())])


def _returned(pool: BlockPool) -> tuple[int, ...]:
    ids, returned = [], pool.returned
    while returned is not None:
        block, returned = returned
        ids.append(block)
    return tuple(ids)


def check(pool: BlockPool, tables: Iterable[Sequence[int]]) -> None:
    """The pool's invariants against the block tables in use.

    Raises:
        AssertionError: a block both free and owned, a leaked one, a count that differs from its occurrences, or
            content that is published twice or not at all.
    """
    free = free_ids(pool)
    assert len(free) == len(set(free)) == pool.num_free, "the free list repeats a block or its count is off"
    used = Counter(block for table in tables for block in table)
    assert dict(pool.owners) == dict(used), "owner counts differ from occurrences in block tables"
    assert not set(free) & set(used), "a block is free and owned"
    assert set(free) | set(used) == set(range(1, pool.num_blocks + 1)), "a block leaked, or an id is out of range"
    assert dict(pool.hashes) == {block: key for key, block in pool.contents.items()}, "two blocks hold the same"
    assert dict(pool.stamps) == {block: stamp for stamp, block in pool.idle.items()}, "an idle block has two stamps"
    assert set(pool.stamps) == set(pool.hashes) - set(used), "idle blocks are those published and not owned"
    assert all(pool.oldest <= stamp < pool.newest for stamp in pool.idle), "a stamp lies outside the queue"
