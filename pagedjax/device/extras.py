"""Arrays that only some engines have in their batches. Each kind is a class that inherits from
`Extra`. `ARRAYS` of engine/pack.py lists the functions that make the arrays from a plan. A model
finds the arrays of a kind with `Batch.extra`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pagedjax.device.checks import check_shape
from pagedjax.device.layer_groups import LayerGroups, PagePart
from pagedjax.device.linear import LowRank

if TYPE_CHECKING:
    from pagedjax.device.batch import Batch

Factors = tuple[dict[str, tuple[Any, Any]], ...]  # by layer and matrix: a and b of a `LowRank`


class SampleRows(NamedTuple):
    """The rows of a batch with only the tokens that samples follow, a row for each token."""

    numbers: jax.Array  # [R + 1] i32: 0, 1, ...
    count: jax.Array  # [1] i32: rows that are used
    used: jax.Array  # [R] bool


@dataclass(frozen=True, eq=False)
class Extra:
    """Some arrays of a batch. A subclass is a frozen dataclass that JAX knows as a tree, as the
    classes below are.

    words: fields that go to the device with the small arrays of every step, in one transfer: arrays
        of 32-bit numbers from the host.
    """

    words: ClassVar[tuple[str, ...]] = ()

    def check(self, batch: Batch) -> None:
        """Raises ValueError for arrays that do not fit to those of the batch."""

    def arrive(self, batch: Batch) -> Batch:
        """The batch as the model gets it, at the beginning of a step's program."""
        return batch

    def of_layer(self, batch: Batch, layer: int) -> Batch:
        """The batch as a layer sees it."""
        return batch

    def at_samples(self, batch: Batch, rows: SampleRows) -> Extra:
        """These arrays for only the tokens that samples follow (`decoder.samples_of`)."""
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Feed(Extra):
    """Tokens that the host does not know yet, because the step before samples them
    (engine/lookahead.py). In every step of an engine that looks ahead.
    """

    words = ("rows",)

    rows: Any  # [T] row of the step before, -1 where `Batch.tokens` has the token
    tokens: Any  # [max_num_seqs] the tokens that the step before samples, on the device

    def check(self, batch: Batch) -> None:
        check_shape("feed.rows", self.rows, batch.tokens.shape)

    def arrive(self, batch: Batch) -> Batch:
        tokens = jnp.where(self.rows >= 0, self.tokens[self.rows], batch.tokens)
        return batch._replace(tokens=tokens)


