"""The block pool: its operations match a dictionary of counts, and invalid operations are
refused.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.host import blocks
from pagedjax.host.blocks import BlockPool
from tests import drawn
from tests.refusals import refused


def take(pool: BlockPool, n: int, allocate=blocks.allocate) -> tuple[BlockPool, tuple[int, ...]]:
    allocation = allocate(pool, n)
    assert allocation is not None
    return allocation


def facts(pool: BlockPool) -> tuple[int, tuple[int, ...], dict[int, int], dict[str, int]]:
    return pool.num_free, blocks.free_ids(pool), dict(pool.owners), dict(pool.contents)


@pytest.mark.parametrize("size", [0, -1])
def test_a_pool_without_blocks_is_refused(size):
    with refused(f"num_blocks is {size}; the pool needs at least 1"):
        blocks.init(size)


def test_the_block_released_first_is_allocated_first_behind_those_that_are_new():
    pool, (a, b, c) = take(blocks.init(5), 3)
    pool = blocks.release(pool, [c, a])
    assert blocks.free_ids(pool) == (4, 5, c, a)
    pool, ids = take(pool, 3)
    assert ids == (4, 5, c)
    pool = blocks.release(pool, [5, b])
    assert take(pool, 3)[1] == (a, 5, b)


def test_an_unexpected_release_does_not_change_what_the_next_allocations_get():
    pool, ids = take(blocks.init(9), 6)
    pool = blocks.release(pool, ids[:2])
    ended = blocks.release(pool, ids[2:4])
    for n in range(6):
        assert take(ended, n)[1] == take(pool, n)[1]


@pytest.mark.parametrize("ids", [[3], [-1], [0, 3], [1, 1]])
def test_releasing_a_block_without_an_owner_is_an_error(ids):
    pool, _ = take(blocks.init(3), 2)
    with refused(rf"block {ids[-1]} has no owner; it was released twice or never allocated"):
        blocks.release(pool, ids)
    blocks.check(pool, [(1, 2)])


def test_sharing_a_block_without_an_owner_is_an_error():
    pool, _ = take(blocks.init(3), 2)
    with refused("block 3 has no owner"):
        blocks.share(pool, [1, 3])
    blocks.check(pool, [(1, 2)])


@pytest.mark.parametrize(
    "tables",
    [
        [(1, 2)],  # a table forgot block 3
        [(1, 2, 3), (3,)],  # a table lists a block that it never shared
        [(1, 2, 3, 4)],  # a table lists a free block
    ],
)
def test_check_finds_tables_that_disagree_with_the_owners(tables):
    pool, _ = take(blocks.init(4), 3)
    with pytest.raises(AssertionError, match="owner counts"):
        blocks.check(pool, tables)


@pytest.mark.parametrize(
    ("broken", "table", "message"),
    [
        (lambda pool: pool._replace(owners=pool.owners.delete(1)), (2,), "leaked"),
        (
            lambda pool: blocks.release(pool, (1,))._replace(owners=pool.owners),
            (1, 2),
            "free and owned",
        ),
        (lambda pool: pool._replace(num_free=3), (1, 2), "free list"),
    ],
)
def test_check_finds_a_broken_free_list(broken, table, message):
    pool, _ = take(blocks.init(4), 2)
    with pytest.raises(AssertionError, match=message):
        blocks.check(broken(pool), [table])


def test_pools_with_equal_history_are_equal():
    pool, ids = take(blocks.init(9), 4)
    released, equal = (blocks.release(take(blocks.init(9), 4)[0], ids) for _ in range(2))
    assert released == equal
    assert hash(released) == hash(equal)
    for unequal in (blocks.release(pool, ids[::-1]), pool, blocks.init(9), blocks.init(8)):
        assert released != unequal
    assert released != tuple(released)


def test_a_large_pool_can_be_compared_printed_and_copied():
    """The free list must not make Python recurse once for each block."""
    pool, ids = take(blocks.init(30_000), 20_000)
    pool = blocks.release(pool, ids[1:])
    loaded = pickle.loads(pickle.dumps(pool))
    assert loaded == pool == copy.deepcopy(pool)
    assert loaded != blocks.release(loaded, ids[:1])
    assert blocks.free_ids(loaded) == blocks.free_ids(pool)
    blocks.check(loaded, [ids[:1]])
    assert repr(pool) == "BlockPool(29999 of 30000 free)"


def test_content_published_twice_stays_in_its_first_block():
    pool, (a, b) = take(blocks.init(2), 2)
    pool = blocks.publish(blocks.publish(pool, [(a, "x")]), [(b, "x")])
    assert blocks.find(pool, ["x", "y"]) == (a,)
    assert blocks.find(pool, ["y", "x"]) == ()
    pool = blocks.release(pool, (a, b))
    assert blocks.idle_ids(pool) == (a,)
    blocks.check(pool, [])


def test_publish_refuses_a_second_content_and_a_block_without_an_owner():
    pool, (a,) = take(blocks.init(2), 1)
    pool = blocks.publish(pool, [(a, "x")])
    assert blocks.publish(pool, [(a, "x")]) == pool
    with refused("block 1 holds x; it cannot hold y as well"):
        blocks.publish(pool, [(a, "y")])
    with refused("block 2 has no owner"):
        blocks.publish(pool, [(2, "y")])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"hashes": blocks.Map()}, "two blocks hold the same"),
        ({"stamps": blocks.Map()}, "two stamps"),
        ({"idle": blocks.Map(), "stamps": blocks.Map()}, "free list"),
        ({"newest": 0}, "outside the queue"),
    ],
)
def test_check_finds_inconsistent_content(broken, message):
    pool, ids = take(blocks.init(3), 2)
    pool = blocks.release(blocks.publish(pool, zip(ids, "ab", strict=True)), ids[:1])
    blocks.check(pool, [ids[1:]])
    with pytest.raises(AssertionError, match=message):
        blocks.check(pool._replace(**broken), [ids[1:]])


# --- runs -----------------------------------------------------------------------------------------


def take_run(pool: BlockPool, n: int) -> tuple[BlockPool, tuple[int, ...]]:
    return take(pool, n, blocks.allocate_run)


@pytest.mark.parametrize("n", [-1, 0, 3, 6])
def test_a_run_must_be_a_power_of_two(n):
    with refused(f"n is {n}; a run is a power of two of blocks"):
        blocks.allocate_run(blocks.init(8), n)


def test_runs_are_refused_while_blocks_are_published():
    pool, ids = take(blocks.init(4), 1)
    pool = blocks.release(blocks.publish(pool, [(1, "x")]), ids)
    with refused("runs come from pools that share nothing, and this one has published blocks"):
        blocks.allocate_run(pool, 2)
    assert take_run(blocks.forget(pool), 4)[1] == (1, 2, 3, 4)


class Buddies:
    """A buddy allocator with its free pieces in a list: taking splits one, giving back merges it
    with its twin.
    """

    def __init__(self, size: int) -> None:
        # (first block counted from 0, blocks)
        self.size = size
        self.free = list[tuple[int, int]]()
        start = 0
        for length in (16, 8, 4, 2, 1):
            if start + length <= size:
                self.free.append((start, length))
                start += length

    def take(self, n: int) -> int | None:
        large = [(length, start) for start, length in self.free if length >= n]
        if not large:
            return None
        length, start = min(large)
        self.free.remove((start, length))
        while length > n:
            length //= 2
            self.free.append((start + length, length))
        return start

    def give_back(self, start: int, length: int) -> None:
        twin = (start - length if start // length % 2 else start + length, length)
        if twin in self.free:
            self.free.remove(twin)
            self.give_back(min(start, twin[0]), 2 * length)
        else:
            self.free.append((start, length))


@settings(max_examples=200)
@given(
    size=st.integers(1, 31),
    script=st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60),
)
def test_random_runs_match_a_buddy_allocator(size: int, script: list[tuple[bool, int]]):
    pool = blocks.init(size)
    buddies = Buddies(size)
    runs: list[tuple[int, ...]] = []
    past = []
    for takes, number in script:
        past.append((pool, facts(pool)))
        n = 1 << number % 5
        if takes:
            allocation = blocks.allocate_run(pool, n)
            start = buddies.take(n)
            assert (allocation is None) == (start is None), (
                "refused although a piece is free, or the reverse"
            )
            if allocation is not None and start is not None:
                pool, ids = allocation
                assert ids == tuple(range(start + 1, start + n + 1)), (
                    "another piece than the smallest that suffices"
                )
                assert start % n == 0
                still_free = [block for block in blocks.free_ids(past[-1][0]) if block not in ids]
                assert list(blocks.free_ids(pool)) == still_free, (
                    "the others are handed out in another order"
                )
                runs.append(ids)
        elif runs:
            ids = runs.pop(number % len(runs))
            pool = blocks.release(pool, ids[::-1])
            buddies.give_back(ids[0] - 1, len(ids))
        assert pool.num_free == sum(length for _, length in buddies.free)
        blocks.check(pool, runs)
    assert all(facts(pool) == before for pool, before in past), "an old pool changed"
    while runs:
        pool = blocks.release(pool, runs.pop())
    largest = 1 << size.bit_length() - 1
    assert blocks.allocate_run(pool, 2 * largest) is None
    assert take_run(pool, largest)[1] == tuple(range(1, largest + 1))


# --- any history ----------------------------------------------------------------------------------

actions = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "share", "release", "publish", "reuse", "keep", "forget"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


@drawn.given(120, 300, size=st.integers(1, 12), script=actions)
def test_random_operations_match_a_dictionary_of_counts(size: int, script: list[tuple[str, int]]):
    pool = blocks.init(size)
    tables: list[list[int]] = []  # one table for each owner
    content: dict[str, int] = {}  # hash -> block
    idle: list[int] = []
    empty = list(range(1, size + 1))  # in the order of allocation
    past = []
    for action, number in script:
        before = {block for table in tables for block in table}
        past.append((pool, facts(pool)))
        if action == "allocate":
            counts = Counter(block for table in tables for block in table)
            allocation = blocks.allocate(pool, number)
            assert (allocation is None) == (number > size - len(counts)), (
                "refused although blocks were free, or the reverse"
            )
            if allocation is not None:
                pool, ids = allocation
                assert len(set(ids)) == len(ids) == number
                assert not set(ids) & set(counts), "handed out a block that has an owner"
                assert ids[: len(empty)] == tuple(empty[:number]), "another order of empty blocks"
                empty = empty[number:]
                tables.append(list(ids))
        elif action == "share" and tables:
            tables.append(list(tables[number % len(tables)]))
            pool = blocks.share(pool, tables[-1])
        elif action == "release" and tables:
            table = tables.pop(number % len(tables))
            pool = blocks.release(pool, table)
            owned = {block for table in tables for block in table}
            empty += [b for b in table if b not in owned and b not in content.values()]
        elif action == "publish" and tables:
            keys = [(block, f"{block}@{len(past)}") for block in tables[number % len(tables)]]
            new = [(block, key) for block, key in keys if block not in content.values()]
            content |= {key: block for block, key in new}
            pool = blocks.publish(pool, new)
        elif action == "reuse" and idle:
            tables.append([idle[number % len(idle)]])
            pool = blocks.share(pool, tables[-1])
        elif action == "keep":
            pool = blocks.keep_empty(pool, number)
            while idle and len(empty) < number:
                block = idle.pop(0)
                empty.append(block)
                content = {key: other for key, other in content.items() if other != block}
        elif action == "forget":
            content.clear()
            pool = blocks.forget(pool)
            empty += idle

        owned = {block for table in tables for block in table}
        evicted = [block for block in idle if block in owned and action == "allocate"]
        assert evicted == idle[: len(evicted)], (
            "another block than the longest idle one was evicted"
        )
        assert not evicted or set(range(1, size + 1)) <= owned | set(idle), (
            "evicted an idle block although others were empty"
        )
        content = {key: block for key, block in content.items() if block not in evicted}
        still_idle = [block for block in idle if block not in owned and block in content.values()]
        idle = still_idle + [
            b for b in blocks.idle_ids(pool) if b in before - owned and b in content.values()
        ]
        assert list(blocks.idle_ids(pool)) == idle
        assert dict(pool.contents) == content
        counts = Counter(block for table in tables for block in table)
        assert dict(pool.owners) == dict(counts)
        assert blocks.free_ids(pool) == (*empty, *idle)
        assert sorted(blocks.free_ids(pool)) == sorted(set(range(1, size + 1)) - set(counts))
        assert pool.num_free == size - len(counts)
        blocks.check(pool, tables)
        assert pickle.loads(pickle.dumps(pool)) == pool
        for block in (-1, *range(1, size + 2)):  # 0 is a hole of a table
            if block not in counts:
                with refused(f"block {block} has no owner"):
                    blocks.release(pool, [block])
    assert all(facts(pool) == before for pool, before in past), "an old pool changed"
