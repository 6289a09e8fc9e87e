"""Arithmetic of the attention kernel on arrays at addresses. `size` is the bytes of a number in the pages."""

from __future__ import annotations

import math
from functools import partial

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pallas_kernels.shared.cpu.memory import INT32, WORD, instruction, pointer
from pallas_kernels.shared.cpu.vectors import (
    FULL,
    HALF,
    POWERS,
    constant,
    either,
    exponential,
    floats,
    fold,
    has,
    load,
    load_one,
    multiply_add,
    pieces,
    polynomial,
    shuffle,
    splat,
    store,
    transposed,
    two_to,
    whole_and_part,
)

LANES = 48  # queries of a chunk's item: (token, query head) pairs of one key head
# The sums of a chunk that are computed together fill the registers: 24 of 32 with AVX-512, 12 of 16 (half as long)
# without.
WIDE_CPU = has("avx512f")
KEYS_AT_ONCE = 8 if WIDE_CPU else 2  # by LANES queries
QUERIES_AT_ONCE = 6  # by LONGEST numbers of a value
LONGEST = 64 if WIDE_CPU else 16


def _add_pairs(builder, a, b):
    """Sums of neighbours: a's in the lower half, b's in the upper."""
    return builder.fadd(*(shuffle(builder, a, b, range(first, 2 * FULL, 2)) for first in (0, 1)))


