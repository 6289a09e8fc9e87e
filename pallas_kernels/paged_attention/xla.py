"""Paged attention in plain XLA. The cost depends on the real context; a gathered tile fits a cache.

Shapes are static and loop counts are not. Rows with one query token (decodes) and rows with more
(prompt chunks) have one loop each, over a list of work items of exactly those rows:

    decode loop   an item is (row, span of `span` context tokens); `group` items an iteration. Every
                  item's softmax is local and is merged into the running (max, sum, output) of the
                  rows after each iteration (the online softmax of FlashAttention, Dao et al. 2022,
                  split over the context as in Flash-Decoding). A long context does not add spans to
                  the short ones beside it.
    chunk loop    an item is a tile of `tile` consecutive query tokens of one row; its inner loop
                  walks the row's context up to the tile's last token. A call of at most ROWS tokens
                  has no chunk loop: each token is a row of the decode loop, which halves the code
                  to compile.

Why the scores of a decode are a product of keys by queries, transposed behind a barrier: XLA's CPU
product packs its right operand, and here that is the handful of queries of a group and not the
keys. 30 layers, 64 sequences of 200 tokens, two AVX-512 cores, milliseconds: 180 that way, 235 with
the queries on the left, 257 with keys stored [D, S].
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.implementation import Implementation
from pallas_kernels.shared.page_bits import read

# Context tokens of a decode item, and half of those of a trip through the chunk loop's inner loop
SPAN = 128
GROUP = 32  # decode items an iteration: 32 x 128 tokens of keys and values fit a last-level cache
# Query tokens of a chunk tile: 64 took 1.5 times as long on whole prompts of 200 and 2,048 tokens
TILE = 128
ROWS = 64  # calls of at most so many tokens have no chunk loop
NEG = -1e30  # a finite minus infinity: exp(NEG - NEG) is a number, and the masks make it 0


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
) -> jax.Array:
    """See `api.paged_attention`.

    Spans before the windows of all of an item's queries are not gathered.
    """
    options = {"window": window, "soft_cap": soft_cap}
    t, n, d = q.shape
    k = k_pages.shape[1]
    q_lens = jnp.diff(cu_q_lens)
    grouped = (q.astype(jnp.float32) * scale).reshape(t, k, n // k, d).astype(q.dtype)
    if t <= ROWS:
        token = jnp.arange(t)
        row = jnp.minimum((token[:, None] >= cu_q_lens[1:]).sum(1), len(seq_lens) - 1)
        visible = seq_lens[row] - (cu_q_lens[row + 1] - 1 - token)
        visible = jnp.where(token < cu_q_lens[-1], visible, 0)
        out = _decodes(grouped, k_pages, v_pages, block_tables[row], visible, **options)
        return out.reshape(t, n, d).astype(q.dtype)

    chunk_lens = jnp.where(q_lens > 1, q_lens, 0)
    out = _chunks(
        grouped, k_pages, v_pages, block_tables, seq_lens, cu_q_lens, chunk_lens, **options
    )

    single = q_lens == 1
    first = jnp.minimum(cu_q_lens[:-1], t - 1)
    lengths = jnp.where(single, seq_lens, 0)
    decoded = _decodes(grouped[first], k_pages, v_pages, block_tables, lengths, **options)
    # a row without a single query token writes out of bounds, which drops it
    out = out.at[jnp.where(single, first, t)].set(decoded, mode="drop", unique_indices=False)
    return out.reshape(t, n, d).astype(q.dtype)


def _decodes(q, k_pages, v_pages, block_tables, seq_lens, *, window, soft_cap) -> jax.Array:
    """Computes the attention of q [B, K, G, D], one query a row.

    Returns [B, K, G, D] float32; rows of length 0 give 0.
    """
    b, k, g, d = q.shape
    s = k_pages.shape[2]
    per = max(1, SPAN // s)  # pages of a span
    span = per * s
    group = min(GROUP, max(4, b))
    tables = _spans(block_tables, per)  # [B, M / per, per]

    begin = _begin(seq_lens, window)
    counts = (seq_lens + span - 1) // span - begin // span
    widest = tables.shape[1] if window is None else min(tables.shape[1], (window - 2) // span + 2)
    size = math.ceil(b * widest / group) * group
    row, index, valid, total = _worklist(counts, size)
    index = jnp.minimum(index + begin[row] // span, tables.shape[1] - 1)
    pages = tables[row, index].reshape(-1, group, per)
    # tokens from the span's start: to the end of the context, and to the begin of the window
    context_ends = jnp.where(valid, seq_lens[row] - index * span, 0).reshape(-1, group)
    window_begins = (begin[row] - index * span).reshape(-1, group)
    row = row.reshape(-1, group)

    def body(state):
        i, top, norm, acc = state
        r = row[i]
        ends = context_ends[i]
        # [group, K, span, D]
        keys = _tile(k_pages, pages[i], q.dtype)
        values = _tile(v_pages, pages[i], q.dtype)
        scores = _product("xkcd,xkgd->xkcg", keys, q[r])
        scores = _with_soft_cap(jax.lax.optimization_barrier(scores).swapaxes(2, 3), soft_cap)
        real = (jnp.arange(span) < ends[:, None]) & (jnp.arange(span) >= window_begins[i][:, None])
        scores = jnp.where(real[:, None, None], scores, NEG)
        # 0 * NaN of a block's earlier owner is not 0
        values = jnp.where(real[:, None, :, None], values, 0)
        local = scores.max(-1)
        weights = jnp.exp(scores - local[..., None])
        part = _product("xkgc,xkcd->xkgd", weights.astype(values.dtype), values)

        # Items of one row may meet in one group. A one-hot product adds them up without a scatter.
        owns = (r[:, None] == jnp.arange(b)) & (ends[:, None] > 0)  # [group, B]
        new = jnp.maximum(top, jnp.where(owns[:, :, None, None], local[:, None], NEG).max(0))
        share = jnp.exp(local - new[r])
        hot = owns.astype(jnp.float32)
        keep = jnp.exp(top - new)
        norm = norm * keep + _product("xb,xkg->bkg", hot, weights.sum(-1) * share)
        acc = acc * keep[..., None] + _product("xb,xkgd->bkgd", hot, part * share[..., None])
        return i + 1, new, norm, acc

    start = (0, jnp.full((b, k, g), NEG), jnp.zeros((b, k, g)), jnp.zeros((b, k, g, d)))
    _, _, norm, acc = jax.lax.while_loop(lambda state: state[0] * group < total, body, start)
    return acc / jnp.maximum(norm, 1e-30)[..., None]


def _chunks(
    q, k_pages, v_pages, block_tables, seq_lens, cu_q_lens, q_lens, *, window, soft_cap
) -> jax.Array:
    """Computes the attention of q [T, K, G, D]; rows with q_lens 0 are skipped.

    Returns [T, K, G, D] float32, zeros where no tile wrote.
    """
    t, k, g, d = q.shape
    b = len(seq_lens)
    s = k_pages.shape[2]
    tile = min(TILE, t)
    per = max(1, 2 * SPAN // s)
    span = per * s
    tables = _spans(block_tables, per)
    row, index, _, total = _worklist((q_lens + tile - 1) // tile, t // tile + b)
    # The tile that starts at the last token reaches `tile` past the end; padding keeps the slice
    # from moving back.
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0), (0, 0)))

    def attend_tile(i, out):
        r = row[i]
        start = cu_q_lens[r] + index[i] * tile
        number = jnp.minimum(tile, cu_q_lens[r + 1] - start)  # real queries in the tile
        # of each query in its sequence
        position = seq_lens[r] - (cu_q_lens[r + 1] - start) + jnp.arange(tile)
        queries = (
            jax.lax.dynamic_slice_in_dim(padded, start, tile)
            .transpose(1, 2, 0, 3)
            .reshape(k, g * tile, d)
        )
        # the context that the tile's queries see
        begin = _begin(position[0] + 1, window)
        last = position[0] + number

        def walk(state):
            j, top, norm, acc = state
            page = tables[r, j][None]
            keys, values = (_tile(x, page, q.dtype)[0] for x in (k_pages, v_pages))  # [K, span, D]
            scores = _product("kqd,kcd->kqc", queries, keys)
            place = j * span + jnp.arange(span)
            visible = place <= position[:, None]
            if window is not None:
                visible &= place > position[:, None] - window
            scores = jnp.where(jnp.tile(visible, (g, 1)), _with_soft_cap(scores, soft_cap), NEG)
            # 0 * NaN of what no query of the tile sees is not 0
            real = (place < last) & (place >= begin)
            values = jnp.where(real[:, None], values, 0)
            new = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new[..., None])
            keep = jnp.exp(top - new)
            part = _product("kqc,kcd->kqd", weights.astype(values.dtype), values)
            return j + 1, new, norm * keep + weights.sum(-1), acc * keep[..., None] + part

        rows = g * tile
        state = (
            begin // span,
            jnp.full((k, rows), NEG),
            jnp.zeros((k, rows)),
            jnp.zeros((k, rows, d)),
        )
        # Without a window the first span holds token 0, which every query sees: `top` is a real
        # score from then on. With a window, sums before a query's first real score are then
        # multiplied by exp(NEG - score) = 0.
        _, _, norm, acc = jax.lax.while_loop(lambda state: state[0] * span < last, walk, state)
        result = acc / jnp.maximum(norm, 1e-30)[..., None]
        result = result.reshape(k, g, tile, d).transpose(2, 0, 1, 3)
        old = jax.lax.dynamic_slice_in_dim(out, start, tile)
        result = jnp.where((jnp.arange(tile) < number)[:, None, None, None], result, old)
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, 0)

    out = jnp.zeros((t + tile, k, g, d), jnp.float32)
    return jax.lax.fori_loop(0, total, attend_tile, out)[:t]


def _product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
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

    Returns (row, index within the row, valid) of `size` items, and the number of valid ones.
    """
    end = jnp.cumsum(counts)
    item = jnp.arange(size)
    # rows whose items lie before each
    ended = jnp.cumsum(jnp.zeros(size, jnp.int32).at[end].add(1, mode="drop"))
    row = jnp.minimum(ended, counts.shape[0] - 1)
    valid = item < end[-1]
    return row, jnp.where(valid, item - (end - counts)[row], 0), valid, end[-1]


def _spans(block_tables: jax.Array, per: int) -> jax.Array:
    """Returns tables [B, M] as [B, M / per, per]; the end is filled with page 0."""
    b, m = block_tables.shape
    return jnp.pad(block_tables, ((0, 0), (0, -m % per))).reshape(b, -1, per)


def _tile(pages: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Gathers the pages [P, K, S, D] of ids [X, per] to [X, K, per * S, D] of a dtype.

    Tables hold valid ids, so there is no check of bounds.
    """
    x, per = ids.shape
    _, k, s, d = pages.shape
    tile = read(pages.at[ids].get(mode="promise_in_bounds")).astype(dtype)
    return tile.transpose(0, 2, 1, 3, 4).reshape(x, k, per * s, d)


IMPLEMENTATION = Implementation("xla", paged_attention)
