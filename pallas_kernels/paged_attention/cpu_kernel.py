"""Ragged paged attention that reads pages where they lie: numba code behind XLA's FFI. `cpu` imports it when chosen.

    handler   XLA calls it with a call frame. It lists the work, asks XLA's own thread pool for helpers, works, waits
              for what helpers have begun, and merges decodes of more than one span.
    work      takes items until none is left: of a row with one query token (a decode) an item is (span of SPAN context
              tokens, key head), of a row with more (a chunk) it is (tile of LANES queries, key head). Helpers and the
              handler's own thread run the same loop, so a long context is shared out and a short one is nobody's wait.
    attend    one item of a decode: scores of the span into a scratch, their softmax, the weighted sum of the values.
    attend_tile   one item of a chunk: an online softmax (FlashAttention, Dao et al. 2022) over steps of STEP context
              tokens, as two small matrix products whose sums stay in registers.

A tile's queries are the row's (token, query head) pairs of one key head in order, so that any number of query heads
fills vectors: scores are held [token, query], 16 queries a vector, and their softmax needs no sums across lanes.

Nothing waits for a helper that has not begun: the handler's thread would do all items alone. So it cannot deadlock,
however many engines share the pool. A helper that begins too late finds no item; what it looks at is the job, which
lives in memory of its own until the last of them lets go of it.

Addresses are plain integers: numba's arrays would check each index for a negative one, and loops with that do not
vectorise. Head sizes are multiples of 8; all else is read from the call frame, so that one program serves every shape,
of float32 and of bfloat16 pages. numba keeps it on disk once compiled. It has two parts, the handler and the work, that
are linked by name: numba optimises a function again in each that calls it, and three call the work. All of it is in one
file, because numba's cache on disk looks no further than the file of what it keeps to see that something changed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

SPAN = 256  # context tokens of a decode's item
LANES = 48  # queries of a chunk's item: (token, query head) pairs of one key head
STEP = 64  # context tokens that a chunk's item takes at a time
# What of a chunk is summed at once fills the registers: 24 sums of 32 with AVX-512, 12 of 16 (half as long) without.
WIDE_CPU = binding.get_host_cpu_features().get("avx512f", False)
KEYS_AT_ONCE = 8 if WIDE_CPU else 2  # by LANES queries
QUERIES_AT_ONCE = 6  # by as much of a value as the next line says
LONGEST = 64 if WIDE_CPU else 16

# Only other compiled code calls these functions: wrappers for Python would double the time to compile them.
WRAPPERLESS: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
compiled: Any = njit(nogil=True, error_model="numpy", **WRAPPERLESS)
instruction: Any = intrinsic  # as a type checker sees it: what it makes is called without the first argument
HALF, FULL = 8, 16  # lanes of a vector


# --- memory and threads -----------------------------------------------------------------------------------------------

malloc = types.ExternalFunction("malloc", types.intp(types.intp))
free = types.ExternalFunction("free", types.void(types.intp))
sched_yield = types.ExternalFunction("sched_yield", types.int32())


def _pointer(builder, address, pointee):
    return builder.inttoptr(address, pointee.as_pointer())


def _access(numba_type, llvm_type):
    """(load, store) of a scalar at an address."""

    @instruction
    def load(typing, address):
        def generate(context, builder, signature, args):
            return builder.load(_pointer(builder, args[0], llvm_type))

        return numba_type(types.intp), generate

    @instruction
    def store(typing, address, value):
        def generate(context, builder, signature, args):
            builder.store(args[1], _pointer(builder, args[0], llvm_type))
            return context.get_dummy_value()

        return types.void(types.intp, numba_type), generate

    return load, store


FLOAT, INT32, WORD = ir.FloatType(), ir.IntType(32), ir.IntType(64)
load_float, store_float = _access(types.float32, FLOAT)
load_int, store_int = _access(types.int32, INT32)
load_word, store_word = _access(types.intp, WORD)


@instruction
def fetch_add(typing, address, value):
    """Atomic: add to a word and return what it was. Orders all memory accesses around it."""

    def generate(context, builder, signature, args):
        return builder.atomic_rmw("add", _pointer(builder, args[0], WORD), args[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


@instruction
def call(typing, function, argument):
    """Call the C function at an address: word -> word."""

    def generate(context, builder, signature, args):
        return builder.call(_pointer(builder, args[0], ir.FunctionType(WORD, [WORD])), [args[1]])

    return types.intp(types.intp, types.intp), generate


def _linked(name, words):
    """(its name, a C function of so many words that `compile_handler` makes and others call by name)."""
    name = f"pallas_kernels_paged_attention_{name}"
    return name, types.ExternalFunction(name, types.void(*[types.intp] * words))


ATTEND, attend = _linked("attend", 14)
ATTEND_TILE, attend_tile = _linked("attend_tile", 15)
WORK, work = _linked("work", 1)


@instruction
def address_of_work(typing):
    def generate(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [WORD])
        return builder.ptrtoint(cgutils.get_or_insert_function(builder.module, kind, WORK), WORD)

    return types.intp(), generate


# --- vectors ----------------------------------------------------------------------------------------------------------
# Built as vector code, so that nothing hangs on what a vectoriser recognises. `size` is that of a number in the
# pages: 4 of float32, 2 of bfloat16, which is the upper half of a float32 number.


def _lanes(count):
    return ir.VectorType(FLOAT, count)


def _shuffle(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes)))


def _splat(builder, value, lanes):
    undefined = ir.Constant(_lanes(lanes), ir.Undefined)
    return _shuffle(builder, builder.insert_element(undefined, value, ir.Constant(INT32, 0)), undefined, [0] * lanes)


def _either(builder, size, generate):
    """generate(4) or generate(2), as the word `size` says when it runs."""
    with builder.if_else(builder.icmp_signed("==", size, ir.Constant(WORD, 4))) as (then, otherwise):
        with then:
            generate(4)
        with otherwise:
            generate(2)


def _load(builder, base, index, lanes, size=4):
    """`lanes` numbers from index `index` of an array at address `base`, as float32."""
    address = builder.add(base, builder.mul(index, ir.Constant(WORD, size)))
    if size == 4:
        return builder.load(_pointer(builder, address, _lanes(lanes)), align=4)
    short, wide = ir.VectorType(ir.IntType(16), lanes), ir.VectorType(INT32, lanes)
    number = builder.zext(builder.load(_pointer(builder, address, short), align=2), wide)
    return builder.bitcast(builder.shl(number, ir.Constant(wide, [16] * lanes)), _lanes(lanes))


def _number(builder, base, index):
    """One float32."""
    address = builder.add(base, builder.mul(index, ir.Constant(WORD, 4)))
    return builder.load(_pointer(builder, address, FLOAT))


def _store(builder, value, base, index):
    address = builder.add(base, builder.mul(index, ir.Constant(WORD, 4)))
    builder.store(value, _pointer(builder, address, value.type), align=4)


def _multiply_add(builder, a, b, c):
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _pieces(builder, size, piece, longest=FULL):
    """piece(index, lanes) over `size` elements, a multiple of 8: `longest` at a time, then 16, then 8."""
    start = ir.Constant(WORD, 0)
    for lanes in sorted({longest, FULL, HALF}, reverse=True):
        end = builder.and_(size, ir.Constant(WORD, -lanes))
        with cgutils.for_range_slice(builder, start, end, ir.Constant(WORD, lanes)) as (index, _):
            piece(index, lanes)
        start = end


def _fold(builder, value, combine):
    """One number from a vector, halving it each time."""
    lanes = value.type.count
    while lanes > 1:
        lanes //= 2
        value = combine(*(_shuffle(builder, value, value, range(first, first + lanes)) for first in (0, lanes)))
    return builder.extract_element(value, ir.Constant(INT32, 0))


def _add_pairs(builder, a, b):
    """Sums of neighbours: a's in the lower half, b's in the upper."""
    return builder.fadd(*(_shuffle(builder, a, b, range(first, 2 * FULL, 2)) for first in (0, 1)))


def _scores(count):
    @instruction
    def scores(typing, size, q, k, d, out):
        """out [count] = q [D] . k [count, D]: one pass over the keys; sums over lanes share their shuffles."""

        def generate(context, builder, signature, args):
            size, q, k, d, out = args
            zeros = ir.Constant(_lanes(FULL), None)
            sums = [cgutils.alloca_once_value(builder, zeros) for _ in range(count)]

            def piece(index, lanes, size):
                x = _load(builder, q, index, lanes)
                for token, accumulated in enumerate(sums):
                    at = builder.add(index, builder.mul(d, ir.Constant(WORD, token)))
                    y, old = _load(builder, k, at, lanes, size), builder.load(accumulated)
                    if lanes == FULL:
                        new = _multiply_add(builder, x, y, old)
                    else:
                        part = _shuffle(builder, builder.fmul(x, y), ir.Constant(_lanes(HALF), None), range(FULL))
                        new = builder.fadd(part, old)
                    builder.store(new, accumulated)

            _either(builder, size, lambda size: _pieces(builder, d, partial(piece, size=size)))
            vectors = [builder.load(accumulated) for accumulated in sums]
            while len(vectors) > 1:
                vectors = [_add_pairs(builder, *vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
            if count == 1:
                result = _fold(builder, vectors[0], builder.fadd)
            else:  # two sums of every token are left, side by side
                result = _add_pairs(builder, vectors[0], vectors[0])
                result = _shuffle(builder, result, result, range(HALF))
            _store(builder, result, out, ir.Constant(WORD, 0))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), generate

    return scores


def _weigh(count):
    @instruction
    def weigh(typing, size, weights, v, d, out):
        """out [D] += weights [count] . v [count, D]."""

        def generate(context, builder, signature, args):
            size, weights, v, d, out = args
            scalars = [_number(builder, weights, ir.Constant(WORD, token)) for token in range(count)]

            def piece(index, lanes, size):
                total = _load(builder, out, index, lanes)
                for token, weight in enumerate(scalars):
                    at = builder.add(index, builder.mul(d, ir.Constant(WORD, token)))
                    y = _load(builder, v, at, lanes, size)
                    total = _multiply_add(builder, _splat(builder, weight, lanes), y, total)
                _store(builder, total, out, index)

            _either(builder, size, lambda size: _pieces(builder, d, partial(piece, size=size)))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), generate

    return weigh


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
        for step in (1, 2, 4, 8):  # swap the blocks beside the diagonal, of ever more numbers
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
def weigh_tile(typing, weights, v, d, count, keep, out):
    """out [queries, D] = keep [queries] * out + weights [count, LANES]^T . v [count, D], of QUERIES_AT_ONCE."""

    def generate(context, builder, signature, args):
        weights, v, d, count, keep, out = args
        queries = range(QUERIES_AT_ONCE)
        rows = [builder.mul(d, ir.Constant(WORD, i)) for i in queries]

        def piece(index, lanes):
            places = [builder.add(row, index) for row in rows]
            sums = []
            for i in queries:
                old = _load(builder, out, places[i], lanes)
                kept = _splat(builder, _number(builder, keep, ir.Constant(WORD, i)), lanes)
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


TOGETHER = HALF  # tokens that are scored and weighed at a time, where a page has so many left
scores_together, score_one = _scores(TOGETHER), _scores(1)
weigh_together, weigh_one = _weigh(TOGETHER), _weigh(1)


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
    """Of 16 float32 numbers."""

    def generate(context, builder, signature, args):
        vector = _load(builder, args[0], ir.Constant(WORD, 0), FULL)
        return _fold(builder, vector, lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))

    return types.float32(types.intp), generate


# 2**f for f in [-0.5, 0.5], by powers of f from the seventh down: Taylor's, whose error is below float32's there
POWERS = [math.log(2) ** i / math.factorial(i) for i in range(7, -1, -1)]


def _exponential(builder, x):
    """exp(x) of 16 float32 numbers of at most 0; 0 where they are below -87.

    exp(x) is 2**(whole + part) with part in [-0.5, 0.5]: a polynomial, and a whole number added to the exponent.
    """
    vector, integers = _lanes(FULL), ir.VectorType(INT32, FULL)

    def constant(value):
        return ir.Constant(vector, [float(np.float32(value))] * FULL)

    power = builder.fmul(x, constant(1 / math.log(2)))
    floor = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector]), "llvm.floor.v16f32")
    whole = builder.call(floor, [builder.fadd(power, constant(0.5))])
    part = builder.fsub(power, whole)
    result = constant(POWERS[0])
    for coefficient in POWERS[1:]:
        result = _multiply_add(builder, result, part, constant(coefficient))
    tiny = builder.fcmp_ordered("<", power, constant(-126))
    exponent = builder.fptosi(builder.select(tiny, constant(0), whole), integers)
    exponent = builder.add(exponent, ir.Constant(integers, [127] * FULL))
    exponent = builder.shl(exponent, ir.Constant(integers, [23] * FULL))
    return builder.select(tiny, constant(0), builder.fmul(result, builder.bitcast(exponent, vector)))


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
def soften(typing, scores, count, visible, top, norm, keep):
    """One step of the online softmax of 16 queries: scores [count, LANES] -> exp(score - top), in place.

    visible [16] int32: how many of these tokens, from the first, a query sees; it may be negative or above count.
    top, norm [16]: the largest score and the sum of the weights so far; keep [16]: what earlier weights shrink by.
    """

    def generate(context, builder, signature, args):
        scores, count, visible, top, norm, keep = args
        start, hidden = ir.Constant(WORD, 0), ir.Constant(_lanes(FULL), [float("-inf")] * FULL)
        integers = ir.VectorType(INT32, FULL)
        ends = builder.load(_pointer(builder, visible, integers), align=4)
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
        _store(builder, shrunk, keep, start)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


@instruction
def prefetch(typing, address):
    """Ask for the cache line at an address; any address may be asked for."""

    def generate(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        read, soon, data = (ir.Constant(INT32, value) for value in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], byte), read, soon, data])
        return context.get_dummy_value()

    return types.void(types.intp), generate


# --- one item of a decode ---------------------------------------------------------------------------------------------


@compiled
def _softmax(scores, count):
    """scores [count] -> exp(scores - their largest), in place; (largest, sum). Writes up to the next 16."""
    end = -(-count // FULL) * FULL
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
    for at in range(0, size, 64):
        prefetch(address + at)


def _attend(size, q, k, v, page_bytes, table, first, stop, group, d, s, scores, out, stats):
    """G queries over the context tokens first : stop of one key head.

    q, out: [G, D] float32; out is the sum of the values, weighted by exp(score - the largest score).
    k, v: addresses of this head in page 0; table: [M] int32 pages of the row.
    scores: [G, SPAN] float32, scratch. stats: [G, 2] float32, (largest score, sum of the weights).
    """
    row = size * d
    at = first
    while at < stop:
        offset = at % s
        run = min(s - offset, stop - at)
        base = k + load_int(table + 4 * (at // s)) * page_bytes + offset * row
        ahead = v + load_int(table + 4 * (first // s)) * page_bytes + first % s * row
        if at + run < stop:
            ahead = k + load_int(table + 4 * (at // s + 1)) * page_bytes
        to = scores + 4 * (at - first)
        i = 0
        while i + TOGETHER <= run:
            _fetch(ahead + i * row, TOGETHER * row)
            for g in range(group):
                scores_together(size, q + 4 * g * d, base + i * row, d, to + 4 * (g * SPAN + i))
            i += TOGETHER
        while i < run:
            for g in range(group):
                score_one(size, q + 4 * g * d, base + i * row, d, to + 4 * (g * SPAN + i))
            i += 1
        at += run

    for g in range(group):
        top, norm = _softmax(scores + 4 * g * SPAN, stop - first)
        store_float(stats + 8 * g, top)
        store_float(stats + 8 * g + 4, norm)
        clear(out + 4 * g * d, d)

    at = first
    while at < stop:
        offset = at % s
        run = min(s - offset, stop - at)
        base = v + load_int(table + 4 * (at // s)) * page_bytes + offset * row
        ahead = base
        if at + run < stop:
            ahead = v + load_int(table + 4 * (at // s + 1)) * page_bytes
        to = scores + 4 * (at - first)
        i = 0
        while i + TOGETHER <= run:
            _fetch(ahead + i * row, TOGETHER * row)
            for g in range(group):
                weigh_together(size, to + 4 * (g * SPAN + i), base + i * row, d, out + 4 * g * d)
            i += TOGETHER
        while i < run:
            for g in range(group):
                weigh_one(size, to + 4 * (g * SPAN + i), base + i * row, d, out + 4 * g * d)
            i += 1
        at += run


# --- one item of a chunk ----------------------------------------------------------------------------------------------

NEVER = np.float32(-1e30)  # the largest score of none: finite, so that exp(NEVER - NEVER) is a number


@compiled
def _take(size, pages, page_bytes, table, first, count, d, s, out):
    """out [count, D] float32 = what one key head has of the context tokens from `first`."""
    at, stop = first, first + count
    while at < stop:
        offset = at % s
        run = min(s - offset, stop - at)
        page = pages + load_int(table + 4 * (at // s)) * page_bytes
        copy(size, page + size * d * offset, out + 4 * d * (at - first), run * d)
        at += run


@compiled
def _score(q, k, d, count, lanes, out):
    """out [count, LANES] = k [count, D] . q [D, LANES]. Writes up to the next KEYS_AT_ONCE."""
    for i in range(0, count, KEYS_AT_ONCE):
        keys, to = k + 4 * d * i, out + 4 * LANES * i
        if lanes <= 16:
            score_16(q, keys, d, to)
        elif lanes <= 32:
            score_32(q, keys, d, to)
        else:
            score_48(q, keys, d, to)


@compiled
def _turn(q, d, lanes, out):
    """q [lanes, D] -> out [D, LANES]. Reads and writes up to the next 16 of both."""
    for lane in range(0, lanes, FULL):
        for i in range(0, d, FULL):
            transpose(q + 4 * (d * lane + i), d, out + 4 * (LANES * i + lane))


def _attend_tile(size, q, k, v, page_bytes, table, first, number, before, token_bytes, group, d, s, scratch, out):
    """Queries first : first + number of a row's for one key head, at most LANES, over the context that they see.

    q, out: addresses of this head's first query of the row, float32. before: context tokens before the row's first.
    k, v, table: as in `_attend`. scratch: `_scratch` bytes.
    """
    scratch += -scratch % 64  # no vector across two cache lines
    visible, top, norm, keep = scratch, scratch + 4 * LANES, scratch + 8 * LANES, scratch + 12 * LANES
    places = scratch + 16 * LANES  # [LANES] words: where a query and its result lie, from the row's first
    weights = places + 8 * LANES  # [STEP, LANES]
    turned = weights + 4 * STEP * LANES  # [D, LANES], D up to the next 16
    tokens = turned + 4 * LANES * (d + FULL)  # [STEP, D]: keys, then values
    sums = tokens + 4 * d * STEP  # [LANES, D]; before that, the queries
    token, head = first // group, first % group  # counted on below: divisions are slow
    for lane in range(LANES):
        store_word(places + 8 * lane, token * token_bytes + head * 4 * d)
        store_int(visible + 4 * lane, np.int32(before + token + 1))
        store_float(top + 4 * lane, NEVER)
        store_float(norm + 4 * lane, np.float32(0))
        copy(4, q + load_word(places + 8 * lane), sums + 4 * d * lane, d)
        if lane + 1 < number:  # the last one again fills the vector
            head += 1
            if head == group:
                token, head = token + 1, 0
    _turn(sums, d, number, turned)
    clear(sums, LANES * d)

    stop = before + token + 1
    for start in range(0, stop, STEP):
        count = min(STEP, stop - start)
        _take(size, k, page_bytes, table, start, count, d, s, tokens)
        _score(turned, tokens, d, count, number, weights)
        for lane in range(0, number, FULL):
            at = 4 * lane
            soften(weights + at, count, visible + at, top + at, norm + at, keep + at)
        for lane in range(LANES):
            store_int(visible + 4 * lane, np.int32(load_int(visible + 4 * lane) - STEP))
        _take(size, v, page_bytes, table, start, count, d, s, tokens)
        for lane in range(0, number, QUERIES_AT_ONCE):
            weigh_tile(weights + 4 * lane, tokens, d, count, keep + 4 * lane, sums + 4 * d * lane)

    for lane in range(number):
        scale(sums + 4 * d * lane, np.float32(1) / load_float(norm + 4 * lane), d)
        copy(4, sums + 4 * d * lane, out + load_word(places + 8 * lane), d)


@compiled
def _scratch(group, d):
    """Bytes that an item of either sort works in."""
    tile = 6 * LANES + STEP * LANES + LANES * (d + FULL) + STEP * d + LANES * d + 2 * FULL
    return 4 * max(group * SPAN, tile)


# --- a job: all items of a call, shared by the threads ----------------------------------------------------------------

# Words of a job, a block of memory: counters that the threads share, then what stays as the handler wrote it.
HOLDERS, NEXT, DONE, ITEMS = 0, 8, 16, 24
Q, KEYS, VALUES, TABLES, LENGTHS, OFFSETS, OUT = 32, 40, 48, 56, 64, 72, 80  # addresses of arguments and result
ROWS, WIDTH, HEADS, GROUP, DIM, BLOCK = 88, 96, 104, 112, 120, 128  # B, M, K, G, D, S
SIZE = 136  # of a number in the pages
STATS, PARTS = 144, 152  # addresses within the job: [units, K, G, 2] and [units, K, G, D] float32, used by decodes
STARTS = 160  # [B + 1] units of all rows before this one: spans of a decode, tiles of a chunk


@compiled
def _units(length, count, group):
    """Of a row: spans of its context where it has one query token, tiles of its queries where it has more."""
    return -(-length // SPAN) if count == 1 else -(-count * group // LANES)


@compiled
def _row(job, row):
    """(first query token, number of query tokens, context length)."""
    offsets = load_word(job + OFFSETS) + 4 * row
    first = load_int(offsets)
    return first, load_int(offsets + 4) - first, load_int(load_word(job + LENGTHS) + 4 * row)


@compiled
def _merge(job):
    """Decodes of several spans: the online softmax of their parts, in the order of the context."""
    queries, d = load_word(job + HEADS) * load_word(job + GROUP), load_word(job + DIM)
    for row in range(load_word(job + ROWS)):
        first, count, length = _row(job, row)
        if count != 1 or 0 < length <= SPAN:
            continue
        start, end = load_word(job + STARTS + 8 * row), load_word(job + STARTS + 8 * (row + 1))
        for query in range(queries):
            out = load_word(job + OUT) + 4 * d * (first * queries + query)
            clear(out, d)
            top, norm = np.float32(-np.inf), np.float32(0)
            for unit in range(start, end):
                top = max(top, load_float(load_word(job + STATS) + 8 * (unit * queries + query)))
            for unit in range(start, end):
                stats = load_word(job + STATS) + 8 * (unit * queries + query)
                share = np.float32(math.exp(load_float(stats) - top))
                norm += share * load_float(stats + 4)
                part = load_word(job + PARTS) + 4 * d * (unit * queries + query)
                store_float(stats, share)
                weigh_one(4, stats, part, d, out)
            if end > start:
                scale(out, np.float32(1) / norm, d)


@compiled
def _let_go(job):
    if fetch_add(job + HOLDERS, -1) == 1:
        free(job)


def _work(job):
    """Take items until none is left, then let go of the job."""
    heads, group, d, s = load_word(job + HEADS), load_word(job + GROUP), load_word(job + DIM), load_word(job + BLOCK)
    size = load_word(job + SIZE)
    head_bytes = size * s * d
    page_bytes = head_bytes * heads
    token_bytes = 4 * heads * group * d
    scratch = 0
    row = 0
    while True:
        item = fetch_add(job + NEXT, 1)
        if item >= load_word(job + ITEMS):
            break
        if scratch == 0:
            scratch = malloc(_scratch(group, d))
        unit, head = item // heads, item % heads
        while load_word(job + STARTS + 8 * (row + 1)) <= unit:
            row += 1
        first, count, length = _row(job, row)
        index = unit - load_word(job + STARTS + 8 * row)
        at = first * token_bytes + 4 * group * d * head
        q, out = load_word(job + Q) + at, load_word(job + OUT) + at
        k, v = load_word(job + KEYS) + head_bytes * head, load_word(job + VALUES) + head_bytes * head
        table = load_word(job + TABLES) + 4 * load_word(job + WIDTH) * row
        if count > 1:
            begin = LANES * index
            number = min(LANES, group * count - begin)
            before = length - count
            attend_tile(size, q, k, v, page_bytes, table, begin, number, before, token_bytes, group, d, s, scratch, out)
        else:
            stats = load_word(job + STATS) + 8 * group * item
            part = out if length <= SPAN else load_word(job + PARTS) + 4 * group * d * item
            begin = SPAN * index
            stop = min(begin + SPAN, length)
            attend(size, q, k, v, page_bytes, table, begin, stop, group, d, s, scratch, part, stats)
            if length <= SPAN:
                for g in range(group):
                    scale(out + 4 * g * d, np.float32(1) / load_float(stats + 8 * g + 4), d)
        fetch_add(job + DONE, 1)
    if scratch != 0:
        free(scratch)
    _let_go(job)


# --- XLA's side (xla/ffi/api/c_api.h, version 0.3): byte offsets in its structs on machines of 64 bits ----------------

FFI_MAJOR, FFI_MINOR = 0, 3
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGUMENTS, FRAME_RESULTS = 8, 16, 24, 72, 112
EXTENSION_TYPE, EXTENSION_METADATA, METADATA = 8, 1, 24  # the type's offset, its value for metadata, and theirs
METADATA_MAJOR, METADATA_MINOR, METADATA_TRAITS, METADATA_STATE = 24, 28, 32, 40
BUFFER_TYPE, BUFFER_DATA, BUFFER_DIMS = 16, 24, 40
BUFFER_IS_FLOAT32 = 11
API_ERROR_DESTROY, API_SCHEDULE, API_NUM_THREADS = 64, 136, 144
ARGUMENT_BYTES = 40  # the longest of the argument structs below


@compiled
def _describe(extension):
    """Answer XLA's question which version of its interface this was written for."""
    metadata = load_word(extension + METADATA)
    store_int(metadata + METADATA_MAJOR, np.int32(FFI_MAJOR))
    store_int(metadata + METADATA_MINOR, np.int32(FFI_MINOR))
    store_int(metadata + METADATA_TRAITS, np.int32(0))
    store_word(metadata + METADATA_STATE, 0)


