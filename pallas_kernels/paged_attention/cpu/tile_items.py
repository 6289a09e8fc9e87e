"""A work item of a chunk: a tile of queries.

It is computed by an online softmax (FlashAttention, Dao et al. 2022). `attend_tile` goes over steps
of CONTEXT_TILE context tokens. A step is two small matrix products whose sums stay in registers. If
queries and pages are bfloat16 and the CPU multiplies pairs of bfloat16 numbers, the products do so.
Weights are then rounded to bfloat16, as FlashAttention implementations do. Sums and softmax are
float32.

A tile's queries are the row's (token, query head) pairs of one key head in order, so that any
number of query heads fills vectors. Scores are [token, query], 16 queries a vector, so their
softmax needs no sums across lanes.
"""

from __future__ import annotations

import math

import numpy as np

from pallas_kernels.paged_attention.cpu.options import PAIRED, SINKS, SIZE
from pallas_kernels.paged_attention.cpu.tile_vectors import (
    KEYS_AT_ONCE,
    LANES,
    PAIRS,
    QUERIES_AT_ONCE,
    add_weighted_values_pairs,
    add_weighted_values_tile,
    hide,
    interleave,
    online_softmax_step,
    online_softmax_step_pairs,
    round_to_bfloat16,
    score_16,
    score_32,
    score_48,
    score_pairs_16,
    score_pairs_32,
    score_pairs_48,
    transpose,
)
from pallas_kernels.paged_attention.cpu.vectors import (
    apply_soft_cap,
    clear,
    copy,
    scale,
)
from pallas_kernels.shared.cpu.memory import (
    load_float,
    load_int,
    load_word,
    store_float,
    store_int,
    store_word,
)
from pallas_kernels.shared.cpu.translate import compiled, compiled_apart
from pallas_kernels.shared.cpu.vectors import FULL

CONTEXT_TILE = 64  # context tokens of a step; above LANES, so that windows begin in the first step


# The largest score while there is none. It is finite, so that exp(NEVER - NEVER) is a number.
NEVER = np.float32(-1e30)


