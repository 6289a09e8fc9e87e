"""`Mixer`: a layer that keeps something else than keys and values, and `KeptPages`, what it keeps.

    of a token    numbers that later tokens read: the inputs of a convolution, a key, a value
    of a block    numbers that hold before the first token of the block: a recurrent state

A layer never changes what another step needs. A token's numbers are written when the token is
computed; a block's are written when its first token is. So a token may be computed twice (a branch,
a beam), a draft may be rejected, and a block may be shared or copied: the scheduler treats these
pages as keys and values. A query reads its own block and some before it (`Mixer.window`). What lies
before is given back, and is found again by its hash until it is evicted, as with windows of
attention. So each full block is a checkpoint of the state.

All pages of a cache have one size: that of the keys and values of one layer of attention. Here they
are plain memory. Token arrays take whole page arrays: S parts of equal size, one for each token.
Block arrays follow them. Numbers are stored as words of the pages' dtype, so nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.device.attention import Attend
from pagedjax.device.batch import Batch
from pagedjax.device.cache import BlockSizes, Pages
from pagedjax.device.extras import LayerTables

if TYPE_CHECKING:
    from pagedjax.device.models.decoder import DecoderConfig

ARRAYS_OF_PAGE = ("k", "v")


class Kept(NamedTuple):
    """What a layer keeps, by name: shapes and dtypes for one token, and for one block."""

    tokens: Mapping[str, jax.ShapeDtypeStruct]
    blocks: Mapping[str, jax.ShapeDtypeStruct] = {}


@dataclass(frozen=True)
class Mixer:
    """A layer that mixes tokens without attention. Its fields are sizes.

    invariant: whether a token's bits depend on its sequence alone (docs/design/batch-invariance.md).
    """

    invariant: ClassVar[bool] = False

    def kept(self, c: DecoderConfig, dtype: str) -> Kept:
        """What the layer keeps. dtype: of the activations."""
        raise NotImplementedError

    def window(self, block_size: int) -> int:
        """How many tokens the layer sees, its own included."""
        raise NotImplementedError

    def layer(self, c: DecoderConfig, dtype: str) -> MixerLayer:
        """The layer's module."""
        raise NotImplementedError

    def pages(self, c: DecoderConfig, sizes: BlockSizes, dtype: str) -> int:
        """How many pages of one layer of attention it needs of each block.

        Args:
            c: of one device's part of the model, as `sizes`.
        """
        return pages_needed(self.kept(c, dtype), sizes)


