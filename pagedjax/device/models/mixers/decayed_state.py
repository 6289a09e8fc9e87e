"""A recurrent state with decay, computed block by block: gated delta rule and Mamba 2.

Each head has a state [E, D] of keys of E and values of D numbers:

    state of t = exp(decay of t) * (state of t - 1) + key of t (x) update of t
    output of t = (state of t)^T query of t

The update of Mamba 2 is the value (Dao & Gu 2024, arXiv 2405.21060). That of the gated delta rule
(Yang et al. 2024, arXiv 2412.06464) is what the state does not yet give for the key, times a rate:

    update of t = rate of t * (value of t - exp(decay of t) * (state of t - 1)^T key of t)

A block has the state before its first token, and the key, the update and the decay of each token.
Within a block everything follows from these by products of matrices, as in the chunked form of both
papers: the chunk is the block. So a step reads states and writes none but those of blocks that it
enters. The result is the same for any cut of a prompt into chunks.

All numbers here are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pagedjax.device.batch import Batch
from pagedjax.device.models.mixers.mixer import Kept, KeptPages, row_of_tokens

RECENT = "recent"  # key, update and decay of a token
STATE = "state"


class StateSizes(NamedTuple):
    """key_heads: each serves heads / key_heads heads, one behind the other."""

    heads: int
    key_heads: int
    key_dim: int  # E
    value_dim: int  # D

    def kept(self, inputs: jax.ShapeDtypeStruct, name: str) -> Kept:
        """What a layer keeps: the state, and `inputs` of a convolution by `name`."""
        recent = self.key_heads * self.key_dim + self.heads * self.value_dim + self.heads
        state = self.heads, self.key_dim, self.value_dim
        return Kept(
            tokens={name: inputs, RECENT: jax.ShapeDtypeStruct((recent,), jnp.float32)},
            blocks={STATE: jax.ShapeDtypeStruct(state, jnp.float32)},
        )


class Inputs(NamedTuple):
    """What the tokens of a step bring: [..., heads, numbers] float32, for T tokens or for the S
    tokens of blocks.

    rate: of the delta rule; None: the update is the value.
    """

    query: jax.Array  # [..., K, E]
    key: jax.Array  # [..., K, E]
    value: jax.Array  # [..., N, D]
    decay: jax.Array  # [..., N] at most 0
    rate: jax.Array | None  # [..., N]

    def at(self, tokens: jax.Array) -> Inputs:
        """The inputs of some tokens of the step."""
        return jax.tree.map(lambda x: x[tokens], self)


class Recent(NamedTuple):
    """What blocks have of their tokens; zeros where no token is known."""

    key: jax.Array  # [..., S, K, E]
    update: jax.Array  # [..., S, N, D]
    decay: jax.Array  # [..., S, N]

    def where(self, condition: jax.Array, other: Recent) -> Recent:
        """These tokens where the condition [..., S] holds, else the others."""
        return jax.tree.map(
            lambda x, y: jnp.where(condition.reshape(*condition.shape, *[1] * (x.ndim - 2)), x, y),
            self,
            other,
        )


def run(
    kept: KeptPages, sizes: StateSizes, inputs: Inputs, batch: Batch
) -> tuple[KeptPages, jax.Array]:
    """Computes the tokens of a step -> (pages, outputs [T, N, D]).

    Rows of one token are computed together. Those that enter a block get its state before, one at a
    time: they are few. Then the blocks of longer rows follow one at a time, because each state
    follows from the one before.
    """
    spans = Spans.of(batch)
    size = kept.sizes.block_size
    first_blocks = spans.positions // size
    is_decode = spans.counts == 1
    enters = is_decode & (spans.positions % size == 0)
    first = jnp.argsort(~enters, stable=True).astype(jnp.int32)  # the rows that enter, first

    def enter_next(carry):
        number, arrays = carry
        row = first[number][None]
        pages = _entered(kept._replace(arrays=arrays), sizes, row, first_blocks[row])
        return number + 1, pages.arrays

    kept = _repeated(enter_next, enters.sum(), kept)[0]
    outputs = jnp.zeros((len(batch.tokens), sizes.heads, sizes.value_dim), jnp.float32)
    kept, outputs = _decodes(kept, sizes, inputs, spans, is_decode, outputs)
    if batch.cu_q_lens is None:
        return kept, outputs
    last_blocks = (spans.positions + spans.counts - 1) // size
    blocks = jnp.where(spans.counts > 1, last_blocks - first_blocks + 1, 0)
    ends = jnp.cumsum(blocks)

    def run_next(carry):
        number, arrays, outputs = carry
        row = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
        block = first_blocks[row] + number - (ends[row] - blocks[row])
        enters = block * size >= spans.positions[row]
        row = row[None]
        block = block[None]
        pages = kept._replace(arrays=arrays)
        pages = _entered(pages, sizes, row, block, enters[None])
        pages, outputs = _run_blocks(pages, sizes, inputs, spans, row, block, outputs)
        return number + 1, pages.arrays, outputs

    return _repeated(run_next, ends[-1], kept, outputs)


def _repeated(step: Any, count: jax.Array, kept: KeptPages, *others: Any) -> Any:
    """Calls step((number, arrays, *others)) `count` times -> (pages, *others)."""
    carry = (jnp.zeros((), jnp.int32), kept.arrays, *others)
    _, arrays, *results = jax.lax.while_loop(lambda carry: carry[0] < count, step, carry)
    return kept._replace(arrays=arrays), *results


def read(kept: KeptPages, sizes: StateSizes, query: jax.Array, batch: Batch) -> jax.Array:
    """Outputs [T, N, D] of tokens that are in the pages.

    Args:
        query: [T, K, E].
    """
    rows = row_of_tokens(batch)
    size = kept.sizes.block_size
    blocks = batch.positions // size
    recent = _recent(kept, sizes, rows, blocks)
    state = kept.blocks(STATE, rows, blocks)
    return _read(state, recent, query[:, None], batch.positions[:, None] % size, sizes)[:, 0]


class Spans(NamedTuple):
    """Which tokens of a step a row has, and their positions."""

    starts: jax.Array  # [B] among the step's tokens
    counts: jax.Array  # [B]
    positions: jax.Array  # [B] of the first one; 0 in padding

    @classmethod
    def of(cls, batch: Batch) -> Spans:
        starts = batch.row_cu_q_lens[:-1]
        counts = batch.row_cu_q_lens[1:] - starts
        return cls(starts, counts, batch.seq_lens - counts)


def _entered(
    kept: KeptPages,
    sizes: StateSizes,
    rows: jax.Array,
    blocks: jax.Array,
    used: jax.Array | None = None,
) -> KeptPages:
    """The pages with the states [N, ...] before blocks, which follow from the blocks before them.

    Args:
        rows, blocks: [N] number `blocks` of the sequences of `rows`.
        used: [N] whether the state is wanted; None: it is.
    """
    before = jnp.maximum(blocks - 1, 0)
    recent = _recent(kept, sizes, rows, before)
    state = kept.blocks(STATE, rows, before)
    sums = jnp.cumsum(recent.decay, axis=1)
    last = sums[:, -1]
    weights = jnp.exp(last[:, None] - sums)  # [N, S, heads]
    keys = _of_heads(recent.key, sizes)
    added = jnp.einsum("nshe,nsh,nshd->nhed", keys, weights, recent.update, precision="highest")
    state = jnp.exp(last)[..., None, None] * state + added
    state = jnp.where((blocks == 0)[:, None, None, None], 0, state)
    return kept.with_blocks(STATE, rows, blocks, state, used)


def _decodes(
    kept: KeptPages,
    sizes: StateSizes,
    inputs: Inputs,
    spans: Spans,
    is_decode: jax.Array,
    outputs: jax.Array,
) -> tuple[KeptPages, jax.Array]:
    """Computes the rows of one token -> (pages, outputs). is_decode: [B] which rows these are."""
    of_rows = inputs.at(jnp.minimum(spans.starts, len(outputs) - 1))
    rows = jnp.arange(len(is_decode), dtype=jnp.int32)
    size = kept.sizes.block_size
    blocks = spans.positions // size
    offsets = spans.positions[:, None] % size
    state = kept.blocks(STATE, rows, blocks)
    known = _recent(kept, sizes, rows, blocks)
    places = jnp.arange(size)
    known = known.where(places < offsets, jax.tree.map(jnp.zeros_like, known))
    own = Recent(of_rows.key, jnp.zeros_like(of_rows.value), of_rows.decay)
    is_own = places == offsets
    recent = jax.tree.map(lambda x: x[:, None], own).where(is_own, known)
    update = of_rows.value
    if of_rows.rate is not None:
        given = _read(state, recent, of_rows.key[:, None], offsets, sizes)[:, 0]
        update = of_rows.rate[..., None] * (of_rows.value - given)
    updates = jnp.where(is_own[..., None, None], update[:, None], recent.update)
    recent = recent._replace(update=updates)
    results = _read(state, recent, of_rows.query[:, None], offsets, sizes)[:, 0]
    joined = _joined(own._replace(update=update))
    kept = kept.with_rows(RECENT, rows, spans.positions, joined, is_decode)
    target = jnp.where(is_decode, spans.starts, len(outputs))
    return kept, outputs.at[target].set(results, mode="drop")


def _run_blocks(
    kept: KeptPages,
    sizes: StateSizes,
    inputs: Inputs,
    spans: Spans,
    rows: jax.Array,
    blocks: jax.Array,
    outputs: jax.Array,
) -> tuple[KeptPages, jax.Array]:
    """Computes the step's tokens in some blocks, of other rows each, whose states are in the pages
    -> (pages, outputs).

    Args:
        rows, blocks: [N] number `blocks` of the sequences of `rows`.
    """
    size = kept.sizes.block_size
    positions = blocks[:, None] * size + jnp.arange(size)  # [N, S]
    places = positions - spans.positions[rows][:, None]  # among the row's tokens of this step
    is_new = (places >= 0) & (places < spans.counts[rows][:, None])
    token = jnp.where(is_new, spans.starts[rows][:, None] + places, 0)
    of_step = inputs.at(token)
    state = kept.blocks(STATE, rows, blocks)
    known = _recent(kept, sizes, rows, blocks)
    known = known.where(places < 0, jax.tree.map(jnp.zeros_like, known))
    recent = _with_new(known, is_new, of_step, state, sizes)
    offsets = jnp.broadcast_to(jnp.arange(size), is_new.shape)
    results = _read(state, recent, of_step.query, offsets, sizes)
    # a row without tokens in the block writes to the trash block
    kept = kept.with_block_tokens(RECENT, rows, blocks, _joined(recent), is_new.any(axis=1))
    target = jnp.where(is_new, token, len(outputs))
    return kept, outputs.at[target].set(results, mode="drop")


def _recent(kept: KeptPages, sizes: StateSizes, rows: jax.Array, blocks: jax.Array) -> Recent:
    """[N, S, ...] what the pages have of the tokens of blocks."""
    joined = kept.block_tokens(RECENT, rows, blocks)
    keys = sizes.key_heads * sizes.key_dim
    values = sizes.heads * sizes.value_dim
    key, update, decay = jnp.split(joined, [keys, keys + values], axis=-1)
    lead = joined.shape[:-1]
    return Recent(
        key.reshape(*lead, sizes.key_heads, sizes.key_dim),
        update.reshape(*lead, sizes.heads, sizes.value_dim),
        decay,
    )


def _joined(recent: Recent) -> jax.Array:
    """[..., numbers] as the pages have them."""
    lead = recent.decay.shape[:-1]
    return jnp.concatenate([x.reshape(*lead, -1) for x in recent], axis=-1)


def _with_new(
    known: Recent, is_new: jax.Array, of_step: Inputs, state: jax.Array, sizes: StateSizes
) -> Recent:
    """The tokens of blocks with those of the step [N, S, ...] among them."""
    with_values = Recent(of_step.key, of_step.value, of_step.decay).where(is_new, known)
    if of_step.rate is None:
        return with_values
    sums = jnp.cumsum(with_values.decay, axis=1)  # [N, S, heads]
    keys = _of_heads(with_values.key, sizes)
    rate = jnp.where(is_new[..., None], of_step.rate, 0)
    given = jnp.exp(sums)[..., None] * jnp.einsum(
        "nshe,nhed->nshd", keys, state, precision="highest"
    )
    corrected = rate[..., None] * (of_step.value - given)
    target = jnp.where(is_new[..., None, None], corrected, known.update)
    # (1 + A) update = target, where A has what earlier tokens of the block give for a key
    products = jnp.einsum("nshe,nthe->nhst", keys, keys, precision="highest")
    earlier = jnp.tril(jnp.ones(products.shape[-2:], bool), -1)
    rates = jnp.swapaxes(rate, 1, 2)[..., None]
    system = jnp.where(earlier, rates * products * _decay_between(sums), 0)
    update = jax.lax.linalg.triangular_solve(
        system + jnp.eye(system.shape[-1]),
        jnp.swapaxes(target, 1, 2),
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    return with_values._replace(update=jnp.swapaxes(update, 1, 2))


def _read(
    state: jax.Array, recent: Recent, query: jax.Array, offsets: jax.Array, sizes: StateSizes
) -> jax.Array:
    """[N, Q, heads, D] the outputs of queries [N, Q, K, E] at these offsets [N, Q] of blocks.

    Args:
        state: [N, heads, E, D] before the blocks.
    """
    sums = jnp.cumsum(recent.decay, axis=1)  # [N, S, heads]
    at_queries = jnp.take_along_axis(sums, offsets[..., None], axis=1)  # [N, Q, heads]
    queries = _of_heads(query, sizes)
    from_state = jnp.exp(at_queries)[..., None] * jnp.einsum(
        "nqhe,nhed->nqhd", queries, state, precision="highest"
    )
    keys = _of_heads(recent.key, sizes)
    products = jnp.einsum("nqhe,nshe->nqsh", queries, keys, precision="highest")
    is_seen = jnp.arange(sums.shape[1]) <= offsets[..., None]  # [N, Q, S]
    between = at_queries[:, :, None] - sums[:, None]  # [N, Q, S, heads]
    weights = jnp.exp(jnp.where(is_seen[..., None], between, -jnp.inf))
    within = jnp.einsum("nqsh,nshd->nqhd", products * weights, recent.update, precision="highest")
    return from_state + within


def _decay_between(sums: jax.Array) -> jax.Array:
    """[N, heads, S, S] the decay from a token t to a later one s, at [..., s, t]; 0 elsewhere."""
    of_heads = jnp.swapaxes(sums, 1, 2)
    between = of_heads[..., :, None] - of_heads[..., None, :]
    later = jnp.tril(jnp.ones(between.shape[-2:], bool))
    return jnp.exp(jnp.where(later, between, -jnp.inf))


def _of_heads(x: jax.Array, sizes: StateSizes) -> jax.Array:
    """[..., K, E] -> [..., heads, E]: each key head serves several heads."""
    return jnp.repeat(x, sizes.heads // sizes.key_heads, axis=-2)
