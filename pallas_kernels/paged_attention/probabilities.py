"""The weights that attention gives to values, as an output for people. Plain XLA.

They are computed for some heads of single queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.shared.page_bits import read


def weights_of(scores: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Computes the softmax of scores [..., C], over the last axis.

    sinks: [...] one more score of each row, whose weight is left out; None: there are none.
    """
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    one_more = jnp.broadcast_to(sinks[..., None], (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, one_more], axis=-1), axis=-1)[..., :-1]


def probabilities(
    q: jax.Array,
    k_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    heads: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax(soft_cap(scale q k^T)) of one query a row.

    These are the weights of the values in `api.paged_attention`. One row is computed at a time, so
    beside the result it needs memory only for the keys of one row.

    Args:
        q: [R, N, D] the last token of each row.
        k_pages: [P, K, S, D] keys, in any form that `api.paged_attention` takes.
        block_tables: [R, M] int32.
        seq_lens: [R] int32; a row of length 0 has zeros.
        heads: the query heads whose probabilities are returned.
        scale, window, soft_cap, sinks: as in `api.paged_attention`. With sinks a row adds up to
            less than 1.

    Returns:
        [R, heads, M S] float32, by position; zeros for the tokens that the query does not see.
    """
    query_heads = jnp.array(heads, jnp.int32)
    key_heads = query_heads * k_pages.shape[1] // q.shape[1]  # their key heads
    d = q.shape[2]
    context = block_tables.shape[1] * (k_pages.shape[2] * k_pages.shape[3] // q.shape[2])

    def row(query: jax.Array, table: jax.Array, length: jax.Array) -> jax.Array:
        # a page of each head and block of the table, [heads, M, S, D]
        keys = k_pages.at[table[None, :], key_heads[:, None]].get(mode="promise_in_bounds")
        keys = read(keys).astype(jnp.float32).reshape(len(query_heads), context, d)
        scores = jnp.einsum(
            "hd,hcd->hc", query.astype(jnp.float32) * scale, keys, precision="highest"
        )
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        visible = _visible(context, length, window)
        row_sinks = None if sinks is None else sinks[query_heads]
        weights = weights_of(jnp.where(visible, scores, -jnp.inf), row_sinks)
        return jnp.where(visible, weights, 0.0)

    def used_row(arrays: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        _, _, length = arrays
        return jax.lax.cond(
            length > 0, row, lambda *_: jnp.zeros((len(query_heads), context)), *arrays
        )

    return jax.lax.map(used_row, (q[:, query_heads], block_tables, seq_lens))


def _visible(context: int, length: jax.Array, window: int | None) -> jax.Array:
    """Which of so many tokens the last one of a row of `length` tokens sees, [context] bool."""
    place = jnp.arange(context)
    visible = place < length
    return visible if window is None else visible & (place >= length - window)
