"""Arithmetic of short rows, and of both kinds of items, on arrays at addresses.

`size` is the bytes of a number in the pages, a constant.
"""

from __future__ import annotations

import math

from llvmlite import ir

from pallas_kernels.shared.cpu.translate import INT32, WORD, external_function, instruction
from pallas_kernels.shared.cpu.vectors import (
    COEFFICIENTS,
    FULL,
    HALF,
    constant,
    each_index,
    each_piece,
    exponential,
    float_vector,
    fold,
    integer_and_fraction,
    load,
    load_one,
    multiply_add,
    polynomial,
    shuffle,
    splat,
    store,
    two_to,
    variable,
)


def _add_pairs(builder, a, b):
    """Returns the sums of neighbours: a's in the lower half, b's in the upper."""
    even_lanes = shuffle(builder, a, b, range(0, 2 * FULL, 2))
    odd_lanes = shuffle(builder, a, b, range(1, 2 * FULL, 2))
    return builder.fadd(even_lanes, odd_lanes)


def _scores(count, queries):
    @instruction
    def scores(builder, size, q, k, d, out, stride):
        """out [queries, count] = q [queries, D] . k [count, D].

        All queries share one pass over the keys, and sums over lanes share their shuffles. Queries
        follow each other; their results are `stride` numbers apart.
        """
        zeros = ir.Constant(float_vector(FULL), None)
        sums = [
            [variable(builder, float_vector(FULL), zeros) for _ in range(count)]
            for _ in range(queries)
        ]
        rows = [builder.mul(d, ir.Constant(WORD, i)) for i in range(queries)]

        def piece(index, lanes):
            query_parts = [load(builder, q, builder.add(row, index), lanes) for row in rows]
            for token in range(count):
                place = builder.add(index, builder.mul(d, ir.Constant(WORD, token)))
                y = load(builder, k, place, lanes, size.constant)
                for x, query_sums in zip(query_parts, sums, strict=True):
                    old = builder.load(query_sums[token])
                    if lanes == FULL:
                        new = multiply_add(builder, x, y, old)
                    else:
                        part = shuffle(
                            builder,
                            builder.fmul(x, y),
                            ir.Constant(float_vector(HALF), None),
                            range(FULL),
                        )
                        new = builder.fadd(part, old)
                    builder.store(new, query_sums[token])

        each_piece(builder, d, piece)
        for i, query_sums in enumerate(sums):
            vectors = [builder.load(accumulated) for accumulated in query_sums]
            while len(vectors) > 1:
                vectors = [
                    _add_pairs(builder, *vectors[first : first + 2])
                    for first in range(0, len(vectors), 2)
                ]
            # The lanes of a single key are added in the same order, so a score has the same bits
            # either way.
            result = vectors[0]
            # A vector of one key is summed to its first lane. One of HALF keys has two lanes of
            # each, which are added.
            for _ in range(4 if count == 1 else 1):
                result = _add_pairs(builder, result, result)
            if count == 1:
                result = builder.extract_element(result, ir.Constant(INT32, 0))
            else:
                result = shuffle(builder, result, result, range(HALF))
            store(builder, result, out, builder.mul(stride, ir.Constant(WORD, i)))

    return scores


def _add_weighted_values(count, queries):
    @instruction
    def add_weighted_values(builder, size, weights, v, d, out, stride):
        """out [queries, D] += weights [queries, count] . v [count, D].

        Results follow each other; weights of queries are `stride` numbers apart.
        """
        starts = [builder.mul(stride, ir.Constant(WORD, i)) for i in range(queries)]
        scalars = [
            [
                load_one(builder, weights, builder.add(start, ir.Constant(WORD, token)))
                for token in range(count)
            ]
            for start in starts
        ]
        rows = [builder.mul(d, ir.Constant(WORD, i)) for i in range(queries)]

        def piece(index, lanes):
            places = [builder.add(row, index) for row in rows]
            totals = [load(builder, out, place, lanes) for place in places]
            for token in range(count):
                place = builder.add(index, builder.mul(d, ir.Constant(WORD, token)))
                y = load(builder, v, place, lanes, size.constant)
                for i, query_weights in enumerate(scalars):
                    totals[i] = multiply_add(
                        builder, splat(builder, query_weights[token], lanes), y, totals[i]
                    )
            for total, place in zip(totals, places, strict=True):
                store(builder, total, out, place)

        each_piece(builder, d, piece)

    return add_weighted_values


