"""A work item of a chunk in a batch-invariant call: a piece of up to SHORT query tokens, with one
key head.

Every sum of a query is made in the order of a decode: over spans that begin at multiples of SPAN,
whose parts are merged in the order of the context. So a token has the same bits as a decode and in
any chunk.
"""

from __future__ import annotations

import math

import numpy as np

from pallas_kernels.paged_attention.cpu.items import SPAN, attend, first_seen
from pallas_kernels.paged_attention.cpu.options import SINKS
from pallas_kernels.paged_attention.cpu.tile_items import with_sink
from pallas_kernels.paged_attention.cpu.vectors import add_weighted_values_one, clear, scale
from pallas_kernels.shared.cpu.memory import free, load_float, malloc, store_float
from pallas_kernels.shared.cpu.translate import compiled, compiled_apart


@compiled
def merge_parts(out, stats, parts, count, stride, d, sink):
    """Merges `count` parts of a query's result by their log-sum-exp, in the order of the context.

    out: [D] float32.
    stats: (largest score, sum of the weights) of the first part. The largest score is overwritten.
    parts: [D] of the first part.
    stride: from the stats of one part to those of the next are 2 * stride numbers, and from [D] of
        one part to that of the next are D * stride.
    sink: address of the query's sink, in a variant that has them.
    """
    clear(out, d)
    top = np.float32(-np.inf)
    norm = np.float32(0)
    for i in range(count):
        top = max(top, load_float(stats + 8 * stride * i))
    for i in range(count):
        part_stats = stats + 8 * stride * i
        share = np.float32(math.exp(load_float(part_stats) - top))
        norm += share * load_float(part_stats + 4)
        store_float(part_stats, share)  # the next line reads its weight from memory
        add_weighted_values_one(4, part_stats, parts + 4 * d * stride * i, d, out, 0)
    if SINKS:
        norm = with_sink(norm, top, sink)
    scale(out, np.float32(1) / norm, d)


@compiled_apart
def attend_piece(
    q, k, v, page_bytes, table, cap, group, d, s, scores, out, count, length, window, token_bytes,
    heads, sinks,
):  # fmt: skip
    """Computes the queries of `count` tokens, G each, over all that they see of one key head.

    length: context tokens of the piece's last token. The other arguments are those of `attend`.
    sinks: address of the key head's sinks [G], in a variant that has them.
    out: [G, D] float32 of the first token; those of the next token are token_bytes behind.
    """
    first = first_seen(length, window, count)
    queries = count * group
    spans = -(-(length - first) // SPAN)
    stats = malloc(4 * spans * queries * (2 + d))
    parts = stats + 8 * spans * queries
    for i in range(spans):
        begin = first + SPAN * i
        attend(
            q, k, v, page_bytes, table, begin, min(begin + SPAN, length), cap, group, d, s, scores,
            parts + 4 * d * queries * i, stats + 8 * queries * i, count, length, window,
            token_bytes, 1,
        )  # fmt: skip
    for query in range(queries):
        result = out + query // group * token_bytes + 4 * d * (query % group)
        sink = sinks + 4 * (query % group)
        merge_parts(result, stats + 8 * query, parts + 4 * d * query, spans, queries, d, sink)
    free(stats)