@compiled
def _argument(frame, index):
    return load_word(load_word(frame + FRAME_ARGUMENTS) + 8 * index)


@compiled
def _dim(buffer, axis):
    return load_word(load_word(buffer + BUFFER_DIMS) + 8 * axis)


@compiled
def _threads(frame):
    """How many threads XLA's pool has; 1 when there is none."""
    api = load_word(frame + FRAME_API)
    request, answer = malloc(ARGUMENT_BYTES), malloc(8)
    store_word(request, 32)  # the struct's size; then: extensions, context, where the answer goes
    store_word(request + 8, 0)
    store_word(request + 16, load_word(frame + FRAME_CONTEXT))
    store_word(request + 24, answer)
    store_word(answer, 1)
    error = call(load_word(api + API_NUM_THREADS), request)
    threads = 1 if error != 0 else load_word(answer)
    if error != 0:
        _destroy(api, error)
    free(request)
    free(answer)
    return threads


@compiled
def _destroy(api, error):
    request = malloc(ARGUMENT_BYTES)
    store_word(request, 24)
    store_word(request + 8, 0)
    store_word(request + 16, error)
    call(load_word(api + API_ERROR_DESTROY), request)
    free(request)


@compiled
def _ask_for_help(frame, job, helpers):
    api = load_word(frame + FRAME_API)
    request = malloc(ARGUMENT_BYTES)
    store_word(request, 40)  # the struct's size; then: extensions, context, task, its argument
    store_word(request + 8, 0)
    store_word(request + 16, load_word(frame + FRAME_CONTEXT))
    store_word(request + 24, address_of_work())
    store_word(request + 32, job)
    for _ in range(helpers):
        fetch_add(job + HOLDERS, 1)
        error = call(load_word(api + API_SCHEDULE), request)
        if error != 0:
            _destroy(api, error)
            _let_go(job)
    free(request)