def _scores(count, queries):
    @instruction
    def scores(typing, size, q, k, d, out, stride):
        """out [queries, count] = q [queries, D] . k [count, D]: one pass over the keys, which all queries share; sums
        over lanes share their shuffles. Queries follow each other; their results are `stride` numbers apart."""

        def generate(context, builder, signature, args):
            size, q, k, d, out, stride = args
            zeros = ir.Constant(floats(FULL), None)
            sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(count)] for _ in range(queries)]
            rows = [builder.mul(d, ir.Constant(WORD, i)) for i in range(queries)]

            def piece(index, lanes, size):
                several = [load(builder, q, builder.add(row, index), lanes) for row in rows]
                for token in range(count):
                    at = builder.add(index, builder.mul(d, ir.Constant(WORD, token)))
                    y = load(builder, k, at, lanes, size)
                    for x, mine in zip(several, sums, strict=True):
                        old = builder.load(mine[token])
                        if lanes == FULL:
                            new = multiply_add(builder, x, y, old)
                        else:
                            part = shuffle(builder, builder.fmul(x, y), ir.Constant(floats(HALF), None), range(FULL))
                            new = builder.fadd(part, old)
                        builder.store(new, mine[token])

            either(builder, size, lambda size: pieces(builder, d, partial(piece, size=size)))
            for i, mine in enumerate(sums):
                vectors = [builder.load(accumulated) for accumulated in mine]
                while len(vectors) > 1:
                    vectors = [_add_pairs(builder, *vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
                # one key alone has its lanes added in the same order, so a score has the same bits either way
                result = vectors[0]
                for _ in range(4 if count == 1 else 1):  # sums are left side by side: all lanes of a key, or two
                    result = _add_pairs(builder, result, result)
                if count == 1:
                    result = builder.extract_element(result, ir.Constant(INT32, 0))
                else:
                    result = shuffle(builder, result, result, range(HALF))
                store(builder, result, out, builder.mul(stride, ir.Constant(WORD, i)))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return scores


def _add_weighted_values(count, queries):
    @instruction
    def add_weighted_values(typing, size, weights, v, d, out, stride):
        """out [queries, D] += weights [queries, count] . v [count, D]. Results follow each other; weights of queries
        are `stride` numbers apart."""

        def generate(context, builder, signature, args):
            size, weights, v, d, out, stride = args
            starts = [builder.mul(stride, ir.Constant(WORD, i)) for i in range(queries)]
            scalars = [
                [load_one(builder, weights, builder.add(start, ir.Constant(WORD, token))) for token in range(count)]
                for start in starts
            ]
            rows = [builder.mul(d, ir.Constant(WORD, i)) for i in range(queries)]

            def piece(index, lanes, size):
                places = [builder.add(row, index) for row in rows]
                totals = [load(builder, out, place, lanes) for place in places]
                for token in range(count):
                    at = builder.add(index, builder.mul(d, ir.Constant(WORD, token)))
                    y = load(builder, v, at, lanes, size)
                    for i, mine in enumerate(scalars):
                        totals[i] = multiply_add(builder, splat(builder, mine[token], lanes), y, totals[i])
                for total, place in zip(totals, places, strict=True):
                    store(builder, total, out, place)

            either(builder, size, lambda size: pieces(builder, d, partial(piece, size=size)))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return add_weighted_values


@instruction
def copy(typing, size, source, out, d):
    """out [D] = source [D] as float32."""

    def generate(context, builder, signature, args):
        size, source, out, d = args

        def piece(index, lanes, size):
            store(builder, load(builder, source, index, lanes, size), out, index)

        either(builder, size, lambda size: pieces(builder, d, partial(piece, size=size)))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@instruction
def transpose(typing, rows, stride, out):
    """16 x 16 float32 numbers, rows `stride` numbers apart -> columns LANES numbers apart."""

    def generate(context, builder, signature, args):
        rows, stride, out = args
        starts = [builder.mul(stride, ir.Constant(WORD, i)) for i in range(FULL)]
        vectors = [load(builder, rows, start, FULL) for start in starts]
        for i, vector in enumerate(transposed(builder, vectors)):
            store(builder, vector, out, ir.Constant(WORD, i * LANES))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def _score_tile(vectors):
    @instruction
    def score_tile(typing, q, k, d, out):
        """out [keys, LANES] = k [keys, D] . q [D, LANES], of KEYS_AT_ONCE keys and of `vectors` x 16 lanes."""

        def generate(context, builder, signature, args):
            q, k, d, out = args
            parts = range(vectors)
            zeros = ir.Constant(floats(FULL), None)
            sums = [[cgutils.alloca_once_value(builder, zeros) for _ in parts] for _ in range(KEYS_AT_ONCE)]
            keys = [builder.add(k, builder.mul(d, ir.Constant(WORD, 4 * i))) for i in range(KEYS_AT_ONCE)]
            with cgutils.for_range(builder, d) as loop:
                at = builder.mul(loop.index, ir.Constant(WORD, LANES))
                columns = [builder.add(at, ir.Constant(WORD, part * FULL)) for part in parts]
                queries = [load(builder, q, column, FULL) for column in columns]
                for key, accumulated in zip(keys, sums, strict=True):
                    number = load_one(builder, key, loop.index)
                    for x, total in zip(queries, accumulated, strict=True):
                        y = splat(builder, number, FULL)
                        builder.store(multiply_add(builder, x, y, builder.load(total)), total)
            for i, accumulated in enumerate(sums):
                for part, total in enumerate(accumulated):
                    store(builder, builder.load(total), out, ir.Constant(WORD, i * LANES + part * FULL))
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.intp), generate

    return score_tile


score_16, score_32, score_48 = (_score_tile(vectors) for vectors in (1, 2, 3))


@instruction
def add_weighted_values_tile(typing, weights, v, d, count, rescale, out):
    """out [queries, D] = rescale [queries] * out + weights [count, LANES]^T . v [count, D], of QUERIES_AT_ONCE."""

    def generate(context, builder, signature, args):
        weights, v, d, count, rescale, out = args
        queries = range(QUERIES_AT_ONCE)
        rows = [builder.mul(d, ir.Constant(WORD, i)) for i in queries]

        def piece(index, lanes):
            places = [builder.add(row, index) for row in rows]
            sums = []
            for i in queries:
                old = load(builder, out, places[i], lanes)
                kept = splat(builder, load_one(builder, rescale, ir.Constant(WORD, i)), lanes)
                sums.append(cgutils.alloca_once(builder, floats(lanes)))
                builder.store(builder.fmul(old, kept), sums[i])
            with cgutils.for_range(builder, count) as loop:
                y = load(builder, v, builder.add(builder.mul(d, loop.index), index), lanes)
                first = builder.mul(loop.index, ir.Constant(WORD, LANES))
                for i in queries:
                    number = load_one(builder, weights, builder.add(first, ir.Constant(WORD, i)))
                    new = multiply_add(builder, splat(builder, number, lanes), y, builder.load(sums[i]))
                    builder.store(new, sums[i])
            for i in queries:
                store(builder, builder.load(sums[i]), out, places[i])

        pieces(builder, d, piece, LONGEST)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


TOGETHER = HALF  # tokens that are scored and weighed at a time, if the page has this many left
SHARED = 3  # queries that share a pass over TOGETHER tokens: 24 sums, which fill the registers of AVX-512
scores_shared, scores_together, score_one = _scores(TOGETHER, SHARED), _scores(TOGETHER, 1), _scores(1, 1)
add_weighted_values_shared = _add_weighted_values(TOGETHER, SHARED)
add_weighted_values_together, add_weighted_values_one = _add_weighted_values(TOGETHER, 1), _add_weighted_values(1, 1)


@instruction
def scale(typing, out, factor, d):
    """out [D] *= factor."""

    def generate(context, builder, signature, args):
        out, factor, d = args

        def piece(index, lanes):
            old = load(builder, out, index, lanes)
            store(builder, builder.fmul(old, splat(builder, factor, lanes)), out, index)

        pieces(builder, d, piece)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp), generate


@instruction
def clear(typing, out, d):
    """out [D] = 0."""

    def generate(context, builder, signature, args):
        out, d = args
        pieces(builder, d, lambda index, lanes: store(builder, ir.Constant(floats(lanes), None), out, index))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@instruction
