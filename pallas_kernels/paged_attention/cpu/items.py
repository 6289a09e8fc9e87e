"""A work item of a short row: a decode, which is one query token, and one more for each draft.

`attend` computes the scores of a span of visible tokens, their softmax, and the weighted sum of the
values. Each page is read once for all query tokens. Each query token is computed as if it were
alone, so drafts change no bit of its result.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.paged_attention.cpu.options import INVARIANT, SIZE
from pallas_kernels.paged_attention.cpu.tile_items import tile_numbers
from pallas_kernels.paged_attention.cpu.vectors import (
    BATCH_QUERIES,
    BATCH_TOKENS,
    add_weighted_values_one,
    add_weighted_values_shared,
    add_weighted_values_together,
    apply_soft_cap,
    clear,
    exponentials,
    largest,
    prefetch,
    score_one,
    scores_shared,
    scores_together,
)
from pallas_kernels.shared.cpu.memory import (
    load_float,
    load_int,
    store_float,
)
from pallas_kernels.shared.cpu.translate import compiled, compiled_apart
from pallas_kernels.shared.cpu.vectors import FULL

SPAN = 256  # context tokens of a short row's item, counted from the first visible one
SHORT = 8  # most query tokens of a short row


@compiled
def first_seen(length, window, count):
    """Returns the first context token of a row's first span.

    It is the first token that any of the row's query tokens sees. In an invariant call spans begin
    at multiples of SPAN, so they are the same for every query token.
    """
    first = max(length - (window + count - 1), 0)
    return first - first % SPAN if INVARIANT else first


@compiled
def _softmax(scores, begin, count, total, cap) -> tuple[np.float32, np.float32]:
    """Replaces scores [total] by exp(score - the largest score) from `begin` to `count`, 0 outside.

    Returns (largest score, sum); without a score (minus infinity, 0). It writes on to the next
    multiple of 16.
    """
    end = -(-total // FULL) * FULL
    if count <= begin:
        clear(scores, end)
        return np.float32(-np.inf), np.float32(0)
    if cap > 0:
        apply_soft_cap(scores, end // FULL, FULL, cap)
    for i in range(begin):
        store_float(scores + 4 * i, np.float32(-np.inf))
    for i in range(count, end):
        store_float(scores + 4 * i, np.float32(-np.inf))
    top = np.float32(-np.inf)
    for i in range(0, end, FULL):
        top = max(top, largest(scores + 4 * i))
    norm = np.float32(0)
    for i in range(0, end, FULL):
        norm += exponentials(scores + 4 * i, top)
    return top, norm


@compiled
def _fetch(address, size):
    """Prefetches `size` bytes, in cache lines of 64."""
    for at in range(0, size, 64):
        prefetch(address + at)


@compiled_apart
def attend(
    q, k, v, page_bytes, table, first, stop, cap, group, d, s, scores, out, stats,
    count, length, window, token_bytes, heads,
):  # fmt: skip
    """Computes the queries of `count` tokens, G each, over context tokens first : stop of one head.

    q: [G, D] float32 of the first token; those of the next token are token_bytes behind.
    out: [G, D] float32 of the first token: the sum of the values, weighted by exp(score - the
        largest score).
    stats: [G, 2] float32 of the first token: (largest score, sum of the weights), for the merge of
        items.
    The out and the stats of the next token are `heads` times their own size behind.
    k, v: addresses of this head in page 0.
    table: [M] int32 pages of the row.
    cap: address of the soft cap, or of 0.
    scores: [count, G, SPAN] float32, scratch.
    length: context tokens of the last query token; each query token before it has one less.
    window: a query token sees the last `window` of its context tokens.
    """
    row = SIZE * d
    part = 4 * group * d * heads
    # an aligned span may begin before the window
    visible = max(first, length - (window + count - 1))
    position = visible
    while position < stop:
        offset = position % s
        run = min(s - offset, stop - position)
        base = k + load_int(table + 4 * (position // s)) * page_bytes + offset * row
        next_rows = v + load_int(table + 4 * (visible // s)) * page_bytes + visible % s * row
        if position + run < stop:
            next_rows = k + load_int(table + 4 * (position // s + 1)) * page_bytes
        span_scores = scores + 4 * (position - first)
        i = 0
        while i + BATCH_TOKENS <= run:
            _fetch(next_rows + i * row, BATCH_TOKENS * row)
            for token in range(count):
                query = q + token * token_bytes
                score = span_scores + 4 * (token * group * SPAN + i)
                g = 0
                while g + BATCH_QUERIES <= group:
                    scores_shared(
                        SIZE, query + 4 * g * d, base + i * row, d, score + 4 * g * SPAN, SPAN
                    )
                    g += BATCH_QUERIES
                while g < group:
                    scores_together(
                        SIZE, query + 4 * g * d, base + i * row, d, score + 4 * g * SPAN, SPAN
                    )
                    g += 1
            i += BATCH_TOKENS
        while i < run:
            for token in range(count):
                for g in range(group):
                    query = q + token * token_bytes + 4 * g * d
                    score = span_scores + 4 * ((token * group + g) * SPAN + i)
                    score_one(SIZE, query, base + i * row, d, score, SPAN)
            i += 1
        position += run

    for token in range(count):
        visible_end = length - (count - 1 - token)
        begin = max(visible_end - window - first, 0)
        end = min(visible_end, stop) - first
        for g in range(group):
            top, norm = _softmax(
                scores + 4 * (token * group + g) * SPAN, begin, end, stop - first, load_float(cap)
            )
            store_float(stats + 8 * (token * group * heads + g), top)
            store_float(stats + 8 * (token * group * heads + g) + 4, norm)
            clear(out + token * part + 4 * g * d, d)

    position = visible
    while position < stop:
        offset = position % s
        run = min(s - offset, stop - position)
        base = v + load_int(table + 4 * (position // s)) * page_bytes + offset * row
        next_rows = base
        if position + run < stop:
            next_rows = v + load_int(table + 4 * (position // s + 1)) * page_bytes
        span_scores = scores + 4 * (position - first)
        i = 0
        while i + BATCH_TOKENS <= run:
            _fetch(next_rows + i * row, BATCH_TOKENS * row)
            for token in range(count):
                weights = span_scores + 4 * (token * group * SPAN + i)
                sums = out + token * part
                g = 0
                while g + BATCH_QUERIES <= group:
                    address = sums + 4 * g * d
                    add_weighted_values_shared(
                        SIZE, weights + 4 * g * SPAN, base + i * row, d, address, SPAN
                    )
                    g += BATCH_QUERIES
                while g < group:
                    address = sums + 4 * g * d
                    add_weighted_values_together(
                        SIZE, weights + 4 * g * SPAN, base + i * row, d, address, SPAN
                    )
                    g += 1
            i += BATCH_TOKENS
        while i < run:
            for token in range(count):
                for g in range(group):
                    weights = span_scores + 4 * ((token * group + g) * SPAN + i)
                    sums = out + token * part + 4 * g * d
                    add_weighted_values_one(SIZE, weights, base + i * row, d, sums, SPAN)
            i += 1
        position += run


@compiled
def scratch_bytes(group, d):
    """Returns the bytes of scratch memory of an item of either kind."""
    return 4 * max(SHORT * group * SPAN, tile_numbers(d))
