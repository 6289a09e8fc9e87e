"""Products of low rank (`LowRank`), which are added to the products with the weight.

Tokens come in the order of their adapter slots, so that the tokens of a tile have few slots.

    begin               lists the tokens in the order of their slots, when the work of a call is listed
    multiply_rows       multiplies a tile's tokens with the rows of `a`, when the tile is packed
    prefetch_factors    fetches rows of `b` before the sums of a tile are computed
    add_sums            adds the products with the rows of `b` to them
"""

from __future__ import annotations

from pallas_kernels.linear.cpu.job import (
    LOW_A,
    LOW_B,
    LOW_HALVES,
    LOW_K,
    LOW_ROWS,
    LOW_X,
    ORDER,
    RANKS,
    SLOTS,
    TILE_PLACE,
    TILE_ROWS,
    WEIGHT_SIZE,
    X_SIZE,
    K,
    bytes_of_row,
    half_outputs,
)
from pallas_kernels.linear.cpu.vectors import (
    BATCH_TOKENS,
    BFLOAT16,
    DOTS,
    PAIRS,
    PANEL,
    add_rows,
    dots,
    prefetch,
)
from pallas_kernels.shared.cpu.memory import load_int, load_word, store_int, store_word
from pallas_kernels.shared.cpu.translate import compiled
from pallas_kernels.shared.cpu.vectors import FULL
from pallas_kernels.shared.cpu.xla_call import argument, data, dim

LINE_BYTES = 64  # of a cache line
# The call's operands, by number (`implementation.py`)
A_OPERAND = 9
B_OPERAND = 10
SLOTS_OPERAND = 11
RANKS_OPERAND = 12


@compiled
def _run(job, place, end):
    """Returns (slot, tokens): the slot of the token at a place, and how many tokens have that slot.

    The tokens are counted from the place on, up to BATCH_TOKENS of them.
    """
    slots = load_word(job + SLOTS)
    order = load_word(job + ORDER)
    slot = load_int(slots + 4 * load_int(order + 4 * place))
    tokens = 1
    max_tokens = min(BATCH_TOKENS, end - place)
    while (
        tokens < max_tokens and load_int(slots + 4 * load_int(order + 4 * (place + tokens))) == slot
    ):
        tokens += 1
    return slot, tokens


@compiled
def multiply_rows(job, first, columns, x):
    """Multiplies a tile's normalised rows with the rows of `a` of their slots.

    first: place of the tile.
    """
    factor_rows = load_word(job + LOW_ROWS)
    length = load_word(job + LOW_K)
    row_bytes = X_SIZE * length
    stride = bytes_of_row(load_word(job + K))
    column = 0
    while column < columns:
        slot, tokens = _run(job, first + column, first + columns)
        if slot != 0:
            rows = load_word(job + LOW_A) + row_bytes * factor_rows * slot
            out = load_word(job + LOW_X) + 4 * factor_rows * (first + column)
            for i in range(0, factor_rows, DOTS):
                token_rows = x + stride * column
                row = rows + row_bytes * i
                products = out + 4 * i
                if X_SIZE == BFLOAT16 and PAIRS and WEIGHT_SIZE == BFLOAT16:
                    dots(
                        tokens, BFLOAT16, token_rows, stride, X_SIZE, row, row_bytes, length,
                        products, 4 * factor_rows,
                    )  # fmt: skip
                else:
                    dots(
                        tokens, 4, token_rows, stride, X_SIZE, row, row_bytes, length,
                        products, 4 * factor_rows,
                    )  # fmt: skip
        column += tokens


@compiled
def _factors(job, panel, half, slot):
    """Returns (address in `b`, first row, rows) for a slot and the 16 outputs of half a panel."""
    ranks = load_word(job + RANKS) + 8 * (2 * panel + half)
    first = load_int(ranks)
    end = load_int(ranks + 4)
    row = (
        load_word(job + LOW_ROWS) * (load_word(job + LOW_HALVES) * slot + 2 * panel + half) + first
    )
    return load_word(job + LOW_B) + X_SIZE * FULL * row, first, end - first


