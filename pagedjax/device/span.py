"""A span: several decode steps of the same rows in one program.

The tokens of one step are the input of the next one, so they stay on the device. All else that a
step needs is known before: a row's position grows by one, and its block table is that of its last
step. The host is called once for all steps (engine/lookahead.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax.device.batch import Batch
from pagedjax.device.cache import KVCache
from pagedjax.device.extras import GroupTables, Span

OneStep = Callable[[KVCache, Batch], tuple[KVCache, jax.Array]]


def decode_span(one_step: OneStep, cache: KVCache, batch: Batch) -> tuple[KVCache, jax.Array]:
    """All steps of a span -> (cache, [count, B] int32: the sampled tokens of each step).

    The number of steps is a constant of the program, so no step waits for a condition. A row that
    ends earlier computes padding in the steps behind its end.

    Args:
        one_step: (cache, batch of decodes alone) -> (cache, its sampled tokens [B]).
        batch: of the first step, with a `Span`.
    """
    span = batch.extra(Span)
    assert span is not None, "the caller has checked it"
    first = batch.without(Span)

    def step(i: jax.Array, carried: tuple[KVCache, jax.Array, jax.Array]) -> Any:
        cache, tokens, all_tokens = carried
        cache, tokens = one_step(cache, _step_of(first, span, i, tokens, cache.tokens.shape[1]))
        return cache, tokens, all_tokens.at[i].set(tokens)

    all_tokens = jnp.zeros((span.count, len(batch.last)), jnp.int32)
    cache, _, all_tokens = jax.lax.fori_loop(0, span.count, step, (cache, batch.tokens, all_tokens))
    return cache, all_tokens


def _step_of(first: Batch, span: Span, i: jax.Array, tokens: jax.Array, block_size: int) -> Batch:
    """The batch of step i of a span.

    A row without a token in this step is like padding: its table and its slots are the trash block.
    Its length is 1 and not 0, so that the row behind it has its own number still. No row wants
    log-probabilities: a span returns none.

    Args:
        first: the batch of the first step.
        tokens: [B] the input of step i.
    """
    has_token = i < span.steps
    positions = first.positions + jnp.minimum(i, jnp.maximum(span.steps - 1, 0))
    entry = (positions // block_size)[:, None]

    def tables_of(tables: jax.Array) -> jax.Array:
        return jnp.where(has_token[:, None], tables, 0)

    def slots_in(tables: jax.Array) -> jax.Array:
        block = jnp.take_along_axis(tables, entry, axis=1)[:, 0]
        return jnp.where(has_token, block * block_size + positions % block_size, 0)

    tables = tables_of(first.block_tables)
    batch = first._replace(
        tokens=tokens,
        positions=positions,
        slots=slots_in(tables),
        block_tables=tables,
        seq_lens=jnp.where(has_token, positions + 1, jnp.minimum(span.steps, 1)),
        sampling=first.sampling._replace(position=first.sampling.position + i, num_top=None),
    )
    groups = batch.extra(GroupTables)
    if groups is None:
        return batch
    other_tables = tuple(map(tables_of, groups.block_tables))
    other_slots = tuple(map(slots_in, other_tables))
    return batch.having(replace(groups, slots=other_slots, block_tables=other_tables))
