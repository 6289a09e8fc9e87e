"""Rows of a few query tokens, such as a decode with drafts to verify, for GPUs and TPUs.

Only the device knows which rows are short, so a kernel's program has as many slots as the tokens of
a call can need.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Query tokens of the tiles of short rows. A row of 4 in a tile of 8 would compute twice as many
# scores, so there are two sizes.
SHORT = (4, 8)


def sizes_of_short_rows(t: int, max_size: int = SHORT[-1]) -> list[tuple[int, int]]:
    """Returns the sizes of short rows that a call of `t` tokens can have.

    A size is (fewest, most) query tokens of a row. The most are those of the tile, a power of two.

    Args:
        max_size: no size has more tokens.
    """
    padded_tokens = 1 << (t - 1).bit_length()
    fewest = (2, *(size + 1 for size in SHORT))
    sizes = zip(fewest, SHORT, strict=False)
    return [
        (least_tokens, min(size, padded_tokens))
        for least_tokens, size in sizes
        if least_tokens <= t and size <= max_size
    ]


def slots_of(
    chosen: jax.Array, cu_q_lens: jax.Array, slots: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gives a slot to each row that is `chosen` [B], at most `slots` of them.

    Returns (row, first, number), each [slots]: the row of each slot, the row's first query token,
    and how many query tokens it has. The number is 0 in an unused slot.
    """
    end = jnp.cumsum(chosen.astype(jnp.int32))
    slot = jnp.arange(slots, dtype=jnp.int32)
    row = jnp.minimum((slot[:, None] >= end).sum(1, dtype=jnp.int32), len(chosen) - 1)
    first = cu_q_lens[row]
    return row, first, jnp.where(slot < end[-1], cu_q_lens[row + 1] - first, 0)


def slot_queries(q: jax.Array, first: jax.Array, size: int) -> jax.Array:
    """Returns [slots, size, N, D] of q [T, N, D]: `size` tokens for each slot, from `first` on.

    If the slot's row has fewer tokens, the rest are tokens of other rows.
    """
    return q[jnp.minimum(first[:, None] + jnp.arange(size, dtype=jnp.int32), len(q) - 1)]


def with_results(
    out: jax.Array, results: jax.Array, first: jax.Array, number: jax.Array
) -> jax.Array:
    """Returns out [T, N, D] with results[i, :number[i]] at the tokens from first[i] on.

    results: [slots, size, N, D].
    """
    index = jnp.arange(results.shape[1], dtype=jnp.int32)
    places = jnp.where(index < number[:, None], first[:, None] + index, len(out))
    return out.at[places].set(results, mode="drop")