@compiled
def _copy_rows(pages, page_bytes, table, first, count, d, s, out):
    """Copies the keys or values of context tokens from `first`, of one head, to out [count, D].

    They become float32.
    """
    position = first
    stop = first + count
    while position < stop:
        offset = position % s
        run = min(s - offset, stop - position)
        page = pages + load_int(table + 4 * (position // s)) * page_bytes
        copy(SIZE, page + SIZE * d * offset, out + 4 * d * (position - first), run * d)
        position += run


@compiled
def _score(q, k, d, count, lanes, out):
    """out [count, LANES] = k [count, D] . q [D, LANES].

    It writes on to the next multiple of KEYS_AT_ONCE.
    """
    for i in range(0, count, KEYS_AT_ONCE):
        keys = k + 4 * d * i
        result = out + 4 * LANES * i
        if lanes <= 16:
            score_16(q, keys, d, result)
        elif lanes <= 32:
            score_32(q, keys, d, result)
        else:
            score_48(q, keys, d, result)


@compiled
def _find_rows(pages, page_bytes, table, first, count, row, s, out):
    """Writes the addresses of the keys or values of context tokens to out [count].

    first: the first of these tokens. row: bytes of the key or value of a token.
    """
    position = first
    stop = first + count
    while position < stop:
        offset = position % s
        run = min(s - offset, stop - position)
        page = pages + load_int(table + 4 * (position // s)) * page_bytes
        for i in range(run):
            store_word(out + 8 * (position - first + i), page + row * (offset + i))
        position += run


@compiled
def _score_pairs(q, rows, words, factor, count, lanes, out):
    """As `_score`, by pairs of bfloat16 numbers.

    rows: addresses of the keys. words: D / 2. factor: the scores are multiplied by it.
    """
    for i in range(0, count, KEYS_AT_ONCE):
        keys = rows + 8 * i
        result = out + 4 * LANES * i
        if lanes <= 16:
            score_pairs_16(q, keys, words, factor, result)
        elif lanes <= 32:
            score_pairs_32(q, keys, words, factor, result)
        else:
            score_pairs_48(q, keys, words, factor, result)


@compiled
def _place_queries(
    places, visible, top, norm, first, number, before, window, token_bytes, group, d
):
    """Places the queries of a tile.

    Returns (the first token that any of them sees, the last one + 1).
    """
    # incremented for each lane, because divisions are slow
    token = first // group
    head = first % group
    begin = max(before + token + 1 - window, 0)
    for lane in range(LANES):
        store_word(places + 8 * lane, token * token_bytes + head * 4 * d)
        store_int(visible + 4 * lane, before + token + 1 - begin)
        store_float(top + 4 * lane, NEVER)
        store_float(norm + 4 * lane, np.float32(0))
        if lane + 1 < number:  # behind the last query it is repeated, to fill the vector
            head += 1
            if head == group:
                token += 1
                head = 0
    return begin, before + token + 1


@compiled
def _advance_visible(visible):
    """Counts the tokens that queries see from the next step's first one."""
    for lane in range(LANES):
        store_int(visible + 4 * lane, load_int(visible + 4 * lane) - CONTEXT_TILE)


@compiled
def with_sink(norm, top, sink) -> np.float32:
    """Returns the sum of the weights with that of the sink at this address.

    It is infinite for a sink far above all scores, and the query's result is then 0.
    """
    return norm + np.float32(math.exp(load_float(sink) - top))


@compiled
def _write_results(sums, top, norm, places, first, number, group, d, out, sinks):
    """Divides the sums of each query by its norm, and writes them to its place in `out`."""
    for lane in range(number):
        total = load_float(norm + 4 * lane)
        if SINKS:
            total = with_sink(
                total, load_float(top + 4 * lane), sinks + 4 * ((first + lane) % group)
            )
        scale(sums + 4 * d * lane, np.float32(1) / total, d)
        copy(4, sums + 4 * d * lane, out + load_word(places + 8 * lane), d)


@compiled
def _transpose_queries(q, d, lanes, out):
    """q [lanes, D] -> out [D, LANES]. It reads and writes on to the next multiples of 16."""
    for lane in range(0, lanes, FULL):
        for i in range(0, d, FULL):
            transpose(q + 4 * (d * lane + i), d, out + 4 * (LANES * i + lane))


@compiled
def _mask_window(scores, visible, window, number):
    """Sets scores before the windows to minus infinity, in the first step."""
    for lane in range(number):
        for token in range(load_int(visible + 4 * lane) - window):
            store_float(scores + 4 * (LANES * token + lane), np.float32(-np.inf))


@compiled_apart
def attend_tile(
    q,
    k,
    v,
    page_bytes,
    table,
    first,
    number,
    before,
    window,
    cap,
    factor,
    token_bytes,
    group,
    d,
    s,
    scratch,
    out,
    sinks,
):
    """Computes queries first : first + number of a row for one key head, over what they see.

    number: LANES at most.
    q, out: addresses of this head's first query of the row, float32.
    before: context tokens before the row's first query token.
    window: the number of tokens up to itself that a query sees.
    k, v, table, cap: as in `attend`.
    factor: the scale that bfloat16 queries have been multiplied by, 0 if they are float32.
    scratch: `scratch_bytes` bytes.
    sinks: address of the key head's sinks [G], in a variant that has them.

    By products of pairs of bfloat16 numbers, queries that are divided by `factor` and rounded are
    the bfloat16 numbers that they were. The scores are multiplied by it instead.
    """
    words = d  # of a query, a key or a value
    if PAIRS and PAIRED:
        words = d // 2
    scratch += -scratch % 64  # no vector across two cache lines
    visible = scratch
    top = scratch + 4 * LANES
    norm = scratch + 8 * LANES
    rescale = scratch + 12 * LANES
    # [LANES] words: bytes from the row's first query to each query, and so for the results
    places = scratch + 16 * LANES
    # [CONTEXT_TILE, LANES] scores, or half as many rows of pairs of tokens
    weights = places + 8 * LANES
    transposed = weights + 4 * CONTEXT_TILE * LANES  # [words, LANES], words up to the next 16
    # [CONTEXT_TILE, D]: keys, then values; or [CONTEXT_TILE / 2, D] pairs of values
    tokens = transposed + 4 * LANES * (words + FULL)
    sums = tokens + 4 * words * CONTEXT_TILE  # [LANES, D]; at first the queries are here
    rows = sums + 4 * d * LANES  # of pairs, [CONTEXT_TILE] addresses of keys, then of values
    zeros = rows + 8 * CONTEXT_TILE  # of pairs, [D] bfloat16
    begin, stop = _place_queries(
        places, visible, top, norm, first, number, before, window, token_bytes, group, d
    )
    for lane in range(LANES):
        query = q + load_word(places + 8 * lane)
        if PAIRS and PAIRED:
            round_to_bfloat16(query, np.float32(1) / factor, sums + 2 * d * lane, d)
        else:
            copy(4, query, sums + 4 * d * lane, d)
    _transpose_queries(sums, words, number, transposed)
    clear(sums, LANES * d)
    if PAIRS and PAIRED:
        clear(zeros, d)

    for start in range(begin, stop, CONTEXT_TILE):
        count = min(CONTEXT_TILE, stop - start)
        shown = count
        if PAIRS and PAIRED:
            shown = count + count % 2  # behind an odd count is a token that no query sees
            _find_rows(k, page_bytes, table, start, count, 2 * d, s, rows)
            for i in range(count, -(-count // KEYS_AT_ONCE) * KEYS_AT_ONCE):
                store_word(rows + 8 * i, load_word(rows))  # any key, whose scores no query sees
            _score_pairs(transposed, rows, words, factor, count, number, weights)
        else:
            _copy_rows(k, page_bytes, table, start, count, d, s, tokens)
            _score(transposed, tokens, d, count, number, weights)
        if load_float(cap) > 0:
            for lane in range(0, number, FULL):
                apply_soft_cap(weights + 4 * lane, count, LANES, load_float(cap))
        if start == begin:
            _mask_window(weights, visible, window, number)
        for lane in range(0, number, FULL):
            offset = 4 * lane
            if load_int(visible) < shown:  # the first query sees the fewest
                hide(weights + offset, shown, visible + offset)
            if PAIRS and PAIRED:
                online_softmax_step_pairs(
                    weights + offset, shown, top + offset, norm + offset, rescale + offset
                )
            else:
                online_softmax_step(
                    weights + offset, shown, top + offset, norm + offset, rescale + offset
                )
        _advance_visible(visible)
        if PAIRS and PAIRED:
            _find_rows(v, page_bytes, table, start, count, 2 * d, s, rows)
            if count % 2:
                store_word(rows + 8 * count, zeros)  # memory behind the context may hold a NaN
            for i in range(0, shown, 2):
                pair = tokens + 2 * d * i
                interleave(load_word(rows + 8 * i), load_word(rows + 8 * i + 8), pair, d)
        else:
            _copy_rows(v, page_bytes, table, start, count, d, s, tokens)
        for lane in range(0, number, QUERIES_AT_ONCE):
            lane_sums = sums + 4 * d * lane
            if PAIRS and PAIRED:
                add_weighted_values_pairs(
                    weights + 4 * lane, tokens, d, shown // 2, rescale + 4 * lane, lane_sums
                )
            else:
                add_weighted_values_tile(
                    weights + 4 * lane, tokens, d, count, rescale + 4 * lane, lane_sums
                )

    _write_results(sums, top, norm, places, first, number, group, d, out, sinks)


@compiled
def tile_numbers(d):
    """Returns how many float32 numbers the scratch memory of an item holds.

    An item of pairs of bfloat16 numbers needs less.
    """
    return (
        6 * LANES
        + CONTEXT_TILE * LANES
        + LANES * (d + FULL)
        + CONTEXT_TILE * d
        + LANES * d
        + 2 * FULL
    )