@compiled
def _job(frame):
    """List the work of a call with q [T, K, G, D] and the other arguments of `api.paged_attention`."""
    q, keys, tables = _argument(frame, 0), _argument(frame, 1), _argument(frame, 3)
    lengths, offsets = _argument(frame, 4), _argument(frame, 5)
    rows, heads, group, d = _dim(lengths, 0), _dim(q, 1), _dim(q, 2), _dim(q, 3)
    length, offset = load_word(lengths + BUFFER_DATA), load_word(offsets + BUFFER_DATA)
    units, several = 0, False
    for row in range(rows):
        count = load_int(offset + 4 * (row + 1)) - load_int(offset + 4 * row)
        units += _units(load_int(length + 4 * row), count, group)
        several = several or (count == 1 and load_int(length + 4 * row) > SPAN)
    stats = STARTS + 8 * (rows + 1)
    parts = stats + 8 * units * heads * group
    job = malloc(parts + (4 * units * heads * group * d if several else 0))
    store_word(job + HOLDERS, 2)  # the handler and its own call of the work
    store_word(job + NEXT, 0)
    store_word(job + DONE, 0)
    store_word(job + ITEMS, units * heads)
    for index in range(6):
        store_word(job + Q + 8 * index, load_word(_argument(frame, index) + BUFFER_DATA))
    store_word(job + OUT, load_word(load_word(load_word(frame + FRAME_RESULTS)) + BUFFER_DATA))
    store_word(job + ROWS, rows)
    store_word(job + WIDTH, _dim(tables, 1))
    store_word(job + HEADS, heads)
    store_word(job + GROUP, group)
    store_word(job + DIM, d)
    store_word(job + BLOCK, _dim(keys, 2))
    store_word(job + SIZE, 4 if load_int(keys + BUFFER_TYPE) == BUFFER_IS_FLOAT32 else 2)
    store_word(job + STATS, job + stats)
    store_word(job + PARTS, job + parts)
    units = 0
    for row in range(rows):
        store_word(job + STARTS + 8 * row, units)
        _, count, context = _row(job, row)
        units += _units(context, count, group)
    store_word(job + STARTS + 8 * rows, units)
    return job


