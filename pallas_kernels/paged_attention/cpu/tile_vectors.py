"""Arithmetic of a chunk's item on arrays at addresses: scores, softmax and weighted sums."""

from __future__ import annotations

from llvmlite import ir

from pallas_kernels.shared.cpu.compiler import has
from pallas_kernels.shared.cpu.memory import pointer
from pallas_kernels.shared.cpu.translate import INT32, WORD, external_function, instruction
from pallas_kernels.shared.cpu.vectors import (
    COEFFICIENTS,
    FULL,
    BFloat,
    columns_of,
    constant,
    dot_pairs,
    each_index,
    each_piece,
    exponential,
    float_vector,
    load,
    load_one,
    multiply_add,
    shuffle,
    splat,
    store,
    uniform,
    variable,
)

LANES = 48  # queries of a chunk's item: (token, query head) pairs of one key head
WIDE_CPU = has("avx512f")
# Whether the CPU multiplies pairs of bfloat16 numbers, in vectors of any length
PAIRS = has("avx512bf16") and has("avx512vl")
# Sums that are computed together fill the registers: 24 of 32 with AVX-512, 12 of 16 (half as long)
# without. Sums of scores are of KEYS_AT_ONCE keys by LANES queries. Sums of values are of
# QUERIES_AT_ONCE queries by LONGEST numbers of a value.
KEYS_AT_ONCE = 8 if WIDE_CPU else 2
QUERIES_AT_ONCE = 6
LONGEST = 64 if WIDE_CPU else 16


def _shorts(lanes):
    return ir.VectorType(ir.IntType(16), lanes)


def _paired(builder, a, b):
    """Returns two vectors of 16 bits a lane as one of 32 bits a lane, in the type of float32.

    The lanes of `a` are the lower halves.
    """
    lanes = a.type.count
    pairs = shuffle(builder, a, b, [i + side for i in range(lanes) for side in (0, lanes)])
    return builder.bitcast(pairs, float_vector(lanes))


@instruction
def round_to_bfloat16(builder, source, factor, out, d):
    """out [D] bfloat16 = source [D] float32 * factor."""

    def piece(index, lanes):
        product = builder.fmul(load(builder, source, index, lanes), splat(builder, factor, lanes))
        bits = builder.bitcast(
            builder.fptrunc(product, ir.VectorType(BFloat(), lanes)), _shorts(lanes)
        )
        address = builder.add(out, builder.mul(index, ir.Constant(WORD, 2)))
        builder.store(bits, pointer(builder, address, bits.type), align=2)

    each_piece(builder, d, piece)


@instruction
def interleave(builder, first, second, out, d):
    """out [D] = pairs of the numbers, of 16 bits, of two rows."""

    def piece(index, lanes):
        offset = builder.mul(index, ir.Constant(WORD, 2))
        rows = [
            pointer(builder, builder.add(row, offset), _shorts(lanes)) for row in (first, second)
        ]
        store(builder, _paired(builder, *(builder.load(row, align=2) for row in rows)), out, index)

    each_piece(builder, d, piece)


@instruction
def transpose(builder, rows, stride, out):
    """16 x 16 float32 numbers, rows `stride` numbers apart -> columns LANES numbers apart."""
    starts = [builder.mul(stride, ir.Constant(WORD, i)) for i in range(FULL)]
    vectors = [load(builder, rows, start, FULL) for start in starts]
    for i, vector in enumerate(columns_of(builder, vectors)):
        store(builder, vector, out, ir.Constant(WORD, i * LANES))


def _sums_of_tile(builder, vectors, q, keys, words, add):
    """Returns the sums over `words` words of each key by `vectors` x 16 lanes of q [words, LANES].

    keys: addresses. add: (builder, queries, number of the key in all lanes, sum) -> new sum.
    """
    parts = range(vectors)
    zeros = ir.Constant(float_vector(FULL), None)
    sums = [[variable(builder, float_vector(FULL), zeros) for _ in parts] for _ in keys]
    with each_index(builder, words) as index:
        place = builder.mul(index, ir.Constant(WORD, LANES))
        columns = [builder.add(place, ir.Constant(WORD, part * FULL)) for part in parts]
        queries = [load(builder, q, column, FULL) for column in columns]
        for key, accumulated in zip(keys, sums, strict=True):
            number = load_one(builder, key, index)
            for x, total in zip(queries, accumulated, strict=True):
                y = splat(builder, number, FULL)
                builder.store(add(builder, x, y, builder.load(total)), total)
    return [[builder.load(total) for total in accumulated] for accumulated in sums]