@partial(jax.tree_util.register_dataclass, data_fields=["steps"], meta_fields=["count"])
@dataclass(frozen=True, eq=False)
class Span(Extra):
    """The batch is the first of `count` steps of decodes, which one program computes (span.py). Its
    block tables are those of the last step, and row b has the token b.
    """

    words = ("steps",)

    steps: Any  # [B] i32: in how many of the steps each row has a token; 0 in padding
    count: int

    def check(self, batch: Batch) -> None:
        check_shape("span.steps", self.steps, batch.tokens.shape)
        check_shape("last", batch.last, batch.tokens.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Drafted(Extra):
    """The drafts of a step's samples, for rejection sampling (rejection.py). In every step of an
    engine with that way to accept drafts.
    """

    tokens: Any  # [R] i32: the draft in the place of the sample, -1 without a draft
    # [R, V] f32: the weights that it was drawn from, unnormalised; None: the drafter is sure
    probs: Any = None

    def check(self, batch: Batch) -> None:
        check_shape("drafted.tokens", self.tokens, batch.last.shape)
        if self.probs is not None:
            check_shape("drafted.probs", self.probs, (*batch.last.shape, None))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class AttentionRows(Extra):
    """The rows of attention where queries do not see all blocks of their sequence (a KV policy;
    engine/seen_rows.py). In every step of an engine with such a policy.

    A row is a part of a chunk whose queries see the same blocks. Its table lists these blocks
    alone, so positions of attention count only the tokens that are seen. Keys keep the rotation of
    their positions in the sequence.
    """

    words = ("block_tables", "seq_lens", "cu_q_lens", "of_samples")

    block_tables: Any  # [A, W]: W blocks are seen at most
    seq_lens: Any  # [A] tokens that the row's last query sees
    cu_q_lens: Any  # [A + 1]
    of_samples: Any  # [R] the row of the token that each sample follows

    def check(self, batch: Batch) -> None:
        (a,) = self.seq_lens.shape
        check_shape("seen.block_tables", self.block_tables, (a, None))
        check_shape("seen.cu_q_lens", self.cu_q_lens, (a + 1,))
        check_shape("seen.of_samples", self.of_samples, batch.last.shape)

    def at_samples(self, batch: Batch, rows: SampleRows) -> AttentionRows:
        row = self.of_samples
        # a query does not see the queries behind it in its row
        lens = self.seq_lens[row] - (self.cu_q_lens[row + 1] - 1 - batch.last)
        offsets = jnp.minimum(rows.numbers, rows.count)
        return AttentionRows(
            self.block_tables[row], jnp.where(rows.used, lens, 0), offsets, rows.numbers[:-1]
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class GroupTables(Extra):
    """Slots and block tables of all groups of layers but the first one, whose arrays are those of
    the batch itself. In every step of an engine with several groups of layers.
    """

    words = ("slots", "block_tables")

    layout: LayerGroups
    slots: tuple[Any, ...]  # [T] of each group
    block_tables: tuple[Any, ...]  # [B, M] of each group

    def check(self, batch: Batch) -> None:
        for slots, tables in zip(self.slots, self.block_tables, strict=True):
            check_shape("groups.slots", slots, batch.tokens.shape)
            check_shape("groups.block_tables", tables, batch.block_tables.shape)

    def of_layer(self, batch: Batch, layer: int) -> Batch:
        """The batch with the slots and the block tables of the layer's groups alone."""
        group, _ = self.layout.places[layer]
        if not self.layout.attention[layer]:
            return batch.having(self._tables_of(batch, layer), GroupTables)
        batch = batch.without(GroupTables)
        if group > 0:
            batch = batch._replace(
                slots=self.slots[group - 1], block_tables=self.block_tables[group - 1]
            )
        if not self.layout.parts or self.layout.parts[layer].count == 1:
            return batch
        return self._in_parts(batch, self.layout.parts[layer])

    def _in_parts(self, batch: Batch, part: PagePart) -> Batch:
        """The batch with the pages of a part of each block in the place of blocks."""
        size = self.layout.block_size
        block = batch.slots // size
        slots = (block * part.count + part.index) * size + batch.slots % size
        return batch._replace(
            # padding stays in the first page, which no sequence owns
            slots=jnp.where(block > 0, slots, batch.slots),
            block_tables=batch.block_tables * part.count + part.index,
        )

    def _tables_of(self, batch: Batch, layer: int) -> LayerTables:
        """The tables of a layer with a mixer."""
        first, _ = self.layout.places[layer]
        groups = slice(first, first + self.layout.pages[layer])
        slots = (batch.slots, *self.slots)[groups]
        tables = (batch.block_tables, *self.block_tables)[groups]
        return LayerTables(jnp.stack(slots), jnp.stack(tables))

    def at_samples(self, batch: Batch, rows: SampleRows) -> GroupTables:
        slots = tuple([slots[batch.last] for slots in self.slots])
        tables = tuple([tables[batch.sampled_row] for tables in self.block_tables])
        return GroupTables(self.layout, slots, tables)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LayerTables(Extra):
    """Where the pages of one layer with a mixer are (models/mixers/mixer.py): `GroupTables` as such
    a layer sees them.
    """

    slots: Any  # [pages of the layer, T]
    block_tables: Any  # [pages of the layer, B, M]


@jax.tree_util.register_static
@dataclass(frozen=True)
class WholeSequences(Extra):
    """The batch is `count` whole sequences of `length` tokens each, and there is no cache
    (windows.py).
    """

    count: int
    length: int


@jax.tree_util.register_static
@dataclass(frozen=True)
class Selection:
    """Queries read some of the blocks that they see (a KV policy; selection.py).

    Attributes:
        blocks: that a query reads at most, its own included.
        dense_layers: the first layers, in which every query reads all that it sees.
        dense_prompts: queries of prompts read all that they see.
    """

    blocks: int
    dense_layers: int
    dense_prompts: bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Selecting(Extra):
    """Which queries of a step select blocks. In every step of an engine whose KV policy selects."""

    selection: Selection
    tokens: Any  # [T] bool

    def check(self, batch: Batch) -> None:
        check_shape("selecting.tokens", self.tokens, batch.tokens.shape)

    def at_samples(self, batch: Batch, rows: SampleRows) -> Selecting:
        return Selecting(self.selection, self.tokens[batch.last])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class TokenAdapters(Extra):
    """The adapters of low rank of a step's tokens (adapters.py). In every step of an engine with
    adapters.

    adapter_slots: [T] i32; 0 is no adapter.
    factors: of all layers, or of one of them.
    order: [T] i32, the tokens in the order of their adapter slots; None from the host.
    sizes: [adapter slots] i32, the number of tokens of each slot; None from the host.
    """

    adapter_slots: Any
    factors: Any
    order: Any = None
    sizes: Any = None

    def check(self, batch: Batch) -> None:
        check_shape("adapters.adapter_slots", self.adapter_slots, batch.tokens.shape)

    def arrive(self, batch: Batch) -> Batch:
        return batch.having(self.routed())

    def of_layer(self, batch: Batch, layer: int) -> Batch:
        return batch.having(replace(self, factors=self.factors[layer]))

    def at_samples(self, batch: Batch, rows: SampleRows) -> TokenAdapters:
        return replace(self, adapter_slots=self.adapter_slots[batch.last]).routed()

    def routed(self) -> TokenAdapters:
        """These arrays with `order` and `sizes`."""
        slots = self.adapter_slots.astype(jnp.int32)
        count = jax.tree.leaves(self.factors)[0].shape[0]
        sizes = (slots[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
        order = jnp.argsort(slots, stable=True).astype(jnp.int32)
        return TokenAdapters(slots, self.factors, order, sizes)

    def low(self, name: str, parts: tuple[int, ...]) -> LowRank:
        """What the adapters add to the product of a layer's matrix.

        Args:
            name: of the matrix, a key of `DecoderConfig.parts`.
            parts: the value of that key.
        """
        a, b = self.factors[name]
        return LowRank(a, b, self.adapter_slots, self.order, self.sizes, parts)
