"""Arithmetic of the CPU kernel on arrays at addresses.

It is generated as vector code and does not depend on a vectoriser. `size` is the bytes of a number in the pages: 4 of
float32, 2 of bfloat16, which is the upper half of a float32 number, 1 of float8_e4m3fn. The bits of the last, moved to
their places in a float16, are a number 2^8 times too small, also for subnormal numbers. (In a float32 those are
subnormal as well, and XLA's threads treat them as zeros.)
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from pallas_kernels.paged_attention.cpu.memory import FLOAT, INT32, WORD, instruction, pointer

SIZES = 4, 2, 1
HALF, FULL = 8, 16  # lanes of a vector
LANES = 48  # queries of a chunk's item: (token, query head) pairs of one key head
# The sums of a chunk that are computed together fill the registers: 24 of 32 with AVX-512, 12 of 16 (half as long)
# without.
WIDE_CPU = binding.get_host_cpu_features().get("avx512f", False)
KEYS_AT_ONCE = 8 if WIDE_CPU else 2  # by LANES queries
QUERIES_AT_ONCE = 6  # by LONGEST numbers of a value
LONGEST = 64 if WIDE_CPU else 16


def _lanes(count):
    return ir.VectorType(FLOAT, count)


def _shuffle(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes)))


def _splat(builder, value, lanes):
    undefined = ir.Constant(_lanes(lanes), ir.Undefined)
    return _shuffle(builder, builder.insert_element(undefined, value, ir.Constant(INT32, 0)), undefined, [0] * lanes)


def _either(builder, size, generate):
    """Generates code that runs generate(4), generate(2) or generate(1), by the value of `size` at run time."""

    def branch(sizes):
        if len(sizes) == 1:
            generate(sizes[0])
            return
        with builder.if_else(builder.icmp_signed("==", size, ir.Constant(WORD, sizes[0]))) as (then, otherwise):
            with then:
                generate(sizes[0])
            with otherwise:
                branch(sizes[1:])

    branch(SIZES)


def _load(builder, base, index, lanes, size=4):
    """`lanes` numbers from index `index` of an array at address `base`, as float32."""
    address = builder.add(base, builder.mul(index, ir.Constant(WORD, size)))
    if size == 4:
        return builder.load(pointer(builder, address, _lanes(lanes)), align=4)
    stored = ir.VectorType(ir.IntType(8 * size), lanes)
    bits = builder.load(pointer(builder, address, stored), align=size)
    if size == 2:
        wide = ir.VectorType(INT32, lanes)
        return builder.bitcast(builder.shl(builder.zext(bits, wide), _all(wide, 16)), _lanes(lanes))
    wide = ir.VectorType(ir.IntType(16), lanes)
    bits = builder.zext(bits, wide)
    sign = builder.shl(builder.and_(bits, _all(wide, 0x80)), _all(wide, 8))
    rest = builder.shl(builder.and_(bits, _all(wide, 0x7F)), _all(wide, 7))
    half = builder.bitcast(builder.or_(sign, rest), ir.VectorType(ir.HalfType(), lanes))
    return builder.fmul(builder.fpext(half, _lanes(lanes)), _all(_lanes(lanes), 256.0))


def _all(kind, value):
    return ir.Constant(kind, [value] * kind.count)


def _number(builder, base, index):
    """One float32."""
    address = builder.add(base, builder.mul(index, ir.Constant(WORD, 4)))
    return builder.load(pointer(builder, address, FLOAT))


def _store(builder, value, base, index):
    address = builder.add(base, builder.mul(index, ir.Constant(WORD, 4)))
    builder.store(value, pointer(builder, address, value.type), align=4)


def _multiply_add(builder, a, b, c):
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _pieces(builder, size, piece, longest=FULL):
    """Calls piece(index, lanes) over `size` elements, a multiple of 8: `longest` at a time, then 16, then 8."""
    start = ir.Constant(WORD, 0)
    for lanes in sorted({longest, FULL, HALF}, reverse=True):
        end = builder.and_(size, ir.Constant(WORD, -lanes))
        with cgutils.for_range_slice(builder, start, end, ir.Constant(WORD, lanes)) as (index, _):
            piece(index, lanes)
        start = end


def _fold(builder, value, combine):
    """Combines the numbers of a vector into one, by halves."""
    lanes = value.type.count
    while lanes > 1:
        lanes //= 2
        value = combine(*(_shuffle(builder, value, value, range(first, first + lanes)) for first in (0, lanes)))
    return builder.extract_element(value, ir.Constant(INT32, 0))


def _add_pairs(builder, a, b):
    """Sums of neighbours: a's in the lower half, b's in the upper."""
    return builder.fadd(*(_shuffle(builder, a, b, range(first, 2 * FULL, 2)) for first in (0, 1)))


def _scores(count, queries):
    @instruction
    def scores(typing, size, q, k, d, out, stride):
        """out [queries, count] = q [queries, D] . k [count, D]: one pass over the keys, which all queries share; sums
        over lanes share their shuffles. Queries follow each other; their results are `stride` numbers apart."""

        def generate(context, builder, signature, args):
            size, q, k, d, out, stride = args
            zeros = ir.Constant(_lanes(FULL), None)
            sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(count)] for _ in range(queries)]
            rows = [builder.mul(d, ir.Constant(WORD, i)) for i in range(queries)]

            def piece(index, lanes, size):
                several = [_load(builder, q, builder.add(row, index), lanes) for row in rows]
                for token in range(count):
                    at = builder.add(index, builder.mul(d, ir.Constant(WORD, token)))
                    y = _load(builder, k, at, lanes, size)
                    for x, mine in zip(several, sums, strict=True):
                        old = builder.load(mine[token])
                        if lanes == FULL:
                            new = _multiply_add(builder, x, y, old)
                        else:
                            part = _shuffle(builder, builder.fmul(x, y), ir.Constant(_lanes(HALF), None), range(FULL))
                            new = builder.fadd(part, old)
                        builder.store(new, mine[token])

            _either(builder, size, lambda size: _pieces(builder, d, partial(piece, size=size)))
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
                    result = _shuffle(builder, result, result, range(HALF))
                _store(builder, result, out, builder.mul(stride, ir.Constant(WORD, i)))
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
                [_number(builder, weights, builder.add(start, ir.Constant(WORD, token))) for token in range(count)]
                for start in starts
            ]
            rows = [builder.mul(d, ir.Constant(WORD, i)) for i in range(queries)]

            def piece(index, lanes, size):
                places = [builder.add(row, index) for row in rows]
                totals = [_load(builder, out, place, lanes) for place in places]
                for token in range(count):
                    at = builder.add(index, builder.mul(d, ir.Constant(WORD, token)))
                    y = _load(builder, v, at, lanes, size)
                    for i, mine in enumerate(scalars):
                        totals[i] = _multiply_add(builder, _splat(builder, mine[token], lanes), y, totals[i])
                for total, place in zip(totals, places, strict=True):
                    _store(builder, total, out, place)

            _either(builder, size, lambda size: _pieces(builder, d, partial(piece, size=size)))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return add_weighted_values


@instruction
def copy(typing, size, source, out, d):
    """out [D] = source [D] as float32."""

    def generate(context, builder, signature, args):
        size, source, out, d = args

        def piece(index, lanes, size):
            _store(builder, _load(builder, source, index, lanes, size), out, index)

        _either(builder, size, lambda size: _pieces(builder, d, partial(piece, size=size)))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@instruction
def transpose(typing, rows, stride, out):
    """16 x 16 float32 numbers, rows `stride` numbers apart -> columns LANES numbers apart."""

    def generate(context, builder, signature, args):
        rows, stride, out = args
        starts = [builder.mul(stride, ir.Constant(WORD, i)) for i in range(FULL)]
        vectors = [_load(builder, rows, start, FULL) for start in starts]
        for step in (1, 2, 4, 8):  # swap the blocks of `step` numbers beside the diagonal
            lower = [i + (FULL - step if i & step else 0) for i in range(FULL)]
            upper = [i + (FULL if i & step else step) for i in range(FULL)]
            pairs = [(i, i + step) for i in range(FULL) if not i & step]
            for i, j in pairs:
                a, b = vectors[i], vectors[j]
                vectors[i], vectors[j] = _shuffle(builder, a, b, lower), _shuffle(builder, a, b, upper)
        for i, vector in enumerate(vectors):
            _store(builder, vector, out, ir.Constant(WORD, i * LANES))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def _score_tile(vectors):
    @instruction
    def score_tile(typing, q, k, d, out):
        """out [keys, LANES] = k [keys, D] . q [D, LANES], of KEYS_AT_ONCE keys and of `vectors` x 16 lanes."""

        def generate(context, builder, signature, args):
            q, k, d, out = args
            parts = range(vectors)
            zeros = ir.Constant(_lanes(FULL), None)
            sums = [[cgutils.alloca_once_value(builder, zeros) for _ in parts] for _ in range(KEYS_AT_ONCE)]
            keys = [builder.add(k, builder.mul(d, ir.Constant(WORD, 4 * i))) for i in range(KEYS_AT_ONCE)]
            with cgutils.for_range(builder, d) as loop:
                at = builder.mul(loop.index, ir.Constant(WORD, LANES))
                columns = [builder.add(at, ir.Constant(WORD, part * FULL)) for part in parts]
                queries = [_load(builder, q, column, FULL) for column in columns]
                for key, accumulated in zip(keys, sums, strict=True):
                    number = _number(builder, key, loop.index)
                    for x, total in zip(queries, accumulated, strict=True):
                        y = _splat(builder, number, FULL)
                        builder.store(_multiply_add(builder, x, y, builder.load(total)), total)
            for i, accumulated in enumerate(sums):
                for part, total in enumerate(accumulated):
                    _store(builder, builder.load(total), out, ir.Constant(WORD, i * LANES + part * FULL))
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
                old = _load(builder, out, places[i], lanes)
                kept = _splat(builder, _number(builder, rescale, ir.Constant(WORD, i)), lanes)
                sums.append(cgutils.alloca_once(builder, _lanes(lanes)))
                builder.store(builder.fmul(old, kept), sums[i])
            with cgutils.for_range(builder, count) as loop:
                y = _load(builder, v, builder.add(builder.mul(d, loop.index), index), lanes)
                first = builder.mul(loop.index, ir.Constant(WORD, LANES))
                for i in queries:
                    number = _number(builder, weights, builder.add(first, ir.Constant(WORD, i)))
                    new = _multiply_add(builder, _splat(builder, number, lanes), y, builder.load(sums[i]))
                    builder.store(new, sums[i])
            for i in queries:
                _store(builder, builder.load(sums[i]), out, places[i])

        _pieces(builder, d, piece, LONGEST)
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
            old = _load(builder, out, index, lanes)
            _store(builder, builder.fmul(old, _splat(builder, factor, lanes)), out, index)

        _pieces(builder, d, piece)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp), generate


@instruction
def clear(typing, out, d):
    """out [D] = 0."""

    def generate(context, builder, signature, args):
        out, d = args
        _pieces(builder, d, lambda index, lanes: _store(builder, ir.Constant(_lanes(lanes), None), out, index))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@instruction
def largest(typing, numbers):
    """Returns the largest of 16 float32 numbers."""

    def generate(context, builder, signature, args):
        vector = _load(builder, args[0], ir.Constant(WORD, 0), FULL)
        return _fold(builder, vector, lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))

    return types.float32(types.intp), generate


# 2**f for f in [-0.5, 0.5], by powers of f from the seventh down: Taylor's, whose error is below float32's there
POWERS = [math.log(2) ** i / math.factorial(i) for i in range(7, -1, -1)]


def _constant(value):
    return ir.Constant(_lanes(FULL), [float(np.float32(value))] * FULL)


def _split(builder, power):
    """(whole, part): they add up to `power`, 16 float32 numbers; part is in [-0.5, 0.5]."""
    vector = _lanes(FULL)
    floor = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector]), "llvm.floor.v16f32")
    whole = builder.call(floor, [builder.fadd(power, _constant(0.5))])
    return whole, builder.fsub(power, whole)


def _polynomial(builder, x, coefficients):
    result = _constant(coefficients[0])
    for coefficient in coefficients[1:]:
        result = _multiply_add(builder, result, x, _constant(coefficient))
    return result


def _two_to(builder, whole):
    """2**whole: a whole number in the place of the exponent."""
    integers = ir.VectorType(INT32, FULL)
    exponent = builder.add(builder.fptosi(whole, integers), ir.Constant(integers, [127] * FULL))
    return builder.bitcast(builder.shl(exponent, ir.Constant(integers, [23] * FULL)), _lanes(FULL))


def _exponential(builder, x):
    """exp(x) of 16 float32 numbers of at most 0; 0 where they are below -87: 2**whole and a polynomial of the part."""
    power = builder.fmul(x, _constant(1 / math.log(2)))
    whole, part = _split(builder, power)
    result = _polynomial(builder, part, POWERS)
    tiny = builder.fcmp_ordered("<", power, _constant(-126))
    scaled = builder.fmul(result, _two_to(builder, builder.select(tiny, _constant(0), whole)))
    return builder.select(tiny, _constant(0), scaled)


FLAT = 40  # tanh(x) is 1 in float32 where exp(2x) is 2**FLAT, and well before


@instruction
def apply_soft_cap(typing, numbers, count, stride, cap):
    """count vectors of 16 float32 numbers x, `stride` numbers apart -> cap * tanh(x / cap), in place.

    tanh(x) is e / (e + 2) with e = exp(2x) - 1, computed from the polynomial without its 1, so it is exact near 0 too.
    """

    def generate(context, builder, signature, args):
        numbers, count, stride, cap = args
        cap = _splat(builder, cap, FULL)
        factor = builder.fdiv(_constant(2 / math.log(2)), cap)
        with cgutils.for_range(builder, count) as loop:
            at = builder.mul(loop.index, stride)
            power = builder.fmul(_load(builder, numbers, at, FULL), factor)
            for side, limit in (("<", -FLAT), (">", FLAT)):  # a NaN stays one
                power = builder.select(builder.fcmp_ordered(side, power, _constant(limit)), _constant(limit), power)
            whole, part = _split(builder, power)
            two = _two_to(builder, whole)
            small = builder.fmul(_polynomial(builder, part, POWERS[:-1]), part)  # 2**part - 1
            e = _multiply_add(builder, two, small, builder.fsub(two, _constant(1)))
            bent = builder.fdiv(e, builder.fadd(e, _constant(2)))
            _store(builder, builder.fmul(bent, cap), numbers, at)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.float32), generate


@instruction
def exponentials(typing, numbers, top):
    """16 float32 numbers x -> exp(x - top), in place, and their sum."""

    def generate(context, builder, signature, args):
        start = ir.Constant(WORD, 0)
        x = _load(builder, args[0], start, FULL)
        result = _exponential(builder, builder.fsub(x, _splat(builder, args[1], FULL)))
        _store(builder, result, args[0], start)
        return _fold(builder, result, builder.fadd)

    return types.float32(types.intp, types.float32), generate


@instruction
def online_softmax_step(typing, scores, count, visible, top, norm, rescale):
    """One step of the online softmax of 16 queries: scores [count, LANES] -> exp(score - top), in place.

    visible [16] int32: how many of these tokens, from the first, a query sees; it may be negative or above count.
    top, norm [16]: the largest score and the sum of the weights so far; rescale [16]: the factor of earlier weights.
    """

    def generate(context, builder, signature, args):
        scores, count, visible, top, norm, rescale = args
        start, hidden = ir.Constant(WORD, 0), ir.Constant(_lanes(FULL), [float("-inf")] * FULL)
        integers = ir.VectorType(INT32, FULL)
        ends = builder.load(pointer(builder, visible, integers), align=4)
        old = _load(builder, top, start, FULL)
        highest = cgutils.alloca_once_value(builder, old)
        total = cgutils.alloca_once_value(builder, ir.Constant(_lanes(FULL), None))

        def seen(index):
            """(index of the token's scores, the scores: minus infinity where the token is not visible)."""
            at, token = builder.mul(index, ir.Constant(WORD, LANES)), builder.trunc(index, INT32)
            tokens = builder.insert_element(ir.Constant(integers, ir.Undefined), token, ir.Constant(INT32, 0))
            tokens = _shuffle(builder, tokens, tokens, [0] * FULL)
            x = _load(builder, scores, at, FULL)
            return at, builder.select(builder.icmp_signed("<", tokens, ends), x, hidden)

        with cgutils.for_range(builder, count) as loop:
            _, x = seen(loop.index)
            above = builder.load(highest)
            builder.store(builder.select(builder.fcmp_ordered(">", x, above), x, above), highest)
        new = builder.load(highest)
        with cgutils.for_range(builder, count) as loop:
            at, x = seen(loop.index)
            weight = _exponential(builder, builder.fsub(x, new))
            builder.store(builder.fadd(builder.load(total), weight), total)
            _store(builder, weight, scores, at)
        shrunk = _exponential(builder, builder.fsub(old, new))
        so_far = builder.fmul(_load(builder, norm, start, FULL), shrunk)
        _store(builder, builder.fadd(so_far, builder.load(total)), norm, start)
        _store(builder, new, top, start)
        _store(builder, shrunk, rescale, start)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


@instruction
def prefetch(typing, address):
    """Prefetches the cache line at an address; every address is allowed."""

    def generate(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        read, soon, data = (ir.Constant(INT32, value) for value in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], byte), read, soon, data])
        return context.get_dummy_value()

    return types.void(types.intp), generate
