"""The prefix cache of a hybrid model under a load of texts that come one after the other: what it
finds, by the states that it keeps.

It makes the transitions of the scheduler (pagedjax/host) for one sequence at a time, counted in
pool blocks and without tables: a trace of 12,000 requests takes seconds, and the scheduler itself
needs an hour for the 100 groups of such a model. A test compares the two.

A block of tokens takes one block of the pool for keys and values, and `states` blocks in layers that
keep a state. The states of a block are found together or not at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import compress
from typing import NamedTuple

from pagedjax.host import blocks
from pagedjax.options.config import PrefixCheckpoints

KEYS = 0  # the part of a block of tokens that is keys and values; other parts are of its states


class Text(NamedTuple):
    """A prompt and its answer.

    keys: of the full blocks of both, as far as they are computed: the last token of an answer is
        not. Equal keys stand for equal blocks behind equal blocks.
    prompt, output: tokens, at least 1.
    """

    keys: Sequence[int]
    prompt: int
    output: int


class CacheSizes(NamedTuple):
    """A pool.

    states: blocks of the pool for the states of a block of tokens.
    chunk: the most tokens of a step.
    """

    block_size: int
    num_blocks: int
    states: int
    chunk: int


class Served(NamedTuple):
    """What one text found, in tokens of its prompt.

    hit_tokens: those behind which it began.
    present_tokens: those whose keys and values were in the cache.
    """

    hit_tokens: int
    present_tokens: int


class Content(NamedTuple):
    """Pool blocks with content that can be found."""

    attention: int
    states: int


def keys_of(
    pieces: Iterable[tuple[Hashable, int, int]], block_size: int, key_by_block: dict[Hashable, int]
) -> tuple[int, ...]:
    """The keys of the full blocks of a text.

    Args:
        pieces: (what, from, to): the tokens from - to of something, which the text has in this
            order.
        key_by_block: the keys of all texts so far, which this function extends.
    """
    keys: list[int] = []
    key = -1
    content: list[Hashable] = []
    missing = block_size
    for name, start, end in pieces:
        while start < end:
            count = min(missing, end - start)
            content.append((name, start, count))
            start += count
            missing -= count
            if not missing:
                key = key_by_block.setdefault((key, *content), len(key_by_block))
                keys.append(key)
                content = []
                missing = block_size
    return tuple(keys)


class CheckpointCache:
    """A cache that serves texts.

    What is idle together is one item, numbered parts * key + part. A state has several parts if
    some of its blocks were evicted and computed again.
    """

    def __init__(self, sizes: CacheSizes, policy: PrefixCheckpoints | None) -> None:
        """policy: which states are kept; None: all."""
        self.sizes = sizes
        self.parts = 1 + sizes.states  # of a block of tokens, at most
        self._policy = policy
        self._empty = sizes.num_blocks  # blocks without content and owner
        # item without an owner -> its blocks, in the order of eviction
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._contents: set[int] = set()  # keys whose keys and values can be found
        self._present: dict[int, int] = {}  # key -> blocks of its state that can be found
        self._num_idle = 0

    @property
    def content(self) -> Content:
        return Content(len(self._contents), sum(self._present.values()))

    def serve(self, text: Text) -> Served:
        """Computes a text.

        Raises:
            ValueError: the pool has not enough blocks for it.
        """
        size = self.sizes.block_size
        ends_at = text.prompt + text.output - 1  # tokens that are computed
        limit = (text.prompt - 1) // size
        present_blocks = 0
        while present_blocks < limit and text.keys[present_blocks] in self._contents:
            present_blocks += 1
        shared = present_blocks
        if self.sizes.states:
            while shared and self._present.get(text.keys[shared - 1], 0) < self.sizes.states:
                shared -= 1
        sequence = _Sequence(self, text, shared)
        policy = self._policy
        boundaries = set[int]()
        if policy is not None and policy.prompts:
            boundaries.add(limit)
        if policy is not None and policy.junctions and present_blocks > shared:
            boundaries.add(present_blocks)
        distance = policy.interval // size if policy is not None else 1
        computed = shared * size
        while computed < ends_at:
            covered = (sequence.length + self._free // (1 + self.sizes.states)) * size
            if computed < text.prompt:
                end = min(text.prompt, computed + self.sizes.chunk, covered)
            else:  # one token a step, of which those at the end of a block matter
                end = min(ends_at, (computed // size + 1) * size)
            if min(end, covered) <= computed:
                raise ValueError(
                    f"a text of {text.prompt} + {text.output} tokens needs more than the "
                    f"{self.sizes.num_blocks} blocks of the pool; give it more"
                )
            sequence.extend(blocks.needed(end, size))
            first = computed // size
            last = end // size
            sequence.publish_keys(first, last)
            if self.sizes.states:
                kept_boundaries = {b for b in boundaries if first < b <= last}
                if distance:
                    kept_boundaries.update(
                        range(first // distance * distance + distance, last + 1, distance)
                    )
                for boundary in sorted(kept_boundaries):
                    sequence.publish_state(boundary - 1)
            computed = end
            if computed < ends_at:
                sequence.release_states(computed // size - 1)  # later queries read two blocks
        if policy is not None and policy.texts and ends_at >= size:
            sequence.publish_state(ends_at // size - 1)
        sequence.release()
        return Served(shared * size, present_blocks * size)

    # --- the pool ---------------------------------------------------------------------------------

    @property
    def _free(self) -> int:
        return self._empty + self._num_idle

    def allocate(self, n: int) -> None:
        """Takes n free blocks: empty ones first, then the content that is idle for longest."""
        missing = n - self._empty
        self._empty = max(0, -missing)
        if missing <= 0:
            return
        self._num_idle -= missing
        pop_oldest = self._idle.popitem
        keys: list[int] = []
        while missing > 0:
            item, count = pop_oldest(last=False)
            key, part = divmod(item, self.parts)
            if part == KEYS:
                keys.append(key)
                missing -= 1
                continue
            evicted = min(count, missing)
            missing -= evicted
            self._present[key] -= evicted
            if not self._present[key]:
                del self._present[key]
            if evicted < count:
                self._idle[item] = count - evicted
                self._idle.move_to_end(item, last=False)
        self._contents.difference_update(keys)

    def empty(self, n: int) -> None:
        """Takes n blocks without content back."""
        self._empty += n

    def idle_keys(self, keys: Sequence[int]) -> None:
        """Takes keys and values back, in the order of eviction."""
        self._idle.update(dict.fromkeys([self.parts * key + KEYS for key in keys], 1))
        self._num_idle += len(keys)

    def idle_state(self, key: int, count: int) -> None:
        """Takes blocks of a state back."""
        item = self.parts * key + 1
        while item in self._idle:
            item += 1
        self._idle[item] = count
        self._num_idle += count

    def share_keys(self, keys: Sequence[int]) -> None:
        """Gives keys and values an owner."""
        for key in keys:
            self._num_idle -= self._idle.pop(self.parts * key + KEYS, 0)

    def share_state(self, key: int) -> int:
        """Gives all blocks of a state an owner -> how many they are."""
        first = self.parts * key + 1
        for item in range(first, first + self.sizes.states):
            self._num_idle -= self._idle.pop(item, 0)
        return self.sizes.states

    def publish_keys(self, keys: Sequence[int]) -> list[bool]:
        """Makes keys and values of blocks findable -> for each block, whether it was not yet."""
        are_new = [key not in self._contents for key in keys]
        self._contents.update(keys)
        return are_new

    def publish_state(self, key: int) -> int:
        """Makes the state of a block findable -> how many of its blocks were not yet."""
        present = self._present.get(key, 0)
        self._present[key] = self.sizes.states
        return self.sizes.states - present


class _Sequence:
    """The blocks of the text that is computed."""

    def __init__(self, cache: CheckpointCache, text: Text, shared: int) -> None:
        self._cache = cache
        self._keys = text.keys
        self.length = shared  # blocks of tokens in its table
        self._are_own = [True] * shared  # whether keys and values can be found in its own block
        cache.share_keys(text.keys[:shared])
        self._first_state = max(shared - 1, 0)  # it has the states of this block and later ones
        self._findable: dict[int, int] = {}  # block -> blocks of its state that can be found by it
        if shared and cache.sizes.states:
            self._findable[shared - 1] = cache.share_state(text.keys[shared - 1])

    def extend(self, length: int) -> None:
        """Gets blocks for its first `length` blocks of tokens."""
        if length > self.length:
            self._cache.allocate((length - self.length) * (1 + self._cache.sizes.states))
            self._are_own += [False] * (length - self.length)
            self.length = length

    def publish_keys(self, first: int, last: int) -> None:
        """Publishes keys and values of the blocks from `first` to before `last`, which are full."""
        self._are_own[first:last] = self._cache.publish_keys(self._keys[first:last])

    def publish_state(self, block: int) -> None:
        """Publishes the state of a full block."""
        if block >= self._first_state and not self._findable.get(block):
            self._findable[block] = self._cache.publish_state(self._keys[block])

    def release(self) -> None:
        """Gives all blocks back, the last one first."""
        cache = self._cache
        first_state = self._first_state if cache.sizes.states else self.length
        for block in range(self.length - 1, first_state - 1, -1):
            self._release_state(block)
            self._release_keys(block, block + 1)
        self._release_keys(0, min(first_state, self.length))

    def _release_keys(self, first: int, last: int) -> None:
        """Gives back keys and values of the blocks from `first` to before `last`."""
        are_own = self._are_own[first:last]
        own_keys = list(compress(self._keys[first:last], are_own))
        self._cache.empty(last - first - len(own_keys))
        self._cache.idle_keys(own_keys[::-1])

    def release_states(self, end: int) -> None:
        """Gives back the states before those of block `end`, the last one first."""
        if end <= self._first_state:
            return
        findable = [block for block in self._findable if block < end]
        missing = (end - self._first_state - len(findable)) * self._cache.sizes.states
        self._cache.empty(missing)
        for block in sorted(findable, reverse=True):
            self._release_state(block)
        self._first_state = end

    def _release_state(self, block: int) -> None:
        count = self._findable.pop(block, 0)
        self._cache.empty(self._cache.sizes.states - count)
        if count:
            self._cache.idle_state(self._keys[block], count)
