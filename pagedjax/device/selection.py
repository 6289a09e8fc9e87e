"""Selections of blocks by their keys (Quest, Tang et al. 2024, arXiv 2406.10774): a query reads
only some of the blocks that it sees.

Each full block of a layer that selects has *bounds*: the least and the largest of each number over
its keys. They give an upper bound of q k for every key k of the block:

    q k = sum_d q_d k_d <= sum_d max(q_d least_d, q_d largest_d) = q+ largest + q- least

where q+ = max(q, 0) and q- = min(q, 0).

For each key head a query reads its own block and the `blocks - 1` blocks before it with the best
scores (`_scores`). The selected blocks of (query, key head) are a row of attention with a compact
table, over pages of one key head: [P, K, S, D] are [P K, 1, S, D], the same numbers in the same
order. So no kernel knows of selections.

A block's bounds are computed from its page in the step that writes its last slot. They are in the
cache beside the pages, by block, so whatever moves or shares blocks does so with the bounds. A
query never uses the bounds of its own block, which may not be full.
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

SPAN = 64  # blocks of a query whose scores are computed at once
# At most so many numbers of bounds are read at once. It decides how many queries are computed at
# once, but one query is always computed with SPAN blocks.
BOUNDS_AT_ONCE = 2**20
NEG = -1e30  # in the place of minus infinity, where a number must be finite


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
    """Writes the bounds of the blocks whose last slot is among `slots` [T], which `rows` sequences
    have written.
    """
    block_size = keys.block_size
    t = len(slots)
    count = min(t, t // block_size + rows)  # blocks that can become full
    fills = slots % block_size == block_size - 1
    (tokens,) = jnp.nonzero(fills, size=count, fill_value=0)
    # entries behind the full blocks are the trash block
    ids = jnp.where(jnp.arange(count) < fills.sum(), slots[tokens] // block_size, 0)
    pages = numbers_in(keys.pages.at[ids].get(mode="promise_in_bounds")).astype(jnp.float32)
    pages = pages.reshape(count, pages.shape[1], block_size, -1)
    bounds = stored_in(jnp.stack([pages.min(2), pages.max(2)], axis=2), keys.bounds.dtype)
    return keys._replace(bounds=keys.bounds.at[ids].set(bounds, mode="promise_in_bounds"))


class QueryOrder(NamedTuple):
    """The T queries of a step in another order: those that select stand behind all others.

    selecting: [T] bool.
    up_to: [T] of each query, how many queries up to and with it select.
    number: [] how many queries select.
    dense: the rows of the queries that do not select.
    first: [] the place of the first query that selects.
    place: [T] the place of each query in the new order.
    query: [T] the query at each place.
    """

    selecting: jax.Array
    up_to: jax.Array
    number: jax.Array
    dense: Rows
    first: jax.Array
    place: jax.Array
    query: jax.Array


def _query_order(
    selects: jax.Array, rows: tuple[jax.Array, jax.Array, jax.Array], token: jax.Array
) -> QueryOrder:
    """The order of a step's queries.

    Args:
        selects: [T] bool, also for padding.
        rows: (block tables, lengths, cu_q_lens) of the step. In a row the queries that select are
            the last ones.
        token: [T] 0, 1, 2, ...
    """
    tables, lens, cu_q_lens = rows
    selecting = selects & (token < cu_q_lens[-1])
    up_to = jnp.cumsum(selecting, dtype=jnp.int32)
    number = up_to[-1]
    before = jnp.pad(up_to, (1, 0))[cu_q_lens]  # [B + 1] how many select before each row
    dense = Rows(tables, lens - jnp.diff(before), cu_q_lens - before)
    dense = dense._replace(seq_lens=jnp.where(jnp.diff(dense.cu_q_lens) > 0, dense.seq_lens, 0))
    first = dense.cu_q_lens[-1]
    place_of_selecting = first + up_to - 1
    # padding stays where it is
    place_of_dense = jnp.where(token < cu_q_lens[-1], token - up_to, token)
    place = jnp.where(selecting, place_of_selecting, place_of_dense)
    query = jnp.zeros(len(token), jnp.int32).at[place].set(token, unique_indices=True)
    return QueryOrder(selecting, up_to, number, dense, first, place, query)


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
    """[T, N, D] attention. Queries that select read their selected blocks; others read all that
    they see.

    In a row the queries that select are the last ones.

    Args:
        q: [T, N, D].
        scale: the factor that `attend` has for q k.
    """
    selecting = batch.extra(Selecting)
    assert selecting is not None
    t, n, d = q.shape
    token = jnp.arange(t, dtype=jnp.int32)
    order = _query_order(selecting.tokens, batch.attention, token)
    to_all = attend(
        q[order.query], keys.pages, v_pages, *order.dense, window=None, soft_cap=soft_cap
    )[order.place]

    queries, rows = _rows_that_select(
        q, keys, batch, order, token, scale, selecting.selection.blocks
    )
    k_flat, v_flat = (pages.reshape(-1, 1, *pages.shape[2:]) for pages in (keys.pages, v_pages))
    to_selected = attend(
        queries.reshape(-1, *queries.shape[2:]),
        k_flat,
        v_flat,
        *rows,
        window=None,
        soft_cap=soft_cap,
    )
    return jnp.where(
        order.selecting[:, None, None], to_selected.reshape(t, n, d)[order.up_to - 1], to_all
    )


def _rows_that_select(
    q: jax.Array,
    keys: BoundedKeys,
    batch: Batch,
    order: QueryOrder,
    token: jax.Array,
    scale: float,
    blocks: int,
) -> tuple[jax.Array, Rows]:
    """The queries that select, [T, K, G, D], in the first `order.number` places, and their rows of
    attention.
    """
    t, n, d = q.shape
    query = order.query[(order.first + token) % t]
    tables, lens, cu_q_lens = batch.attention
    row = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], query, side="right"), len(lens) - 1)
    # what a query sees: its row up to the query itself
    length = jnp.where(token < order.number, lens[row] - (cu_q_lens[row + 1] - 1 - query), 0)
    kv_heads = keys.pages.shape[1]
    queries = q[query].reshape(t, kv_heads, n // kv_heads, d)
    return queries, _selected(queries * scale, keys, tables[row], length, order.number, blocks)


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
        q: [T, K, G, D] single queries, scaled; only the first `number` are used.
        tables: [T, M] the blocks that each query sees.
        lengths: [T] the tokens that each query sees.
    """
    t, kv_heads = q.shape[:2]
    block_size = keys.block_size
    blocks = min(blocks, tables.shape[1])
    pages, length = _pages_by_parts(q, keys, tables, lengths, number, blocks)
    full_blocks = jnp.minimum((length - 1) // block_size, blocks - 1)  # without the own block
    own_tokens = (length - 1) % block_size + 1
    seq_lens = jnp.where(length > 0, full_blocks * block_size + own_tokens, 0)
    cu_q_lens = jnp.minimum(jnp.arange(t * kv_heads + 1, dtype=jnp.int32), number * kv_heads)
    return Rows(pages.reshape(t * kv_heads, blocks), jnp.repeat(seq_lens, kv_heads), cu_q_lens)


def _pages_by_parts(
    q: jax.Array,
    keys: BoundedKeys,
    tables: jax.Array,
    lengths: jax.Array,
    number: jax.Array,
    blocks: int,
) -> tuple[jax.Array, jax.Array]:
    """The `_selected_pages` of all queries, [T, K, `blocks`], as pages of one key head; and their
    `lengths`. A part of the queries is computed at a time (BOUNDS_AT_ONCE). The arguments are those
    of `_selected`.
    """
    t, kv_heads, _, d = q.shape
    bounds_of_query = min(SPAN, tables.shape[1]) * kv_heads * 2 * d
    together = max(1, min(t, BOUNDS_AT_ONCE // bounds_of_query))  # queries
    rows = -(-t // together) * together
    q, tables, lengths = (
        jnp.pad(a, [(0, rows - t), *[(0, 0)] * (a.ndim - 1)]) for a in (q, tables, lengths)
    )
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]

    def select(i: jax.Array, pages: jax.Array) -> jax.Array:
        queries = (
            jax.lax.dynamic_slice_in_dim(a, i * together, together) for a in (q, tables, lengths)
        )
        selected = _selected_pages(*queries, keys=keys, blocks=blocks) * kv_heads + head
        return jax.lax.dynamic_update_slice_in_dim(pages, selected, i * together, 0)

    zeros = jnp.zeros((rows, kv_heads, blocks), jnp.int32)
    pages = jax.lax.fori_loop(0, (number + together - 1) // together, select, zeros)[:t]
    return pages, lengths[:t]


def _selected_pages(
    q: jax.Array, table: jax.Array, length: jax.Array, *, keys: BoundedKeys, blocks: int
) -> jax.Array:
    """[R, K, `blocks`] the pages that each query reads, in the order of the sequence: its own block
    is the last one.

    Args:
        q: [R, K, G, D], scaled.
        table: [R, M] the blocks that each query sees.
        length: [R] the tokens that each query sees.
    """
    width = table.shape[1]
    own_block = (length - 1) // keys.block_size  # -1 in unused rows
    # a query that sees at most `blocks` blocks reads all of them, and needs no scores
    num_scored = jnp.where(own_block < blocks, 0, own_block)
    scores = _scores(q, keys.bounds, table, num_scored)
    index = jnp.arange(width)
    scores = jnp.where(index < own_block[:, None, None], scores, -jnp.inf)
    scores = jnp.where(index == own_block[:, None, None], jnp.inf, scores)
    best, chosen = jax.lax.top_k(scores, blocks)
    chosen = jnp.sort(jnp.where(best > -jnp.inf, chosen, width), axis=-1)
    # the entry `width` is the trash block, for queries that see fewer blocks
    tables = jnp.pad(table, ((0, 0), (0, 1)))[:, None]
    return jnp.take_along_axis(tables, chosen, axis=2)


def _scores(q: jax.Array, bounds: jax.Array, tables: jax.Array, counts: jax.Array) -> jax.Array:
    """[R, K, M] float32: scores of the first `counts` [R] blocks of each row. Scores of other
    blocks are finite, and mean nothing.

    The query heads of a key head share its selection. Each of these heads gives a block a share: a
    softmax over the upper bounds of the blocks. The score of a block is the sum of its shares.

    Args:
        q: [R, K, G, D], scaled.
    """
    r, k, g, d = q.shape
    width = tables.shape[1]
    span = min(SPAN, width)
    tables = jnp.pad(tables, ((0, 0), (0, -width % span)))
    q = q.astype(jnp.float32)
    # q- and q+, in the order of the bounds: they are multiplied with least and largest
    q = jnp.stack([jnp.minimum(q, 0), jnp.maximum(q, 0)], axis=3).reshape(r, k, g, 2 * d)

    def bound(i: jax.Array, bounds_of_blocks: jax.Array) -> jax.Array:
        ids = jax.lax.dynamic_slice_in_dim(tables, i * span, span, axis=1)
        ends = numbers_in(bounds.at[ids].get(mode="promise_in_bounds")).astype(jnp.float32)
        ends = ends.transpose(0, 2, 1, 3, 4).reshape(r, k, span, 2 * d)
        upper = jnp.einsum(
            "rkgd,rkmd->rkgm", q, ends, precision="highest", preferred_element_type=jnp.float32
        )
        return jax.lax.dynamic_update_slice_in_dim(bounds_of_blocks, upper, i * span, axis=3)

    start = jnp.zeros((r, k, g, tables.shape[1]))
    upper = jax.lax.fori_loop(0, (counts.max() + span - 1) // span, bound, start)[..., :width]
    upper = jnp.where(jnp.arange(width) < counts[:, None, None, None], upper, NEG)
    shares = softmax(upper)
    total = shares[:, :, 0]
    for i in range(1, g):  # XLA keeps the order of additions that are written out
        total = total + shares[:, :, i]
    return total