def largest(typing, numbers):
    """Returns the largest of 16 float32 numbers."""

    def generate(context, builder, signature, args):
        vector = load(builder, args[0], ir.Constant(WORD, 0), FULL)
        return fold(builder, vector, lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))

    return types.float32(types.intp), generate


FLAT = 40  # tanh(x) is 1 in float32 where exp(2x) is 2**FLAT, and well before


@instruction
def apply_soft_cap(typing, numbers, count, stride, cap):
    """count vectors of 16 float32 numbers x, `stride` numbers apart -> cap * tanh(x / cap), in place.

    tanh(x) is e / (e + 2) with e = exp(2x) - 1, computed from the polynomial without its 1, so it is exact near 0 too.
    """

    def generate(context, builder, signature, args):
        numbers, count, stride, cap = args
        cap = splat(builder, cap, FULL)
        factor = builder.fdiv(constant(2 / math.log(2)), cap)
        with cgutils.for_range(builder, count) as loop:
            at = builder.mul(loop.index, stride)
            power = builder.fmul(load(builder, numbers, at, FULL), factor)
            for side, limit in (("<", -FLAT), (">", FLAT)):  # a NaN stays one
                power = builder.select(builder.fcmp_ordered(side, power, constant(limit)), constant(limit), power)
            whole, part = whole_and_part(builder, power)
            two = two_to(builder, whole)
            small = builder.fmul(polynomial(builder, part, POWERS[:-1]), part)  # 2**part - 1
            e = multiply_add(builder, two, small, builder.fsub(two, constant(1)))
            bent = builder.fdiv(e, builder.fadd(e, constant(2)))
            store(builder, builder.fmul(bent, cap), numbers, at)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.float32), generate


@instruction
def exponentials(typing, numbers, top):
    """16 float32 numbers x -> exp(x - top), in place, and their sum."""

    def generate(context, builder, signature, args):
        start = ir.Constant(WORD, 0)
        x = load(builder, args[0], start, FULL)
        result = exponential(builder, builder.fsub(x, splat(builder, args[1], FULL)))
        store(builder, result, args[0], start)
        return fold(builder, result, builder.fadd)

    return types.float32(types.intp, types.float32), generate


@instruction
def online_softmax_step(typing, scores, count, visible, top, norm, rescale):
    """One step of the online softmax of 16 queries: scores [count, LANES] -> exp(score - top), in place.

    visible [16] int32: how many of these tokens, from the first, a query sees; it may be negative or above count.
    top, norm [16]: the largest score and the sum of the weights so far; rescale [16]: the factor of earlier weights.
    """

    def generate(context, builder, signature, args):
        scores, count, visible, top, norm, rescale = args
        start, hidden = ir.Constant(WORD, 0), ir.Constant(floats(FULL), [float("-inf")] * FULL)
        integers = ir.VectorType(INT32, FULL)
        ends = builder.load(pointer(builder, visible, integers), align=4)
        old = load(builder, top, start, FULL)
        highest = cgutils.alloca_once_value(builder, old)
        total = cgutils.alloca_once_value(builder, ir.Constant(floats(FULL), None))

        def seen(index):
            """(index of the token's scores, the scores: minus infinity where the token is not visible)."""
            at, token = builder.mul(index, ir.Constant(WORD, LANES)), builder.trunc(index, INT32)
            tokens = builder.insert_element(ir.Constant(integers, ir.Undefined), token, ir.Constant(INT32, 0))
            tokens = shuffle(builder, tokens, tokens, [0] * FULL)
            x = load(builder, scores, at, FULL)
            return at, builder.select(builder.icmp_signed("<", tokens, ends), x, hidden)

        with cgutils.for_range(builder, count) as loop:
            _, x = seen(loop.index)
            above = builder.load(highest)
            builder.store(builder.select(builder.fcmp_ordered(">", x, above), x, above), highest)
        new = builder.load(highest)
        with cgutils.for_range(builder, count) as loop:
            at, x = seen(loop.index)
            weight = exponential(builder, builder.fsub(x, new))
            builder.store(builder.fadd(builder.load(total), weight), total)
            store(builder, weight, scores, at)
        shrunk = exponential(builder, builder.fsub(old, new))
        so_far = builder.fmul(load(builder, norm, start, FULL), shrunk)
        store(builder, builder.fadd(so_far, builder.load(total)), norm, start)
        store(builder, new, top, start)
        store(builder, shrunk, rescale, start)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


@instruction
def prefetch(typing, address):
    """Prefetches the line at an address into the second cache; every address is allowed.

    A core can wait for more lines there than in its first cache.
    """

    def generate(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        read, second, data = (ir.Constant(INT32, value) for value in (0, 2, 1))
        builder.call(function, [builder.inttoptr(args[0], byte), read, second, data])
        return context.get_dummy_value()

    return types.void(types.intp), generate
