"""Paged attention in plain XLA. The cost depends on the real context. A gathered tile fits a cache.

Shapes are static and loop counts are not. There is a loop for rows with one query token (decodes)
and one for rows with more (prompt chunks). Each goes over a list of work items of exactly its rows:

    decode loop   an item is (row, span of `span` context tokens). An iteration computes `group`
                  items. Each item has a softmax of its own. After each iteration the items are
                  merged into the running (maximum, sum, output) of their rows (the online softmax
                  of FlashAttention, Dao et al. 2022, split over the context as in Flash-Decoding).
                  A long context adds no spans to the short ones beside it.
    chunk loop    an item is a tile of `tile` consecutive query tokens of one row. Its inner loop
                  walks the row's context up to the tile's last token. A call of at most ROWS tokens
                  has no chunk loop: each token is a row of the decode loop, which halves the code
                  to compile.

The scores of a decode are a product of keys by queries, which is transposed behind a barrier. XLA's
CPU product packs its right operand, and here that is the few queries of a group and not the keys.
30 layers, 64 sequences of 200 tokens, two AVX-512 cores, milliseconds: 180 this way, 235 with the
queries on the left, 257 with keys stored [D, S].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.implementation import Implementation
from pallas_kernels.shared.page_bits import read

# Context tokens of a decode item. An iteration of the chunk loop's inner loop has twice as many.
SPAN = 128
GROUP = 32  # decode items of an iteration: 32 x 128 keys and values fit a last-level cache
# Query tokens of a chunk tile: 64 took 1.5 times as long on whole prompts of 200 and 2,048 tokens
TILE = 128
ROWS = 64  # calls of at most so many tokens have no chunk loop
# In the place of minus infinity. It is finite, so exp(NEG - NEG) is a number, which masks make 0.
NEG = -1e30


def paged_attention(
    q,
    k_pages,
    v_pages,
    block_tables,
    seq_lens,
    cu_q_lens,
    *,
    scale: float,
    window=None,
    soft_cap=None,
    sinks=None,
) -> jax.Array:
    """See `api.paged_attention`.

    A span that is before the windows of all queries of an item is not gathered.
    """
    t, n, d = q.shape
    k = k_pages.shape[1]
    sinks = None if sinks is None else sinks.reshape(k, n // k)
    options: dict[str, Any] = {"window": window, "soft_cap": soft_cap, "sinks": sinks}
    q_lens = jnp.diff(cu_q_lens)
    # [T, K, G, D]: the query heads of each key head, multiplied by `scale`
    queries = (q.astype(jnp.float32) * scale).reshape(t, k, n // k, d).astype(q.dtype)
    if t <= ROWS:
        # Each query token becomes a row of one token. The row has the block table of the token's
        # sequence, and ends where the context ends that the token sees.
        token = jnp.arange(t)
        row = jnp.minimum((token[:, None] >= cu_q_lens[1:]).sum(1), len(seq_lens) - 1)  # [T]
        context = seq_lens[row]
        visible = context - (cu_q_lens[row + 1] - 1 - token)  # without the row's later tokens
        visible = jnp.where(token < cu_q_lens[-1], visible, 0)
        out = _decodes(queries, k_pages, v_pages, block_tables[row], visible, **options)
        return out.reshape(t, n, d).astype(q.dtype)

    chunk_lens = jnp.where(q_lens > 1, q_lens, 0)

    def keys_and_values(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys, values = (tile_of(pages, ids, q.dtype)[0] for pages in (k_pages, v_pages))
        return keys, values

    spans = Spans(keys_and_values, k_pages.shape[2], d)
    out = chunks(queries, spans, block_tables, seq_lens, cu_q_lens, chunk_lens, **options)

    single = q_lens == 1
    first = jnp.minimum(cu_q_lens[:-1], t - 1)
    lengths = jnp.where(single, seq_lens, 0)
    decoded = _decodes(queries[first], k_pages, v_pages, block_tables, lengths, **options)
    # a row without a single query token writes out of bounds, which drops it
    out = out.at[jnp.where(single, first, t)].set(decoded, mode="drop", unique_indices=False)
    return out.reshape(t, n, d).astype(q.dtype)


def _decodes(q, k_pages, v_pages, block_tables, seq_lens, *, window, soft_cap, sinks) -> jax.Array:
    """Computes the attention of q [B, K, G, D], one query a row. sinks: [K, G], or None.

    Returns [B, K, G, D] float32; rows of length 0 give 0.
    """
    b, k, g, d = q.shape
    s = k_pages.shape[2]
    span_pages = max(1, SPAN // s)
    span = span_pages * s
    # at least 4: a batch of few rows may have long contexts, and so more items than rows
    group = min(GROUP, max(4, b))
    tables = _spans(block_tables, span_pages)  # [B, M / span_pages, span_pages]

    begin = _begin(seq_lens, window)
    counts = (seq_lens + span - 1) // span - begin // span  # spans of each row
    max_count = tables.shape[1]
    if window is not None:
        # wherever a window begins, its tokens are in at most so many spans
        max_count = min(max_count, (window - 2) // span + 2)
    size = math.ceil(b * max_count / group) * group
    row, index, valid, total = _worklist(counts, size)
    span_index = jnp.minimum(index + begin[row] // span, tables.shape[1] - 1)  # in the row's table
    pages = tables[row, span_index].reshape(-1, group, span_pages)
    # in tokens from the span's start: the end of the context, and the beginning of the window
    context_ends = jnp.where(valid, seq_lens[row] - span_index * span, 0).reshape(-1, group)
    window_begins = (begin[row] - span_index * span).reshape(-1, group)
    row = row.reshape(-1, group)

    # The state: i, the next group of items. For each query of the rows, over the groups so far: top
    # [B, K, G] the largest score, norm [B, K, G] the sum of exp(score - top), and acc [B, K, G, D]
    # the sum of the values, weighted by exp(score - top).
    def body(state):
        i, top, norm, acc = state
        item_rows = row[i]  # [group]
        ends = context_ends[i]
        # [group, K, span, D]
        keys = tile_of(k_pages, pages[i], q.dtype)
        values = tile_of(v_pages, pages[i], q.dtype)
        scores = product("xkcd,xkgd->xkcg", keys, q[item_rows])
        scores = _with_soft_cap(jax.lax.optimization_barrier(scores).swapaxes(2, 3), soft_cap)
        real = (jnp.arange(span) < ends[:, None]) & (jnp.arange(span) >= window_begins[i][:, None])
        scores = jnp.where(real[:, None, None], scores, NEG)
        # unused slots may have a NaN of the block's earlier owner, and 0 * NaN is not 0
        values = jnp.where(real[:, None, :, None], values, 0)
        item_top = scores.max(-1)  # [group, K, G]
        weights = jnp.exp(scores - item_top[..., None])
        item_acc = product("xkgc,xkcd->xkgd", weights.astype(values.dtype), values)

        # Items of one row may be in one group. A one-hot product adds them up without a scatter.
        owns = (item_rows[:, None] == jnp.arange(b)) & (ends[:, None] > 0)  # [group, B]
        tops_by_row = jnp.where(owns[:, :, None, None], item_top[:, None], NEG)  # [group, B, K, G]
        new_top = jnp.maximum(top, tops_by_row.max(0))
        item_decay = jnp.exp(item_top - new_top[item_rows])
        one_hot = owns.astype(jnp.float32)
        decay = jnp.exp(top - new_top)
        norm = norm * decay
        norm = norm + product("xb,xkg->bkg", one_hot, weights.sum(-1) * item_decay)
        acc = acc * decay[..., None]
        acc = acc + product("xb,xkgd->bkgd", one_hot, item_acc * item_decay[..., None])
        return i + 1, new_top, norm, acc

    start = (0, jnp.full((b, k, g), NEG), jnp.zeros((b, k, g)), jnp.zeros((b, k, g, d)))
    _, top, norm, acc = jax.lax.while_loop(lambda state: state[0] * group < total, body, start)
    return acc / jnp.maximum(_with_sinks(norm, top, sinks), 1e-30)[..., None]


class Spans(NamedTuple):
    """How a chunk reads spans of its context.

    read: [1, n] ids of pages -> keys [K, n S, D] and values [K, n S, V].
    block_size: token slots of a page (S).
    value_size: numbers of a value (V).
    """

    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    block_size: int
    value_size: int


def chunks(
    q,
    spans: Spans,
    block_tables,
    seq_lens,
    cu_q_lens,
    q_lens,
    *,
    window,
    soft_cap,
    sinks=None,
    tile=TILE,
) -> jax.Array:
    """Computes the attention of q [T, K, G, D], multiplied by `scale`; rows with q_lens 0 are
    skipped.

    Args:
        sinks: [K, G], or None.
        tile: most query tokens that walk over the context together.

    Returns:
        [T, K, G, V] float32, zeros where no tile wrote.
    """
    t, k, g, d = q.shape
    b = len(seq_lens)
    s = spans.block_size
    tile = min(tile, t)
    span_pages = max(1, 2 * SPAN // s)
    span = span_pages * s
    tables = _spans(block_tables, span_pages)
    # t // tile whole tiles at most, and one tile at the end of each row
    row, index, _, total = _worklist((q_lens + tile - 1) // tile, t // tile + b)
    # A tile that starts at the last token would end behind q. Without padding, the slice would be
    # moved back.
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0), (0, 0)))

    def attend_tile(i, out):
        r = row[i]
        start = cu_q_lens[r] + index[i] * tile
        # the queries of the tile that are the row's
        num_queries = jnp.minimum(tile, cu_q_lens[r + 1] - start)
        # [tile] position of each query in its sequence
        position = seq_lens[r] - (cu_q_lens[r + 1] - start) + jnp.arange(tile)
        # [K, G tile, D]
        queries = (
            jax.lax.dynamic_slice_in_dim(padded, start, tile)
            .transpose(1, 2, 0, 3)
            .reshape(k, g * tile, d)
        )
        # the tile's queries see the context tokens begin : end
        begin = _begin(position[0] + 1, window)
        end = position[0] + num_queries

        # The state: j, the next span. For each query (query head, token of the tile), over the
        # spans so far: top [K, G tile], norm [K, G tile] and acc [K, G tile, V], as in `_decodes`.
        def walk(state):
            j = state[0]
            page = tables[r, j][None]
            keys, values = spans.read(page)
            scores = product("kqd,kcd->kqc", queries, keys)
            key_position = j * span + jnp.arange(span)
            visible = key_position <= position[:, None]
            if window is not None:
                visible &= key_position > position[:, None] - window
            scores = jnp.where(jnp.tile(visible, (g, 1)), _with_soft_cap(scores, soft_cap), NEG)
            # slots that no query of the tile sees may have a NaN, and 0 * NaN is not 0
            real = (key_position < end) & (key_position >= begin)
            values = jnp.where(real[:, None], values, 0)
            return _with_span(state, scores, values)

        rows = g * tile
        state = (
            begin // span,
            jnp.full((k, rows), NEG),
            jnp.zeros((k, rows)),
            jnp.zeros((k, rows, spans.value_size)),
        )
        # Without a window the first span holds token 0, which every query sees, so `top` is a real
        # score from then on. With a window, a query may see no token of the first spans. What it
        # sums up there is multiplied by exp(NEG - score) = 0 at its first real score.
        _, top, norm, acc = jax.lax.while_loop(lambda state: state[0] * span < end, walk, state)
        norm = _with_sinks(norm, top, None if sinks is None else sinks.repeat(tile, axis=1))
        result = acc / jnp.maximum(norm, 1e-30)[..., None]
        result = result.reshape(k, g, tile, -1).transpose(2, 0, 1, 3)
        old = jax.lax.dynamic_slice_in_dim(out, start, tile)
        is_query = (jnp.arange(tile) < num_queries)[:, None, None, None]
        result = jnp.where(is_query, result, old)
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, 0)

    out = jnp.zeros((t + tile, k, g, spans.value_size), jnp.float32)
    return jax.lax.fori_loop(0, total, attend_tile, out)[:t]


def _with_span(state: Any, scores: jax.Array, values: jax.Array) -> tuple[Any, ...]:
    """Returns the state of an online softmax of Q queries after one more span.

    Args:
        state: (j, top, norm, acc): the number of the span; [K, Q] the largest score; [K, Q] the sum
            of exp(score - top); [K, Q, V] the sum of the values, weighted by exp(score - top).
        scores: [K, Q, span], NEG for what a query does not see.
        values: [K, span, V].
    """
    j, top, norm, acc = state
    new_top = jnp.maximum(top, scores.max(-1))
    weights = jnp.exp(scores - new_top[..., None])
    decay = jnp.exp(top - new_top)
    part = product("kqc,kcd->kqd", weights.astype(values.dtype), values)
    return j + 1, new_top, norm * decay + weights.sum(-1), acc * decay[..., None] + part


def _with_sinks(norm: jax.Array, top: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Returns the sum of exp(score - top) with the sinks among the scores. A sink that is far above
    all scores makes it infinite, and the result zero.
    """
    return norm if sinks is None else norm + jnp.exp(sinks - top)


