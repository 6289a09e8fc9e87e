"""`Mixer`: a layer that keeps something else than keys and values; and what it keeps: `KeptPages` in
a cache, `KeptSequences` without one.

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
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.device import states
from pagedjax.device.attention import Attend
from pagedjax.device.batch import Batch
from pagedjax.device.cache import BlockSizes, Pages
from pagedjax.device.extras import LayerTables, WholeSequences

if TYPE_CHECKING:
    from pagedjax.device.models.decoder import DecoderConfig

ARRAYS_OF_PAGE = ("k", "v")
CONV_INPUT = "conv_input"  # the name of what a convolution reads
INSIDE = "promise_in_bounds"  # a checked write of one place would copy the array


class Kept(NamedTuple):
    """What a layer keeps, by name: shapes and dtypes for one token, and for one block."""

    tokens: Mapping[str, jax.ShapeDtypeStruct]
    blocks: Mapping[str, jax.ShapeDtypeStruct] = {}


class MixerCost(NamedTuple):
    """What the mixing of tokens costs a step, without products with weights; for simulations.

    row_bytes: read by each row. entry_bytes: written when a sequence enters a block.
    operations: sums and products of each token.
    """

    row_bytes: int
    entry_bytes: int
    operations: int


@dataclass(frozen=True)
class Mixer:
    """A layer that mixes tokens without attention. Its fields are sizes."""

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

    def cost(self, c: DecoderConfig, dtype: str, block_size: int) -> MixerCost:
        """What mixing costs. Here, a row reads all that it sees, and each of its tokens multiplies
        and adds each number of that once.
        """
        kept = self.kept(c, dtype)
        seen = self.window(block_size)
        numbers = seen * sum(_numbers(kept.tokens)) + sum(_numbers(kept.blocks))
        of_blocks = sum(_bytes(kept.blocks))
        return MixerCost(seen * sum(_bytes(kept.tokens)) + of_blocks, of_blocks, 2 * numbers)


def _numbers(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> list[int]:
    return [math.prod(array.shape) for array in arrays.values()]


def _bytes(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> list[int]:
    return [math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays.values()]


def pages_needed(kept: Kept, sizes: BlockSizes) -> int:
    """How many pages of one layer of attention hold what a layer keeps of a block."""
    arrays = sum(_places(kept, sizes).values())
    return -(-arrays // len(ARRAYS_OF_PAGE))


def _words(kept: jax.ShapeDtypeStruct, dtype: Any) -> int:
    """The number of words of a dtype that hold an array. Raises ValueError for numbers of 8 bits."""
    if jnp.dtype(kept.dtype).itemsize < 2:
        raise ValueError(f"a mixer keeps {kept.dtype}; its numbers must have 16 or 32 bits")
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


class Part(NamedTuple):
    """Where some of the words of an array are: in the page array `name`, in the layer's pages from
    `first` to `end`.
    """

    name: str
    first: int
    end: int


class KeptPages(NamedTuple):
    """The pages of a layer in a step.

    kept: what they have.
    sizes: of a block.
    arrays: the page arrays [P, ...], in which all pages of the layer are.
    tables: which blocks of the pool they are.
    """

    kept: Kept
    sizes: BlockSizes
    arrays: Pages
    tables: LayerTables

    @classmethod
    def of(cls, kept: Kept, head_dim: int, arrays: Pages, batch: Batch) -> KeptPages:
        """The pages of a layer, from what `Block` gets. head_dim: of the model's attention."""
        tables = batch.extra(LayerTables)
        assert tables is not None, "a model with mixers has groups of layers"
        _, kv_heads, rows, row = arrays["k"].shape
        block_size = rows * row // head_dim
        sizes = BlockSizes(block_size, kv_heads, head_dim, arrays["k"].dtype.name, row)
        return cls(kept, sizes, arrays, tables)

    def tokens(self, name: str, rows: jax.Array, positions: jax.Array) -> jax.Array:
        """[..., *shape] the numbers of tokens, at any `positions` [...] of the sequences of
        `rows` [...]. Positions before the first token get numbers of no meaning.
        """
        size = self.sizes.block_size
        positions = jnp.maximum(positions, 0)
        words = [
            self._by_token(part)
            .at[self._ids(part, rows, positions // size), positions % size]
            .get(mode=INSIDE)
            for part in self.parts(name)
        ]
        return self._numbers(words, self.kept.tokens[name])

    def block_tokens(self, name: str, rows: jax.Array, blocks: jax.Array) -> jax.Array:
        """[N, S, *shape] the numbers of all tokens of blocks: number `blocks` [N] of the sequences
        of `rows` [N].
        """
        words = [
            self._by_token(part).at[self._ids(part, rows, blocks)].get(mode=INSIDE)
            for part in self.parts(name)
        ]
        return self._numbers(words, self.kept.tokens[name])

    def blocks(self, name: str, rows: jax.Array, blocks: jax.Array) -> jax.Array:
        """[N, *shape] the numbers of blocks: number `blocks` [N] of the sequences of `rows` [N]."""
        words = [
            self._by_block(part).at[self._ids(part, rows, blocks)].get(mode=INSIDE)
            for part in self.parts(name)
        ]
        return self._numbers(words, self.kept.blocks[name])

    def with_tokens(self, name: str, numbers: jax.Array) -> KeptPages:
        """The pages with the numbers [T, *shape] of the step's tokens."""
        size = self.sizes.block_size
        pages = self
        for part, words in self._words_of_parts(name, numbers, self.kept.tokens[name]):
            slots = self.tables.slots[part.first : part.end]
            places = pages._by_token(part).at[slots // size, slots % size]
            pages = pages._with(part, places.set(words, mode=INSIDE))
        return pages

    def with_blocks(
        self, name: str, rows: jax.Array, blocks: jax.Array, numbers: jax.Array
    ) -> KeptPages:
        """The pages with the numbers [N, *shape] of blocks: number `blocks` [N] of the sequences of
        `rows` [N].
        """
        pages = self
        for part, words in self._words_of_parts(name, numbers, self.kept.blocks[name]):
            places = pages._by_block(part).at[self._ids(part, rows, blocks)]
            pages = pages._with(part, places.set(words, mode=INSIDE))
        return pages

    def exchanged(
        self,
        name: str,
        numbers: jax.Array,
        spans: states.Spans,
        count: int,
        kernel: states.Implementation,
    ) -> tuple[KeptPages, jax.Array]:
        """(The pages with the numbers [T, *shape] of the step's tokens, those of the last tokens
        before each row [B, count, *shape], the last one first.) By a kernel, in an order of its own.
        """
        shape = self.kept.tokens[name]
        memory = self.memory(name)
        words = jnp.concatenate([x for _, x in self._words_of_parts(name, numbers, shape)])
        slots = jnp.concatenate([self.tables.slots[p.first : p.end] for p in memory.tokens])
        arrays, before = kernel.exchange(memory, words, slots, spans, count=count)
        return self.with_memory(arrays), self._numbers([before], shape)

    # memory

    def memory(self, tokens: str, of_blocks: str | None = None) -> states.Memory:
        """The pages as a kernel gets them, which has numbers of tokens and of blocks in an order of
        its own.
        """
        return states.Memory(
            arrays=tuple([self.arrays[name] for name in ARRAYS_OF_PAGE]),
            tables=self.tables.block_tables,
            tokens=self._parts_of_memory(tokens),
            states=self._parts_of_memory(of_blocks) if of_blocks else (),
            block_size=self.sizes.block_size,
        )

    def with_memory(self, arrays: Sequence[jax.Array]) -> KeptPages:
        """The pages with the arrays of a kernel."""
        pages = Pages(self.arrays)
        pages.update(zip(ARRAYS_OF_PAGE, arrays, strict=True))
        return self._replace(arrays=pages)

    def _parts_of_memory(self, name: str) -> tuple[states.Part, ...]:
        return tuple(
            [
                states.Part(ARRAYS_OF_PAGE.index(part.name), part.first, part.end)
                for part in self.parts(name)
            ]
        )

    def parts(self, name: str) -> list[Part]:
        """Where an array is: page arrays are used one after the other, and of each all pages."""
        places = _places(self.kept, self.sizes)
        names = list(places)
        first = sum([places[other] for other in names[: names.index(name)]])
        end = first + places[name]
        num_pages = len(self.tables.block_tables)
        parts: list[Part] = []
        for number, array in enumerate(ARRAYS_OF_PAGE):
            start = number * num_pages
            part = Part(array, max(first - start, 0), min(end - start, num_pages))
            if part.first < part.end:
                parts.append(part)
        return parts

    def _ids(self, part: Part, rows: jax.Array, blocks: jax.Array) -> jax.Array:
        """[pages of the part, ...] the blocks of the pool that have number `blocks` [...] of the
        sequences of `rows` [...].
        """
        tables = self.tables.block_tables[part.first : part.end]
        return tables.at[:, rows, blocks].get(mode=INSIDE)

    def _by_token(self, part: Part) -> jax.Array:
        """[P, S, words] a page array as memory of equal size for each token."""
        pages = self.arrays[part.name]
        return pages.reshape(len(pages), self.sizes.block_size, -1)

    def _by_block(self, part: Part) -> jax.Array:
        """[P, words] a page array as memory of blocks."""
        pages = self.arrays[part.name]
        return pages.reshape(len(pages), -1)

    def _with(self, part: Part, changed: jax.Array) -> KeptPages:
        arrays = Pages(self.arrays)
        arrays[part.name] = changed.reshape(self.arrays[part.name].shape)
        return self._replace(arrays=arrays)

    def _words_of_parts(
        self, name: str, numbers: jax.Array, kept: jax.ShapeDtypeStruct
    ) -> list[tuple[Part, jax.Array]]:
        """The parts of an array, and the numbers [..., *shape] as words [pages of the part, ...,
        words of a page] of the pages.
        """
        lead = numbers.shape[: numbers.ndim - len(kept.shape)]
        numbers = numbers.astype(kept.dtype)
        dtype = jnp.dtype(self.sizes.dtype)
        if numbers.dtype == dtype or numbers.dtype.itemsize < dtype.itemsize:
            words = numbers.astype(dtype)  # a wider float holds it exactly
        else:
            words = jax.lax.bitcast_convert_type(numbers, dtype)
        words = words.reshape(*lead, -1)
        width = self.sizes.kv_heads * self.sizes.head_dim
        if name in self.kept.blocks:
            width *= self.sizes.block_size
        missing = -words.shape[-1] % width
        words = jnp.pad(words, [(0, 0)] * len(lead) + [(0, missing)])
        words = jnp.moveaxis(words.reshape(*lead, -1, width), -2, 0)
        parts = self.parts(name)
        first_pages = parts[0].end - parts[0].first
        return list(zip(parts, jnp.split(words, [first_pages][: len(parts) - 1]), strict=True))

    def _numbers(self, words: Sequence[jax.Array], kept: jax.ShapeDtypeStruct) -> jax.Array:
        """[..., *shape] the numbers in the words [pages of a part, ..., words] of parts."""
        pages = words[0] if len(words) == 1 else jnp.concatenate(words)
        joined = jnp.moveaxis(pages, 0, -2)
        lead = joined.shape[:-2]
        joined = joined.reshape(*lead, -1)[..., : _words(kept, pages.dtype)]
        target = jnp.dtype(kept.dtype)
        if pages.dtype == target or target.itemsize < pages.dtype.itemsize:
            return joined.astype(target).reshape(*lead, *kept.shape)
        words_of_number = target.itemsize // pages.dtype.itemsize
        if words_of_number > 1:
            joined = joined.reshape(*lead, -1, words_of_number)
        numbers = jax.lax.bitcast_convert_type(joined, target)
        return numbers.reshape(*lead, *kept.shape)


class KeptSequences(NamedTuple):
    """What a layer keeps of whole sequences, without a cache (windows.py), with the methods of
    `KeptPages`. A sequence is one block of S tokens. The numbers are stored as they are, and not as
    words of pages, so that they have gradients.

    sizes: of a block.
    count: sequences (B).
    arrays: by name, [B S, *shape] of tokens and [B, *shape] of blocks; those that are written.
    """

    kept: Kept
    sizes: BlockSizes
    count: int
    arrays: Pages

    def tokens(self, name: str, rows: jax.Array, positions: jax.Array) -> jax.Array:
        """As `KeptPages.tokens`."""
        places = rows * self.sizes.block_size + jnp.maximum(positions, 0)
        return self.arrays[name].at[places].get(mode=INSIDE)

    def block_tokens(self, name: str, rows: jax.Array, blocks: jax.Array) -> jax.Array:
        """As `KeptPages.block_tokens`."""
        numbers = self.arrays[name]
        of_blocks = numbers.reshape(self.count, self.sizes.block_size, *numbers.shape[1:])
        return of_blocks.at[rows].get(mode=INSIDE)

    def blocks(self, name: str, rows: jax.Array, blocks: jax.Array) -> jax.Array:
        """As `KeptPages.blocks`; zeros where nothing is written."""
        return self._of_blocks(name).at[rows].get(mode=INSIDE)

    def with_tokens(self, name: str, numbers: jax.Array) -> KeptSequences:
        """As `KeptPages.with_tokens`."""
        return self._with(name, numbers.astype(self.kept.tokens[name].dtype))

    def with_blocks(
        self, name: str, rows: jax.Array, blocks: jax.Array, numbers: jax.Array
    ) -> KeptSequences:
        """As `KeptPages.with_blocks`."""
        numbers = numbers.astype(self.kept.blocks[name].dtype)
        return self._with(name, self._of_blocks(name).at[rows].set(numbers, mode=INSIDE))

    def _of_blocks(self, name: str) -> jax.Array:
        """[B, *shape] the numbers of all blocks."""
        if name in self.arrays:
            return self.arrays[name]
        kept = self.kept.blocks[name]
        return jnp.zeros((self.count, *kept.shape), kept.dtype)

    def _with(self, name: str, numbers: jax.Array) -> KeptSequences:
        return self._replace(arrays=Pages({**self.arrays, name: numbers}))


KeptNumbers = KeptPages | KeptSequences


class MixerLayer(nnx.Module):
    """The module of a layer without attention. A subclass adds its parameters, `write` and `read`.

    x is [T, H], before the layer's norm, which is None in models without one there.
    """

    def __init__(self, mixer: Any, c: Any, dtype: str):
        self.mixer = mixer
        self.config = c
        self.dtype = dtype

    def pages(self, arrays: Pages, batch: Batch) -> KeptNumbers:
        """What the layer keeps: `arrays` are what its methods get."""
        c = self.config
        kept = self.mixer.kept(c, self.dtype)
        whole = batch.extra(WholeSequences)
        if whole is None:
            return KeptPages.of(kept, c.head_dim, arrays, batch)
        sizes = BlockSizes(whole.length, c.kv_heads, c.head_dim, self.dtype, c.head_dim)
        return KeptSequences(kept, sizes, whole.count, arrays)

    def __call__(self, x, arrays, batch: Batch, angles, attend: Attend, *, norm, residual=None):
        """norm(x) -> (y + residual [T, H], page arrays)."""
        arrays = self.write(x, arrays, batch, angles, attend, norm=norm)
        return self.read(x, arrays, batch, angles, attend, norm=norm, residual=residual), arrays

    def write(self, x, arrays, batch: Batch, angles, attend: Attend, *, norm) -> Pages:
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


def spans_of(batch: Batch) -> states.Spans:
    """Which tokens of a step each row has."""
    starts = batch.row_cu_q_lens[:-1]
    counts = batch.row_cu_q_lens[1:] - starts
    return states.Spans(starts, counts, batch.seq_lens - counts)


class StepInputs(NamedTuple):
    """The inputs of a step's convolution, where a kernel keeps them in an order of its own."""

    inputs: jax.Array  # [T, C] float32, as they are kept
    before: jax.Array  # [B, L - 1, C] of the last tokens before each row, the last one first
    rows: jax.Array  # [T] the row of each token
    places: jax.Array  # [T] where it is among the row's tokens

    def at(self, distance: int) -> jax.Array:
        """[T, C] float32: the inputs of the tokens so far before; of no meaning before the first
        token of a sequence.
        """
        if distance == 0:
            return self.inputs
        of_step = jnp.pad(self.inputs, ((distance, 0), (0, 0)))[: len(self.inputs)]
        number = jnp.clip(distance - self.places - 1, 0, self.before.shape[1] - 1)
        older = self.before[self.rows, number].astype(jnp.float32)
        return jnp.where((self.places >= distance)[:, None], of_step, older)


def with_inputs(
    kept: KeptNumbers,
    name: str,
    inputs: jax.Array,
    batch: Batch,
    length: int,
    kernel: states.Implementation | None,
) -> tuple[KeptNumbers, StepInputs | None]:
    """Keeps the inputs [T, C] of a step's tokens -> (what is kept, what `convolution` needs of it).

    Args:
        name: of the inputs of a token.
        length: of the convolution (L).
        kernel: of steps with a cache; None: plain JAX, where `convolution` reads what is kept.
    """
    if kernel is None or isinstance(kept, KeptSequences):
        return kept.with_tokens(name, inputs), None
    spans = spans_of(batch)
    rows = row_of_tokens(batch)
    kept, before = kept.exchanged(name, inputs, spans, length - 1, kernel)
    as_kept = inputs.astype(before.dtype).astype(jnp.float32)
    return kept, StepInputs(as_kept, before, rows, batch.positions - spans.positions[rows])


def convolution(
    kept: KeptNumbers,
    name: str,
    batch: Batch,
    weight: jax.Array,
    bias: jax.Array | None,
    of_step: StepInputs | None = None,
) -> jax.Array:
    """[T, C] float32: the causal convolution of each channel over the inputs that are kept.

    Args:
        name: of the inputs [C] of a token.
        weight: [C, L]; the last column is that of the token itself.
        bias: [C].
        of_step: of `with_inputs`.
    """
    rows = row_of_tokens(batch)
    weight = weight.astype(jnp.float32)
    channels, length = weight.shape
    y = jnp.zeros((len(batch.positions), channels), jnp.float32)
    for distance in range(length):
        positions = batch.positions - distance
        if of_step is None:
            inputs = kept.tokens(name, rows, positions).astype(jnp.float32)
        else:
            inputs = of_step.at(distance)
        is_token = (positions >= 0)[:, None]
        y = y + jnp.where(is_token, inputs, 0) * weight[:, length - 1 - distance]
    return y if bias is None else y + bias.astype(jnp.float32)