def pages_needed(kept: Kept, sizes: BlockSizes) -> int:
    """How many pages of one layer of attention hold what a layer keeps of a block."""
    arrays = sum(_places(kept, sizes).values())
    return -(-arrays // len(ARRAYS_OF_PAGE))


def _words(kept: jax.ShapeDtypeStruct, dtype: Any) -> int:
    """The number of words of a dtype that hold an array."""
    numbers = math.prod(kept.shape)
    return numbers * -(-jnp.dtype(kept.dtype).itemsize // jnp.dtype(dtype).itemsize)


def _places(kept: Kept, sizes: BlockSizes) -> dict[str, int]:
    """By name, how many page arrays an array of `kept` takes."""
    token_words = sizes.kv_heads * sizes.head_dim
    block_words = token_words * sizes.block_size
    arrays = {name: -(-_words(x, sizes.dtype) // token_words) for name, x in kept.tokens.items()}
    for name, x in kept.blocks.items():
        arrays[name] = -(-_words(x, sizes.dtype) // block_words)
    return arrays


class KeptPages(NamedTuple):
    """The pages of a layer in a step.

    kept: what they have.
    sizes: of a block.
    arrays: the page arrays [P, ...] of the layer, each once.
    tables: where the pages of blocks are.
    """

    kept: Kept
    sizes: BlockSizes
    arrays: tuple[Pages, ...]
    tables: LayerTables

    @classmethod
    def of(cls, kept: Kept, head_dim: int, arrays: Sequence[Pages], batch: Batch) -> KeptPages:
        """The pages of a layer, from what `Block` gets. head_dim: of the model's attention."""
        tables = batch.extra(LayerTables)
        assert tables is not None, "a model with mixers has groups of layers"
        _, kv_heads, rows, row = arrays[0]["k"].shape
        dtype = arrays[0]["k"].dtype.name
        block_size = rows * row // head_dim
        sizes = BlockSizes(block_size, kv_heads, head_dim, dtype, row)
        return cls(kept, sizes, tuple(arrays), tables)

    def _parts(self, name: str) -> list[tuple[int, int, str]]:
        """The page arrays that have an array: (group of `tables`, index in `arrays`, name)."""
        first = 0
        for kept_name, count in _places(self.kept, self.sizes).items():
            if kept_name == name:
                break
            first += count
        else:
            raise KeyError(name)
        parts: list[tuple[int, int, str]] = []
        for number in range(first, first + count):
            page, array = divmod(number, len(ARRAYS_OF_PAGE))
            group, index = self.tables.places[page]
            parts.append((group, index, ARRAYS_OF_PAGE[array]))
        return parts

    def tokens(self, name: str, rows: jax.Array, positions: jax.Array) -> jax.Array:
        """[..., *shape] the numbers of tokens, at any `positions` [...] of the sequences of
        `rows` [...]. Positions before the first token get numbers of no meaning.
        """
        size = self.sizes.block_size
        block = jnp.maximum(positions, 0) // size
        offset = jnp.maximum(positions, 0) % size
        words = [
            self._by_token(index, array)[self.tables.block_tables[group][rows, block], offset]
            for group, index, array in self._parts(name)
        ]
        return self._numbers(jnp.concatenate(words, axis=-1), self.kept.tokens[name])

    def block_tokens(self, name: str, rows: jax.Array, blocks: jax.Array) -> jax.Array:
        """[..., S, *shape] the numbers of all tokens of blocks: number `blocks` [...] of the
        sequences of `rows` [...].
        """
        words = [
            self._by_token(index, array)[self.tables.block_tables[group][rows, blocks]]
            for group, index, array in self._parts(name)
        ]
        return self._numbers(jnp.concatenate(words, axis=-1), self.kept.tokens[name])

    def blocks(self, name: str, rows: jax.Array, blocks: jax.Array) -> jax.Array:
        """[..., *shape] the numbers of blocks: number `blocks` [...] of the sequences of `rows`
        [...].
        """
        words = [
            self._by_block(index, array)[self.tables.block_tables[group][rows, blocks]]
            for group, index, array in self._parts(name)
        ]
        return self._numbers(jnp.concatenate(words, axis=-1), self.kept.blocks[name])

    def with_tokens(self, name: str, numbers: jax.Array) -> KeptPages:
        """The pages with the numbers [T, *shape] of the step's tokens."""
        size = self.sizes.block_size
        words = self._as_words(numbers, self.kept.tokens[name])
        width = self.sizes.kv_heads * self.sizes.head_dim
        pages = self
        for part, (group, index, array) in enumerate(self._parts(name)):
            slots = self.tables.slots[group]
            of_part = _padded(words[:, part * width : (part + 1) * width], width)
            changed = pages._by_token(index, array).at[slots // size, slots % size].set(of_part)
            pages = pages._with(index, array, changed)
        return pages

    def with_block_tokens(
        self, name: str, rows: jax.Array, blocks: jax.Array, numbers: jax.Array, used: jax.Array
    ) -> KeptPages:
        """The pages with the numbers [N, S, *shape] of all tokens of blocks: number `blocks` [N]
        of the sequences of `rows` [N], where `used` [N].
        """
        n, size = numbers.shape[:2]
        flat = numbers.reshape(n * size, *numbers.shape[2:])
        words = self._as_words(flat, self.kept.tokens[name])
        width = self.sizes.kv_heads * self.sizes.head_dim
        pages = self
        for part, (group, index, array) in enumerate(self._parts(name)):
            targets = jnp.where(used, self.tables.block_tables[group][rows, blocks], 0)
            of_part = _padded(words[:, part * width : (part + 1) * width], width)
            of_blocks = of_part.reshape(n, size, width)
            changed = pages._by_token(index, array).at[targets].set(of_blocks)
            pages = pages._with(index, array, changed)
        return pages

    def with_rows(
        self, name: str, rows: jax.Array, positions: jax.Array, numbers: jax.Array, used: jax.Array
    ) -> KeptPages:
        """The pages with the numbers [N, *shape] of one token of each of `rows` [N], at `positions`
        [N], where `used` [N].
        """
        size = self.sizes.block_size
        words = self._as_words(numbers, self.kept.tokens[name])
        width = self.sizes.kv_heads * self.sizes.head_dim
        pages = self
        for part, (group, index, array) in enumerate(self._parts(name)):
            blocks = self.tables.block_tables[group][rows, positions // size]
            of_part = _padded(words[:, part * width : (part + 1) * width], width)
            places = pages._by_token(index, array).at[jnp.where(used, blocks, 0), positions % size]
            pages = pages._with(index, array, places.set(of_part))
        return pages

    def with_blocks(
        self,
        name: str,
        rows: jax.Array,
        blocks: jax.Array,
        numbers: jax.Array,
        used: jax.Array | None = None,
    ) -> KeptPages:
        """The pages with the numbers [N, *shape] of blocks: number `blocks` [N] of the sequences of
        `rows` [N], where `used` [N]; None: all.
        """
        words = self._as_words(numbers, self.kept.blocks[name])
        width = self.sizes.kv_heads * self.sizes.head_dim * self.sizes.block_size
        pages = self
        for part, (group, index, array) in enumerate(self._parts(name)):
            targets = self.tables.block_tables[group][rows, blocks]
            if used is not None:
                targets = jnp.where(used, targets, 0)  # the trash block
            of_part = _padded(words[:, part * width : (part + 1) * width], width)
            changed = pages._by_block(index, array).at[targets].set(of_part)
            pages = pages._with(index, array, changed)
        return pages

    # memory

    def _by_token(self, index: int, array: str) -> jax.Array:
        """[P, S, words] a page array as parts of equal size for each token."""
        pages = self.arrays[index][array]
        return pages.reshape(len(pages), self.sizes.block_size, -1)

    def _by_block(self, index: int, array: str) -> jax.Array:
        """[P, words] a page array as memory of blocks."""
        pages = self.arrays[index][array]
        return pages.reshape(len(pages), -1)

    def _with(self, index: int, array: str, changed: jax.Array) -> KeptPages:
        old = self.arrays[index]
        new = Pages(old)
        new[array] = changed.reshape(old[array].shape)
        arrays = (*self.arrays[:index], new, *self.arrays[index + 1 :])
        return self._replace(arrays=arrays)

    def _as_words(self, numbers: jax.Array, kept: jax.ShapeDtypeStruct) -> jax.Array:
        """[N, words] numbers [N, *shape] as words of the pages."""
        numbers = numbers.astype(kept.dtype)
        dtype = jnp.dtype(self.sizes.dtype)
        if numbers.dtype == dtype or numbers.dtype.itemsize < dtype.itemsize:
            words = numbers.astype(dtype)  # a wider float holds it exactly
        else:
            words = jax.lax.bitcast_convert_type(numbers, dtype)
        return words.reshape(len(numbers), -1)

    def _numbers(self, words: jax.Array, kept: jax.ShapeDtypeStruct) -> jax.Array:
        """[..., *shape] the numbers in `words` [..., words]."""
        count = _words(kept, words.dtype)
        words = words[..., :count]
        lead = words.shape[:-1]
        target = jnp.dtype(kept.dtype)
        if words.dtype == target or target.itemsize < words.dtype.itemsize:
            return words.astype(target).reshape(*lead, *kept.shape)
        words_of_number = target.itemsize // words.dtype.itemsize
        if words_of_number > 1:
            words = words.reshape(*lead, -1, words_of_number)
        numbers = jax.lax.bitcast_convert_type(words, target)
        return numbers.reshape(*lead, *kept.shape)


def _padded(words: jax.Array, width: int) -> jax.Array:
    """[N, width] words, with zeros behind them."""
    missing = width - words.shape[1]
    return jnp.pad(words, ((0, 0), (0, missing))) if missing else words


class MixerLayer(nnx.Module):
    """The module of a layer without attention. A subclass adds its parameters, `write` and `read`.

    x is [T, H], before the layer's norm, which is None in models without one there.
    """

    def __init__(self, mixer: Any, c: Any, dtype: str):
        self.mixer = mixer
        self.config = c
        self.dtype = dtype

    def pages(self, arrays: Sequence[Pages], batch: Batch) -> KeptPages:
        """The layer's pages: `arrays` are what its methods get."""
        kept = self.mixer.kept(self.config, self.dtype)
        return KeptPages.of(kept, self.config.head_dim, arrays, batch)

    def __call__(self, x, arrays, batch: Batch, angles, attend: Attend, *, norm, residual=None):
        """norm(x) -> (y + residual [T, H], page arrays)."""
        arrays = self.write(x, arrays, batch, angles, attend, norm=norm)
        return self.read(x, arrays, batch, angles, attend, norm=norm, residual=residual), arrays

    def write(self, x, arrays, batch: Batch, angles, attend: Attend, *, norm) -> tuple[Pages, ...]:
        """The page arrays with what the tokens of x keep."""
        raise NotImplementedError

    def read(self, x, arrays, batch: Batch, angles, attend: Attend, *, norm, residual=None):
        """As `__call__`, for tokens that are in the pages: y + residual [T, H]."""
        raise NotImplementedError


def row_of_tokens(batch: Batch) -> jax.Array:
    """[T] the row of each token; that of padding means nothing."""
    tokens = jnp.arange(len(batch.tokens), dtype=jnp.int32)
    if batch.cu_q_lens is None:  # decodes alone, or samples
        return jnp.minimum(tokens, len(batch.seq_lens) - 1)
    row = jnp.searchsorted(batch.cu_q_lens[1:], tokens, side="right")
    return jnp.minimum(row, len(batch.seq_lens) - 1).astype(jnp.int32)


def convolution(
    kept: KeptPages, name: str, batch: Batch, weight: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """[T, C] float32: the causal convolution of each channel over the inputs that the pages have.

    Args:
        name: of the inputs [C] of a token.
        weight: [C, L]; the last column is that of the token itself.
        bias: [C].
    """
    rows = row_of_tokens(batch)
    weight = weight.astype(jnp.float32)
    channels, length = weight.shape
    y = jnp.zeros((len(batch.positions), channels), jnp.float32)
    for distance in range(length):
        positions = batch.positions - distance
        inputs = kept.tokens(name, rows, positions).astype(jnp.float32)
        is_token = (positions >= 0)[:, None]
        y = y + jnp.where(is_token, inputs, 0) * weight[:, length - 1 - distance]
    return y if bias is None else y + bias.astype(jnp.float32)
