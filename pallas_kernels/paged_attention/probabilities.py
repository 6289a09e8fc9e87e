"""The probabilities that attention weighs values with, for some heads of single queries, to look at. Plain XLA."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.shared.page_bits import read


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
) -> jax.Array:
    """Computes softmax(soft_cap(scale q k^T)) of one query a row, as `api.paged_attention` weighs values.

    One row is computed at a time, so beside the result there is room for the keys of one row alone.

    Args:
        q: [R, N, D] the last token of each row.
        k_pages: [P, K, S, D] keys, in any form that `api.paged_attention` takes.
        block_tables: [R, M] int32, seq_lens: [R] int32, as there; a row of length 0 has zeros.
        heads: the query heads that are wanted.
        scale, window, soft_cap: as there.

    Returns:
        [R, heads, M S] float32, by position; zeros where the query does not see.
    """
    chosen = jnp.array(heads, jnp.int32)
    own = chosen * k_pages.shape[1] // q.shape[1]  # their key heads
    d, context = (
        q.shape[2],
        block_tables.shape[1] * (k_pages.shape[2] * k_pages.shape[3] // q.shape[2]),
    )
    place = jnp.arange(context)

    def row(query: jax.Array, table: jax.Array, length: jax.Array) -> jax.Array:
        keys = k_pages.at[table[None, :], own[:, None]].get(
            mode="promise_in_bounds"
        )  # [heads, M, S, D]
        keys = read(keys).astype(jnp.float32).reshape(len(chosen), context, d)
        scores = jnp.einsum(
            "hd,hcd->hc", query.astype(jnp.float32) * scale, keys, precision="highest"
        )
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = place < length
        if window is not None:
            seen &= place >= length - window
        return jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1), 0.0)

    def used_row(arrays: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return jax.lax.cond(
            arrays[2] > 0, row, lambda *_: jnp.zeros((len(chosen), context)), *arrays
        )

    return jax.lax.map(used_row, (q[:, chosen], block_tables, seq_lens))
