"""A recurrent state with decay, computed block by block: gated delta rule and Mamba 2.

Each head has a state [E, D] of keys of E and values of D numbers:

    state of t = exp(decay of t) * (state of t - 1) + key of t (x) update of t
    output of t = (state of t)^T query of t

The update of Mamba 2 is the value (Dao & Gu 2024, arXiv 2405.21060). That of the gated delta rule
(Yang et al. 2024, arXiv 2412.06464) is what the state does not yet give for the key, times a rate:

    update of t = rate of t * (value of t - exp(decay of t) * (state of t - 1)^T key of t)

A block has the state before its first token, and the key, the update and the decay of each token.
Within a block everything follows from these by products of matrices, as in the chunked form of both
papers: the chunk is the block. So a step reads the state and does not write it, until a sequence
enters the next block. The result is the same for any cut of a prompt into chunks.

All numbers here are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pagedjax.device.batch import Batch
from pagedjax.device.models.mixers.mixer import Kept, KeptPages, row_of_tokens

KEY = "key"
UPDATE = "update"
DECAY = "decay"
STATE = "state"


class StateSizes(NamedTuple):
    """key_heads: each serves heads / key_heads heads, one behind the other."""

    heads: int
    key_heads: int
    key_dim: int  # E
    value_dim: int  # D

    def kept(self, inputs: jax.ShapeDtypeStruct, name: str) -> Kept:
        """What a layer keeps: the state, and `inputs` of a convolution by `name`."""

        def numbers(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        return Kept(
            tokens={
                name: inputs,
                KEY: numbers(self.key_heads, self.key_dim),
                UPDATE: numbers(self.heads, self.value_dim),
                DECAY: numbers(self.heads),
            },
            blocks={STATE: numbers(self.heads, self.key_dim, self.value_dim)},
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


class BlockTokens(NamedTuple):
    """The tokens of blocks, of which some are not known yet."""

    key: jax.Array  # [N, S, K, E]
    update: jax.Array  # [N, S, heads, D]
    decay: jax.Array  # [N, S, heads] 0 where no token is known


def run(
    kept: KeptPages, sizes: StateSizes, inputs: Inputs, batch: Batch
) -> tuple[KeptPages, jax.Array]:
    """Computes the tokens of a step -> (pages, outputs [T, heads, D]).

    The first block of each row is computed for all rows at once. A chunk of several blocks
    continues with its other blocks, one at a time, because each state follows from the one before.
    """
    starts = batch.row_cu_q_lens[:-1]
    counts = batch.row_cu_q_lens[1:] - starts
    first_positions = batch.seq_lens - counts
    size = kept.sizes.block_size
    rows = jnp.arange(len(counts), dtype=jnp.int32)
    first_blocks = first_positions // size
    # the blocks of a row in this step, without the first one
    more = jnp.where(counts > 0, (batch.seq_lens - 1) // size - first_blocks, 0)
    ends = jnp.cumsum(more)
    outputs = jnp.zeros((len(batch.tokens), sizes.heads, sizes.value_dim), jnp.float32)
    spans = Spans(starts, counts, first_positions)

    def of_blocks(kept: KeptPages, outputs: jax.Array, rows: jax.Array, blocks: jax.Array):
        return _run_blocks(kept, sizes, inputs, spans, rows, blocks, outputs)

    kept, outputs = of_blocks(kept, outputs, rows, first_blocks)
    if batch.cu_q_lens is None or len(batch.tokens) == 1:  # no row has more than one token
        return kept, outputs

    def next_block(carry):
        number, arrays, outputs = carry
        row = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
        block = first_blocks[row] + 1 + number - (ends[row] - more[row])
        pages, outputs = of_blocks(kept._replace(arrays=arrays), outputs, row[None], block[None])
        return number + 1, pages.arrays, outputs

    total = ends[-1]
    carry = jnp.zeros((), jnp.int32), kept.arrays, outputs
    _, arrays, outputs = jax.lax.while_loop(lambda carry: carry[0] < total, next_block, carry)
    return kept._replace(arrays=arrays), outputs


def read(kept: KeptPages, sizes: StateSizes, query: jax.Array, batch: Batch) -> jax.Array:
    """Outputs [T, heads, D] of tokens that are in the pages.

    Args:
        query: [T, K, E].
    """
    rows = row_of_tokens(batch)
    size = kept.sizes.block_size
    blocks = batch.positions // size
    tokens = _tokens(kept, rows, blocks)
    state = kept.blocks(STATE, rows, blocks)
    state = jnp.where((blocks == 0)[:, None, None, None], 0, state)
    return _read(state, tokens, query[:, None], batch.positions[:, None] % size, sizes)[:, 0]


class Spans(NamedTuple):
    """Which tokens of a step a row has, and their positions."""

    starts: jax.Array  # [B] among the step's tokens
    counts: jax.Array  # [B]
    positions: jax.Array  # [B] of the first one


def _run_blocks(
    kept: KeptPages,
    sizes: StateSizes,
    inputs: Inputs,
    spans: Spans,
    rows: jax.Array,
    blocks: jax.Array,
    outputs: jax.Array,
) -> tuple[KeptPages, jax.Array]:
    """Computes the step's tokens in some blocks, of other rows each -> (pages, outputs).

    Args:
        rows, blocks: [N] number `blocks` of the sequences of `rows`.
    """
    size = kept.sizes.block_size
    positions = blocks[:, None] * size + jnp.arange(size)  # [N, S]
    places = positions - spans.positions[rows][:, None]  # among the row's tokens of this step
    is_new = (places >= 0) & (places < spans.counts[rows][:, None])
    token = jnp.where(is_new, spans.starts[rows][:, None] + places, 0)
    begins = is_new[:, 0]  # the block's first token is computed in this step
    before = jnp.maximum(blocks - 1, 0)
    state = jnp.where(
        begins[:, None, None, None],
        _state_after(kept, sizes, rows, before),
        kept.blocks(STATE, rows, blocks),
    )
    state = jnp.where((blocks == 0)[:, None, None, None], 0, state)
    kept = kept.with_blocks(STATE, rows, blocks, state, begins)
    known = _tokens(kept, rows, blocks)
    is_known = places < 0
    of_step = inputs.at(token)
    tokens = _with_new(known, is_known, is_new, of_step, state, sizes)
    offsets = jnp.broadcast_to(jnp.arange(size), is_new.shape)
    results = _read(state, tokens, of_step.query, offsets, sizes)
    for name, numbers in zip((KEY, UPDATE, DECAY), tokens, strict=True):
        kept = kept.with_block_tokens(name, rows, blocks, numbers, is_new.any(axis=1))
    target = jnp.where(is_new, token, len(outputs))
    return kept, outputs.at[target].set(results, mode="drop")


def _tokens(kept: KeptPages, rows: jax.Array, blocks: jax.Array) -> BlockTokens:
    return BlockTokens._make(
        [kept.block_tokens(name, rows, blocks) for name in (KEY, UPDATE, DECAY)]
    )


def _state_after(
    kept: KeptPages, sizes: StateSizes, rows: jax.Array, blocks: jax.Array
) -> jax.Array:
    """[N, heads, E, D] the state after full blocks."""
    tokens = _tokens(kept, rows, blocks)
    state = kept.blocks(STATE, rows, blocks)
    state = jnp.where((blocks == 0)[:, None, None, None], 0, state)
    sums = jnp.cumsum(tokens.decay, axis=1)
    last = sums[:, -1]
    weights = jnp.exp(last[:, None] - sums)  # [N, S, heads]
    keys = _of_heads(tokens.key, sizes)
    added = jnp.einsum("nshe,nsh,nshd->nhed", keys, weights, tokens.update, precision="highest")
    return jnp.exp(last)[..., None, None] * state + added


def _with_new(
    known: BlockTokens,
    is_known: jax.Array,
    is_new: jax.Array,
    of_step: Inputs,
    state: jax.Array,
    sizes: StateSizes,
) -> BlockTokens:
    """The tokens of blocks with those of the step [N, S] among them. The others are zeros."""
    key_mask = is_new[..., None, None]
    known_mask = is_known[..., None, None]
    key = jnp.where(key_mask, of_step.key, jnp.where(known_mask, known.key, 0))
    decay = jnp.where(
        is_new[..., None], of_step.decay, jnp.where(is_known[..., None], known.decay, 0)
    )
    old_update = jnp.where(known_mask, known.update, 0)
    if of_step.rate is None:
        return BlockTokens(key, jnp.where(key_mask, of_step.value, old_update), decay)
    sums = jnp.cumsum(decay, axis=1)  # [N, S, heads]
    keys = _of_heads(key, sizes)
    rate = jnp.where(is_new[..., None], of_step.rate, 0)
    given = jnp.exp(sums)[..., None] * jnp.einsum(
        "nshe,nhed->nshd", keys, state, precision="highest"
    )
    target = jnp.where(key_mask, rate[..., None] * (of_step.value - given), old_update)
    # (1 + A) update = target, where A has what earlier tokens of the block give for a key
    products = jnp.einsum("nshe,nthe->nhst", keys, keys, precision="highest")
    between = _decay_between(sums)
    earlier = jnp.tril(jnp.ones(products.shape[-2:], bool), -1)
    rates = jnp.swapaxes(rate, 1, 2)[..., None]
    system = jnp.where(earlier, rates * products * between, 0)
    update = jax.lax.linalg.triangular_solve(
        system + jnp.eye(system.shape[-1]),
        jnp.swapaxes(target, 1, 2),
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    return BlockTokens(key, jnp.swapaxes(update, 1, 2), decay)


def _read(
    state: jax.Array, tokens: BlockTokens, query: jax.Array, offsets: jax.Array, sizes: StateSizes
) -> jax.Array:
    """[N, Q, heads, D] the outputs of queries [N, Q, K, E] at these offsets [N, Q] of blocks.

    Args:
        state: [N, heads, E, D] before the blocks.
    """
    sums = jnp.cumsum(tokens.decay, axis=1)  # [N, S, heads]
    at_queries = jnp.take_along_axis(sums, offsets[..., None], axis=1)  # [N, Q, heads]
    queries = _of_heads(query, sizes)
    from_state = jnp.exp(at_queries)[..., None] * jnp.einsum(
        "nqhe,nhed->nqhd", queries, state, precision="highest"
    )
    keys = _of_heads(tokens.key, sizes)
    products = jnp.einsum("nqhe,nshe->nqsh", queries, keys, precision="highest")
    size = sums.shape[1]
    is_seen = jnp.arange(size) <= offsets[..., None]  # [N, Q, S]
    between = at_queries[:, :, None] - sums[:, None]  # [N, Q, S, heads]
    weights = jnp.exp(jnp.where(is_seen[..., None], between, -jnp.inf))
    within = jnp.einsum("nqsh,nshd->nqhd", products * weights, tokens.update, precision="highest")
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