def _store_tile(builder, sums, out):
    for i, row in enumerate(sums):
        for part, total in enumerate(row):
            store(builder, total, out, ir.Constant(WORD, i * LANES + part * FULL))


def _score_tile(vectors):
    @instruction
    def score_tile(builder, q, k, d, out):
        """out [keys, LANES] = k [keys, D] . q [D, LANES].

        It is computed for KEYS_AT_ONCE keys and `vectors` x 16 lanes.
        """
        keys = [
            builder.add(k, builder.mul(d, ir.Constant(WORD, 4 * i))) for i in range(KEYS_AT_ONCE)
        ]
        _store_tile(builder, _sums_of_tile(builder, vectors, q, keys, d, multiply_add), out)

    return score_tile


def _score_pairs(vectors):
    @instruction
    def score_pairs(builder, q, keys, words, factor, out):
        """out [keys, LANES] = factor * k [keys, D] . q [D, LANES], for bfloat16 numbers.

        q: [words, LANES] pairs of neighbours in D.
        keys: addresses of KEYS_AT_ONCE keys.
        words: D / 2.
        """
        places = [builder.add(keys, ir.Constant(WORD, 8 * i)) for i in range(KEYS_AT_ONCE)]
        keys = [builder.load(pointer(builder, place, WORD)) for place in places]
        factor = splat(builder, factor, FULL)
        sums = _sums_of_tile(builder, vectors, q, keys, words, dot_pairs)
        _store_tile(builder, [[builder.fmul(total, factor) for total in row] for row in sums], out)

    return score_pairs


score_16, score_32, score_48 = (_score_tile(vectors) for vectors in (1, 2, 3))
score_pairs_16, score_pairs_32, score_pairs_48 = (_score_pairs(vectors) for vectors in (1, 2, 3))


def _add_values(add):
    @instruction
    def add_values(builder, weights, v, d, count, rescale, out):
        """out [queries, D] = rescale [queries] * out + weights [count, LANES]^T . v [count, D].

        It is computed for QUERIES_AT_ONCE queries. A pair of bfloat16 numbers is of two tokens, and
        `count` is then the number of pairs.
        """
        queries = range(QUERIES_AT_ONCE)
        rows = [builder.mul(d, ir.Constant(WORD, i)) for i in queries]

        def piece(index, lanes):
            places = [builder.add(row, index) for row in rows]
            sums = []
            for i in queries:
                old = load(builder, out, places[i], lanes)
                decay = splat(builder, load_one(builder, rescale, ir.Constant(WORD, i)), lanes)
                sums.append(variable(builder, float_vector(lanes)))
                builder.store(builder.fmul(old, decay), sums[i])
            with each_index(builder, count) as token:
                y = load(builder, v, builder.add(builder.mul(d, token), index), lanes)
                first = builder.mul(token, ir.Constant(WORD, LANES))
                for i in queries:
                    number = load_one(builder, weights, builder.add(first, ir.Constant(WORD, i)))
                    new = add(builder, splat(builder, number, lanes), y, builder.load(sums[i]))
                    builder.store(new, sums[i])
            for i in queries:
                store(builder, builder.load(sums[i]), out, places[i])

        each_piece(builder, d, piece, LONGEST)

    return add_values


add_weighted_values_tile = _add_values(multiply_add)
add_weighted_values_pairs = _add_values(dot_pairs)


