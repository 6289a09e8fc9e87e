"""The block pool: the owners and the content of cache blocks. Every transition returns a new pool
and does not change the old one.

Ids are 1 to num_blocks; block 0 is the trash block and never in the pool. A 0 in a block table is a
hole (views.py), which `share` and `release` skip. A block is in one of three states:

    empty --allocate--> owned (one or more block tables --release--> empty, or idle if its
      ^                 list it)                                     content was published
      |                   ^                                                          |
      |                   +------------------------- share --------------------------+
      +------------- evicted by `allocate` or `keep_empty`, oldest first -------------+

`publish` records the content of an owned block: a hash of its tokens and of all tokens before them
(block_hashes.py). `find` returns the blocks of a chain of hashes. An idle block keeps its content
until `allocate` or `keep_empty` needs it, the oldest first. The cost of an operation depends on the
blocks that it touches, never on the size of the pool (of `allocate`: amortised, since it may
reverse a list of returned blocks).

Empty blocks are handed out first in, first out. So a sequence that ends unexpectedly does not
change which blocks the next steps get, and plans that were predicted for them stay right
(engine/lookahead.py).
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
    fresh: int  # ids from here to num_blocks were never allocated
    # Empty ids below `fresh` are a queue of two linked lists, None | (id, rest). Blocks leave at the
    # front of `returned`. They join at the front of `released`, which is reversed when `returned`
    # is empty.
    returned: Any
    released: Any
    owners: Map[int, int]  # id -> number of owners, for owned blocks only
    contents: Map[str, int] = Map()  # hash -> the block that holds it
    hashes: Map[int, str] = Map()  # the inverse of `contents`
    # stamp -> published block without an owner; the lowest stamp was released first
    idle: Map[int, int] = Map()
    stamps: Map[int, int] = Map()  # the inverse of `idle`
    oldest: int = 0  # no stamp in `idle` is lower
    newest: int = 0  # the next stamp

    # A linked list nests as deep as it is long: comparing, printing or pickling it as a tuple
    # exhausts the stack. (A Map would not, but it costs 6 % of a step with arrivals, and garbage
    # collections.)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockPool) and _flat(self) == _flat(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_flat(self))

    def __repr__(self) -> str:
        return f"BlockPool({self.num_free} of {self.num_blocks} free)"

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_flat, _flat(self)


def _flat(pool: BlockPool) -> tuple[Any, ...]:
    """The fields of the pool with its free blocks as flat tuples."""
    return pool.num_blocks, _returned(pool), pool.owners, pool.contents, idle_ids(pool)


def _from_flat(
    num_blocks: int,
    returned: tuple[int, ...],
    owners: Map[int, int],
    contents: Map[str, int],
    idle: tuple[int, ...],
) -> BlockPool:
    return BlockPool(
        num_blocks,
        num_free=num_blocks - len(owners),
        fresh=len(returned) + len(owners) + len(idle) + 1,
        returned=None,
        released=_pushed(None, returned),
        owners=owners,
        contents=contents,
        hashes=Map((block, key) for key, block in contents.items()),
        idle=Map(enumerate(idle)),
        stamps=Map((block, stamp) for stamp, block in enumerate(idle)),
        oldest=0,
        newest=len(idle),
    )


def init(num_blocks: int) -> BlockPool:
    if num_blocks < 1:
        raise ValueError(f"num_blocks is {num_blocks}; the pool needs at least 1")
    return BlockPool(num_blocks, num_blocks, fresh=1, returned=None, released=None, owners=Map())


def needed(tokens: int, block_size: int) -> int:
    """The number of blocks for a number of tokens."""
    return -(-tokens // block_size)


def allocate(pool: BlockPool, n: int) -> tuple[BlockPool, tuple[int, ...]] | None:
    """Takes n free blocks, one owner each -> (pool, ids); None if fewer are free.

    Blocks that were never allocated are taken first, then empty ones in the order in which they
    were released, then idle ones, least recently used first. An idle block that is taken loses its
    content.
    """
    if n > pool.num_free:
        return None
    fresh = min(pool.fresh + n, pool.num_blocks + 1)
    ids = list(range(pool.fresh, fresh))
    returned = pool.returned
    released = pool.released
    while len(ids) < n:
        if returned is None:
            returned = _pushed(None, _items(released))
            released = None
        if returned is None:
            break
        block, returned = returned
        ids.append(block)
    if len(ids) < n:
        pool, evicted = _evict(pool, n - len(ids))
        ids += evicted
    owners = pool.owners.mutate()
    for block in ids:
        owners[block] = 1
    num_free = pool.num_free - n
    pool = pool._replace(
        num_free=num_free,
        fresh=fresh,
        returned=returned,
        released=released,
        owners=owners.finish(),
    )
    return pool, tuple(ids)


def allocate_run(pool: BlockPool, n: int) -> tuple[BlockPool, tuple[int, ...]] | None:
    """Takes n contiguous free blocks, n a power of two, aligned to n -> (pool, ids); None if no
    such run is free.

    As a buddy allocator does (Knowlton 1965): the smallest sufficient free piece is split, and two
    free halves of a piece merge. The cost depends on the size of the pool: this is a baseline
    (reservation.py).

    Raises:
        ValueError: n is no power of two, or the pool has published blocks, which this function does
        not evict.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"n is {n}; a run is a power of two of blocks")
    if pool.hashes:
        raise ValueError(
            "runs come from pools that share nothing, and this one has published blocks"
        )
    owned = [block in pool.owners for block in range(1, pool.num_blocks + 1)]
    num_owned_before = list(accumulate(owned, initial=0))
    start = _smallest_piece(num_owned_before, n)
    if start is None:
        return None
    ids = tuple(range(start + 1, start + n + 1))
    owners = pool.owners.update(dict.fromkeys(ids, 1))
    still_free = [block for block in free_ids(pool) if block not in owners]
    pool = pool._replace(
        num_free=pool.num_free - n,
        fresh=pool.num_blocks + 1,
        returned=None,
        released=_pushed(None, still_free),
        owners=owners,
    )
    return pool, ids


