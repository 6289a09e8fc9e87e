"""Paged attention that reads pages in place: compiled code behind XLA's FFI.

    handler   XLA calls it with a call frame. It lists the work, asks XLA's thread pool for helpers, works, waits for
              the items that helpers have begun, and merges short rows of more than one span.
    work      computes items until none is left. An item of a row with up to SHORT query tokens (a decode, with or
              without drafts) is (span of SPAN visible tokens, key head); an item of a row with more (a chunk) is (tile
              of LANES queries, key head).
              Helpers and the handler's thread run the same loop, so a long context is shared by threads and short ones
              do not wait.

The handler never waits for a helper that has not begun: its thread then computes all items. So it
cannot deadlock, for any number of engines that share the pool. A helper that begins too late finds
no item. It reads only the job, a block of memory that the last user frees.

Head sizes are multiples of 8. Shapes are read from the call frame, so one program serves all of
them, with and without a window and a soft cap. A variant (`options.py`) has code for pages of one
dtype, and for one kind of chunks. Items are in `items.py`, `tile_items.py` and `pieces.py`.
`object_files.py` stores the object code on disk; a process that finds it does not import this
module.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.paged_attention.cpu.items import SHORT, SPAN, attend, first_seen, scratch_bytes
from pallas_kernels.paged_attention.cpu.options import INVARIANT, SINKS, SIZE
from pallas_kernels.paged_attention.cpu.pieces import attend_piece, merge_parts
from pallas_kernels.paged_attention.cpu.tile_items import attend_tile, with_sink
from pallas_kernels.paged_attention.cpu.tile_vectors import LANES
from pallas_kernels.paged_attention.cpu.vectors import clear, scale
from pallas_kernels.shared.cpu.memory import (
    fetch_add,
    free,
    load_float,
    load_int,
    load_word,
    malloc,
    store_float,
    store_word,
    wait_for,
)
from pallas_kernels.shared.cpu.team import HOLDERS
from pallas_kernels.shared.cpu.translate import address_of, compiled, compiled_apart
from pallas_kernels.shared.cpu.xla_call import (
    argument,
    ask_for_help,
    data,
    dim,
    release,
    result,
    threads,
)

# --- a job: all items of a call, shared by the threads --------------------------------------------

# Byte offsets of words in a job, a block of memory: counters that the threads share, then constants
# that the handler wrote.
NEXT_ITEM = 24  # behind the header
ITEMS_DONE = 32
ITEMS = 40
# Addresses of the arguments and the result
Q = 48
KEYS = 56
VALUES = 64
TABLES = 72
LENGTHS = 80
OFFSETS = 88
OUT = 96
ROWS = 104  # B
WIDTH = 112  # M
HEADS = 120  # K
GROUP = 128  # G
DIM = 136  # D
BLOCK = 144  # S
SINK = 152  # address of the sinks [K, G], in a variant that has them
WINDOW = 160  # NO_WINDOW where there is none
CAP = 168  # a float32, 0 where there is none
# A float32: the scale that bfloat16 queries have been multiplied by, 0 if they are float32
FACTOR = 176
# Addresses within the job, of short rows' parts: [slots, K, G, 2] and [slots, K, G, D] float32
STATS = 184
PARTS = 192
# Address within the job: [B + 1] slots of all rows before this one. A slot is (span, query token)
# of a short row.
SLOTS = 200
# [B + 1] units of all rows before this one. Units are spans of a short row, and tiles or pieces of
# a chunk.
STARTS = 216
NO_WINDOW = 1 << 31  # longer than any context


@compiled
def _units(length, window, count, group):
    """Returns the number of a row's units.

    Units are spans of visible tokens if the row is short, else pieces or tiles of its queries.
    """
    if count <= SHORT:
        return _spans(length, window, count)
    return -(-count // SHORT) if INVARIANT else -(-count * group // LANES)


@compiled
def _spans(length, window, count):
    """Returns how many spans hold what the query tokens of a row see; 0 if it has none."""
    return -(-(length - first_seen(length, window, count)) // SPAN) if count > 0 else 0


@compiled
def _slots(length, window, count):
    """Returns the number of a row's slots for parts of results.

    They are the pairs (span, query token) of a short row.
    """
    return count * _spans(length, window, count) if count <= SHORT else 0


@compiled
def _row(job, row):
    """Returns (first query token, number of query tokens, context length)."""
    offsets = load_word(job + OFFSETS) + 4 * row
    first = load_int(offsets)
    return first, load_int(offsets + 4) - first, load_int(load_word(job + LENGTHS) + 4 * row)


@compiled
def _merge(job):
    """Merges the parts of short rows of more than one span."""
    queries = load_word(job + HEADS) * load_word(job + GROUP)
    d = load_word(job + DIM)
    for row in range(load_word(job + ROWS)):
        first, count, _ = _row(job, row)
        start = load_word(load_word(job + SLOTS) + 8 * row)
        end = load_word(load_word(job + SLOTS) + 8 * (row + 1))
        if end - start <= count:
            continue
        for query in range(count * queries):
            out = load_word(job + OUT) + 4 * d * (first * queries + query)
            place = start * queries + query
            stats = load_word(job + STATS) + 8 * place
            parts = load_word(job + PARTS) + 4 * d * place
            sink = load_word(job + SINK) + 4 * (query % queries) if SINKS else 0
            merge_parts(out, stats, parts, (end - start) // count, count * queries, d, sink)


@compiled_apart
def _work(job):
    """Computes items until none is left, then releases the job."""
    heads = load_word(job + HEADS)
    group = load_word(job + GROUP)
    d = load_word(job + DIM)
    s = load_word(job + BLOCK)
    window = load_word(job + WINDOW)
    cap = job + CAP
    factor = load_float(job + FACTOR)
    head_bytes = SIZE * s * d
    page_bytes = head_bytes * heads
    token_bytes = 4 * heads * group * d
    room = 0
    row = 0
    while True:
        item = fetch_add(job + NEXT_ITEM, 1)
        if item >= load_word(job + ITEMS):
            break
        if room == 0:
            room = malloc(scratch_bytes(group, d))
        unit = item // heads
        head = item % heads
        while load_word(job + STARTS + 8 * (row + 1)) <= unit:
            row += 1
        first, count, length = _row(job, row)
        index = unit - load_word(job + STARTS + 8 * row)
        row_offset = first * token_bytes + 4 * group * d * head
        q = load_word(job + Q) + row_offset
        out = load_word(job + OUT) + row_offset
        k = load_word(job + KEYS) + head_bytes * head
        v = load_word(job + VALUES) + head_bytes * head
        table = load_word(job + TABLES) + 4 * load_word(job + WIDTH) * row
        sinks = load_word(job + SINK) + 4 * group * head if SINKS else 0
        if count > SHORT and INVARIANT:
            begin = SHORT * index
            tokens = min(SHORT, count - begin)
            piece_offset = begin * token_bytes
            attend_piece(
                q + piece_offset, k, v, page_bytes, table, cap, group, d, s, room,
                out + piece_offset, tokens,
                length - (count - begin - tokens), window, token_bytes, heads, sinks,
            )  # fmt: skip
        elif count > SHORT:
            begin = LANES * index
            lanes = min(LANES, group * count - begin)
            before = length - count
            attend_tile(
                q, k, v, page_bytes, table, begin, lanes, before, window, cap, factor, token_bytes,
                group, d, s, room, out, sinks,
            )  # fmt: skip
        else:
            slot = load_word(load_word(job + SLOTS) + 8 * row) + count * index
            place = group * (slot * heads + head)
            stats = load_word(job + STATS) + 8 * place
            first_token = first_seen(length, window, count)
            alone = length - first_token <= SPAN
            part = out if alone else load_word(job + PARTS) + 4 * d * place
            begin = first_token + SPAN * index
            stop = min(begin + SPAN, length)
            attend(
                q, k, v, page_bytes, table, begin, stop, cap, group, d, s, room, part, stats,
                count, length, window, token_bytes, heads,
            )  # fmt: skip
            if alone:
                for token in range(count):
                    for g in range(group):
                        part_stats = stats + 8 * (token * group * heads + g)
                        norm = load_float(part_stats + 4)
                        if SINKS:
                            norm = with_sink(norm, load_float(part_stats), sinks + 4 * g)
                        scale(out + token * token_bytes + 4 * g * d, np.float32(1) / norm, d)
        fetch_add(job + ITEMS_DONE, 1)
    if room != 0:
        free(room)
    release(job)


@compiled
def _make_job(frame):
    """Lists the work of a call.

    Operands: q [T, K, G, D], the other arrays of `api.paged_attention`, window [1], soft cap [1],
    scale of bfloat16 queries [1], and the sinks [N] in a variant that has them.
    """
    q = argument(frame, 0)
    keys = argument(frame, 1)
    tables = argument(frame, 3)
    lengths = argument(frame, 4)
    offsets = argument(frame, 5)
    rows = dim(lengths, 0)
    heads = dim(q, 1)
    group = dim(q, 2)
    d = dim(q, 3)
    length = data(lengths)
    offset = data(offsets)
    window = load_int(data(argument(frame, 6)))
    window = window if window > 0 else NO_WINDOW
    units = 0
    all_slots = 0
    has_parts = False
    for row in range(rows):
        count = load_int(offset + 4 * (row + 1)) - load_int(offset + 4 * row)
        context = load_int(length + 4 * row)
        units += _units(context, window, count, group)
        slots = _slots(context, window, count)
        all_slots += slots
        has_parts = has_parts or slots > count
    slots_at = STARTS + 8 * (rows + 1)
    stats = slots_at + 8 * (rows + 1)
    parts = stats + 8 * all_slots * heads * group
    job = malloc(parts + (4 * all_slots * heads * group * d if has_parts else 0))
    store_word(job + HOLDERS, 2)  # the handler and its own call of the work
    store_word(job + NEXT_ITEM, 0)
    store_word(job + ITEMS_DONE, 0)
    store_word(job + ITEMS, units * heads)
    for index in range(6):
        store_word(job + Q + 8 * index, data(argument(frame, index)))
    store_word(job + OUT, data(result(frame, 0)))
    store_word(job + ROWS, rows)
    store_word(job + WIDTH, dim(tables, 1))
    store_word(job + HEADS, heads)
    store_word(job + GROUP, group)
    store_word(job + DIM, d)
    store_word(job + BLOCK, dim(keys, 2))
    store_word(job + WINDOW, window)
    store_float(job + CAP, load_float(data(argument(frame, 7))))
    store_float(job + FACTOR, load_float(data(argument(frame, 8))))
    if SINKS:
        store_word(job + SINK, data(argument(frame, 9)))
    store_word(job + STATS, job + stats)
    store_word(job + PARTS, job + parts)
    store_word(job + SLOTS, job + slots_at)
    units = 0
    slots = 0
    for row in range(rows):
        store_word(job + STARTS + 8 * row, units)
        store_word(job + slots_at + 8 * row, slots)
        _, count, context = _row(job, row)
        units += _units(context, window, count, group)
        slots += _slots(context, window, count)
    store_word(job + STARTS + 8 * rows, units)
    store_word(job + slots_at + 8 * rows, slots)
    return job


@compiled
def _clear_padding(frame, job):
    """Sets the results of padding tokens to zero. XLA does not clear the result's memory."""
    used = load_int(load_word(job + OFFSETS) + 4 * load_word(job + ROWS))
    size = load_word(job + HEADS) * load_word(job + GROUP) * load_word(job + DIM)
    clear(load_word(job + OUT) + 4 * size * used, size * (dim(argument(frame, 0), 0) - used))


@compiled
def handle(frame, team):
    """What XLA calls, with a call frame and the helpers' places. Returns 0: no error."""
    job = _make_job(frame)
    items = load_word(job + ITEMS)
    ask_for_help(frame, team, address_of(_work), job, min(threads(frame), items) - 1, 1)
    _clear_padding(frame, job)
    _work(job)
    wait_for(job + ITEMS_DONE, items)
    _merge(job)
    release(job)
    return 0