def product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns an einsum with sums in float32, exact for the bits of its operands.

    By default a TPU rounds float32 operands to bfloat16 and a GPU rounds them to TF32. Operands of
    16 bits are multiplied exactly on every device.
    """
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(axes, a, b, precision=exact, preferred_element_type=jnp.float32)


def _begin(length: jax.Array, window: int | None) -> jax.Array:
    """Returns the first token that the last token of a context sees."""
    return jnp.zeros_like(length) if window is None else jnp.maximum(length - window, 0)


def _with_soft_cap(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _worklist(counts: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Lists items, of which row b has counts[b].

    Returns (row, index within the row, valid), each [size], and the number of valid items.
    """
    end = jnp.cumsum(counts)
    item = jnp.arange(size)
    # [size] how many rows have all their items before an item: the number of the item's row
    ended = jnp.cumsum(jnp.zeros(size, jnp.int32).at[end].add(1, mode="drop"))
    row = jnp.minimum(ended, counts.shape[0] - 1)
    valid = item < end[-1]
    return row, jnp.where(valid, item - (end - counts)[row], 0), valid, end[-1]


def _spans(block_tables: jax.Array, pages: int) -> jax.Array:
    """Returns tables [B, M] as [B, M / pages, pages]; the end is filled with page 0."""
    b, m = block_tables.shape
    return jnp.pad(block_tables, ((0, 0), (0, -m % pages))).reshape(b, -1, pages)


def tile_of(pages: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Gathers pages [P, K, S, D] to [X, K, n * S, D] of a dtype. ids: [X, n] of the pages.

    Tables hold valid ids, so there is no check of bounds.
    """
    x, n = ids.shape
    _, k, s, d = pages.shape
    tile = read(pages.at[ids].get(mode="promise_in_bounds")).astype(dtype)
    return tile.transpose(0, 2, 1, 3, 4).reshape(x, k, n * s, d)


IMPLEMENTATION = Implementation("xla", paged_attention, takes_sinks=True)