def _smallest_piece(num_owned_before: Sequence[int], n: int) -> int | None:
    """The start of the smallest free piece of at least n blocks; None if there is none.

    Args:
        num_owned_before: for each place, counted from 0, the number of owned blocks before it.
    """
    num_blocks = len(num_owned_before) - 1

    def is_free(start: int, size: int) -> bool:
        end = start + size
        return end <= num_blocks and num_owned_before[end] == num_owned_before[start]

    size = n
    while size <= num_blocks:
        for start in range(0, num_blocks - size + 1, size):
            twin = start ^ size  # if both are free, they are one larger piece
            if is_free(start, size) and not is_free(twin, size):
                return start
        size *= 2
    return None


def _evict(pool: BlockPool, n: int) -> tuple[BlockPool, list[int]]:
    """Evicts the n blocks that have been idle for longest -> (pool without them, their ids)."""
    contents = pool.contents.mutate()
    hashes = pool.hashes.mutate()
    idle = pool.idle.mutate()
    stamps = pool.stamps.mutate()
    ids: list[int] = []
    oldest = pool.oldest
    while len(ids) < n:
        block = idle.pop(oldest, None)  # a gap is a block that has an owner again
        oldest += 1
        if block is not None:
            ids.append(block)
            del stamps[block], contents[hashes.pop(block)]
    pool = pool._replace(
        contents=contents.finish(),
        hashes=hashes.finish(),
        idle=idle.finish(),
        stamps=stamps.finish(),
        oldest=oldest,
    )
    return pool, ids


def keep_empty(pool: BlockPool, n: int) -> BlockPool:
    """Evicts idle blocks until n blocks are empty, or none is idle.

    So the next n blocks that `allocate` takes are known beforehand: a release adds blocks behind
    them.
    """
    num_empty = pool.num_free - len(pool.idle)
    num_evicted = min(n - num_empty, len(pool.idle))
    if num_evicted <= 0:
        return pool
    pool, evicted = _evict(pool, num_evicted)
    return pool._replace(released=_pushed(pool.released, evicted))


def share(pool: BlockPool, ids: Iterable[int]) -> BlockPool:
    """Adds an owner to each block, owned or idle. Raises ValueError for an empty one."""
    owners = pool.owners.mutate()
    idle = pool.idle.mutate()
    stamps = pool.stamps.mutate()
    num_revived = 0
    for block in ids:
        if not block:
            continue
        stamp = stamps.pop(block, None)
        if stamp is None:
            owners[block] = _owner_count(owners, block) + 1
        else:
            del idle[stamp]
            owners[block] = 1
            num_revived += 1
    pool = pool._replace(num_free=pool.num_free - num_revived, owners=owners.finish())
    if not num_revived:
        return pool
    return pool._replace(idle=idle.finish(), stamps=stamps.finish())