@instruction
def copy(builder, size, source, out, d):
    """out [D] = source [D] as float32."""

    def piece(index, lanes):
        store(builder, load(builder, source, index, lanes, size.constant), out, index)

    each_piece(builder, d, piece)


BATCH_TOKENS = HALF  # context tokens that are computed at a time, if the page has so many left
# Queries that share a pass over BATCH_TOKENS: 24 sums, which fill the registers of AVX-512
BATCH_QUERIES = 3
scores_shared = _scores(BATCH_TOKENS, BATCH_QUERIES)
scores_together = _scores(BATCH_TOKENS, 1)
score_one = _scores(1, 1)
add_weighted_values_shared = _add_weighted_values(BATCH_TOKENS, BATCH_QUERIES)
add_weighted_values_together = _add_weighted_values(BATCH_TOKENS, 1)
add_weighted_values_one = _add_weighted_values(1, 1)


@instruction
def scale(builder, out, factor, d):
    """out [D] *= factor."""

    def piece(index, lanes):
        old = load(builder, out, index, lanes)
        store(builder, builder.fmul(old, splat(builder, factor, lanes)), out, index)

    each_piece(builder, d, piece)


@instruction
def clear(builder, out, d):
    """out [D] = 0."""
    each_piece(
        builder,
        d,
        lambda index, lanes: store(builder, ir.Constant(float_vector(lanes), None), out, index),
    )


@instruction
def largest(builder, numbers):
    """Returns the largest of 16 float32 numbers."""
    vector = load(builder, numbers, ir.Constant(WORD, 0), FULL)
    return fold(builder, vector, lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))


# The largest power of two of the soft cap: where exp(2x) is 2**MAX_POWER, tanh(x) is 1 in float32
MAX_POWER = 40


@instruction
def apply_soft_cap(builder, numbers, count, stride, cap):
    """Replaces `count` vectors of 16 float32 numbers x by cap * tanh(x / cap).

    The vectors are `stride` numbers apart. tanh(x) is e / (e + 2) with e = exp(2x) - 1. e is
    computed from the polynomial without its 1, so it is exact near 0 too.
    """
    cap = splat(builder, cap, FULL)
    factor = builder.fdiv(constant(2 / math.log(2)), cap)
    with each_index(builder, count) as index:
        place = builder.mul(index, stride)
        power = builder.fmul(load(builder, numbers, place, FULL), factor)
        for side, limit in (("<", -MAX_POWER), (">", MAX_POWER)):  # a NaN stays a NaN
            power = builder.select(
                builder.fcmp_ordered(side, power, constant(limit)), constant(limit), power
            )
        integer, fraction = integer_and_fraction(builder, power)
        power_of_two = two_to(builder, integer)
        # 2**fraction - 1
        small = builder.fmul(polynomial(builder, fraction, COEFFICIENTS[:-1]), fraction)
        e = multiply_add(builder, power_of_two, small, builder.fsub(power_of_two, constant(1)))
        capped = builder.fdiv(e, builder.fadd(e, constant(2)))
        store(builder, builder.fmul(capped, cap), numbers, place)


@instruction
def exponentials(builder, numbers, top):
    """Replaces 16 float32 numbers x by exp(x - top). Returns their sum."""
    start = ir.Constant(WORD, 0)
    x = load(builder, numbers, start, FULL)
    result = exponential(builder, builder.fsub(x, splat(builder, top, FULL)))
    store(builder, result, numbers, start)
    return fold(builder, result, builder.fadd)


@instruction
def prefetch(builder, address):
    """Prefetches the line at an address into the core's second cache. Every address is allowed.

    A core can have more pending lines for its second cache than for its first.
    """
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    function = external_function(builder.module, kind, "llvm.prefetch.p0")
    read = ir.Constant(INT32, 0)
    second_cache = ir.Constant(INT32, 2)
    data = ir.Constant(INT32, 1)
    builder.call(function, [builder.inttoptr(address, byte), read, second_cache, data])
