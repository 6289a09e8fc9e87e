"""Selections of blocks by their keys (Quest, Tang et al. 2024, arXiv 2406.10774): what a query
reads of what it sees.

Each full block of a layer that selects has *bounds*: the least and the largest of each number over
its keys. They give an upper bound of q k for every key k of the block:

    q k = sum_d q_d k_d <= sum_d max(q_d least_d, q_d largest_d) = q+ largest + q- least

where q+ = max(q, 0) and q- = min(q, 0).

For each key head a query reads its own block and the `blocks - 1` blocks before it with the best
scores (`_scores`). The selected blocks of (query, key head) are a row of attention with a compact
table, over pages of one key head: [P, K, S, D] are [P K, 1, S, D], the same numbers in the same
order. So no kernel knows of selections.

A block's bounds are computed from its page in the step that writes its last slot. They are in the
cache beside the pages, by block, so whatever moves or shares blocks moves and shares them. A query
never uses the bounds of its own block, which may not be full.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pagedjax.device import attention
from pagedjax.device.attention import Attend, numbers_in, stored_in
from pagedjax.device.batch import Batch
from pagedjax.device.cache import BoundedKeys, Pages
from pagedjax.device.extras import Selecting
from pagedjax.device.row_reductions import softmax

# numbers of bounds that are read at once, at most, unless one block of one row has more
AT_ONCE = 2**20
NEG = -1e30  # a finite minus infinity
SPAN = 64  # blocks of a row whose scores are computed at once


class Rows(NamedTuple):
    """Rows of attention, as an `Attend` takes them."""

    block_tables: jax.Array  # [B, M]
    seq_lens: jax.Array  # [B]
    cu_q_lens: jax.Array  # [B + 1]


def write(attend: Attend, pages: Pages, k: jax.Array, v: jax.Array, batch: Batch) -> Pages:
    """The pages of a layer with the keys and values of the batch's tokens in their slots, and, of a
    layer that selects, the bounds of blocks that become full.
    """
    k_pages, v_pages = attention.write(attend, pages["k"], pages["v"], k, v, batch)
    written = Pages(pages, k=k_pages, v=v_pages)
    if "bounds" in pages:
        keys = BoundedKeys(k_pages, pages["bounds"])
        written["bounds"] = _with_bounds(keys, batch.slots, len(batch.seq_lens)).bounds
    return written


def _with_bounds(keys: BoundedKeys, slots: jax.Array, rows: int) -> BoundedKeys:
    """The bounds of the blocks whose last slot is among `slots` [T], which `rows` sequences have
    written.
    """
    size, t = keys.block_size, len(slots)
    most = min(t, t // size + rows)
    filled = slots % size == size - 1
    (found,) = jnp.nonzero(filled, size=most, fill_value=0)
    # the rest is the trash block
    ids = jnp.where(jnp.arange(most) < filled.sum(), slots[found] // size, 0)
    pages = numbers_in(keys.pages.at[ids].get(mode="promise_in_bounds")).astype(jnp.float32)
    pages = pages.reshape(most, pages.shape[1], size, -1)
    new = stored_in(jnp.stack([pages.min(2), pages.max(2)], axis=2), keys.bounds.dtype)
    return keys._replace(bounds=keys.bounds.at[ids].set(new, mode="promise_in_bounds"))


def attend_selected(
    attend: Attend,
    q: jax.Array,
    keys: BoundedKeys,
    v_pages: jax.Array,
    batch: Batch,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> jax.Array:
    """[T, N, D]: of queries that select, the attention to their selected blocks; of others, to all
    that they see.

    In a row the queries that select are the last ones.

    Args:
        q: [T, N, D].
        scale: what `attend` multiplies q k with.
    """
    selecting = batch.extra(Selecting)
    assert selecting is not None
    selection = selecting.selection
    selects = selecting.tokens
    t, n, d = q.shape
    k = keys.pages.shape[1]
    tables, lens, cu_q_lens = batch.attention
    token = jnp.arange(t, dtype=jnp.int32)
    chosen = selects & (token < cu_q_lens[-1])
    until = jnp.cumsum(chosen, dtype=jnp.int32)  # queries that select, up to each
    number = until[-1]

    # The queries that select are behind all others: a step has both kinds in any order.
    before = jnp.pad(until, (1, 0))[cu_q_lens]
    dense = Rows(tables, lens - jnp.diff(before), cu_q_lens - before)
    dense = dense._replace(seq_lens=jnp.where(jnp.diff(dense.cu_q_lens) > 0, dense.seq_lens, 0))
    first = dense.cu_q_lens[-1]
    place = jnp.where(
        chosen, first + until - 1, jnp.where(token < cu_q_lens[-1], token - until, token)
    )
    order = jnp.zeros(t, jnp.int32).at[place].set(token, unique_indices=True)
    found = attend(q[order], keys.pages, v_pages, *dense, window=None, soft_cap=soft_cap)[place]

    mine = order[(first + token) % t]  # in the first `number` places
    row = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], mine, side="right"), len(lens) - 1)
    length = jnp.where(token < number, lens[row] - (cu_q_lens[row + 1] - 1 - mine), 0)
    queries = q[mine].reshape(t, k, n // k, d)
    selected = _selected(queries * scale, keys, tables[row], length, number, selection.blocks)
    k_flat, v_flat = (pages.reshape(-1, 1, *pages.shape[2:]) for pages in (keys.pages, v_pages))
    out = attend(
        queries.reshape(t * k, n // k, d), k_flat, v_flat, *selected, window=None, soft_cap=soft_cap
    )
    return jnp.where(chosen[:, None, None], out.reshape(t, n, d)[until - 1], found)


def _selected(
    q: jax.Array,
    keys: BoundedKeys,
    tables: jax.Array,
    lengths: jax.Array,
    number: jax.Array,
    blocks: int,
) -> Rows:
    """A row of attention for each query and key head, over pages of one key head.

    Args:
        q: [T, K, G, D] single queries, scaled; the first `number` of them count.
        tables, lengths: [T, M], [T] what they see.
    """
    t, k, _, d = q.shape
    size, width = keys.block_size, tables.shape[1]
    blocks, span = min(blocks, width), min(SPAN, width)
    together = max(1, min(t, AT_ONCE // (span * k * 2 * d)))
    rows = -(-t // together) * together
    q, tables, lengths = (
        jnp.pad(a, [(0, rows - t), *[(0, 0)] * (a.ndim - 1)]) for a in (q, tables, lengths)
    )
    head = jnp.arange(k, dtype=jnp.int32)[None, :, None]

    def some(i: jax.Array, found: jax.Array) -> jax.Array:
        mine, table, length = (
            jax.lax.dynamic_slice_in_dim(a, i * together, together) for a in (q, tables, lengths)
        )
        own = (length - 1) // size  # -1 in rows that do not count
        scores = _scores(mine, keys.bounds, table, jnp.where(own < blocks, 0, own))
        index = jnp.arange(width)
        scores = jnp.where(index < own[:, None, None], scores, -jnp.inf)
        scores = jnp.where(index == own[:, None, None], jnp.inf, scores)
        best, at = jax.lax.top_k(scores, blocks)
        # in their order, so the own block is the last
        at = jnp.sort(jnp.where(best > -jnp.inf, at, width), axis=-1)
        pages = jnp.take_along_axis(jnp.pad(table, ((0, 0), (0, 1)))[:, None], at, axis=2)
        return jax.lax.dynamic_update_slice_in_dim(found, pages * k + head, i * together, 0)

    start = jnp.zeros((rows, k, blocks), jnp.int32)
    found = jax.lax.fori_loop(0, (number + together - 1) // together, some, start)[:t]
    length = lengths[:t]
    whole = jnp.minimum((length - 1) // size, blocks - 1)  # selected blocks before the own one
    seen = jnp.where(length > 0, whole * size + (length - 1) % size + 1, 0)
    each = jnp.minimum(jnp.arange(t * k + 1, dtype=jnp.int32), number * k)
    return Rows(found.reshape(t * k, blocks), jnp.repeat(seen, k), each)


def _scores(q: jax.Array, bounds: jax.Array, tables: jax.Array, counts: jax.Array) -> jax.Array:
    """[R, K, M] float32: scores of the first `counts` [R] blocks of each row; others are any finite
    numbers.

    The query heads of a key head share its selection. The score of a block is the sum of its
    shares: what a softmax of the upper bounds gives it in each of these heads.

    Args:
        q: [R, K, G, D], scaled.
    """
    r, k, g, d = q.shape
    width = tables.shape[1]
    span = min(SPAN, width)
    tables = jnp.pad(tables, ((0, 0), (0, -width % span)))
    q = q.astype(jnp.float32)
    q = jnp.stack([jnp.minimum(q, 0), jnp.maximum(q, 0)], axis=3).reshape(r, k, g, 2 * d)

    def some(i: jax.Array, found: jax.Array) -> jax.Array:
        ids = jax.lax.dynamic_slice_in_dim(tables, i * span, span, axis=1)
        ends = numbers_in(bounds.at[ids].get(mode="promise_in_bounds")).astype(jnp.float32)
        ends = ends.transpose(0, 2, 1, 3, 4).reshape(r, k, span, 2 * d)
        upper = jnp.einsum(
            "rkgd,rkmd->rkgm", q, ends, precision="highest", preferred_element_type=jnp.float32
        )
        return jax.lax.dynamic_update_slice_in_dim(found, upper, i * span, axis=3)

    start = jnp.zeros((r, k, g, tables.shape[1]))
    upper = jax.lax.fori_loop(0, (counts.max() + span - 1) // span, some, start)[..., :width]
    upper = jnp.where(jnp.arange(width) < counts[:, None, None, None], upper, NEG)
    shares = softmax(upper)
    total = shares[:, :, 0]
    for i in range(1, g):  # XLA keeps the order of additions that are written out
        total = total + shares[:, :, i]
    return total