def release(pool: BlockPool, ids: Iterable[int]) -> BlockPool:
    """Removes an owner from each block. A block without owners is free: idle if published, else
    empty.

    Of the blocks that become idle, those earlier in `ids` are evicted earlier. Give a table's last
    block first: a prefix without its end can still be used, an end without its beginning cannot.

    Raises:
        ValueError: a block has no owner.
    """
    owners = pool.owners.mutate()
    released = pool.released
    idle = pool.idle.mutate()
    stamps = pool.stamps.mutate()
    newest = pool.newest
    hashes = pool.hashes
    num_freed = 0
    for block in ids:
        if not block:
            continue
        count = owners.get(block) or _owner_count(owners, block)  # which raises
        if count > 1:
            owners[block] = count - 1
            continue
        del owners[block]
        num_freed += 1
        if hashes and block in hashes:
            idle[newest] = block
            stamps[block] = newest
            newest += 1
        else:
            released = (block, released)
    pool = pool._replace(
        num_free=pool.num_free + num_freed, released=released, owners=owners.finish()
    )
    if newest == pool.newest:
        return pool
    return pool._replace(idle=idle.finish(), stamps=stamps.finish(), newest=newest)


def publish(pool: BlockPool, filled: Iterable[tuple[int, str]]) -> BlockPool:
    """Records the content of owned blocks, so that `find` returns them. A hash that is known keeps
    its first block.

    Raises:
        ValueError: a block has no owner, or has other content.
    """
    contents = pool.contents.mutate()
    hashes = pool.hashes.mutate()
    owners = pool.owners
    for block, key in filled:
        if block not in owners:
            _owner_count(owners, block)  # raises
        if hashes.get(block, key) != key:
            raise ValueError(f"block {block} holds {hashes[block]}; it cannot hold {key} as well")
        if key not in contents:
            contents[key] = block
            hashes[block] = key
    return pool._replace(contents=contents.finish(), hashes=hashes.finish())


def find(pool: BlockPool, keys: Iterable[str]) -> tuple[int, ...]:
    """The blocks of the longest known beginning of a chain of hashes. They are owned or idle:
    `share` them.
    """
    ids: list[int] = []
    for key in keys:
        block = pool.contents.get(key)
        if block is None:
            break
        ids.append(block)
    return tuple(ids)


def forget(pool: BlockPool) -> BlockPool:
    """Removes all published content: idle blocks become empty, owned blocks keep their owners."""
    released = _pushed(pool.released, idle_ids(pool))
    return BlockPool(
        pool.num_blocks, pool.num_free, pool.fresh, pool.returned, released, pool.owners
    )


def _owner_count(owners: Any, block: int) -> int:
    """The number of owners of a block. Raises ValueError if it has none."""
    count = owners.get(block)
    if count is None:
        raise ValueError(f"block {block} has no owner; it was released twice or never allocated")
    return count


def free_ids(pool: BlockPool) -> tuple[int, ...]:
    """The free blocks in the order of allocation."""
    return (*range(pool.fresh, pool.num_blocks + 1), *_returned(pool), *idle_ids(pool))


def idle_ids(pool: BlockPool) -> tuple[int, ...]:
    """Published blocks without an owner, in the order of eviction."""
    return tuple([block for _, block in sorted(pool.idle.items())])


def _returned(pool: BlockPool) -> tuple[int, ...]:
    """The empty blocks that were allocated before, in the order in which they were released."""
    return (*_items(pool.returned), *reversed(_items(pool.released)))


def _items(linked_list: Any) -> list[int]:
    """The ids of a linked list, from its front."""
    ids: list[int] = []
    while linked_list is not None:
        block, linked_list = linked_list
        ids.append(block)
    return ids


def _pushed(linked_list: Any, ids: Iterable[int]) -> Any:
    """A linked list with more ids in front; the last one is the first of the list."""
    for block in ids:
        linked_list = (block, linked_list)
    return linked_list


def check(pool: BlockPool, tables: Iterable[Sequence[int]]) -> None:
    """Checks the invariants of the pool against the block tables in use.

    Raises:
        AssertionError: a block is both free and owned, or leaked; a count differs from the
            occurrences of its block; or two blocks have the same content.
    """
    free = free_ids(pool)
    assert len(free) == len(set(free)) == pool.num_free, (
        "the free list repeats a block or its count is off"
    )
    used = Counter(block for table in tables for block in table if block)
    assert dict(pool.owners) == dict(used), "owner counts differ from occurrences in block tables"
    assert not set(free) & set(used), "a block is free and owned"
    assert set(free) | set(used) == set(range(1, pool.num_blocks + 1)), (
        "a block leaked, or an id is out of range"
    )
    assert dict(pool.hashes) == {block: key for key, block in pool.contents.items()}, (
        "two blocks hold the same"
    )
    assert dict(pool.stamps) == {block: stamp for stamp, block in pool.idle.items()}, (
        "an idle block has two stamps"
    )
    assert set(pool.stamps) == set(pool.hashes) - set(used), (
        "idle blocks are those published and not owned"
    )
    assert all(pool.oldest <= stamp < pool.newest for stamp in pool.idle), (
        "a stamp lies outside the queue"
    )