@instruction
def hide(builder, scores, count, visible):
    """scores [count, LANES] of 16 queries become minus infinity where a token is not visible.

    visible [16] int32: how many of these tokens, from the first, a query sees; it may be negative
    or above count.
    """
    integers = ir.VectorType(INT32, FULL)
    hidden = constant(float("-inf"))
    ends = builder.load(pointer(builder, visible, integers), align=4)
    with each_index(builder, count) as index:
        place = builder.mul(index, ir.Constant(WORD, LANES))
        token = builder.trunc(index, INT32)
        tokens = builder.insert_element(
            ir.Constant(integers, ir.Undefined), token, ir.Constant(INT32, 0)
        )
        tokens = shuffle(builder, tokens, tokens, [0] * FULL)
        x = load(builder, scores, place, FULL)
        store(
            builder,
            builder.select(builder.icmp_signed("<", tokens, ends), x, hidden),
            scores,
            place,
        )


def _online_softmax_step(write):
    @instruction
    def step(builder, scores, count, top, norm, rescale):
        """Computes one step of the online softmax of 16 queries.

        scores: [count, LANES] become exp(score - top), in place.
        top, norm [16]: the largest score and the sum of the weights so far.
        rescale [16]: the factor of earlier weights.
        """
        start = ir.Constant(WORD, 0)
        old = load(builder, top, start, FULL)
        highest = variable(builder, float_vector(FULL), old)

        def score(index):
            return load(builder, scores, builder.mul(index, ir.Constant(WORD, LANES)), FULL)

        with each_index(builder, count) as index:
            x = score(index)
            above = builder.load(highest)
            builder.store(builder.select(builder.fcmp_ordered(">", x, above), x, above), highest)
        new = builder.load(highest)
        total = write(builder, scores, count, lambda index: builder.fsub(score(index), new))
        shrunk = exponential(builder, builder.fsub(old, new))
        so_far = builder.fmul(load(builder, norm, start, FULL), shrunk)
        store(builder, builder.fadd(so_far, total), norm, start)
        store(builder, new, top, start)
        store(builder, shrunk, rescale, start)

    return step


def _write_weights(builder, scores, count, power):
    """scores [count, LANES] = exp(power(token)); returns their sums."""
    total = variable(builder, float_vector(FULL), constant(0))
    with each_index(builder, count) as index:
        weight = exponential(builder, power(index))
        builder.store(builder.fadd(builder.load(total), weight), total)
        store(builder, weight, scores, builder.mul(index, ir.Constant(WORD, LANES)))
    return builder.load(total)


# For a weight that is rounded to 8 bits a shorter polynomial does: its error is below 2**-14.
SHORT_COEFFICIENTS = COEFFICIENTS[-5:]


def _write_pairs(builder, scores, count, power):
    """scores [count / 2, LANES] = exp(power(token)) of pairs of tokens, as bfloat16.

    count: an even number.

    A pair is written over a score that has been read. Returns the sums of the rounded weights, so
    the shares of the values still add up to 1. One instruction adds both weights of a pair.
    """
    total = variable(builder, float_vector(FULL), constant(0))
    # two bfloat16 ones in each lane
    ones = builder.bitcast(uniform(ir.VectorType(INT32, FULL), 0x3F803F80), float_vector(FULL))
    kind = ir.FunctionType(
        ir.VectorType(BFloat(), 2 * FULL), [float_vector(FULL), float_vector(FULL)]
    )
    rounded = external_function(builder.module, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
    with each_index(builder, builder.udiv(count, ir.Constant(WORD, 2))) as index:
        first = builder.mul(index, ir.Constant(WORD, 2))
        even, odd = (
            exponential(builder, power(at), SHORT_COEFFICIENTS)
            for at in (first, builder.add(first, ir.Constant(WORD, 1)))
        )
        # the even tokens are in the lower half
        shorts = builder.bitcast(builder.call(rounded, [odd, even]), _shorts(2 * FULL))
        evens = shuffle(builder, shorts, shorts, range(FULL))
        odds = shuffle(builder, shorts, shorts, range(FULL, 2 * FULL))
        pairs = _paired(builder, evens, odds)
        builder.store(dot_pairs(builder, pairs, ones, builder.load(total)), total)
        store(builder, pairs, scores, builder.mul(index, ir.Constant(WORD, LANES)))
    return builder.load(total)


online_softmax_step = _online_softmax_step(_write_weights)
online_softmax_step_pairs = _online_softmax_step(_write_pairs)