@compiled
def add_sums(job, panel, entry, sums):
    """sums += products of low rank: the tokens' products with `a`, by the rows of `b`."""
    place = load_word(entry + TILE_PLACE)
    columns = load_word(entry + TILE_ROWS)
    factor_rows = load_word(job + LOW_ROWS)
    column = 0
    while column < columns:
        slot, tokens = _run(job, place + column, place + columns)
        for half in range(2 if slot != 0 else 0):
            first, end = half_outputs(job, panel, half)
            if end > first:
                rows, start, count = _factors(job, panel, half, slot)
                factors = load_word(job + LOW_X) + 4 * (factor_rows * (place + column) + start)
                token_sums = sums + 4 * (PANEL * column + FULL * half)
                add_rows(tokens, X_SIZE, token_sums, factors, 4 * factor_rows, rows, count)
        column += tokens


@compiled
def prefetch_factors(job, panel, entry):
    """Fetches the rows of `b` for a tile's sums."""
    place = load_word(entry + TILE_PLACE)
    columns = load_word(entry + TILE_ROWS)
    row_bytes = X_SIZE * FULL
    column = 0
    while column < columns:
        slot, tokens = _run(job, place + column, place + columns)
        for half in range(2 if slot != 0 else 0):
            first, end = half_outputs(job, panel, half)
            if end > first:
                rows, _, count = _factors(job, panel, half, slot)
                for byte in range(0, row_bytes * count, LINE_BYTES):
                    prefetch(rows + byte)
        column += tokens


@compiled
def _sort_by_slot(slots, count, number, order):
    """Writes the tokens in the order of their slots to `order` [count] int32.

    number: the number of slots. Behind `order` is room for `number` + 1 counters. Returns how many
    tokens have another slot than 0.
    """
    starts = order + 4 * count
    for slot in range(number + 1):
        store_int(starts + 4 * slot, 0)
    for token in range(count):
        next_start = starts + 4 * (load_int(slots + 4 * token) + 1)
        store_int(next_start, load_int(next_start) + 1)
    without_slot = load_int(starts + 4)
    for slot in range(1, number):
        store_int(
            starts + 4 * slot, load_int(starts + 4 * slot) + load_int(starts + 4 * (slot - 1))
        )
    for token in range(count):
        start = starts + 4 * load_int(slots + 4 * token)
        place = load_int(start)
        store_int(order + 4 * place, token)
        store_int(start, place + 1)
    return count - without_slot


@compiled
def room(frame, rows):
    """Returns the bytes of the tokens' products with `a`, and of their order."""
    a = argument(frame, A_OPERAND)
    return 4 * dim(a, 1) * rows + 4 * (rows + dim(a, 0) + 1)


@compiled
def begin(job, frame, tokens, place):
    """Lists the products of a call, if a token has another slot than 0.

    place: address of `room` bytes.
    """
    store_word(job + LOW_A, 0)
    store_word(job + ORDER, 0)
    a = argument(frame, A_OPERAND)
    b = argument(frame, B_OPERAND)
    slots = argument(frame, SLOTS_OPERAND)
    ranks = argument(frame, RANKS_OPERAND)
    factor_rows = dim(a, 1)
    order = place + 4 * factor_rows * dim(slots, 0)
    if _sort_by_slot(data(slots), tokens, dim(a, 0), order) == 0:
        return
    store_word(job + ORDER, order)
    store_word(job + LOW_A, data(a))
    store_word(job + LOW_B, data(b))
    store_word(job + SLOTS, data(slots))
    store_word(job + RANKS, data(ranks))
    store_word(job + LOW_X, place)
    store_word(job + LOW_ROWS, factor_rows)
    store_word(job + LOW_K, dim(a, 2))
    store_word(job + LOW_HALVES, dim(b, 1))