@compiled
def _clear_padding(frame, job):
    """XLA hands out the result as it was left by others: zeros for the tokens that are no row's."""
    used = load_int(load_word(job + OFFSETS) + 4 * load_word(job + ROWS))
    size = load_word(job + HEADS) * load_word(job + GROUP) * load_word(job + DIM)
    clear(load_word(job + OUT) + 4 * size * used, size * (_dim(_argument(frame, 0), 0) - used))


def _handle(frame):
    extension = load_word(frame + FRAME_EXTENSION)
    if extension != 0 and load_int(extension + EXTENSION_TYPE) == EXTENSION_METADATA:
        _describe(extension)
        return 0
    job = _job(frame)
    items = load_word(job + ITEMS)
    _ask_for_help(frame, job, min(_threads(frame), items) - 1)
    _clear_padding(frame, job)
    work(job)
    while fetch_add(job + DONE, 0) < items:
        sched_yield()
    _merge(job)
    _let_go(job)
    return 0


def _make(function, kind) -> int:
    """The address of a C function, compiled or loaded."""
    try:
        made = cfunc(kind, cache=True)(function)
    except RuntimeError:  # no folder to keep it in
        made = cfunc(kind)(function)
    _kept.append(made)
    address = made.address
    assert address is not None
    return address


def compile_handler() -> int:
    """The address of XLA's handler."""
    for name, linked, function in (
        (ATTEND, attend, _attend),
        (ATTEND_TILE, attend_tile, _attend_tile),
        (WORK, work, _work),
    ):
        binding.add_symbol(name, _make(function, linked.sig))
    return _make(_handle, types.intp(types.intp))


_kept: list[Any] = []  # XLA holds bare addresses
