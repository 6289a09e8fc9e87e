"""Decode attention that reads pages where they lie: numba code behind XLA's typed FFI. `cpu` imports it when first used.

    handler   XLA calls it with a call frame. It lists the work, asks XLA's own thread pool for helpers, works, waits
              for what helpers have begun, and merges rows of more than one span.
    work      takes items until none is left: an item is (row, span of SPAN context tokens, key head). Helpers and the
              handler's own thread run the same loop, so a long context is shared out and a short one is nobody's wait.
    attend    one item: scores of the span into a scratch, their softmax, the weighted sum of the values.

Nothing waits for a helper that has not begun: the handler's thread would do all items alone. So it cannot deadlock,
however many engines share the pool. A helper that begins too late finds no item; what it looks at is the job, which
lives in memory of its own until the last of them lets go of it.

Addresses are plain integers and all indices are counted in them: numba's arrays would check each index for a negative
one, and loops with that do not vectorise. Vectors are a numba type of their own for the same reason, so that nothing
hangs on what a vectoriser recognises. Head sizes are multiples of 8; all else is read from the call frame, so that two
kernels (float32 and bfloat16 pages) serve every shape and are kept on disk once compiled.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

SPAN = 256  # context tokens of an item
ALONE = 64 * 1024  # keys and values of one head (bytes) that a single thread reads sooner than another one wakes up

OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}
HALF, FULL = 8, 16  # lanes of a vector


# --- memory and threads -----------------------------------------------------------------------------------------------

malloc = types.ExternalFunction("malloc", types.intp(types.intp))
free = types.ExternalFunction("free", types.void(types.intp))
sched_yield = types.ExternalFunction("sched_yield", types.int32())


def _pointer(builder, address, pointee):
    return builder.inttoptr(address, pointee.as_pointer())


def _access(numba_type, llvm_type):
    """(load, store) of a scalar at an address."""

    @intrinsic
    def load(typing, address):
        def generate(context, builder, signature, args):
            return builder.load(_pointer(builder, args[0], llvm_type))

        return numba_type(types.intp), generate

    @intrinsic
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


@intrinsic
def fetch_add(typing, address, value):
    """Atomic: add to a word and return what it was. Orders all memory accesses around it."""

    def generate(context, builder, signature, args):
        return builder.atomic_rmw("add", _pointer(builder, args[0], WORD), args[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def call(typing, function, argument):
    """Call the C function at an address: word -> word."""

    def generate(context, builder, signature, args):
        return builder.call(_pointer(builder, args[0], ir.FunctionType(WORD, [WORD])), [args[1]])

    return types.intp(types.intp, types.intp), generate


@intrinsic
def address_of(typing, function):
    """The address of a C function `void (word)` that calls a jitted function of one word."""
    dispatcher = function.dispatcher

    def generate(context, builder, signature, args):
        dispatcher.compile((types.intp,))
        compiled = dispatcher.overloads[(types.intp,)]
        context.active_code_library.add_linking_library(compiled.library)
        name = f"task_{compiled.fndesc.mangled_name}"
        task = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [WORD]), name)
        task.linkage = "internal"
        body = ir.IRBuilder(task.append_basic_block())
        target = context.declare_function(builder.module, compiled.fndesc)
        context.call_conv.call_function(body, target, compiled.fndesc.restype, compiled.fndesc.argtypes, [task.args[0]])
        body.ret_void()
        return builder.ptrtoint(task, WORD)

    return types.intp(function), generate


# --- vectors ----------------------------------------------------------------------------------------------------------


class Vector(types.Type):
    """`lanes` float32 numbers in registers."""

    def __init__(self, lanes: int):
        super().__init__(f"Vector{lanes}")
        self.llvm = ir.VectorType(FLOAT, lanes)
        self.lanes = lanes


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        super().__init__(manager, vector, vector.llvm)


FULL_VECTOR, HALF_VECTOR = Vector(FULL), Vector(HALF)


def _shuffle(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes)))


def _splat(builder, value, vector):
    undefined = ir.Constant(vector.llvm, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(INT32, 0))
    return _shuffle(builder, first, undefined, [0] * vector.lanes)


def _load_vector(builder, address, vector, page_type=types.float32):
    """Of float32 numbers, or of bfloat16 ones, which are the upper halves of float32 numbers."""
    if page_type == types.float32:
        return builder.load(_pointer(builder, address, vector.llvm), align=4)
    short, wide = (ir.VectorType(ir.IntType(bits), vector.lanes) for bits in (16, 32))
    bits = builder.zext(builder.load(_pointer(builder, address, short), align=2), wide)
    return builder.bitcast(builder.shl(bits, ir.Constant(wide, [16] * vector.lanes)), vector.llvm)


def _loader(vector):
    @intrinsic
    def load(typing, kind, address):
        def generate(context, builder, signature, args):
            return _load_vector(builder, args[1], vector, kind.dtype)

        return vector(kind, types.intp), generate

    return load


load_full, load_half = _loader(FULL_VECTOR), _loader(HALF_VECTOR)


@intrinsic
def store_vector(typing, address, vector):
    def generate(context, builder, signature, args):
        builder.store(args[1], _pointer(builder, args[0], vector.llvm), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, vector), generate


@intrinsic
def widen(typing, vector):
    """A half vector, and zeros."""

    def generate(context, builder, signature, args):
        zeros = ir.Constant(HALF_VECTOR.llvm, None)
        return _shuffle(builder, args[0], zeros, range(FULL))

    return FULL_VECTOR(HALF_VECTOR), generate


@intrinsic
def zeros(typing):
    def generate(context, builder, signature, args):
        return ir.Constant(FULL_VECTOR.llvm, None)

    return FULL_VECTOR(), generate


@intrinsic
def multiply_add(typing, a, b, c):
    """a * b + c; `a` may be a number."""
    vector = c

    def generate(context, builder, signature, args):
        x, y, z = args
        x = x if isinstance(a, Vector) else _splat(builder, x, vector)
        return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))

    return vector(a, vector, vector), generate


@intrinsic
def add_pairs(typing, a, b):
    """Sums of neighbours: a's in the lower half, b's in the upper."""

    def generate(context, builder, signature, args):
        even, odd = (_shuffle(builder, *args, range(first, 2 * FULL, 2)) for first in (0, 1))
        return builder.fadd(even, odd)

    return FULL_VECTOR(FULL_VECTOR, FULL_VECTOR), generate


@intrinsic
def lower(typing, a):
    def generate(context, builder, signature, args):
        return _shuffle(builder, args[0], args[0], range(HALF))

    return HALF_VECTOR(FULL_VECTOR), generate


def _fold(builder, value, combine):
    """One number from a vector, halving it each time."""
    lanes = FULL
    while lanes > 1:
        lanes //= 2
        upper = _shuffle(builder, value, value, range(lanes, 2 * lanes))
        value = combine(_shuffle(builder, value, value, range(lanes)), upper)
    return builder.extract_element(value, ir.Constant(INT32, 0))


@intrinsic
def total(typing, a):
    def generate(context, builder, signature, args):
        return _fold(builder, args[0], builder.fadd)

    return types.float32(FULL_VECTOR), generate


@intrinsic
def largest(typing, a):
    def generate(context, builder, signature, args):
        return _fold(builder, args[0], lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))

    return types.float32(FULL_VECTOR), generate


@intrinsic
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


# 2**f for f in [-0.5, 0.5], by powers of f from the sixth down: Taylor's, whose error there is below 2e-8
POWERS = [math.log(2) ** i / math.factorial(i) for i in range(6, -1, -1)]


@intrinsic
def exp_of_difference(typing, a, number):
    """exp(a - number) for differences up to 0, to 2e-7 of the value; 0 below -87."""

    def generate(context, builder, signature, args):
        vector, integers = FULL_VECTOR.llvm, ir.VectorType(INT32, FULL)
        constant = lambda value: ir.Constant(vector, [value] * FULL)  # noqa: E731
        power = builder.fsub(args[0], _splat(builder, args[1], FULL_VECTOR))
        power = builder.fmul(power, constant(np.float32(1 / math.log(2)).item()))
        floor = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector]), "llvm.floor.v16f32")
        whole = builder.call(floor, [builder.fadd(power, constant(0.5))])
        part = builder.fsub(power, whole)
        result = constant(np.float32(POWERS[0]).item())
        for coefficient in POWERS[1:]:
            product = builder.fmul(result, part, flags=("contract",))
            result = builder.fadd(product, constant(np.float32(coefficient).item()), flags=("contract",))
        tiny = builder.fcmp_ordered("<", power, constant(-126.0))
        exponent = builder.fptosi(builder.select(tiny, constant(0.0), whole), integers)
        bits = builder.shl(
            builder.add(exponent, ir.Constant(integers, [127] * FULL)), ir.Constant(integers, [23] * FULL)
        )
        result = builder.fmul(result, builder.bitcast(bits, vector))
        return builder.select(tiny, constant(0.0), result)

    return FULL_VECTOR(FULL_VECTOR, types.float32), generate


# --- one item ---------------------------------------------------------------------------------------------------------


@njit(**OPTIONS)
def _dot(kind, q, k, size, d):
    """q . k of one token, not yet summed over the lanes."""
    a = zeros()
    j = 0
    while j + FULL <= d:
        a = multiply_add(load_full(np.float32, q + 4 * j), load_full(kind, k + size * j), a)
        j += FULL
    if j < d:
        a = multiply_add(widen(load_half(np.float32, q + 4 * j)), widen(load_half(kind, k + size * j)), a)
    return a


@njit(**OPTIONS)
def _dots(kind, q, k, size, d, out):
    """Scores of eight consecutive tokens: the keys pass by once, the sums over lanes share their shuffles."""
    row = size * d
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = zeros()
    j = 0
    while j + FULL <= d:
        x = load_full(np.float32, q + 4 * j)
        at = k + size * j
        a0 = multiply_add(x, load_full(kind, at), a0)
        a1 = multiply_add(x, load_full(kind, at + row), a1)
        a2 = multiply_add(x, load_full(kind, at + 2 * row), a2)
        a3 = multiply_add(x, load_full(kind, at + 3 * row), a3)
        a4 = multiply_add(x, load_full(kind, at + 4 * row), a4)
        a5 = multiply_add(x, load_full(kind, at + 5 * row), a5)
        a6 = multiply_add(x, load_full(kind, at + 6 * row), a6)
        a7 = multiply_add(x, load_full(kind, at + 7 * row), a7)
        j += FULL
    if j < d:
        x = widen(load_half(np.float32, q + 4 * j))
        at = k + size * j
        a0 = multiply_add(x, widen(load_half(kind, at)), a0)
        a1 = multiply_add(x, widen(load_half(kind, at + row)), a1)
        a2 = multiply_add(x, widen(load_half(kind, at + 2 * row)), a2)
        a3 = multiply_add(x, widen(load_half(kind, at + 3 * row)), a3)
        a4 = multiply_add(x, widen(load_half(kind, at + 4 * row)), a4)
        a5 = multiply_add(x, widen(load_half(kind, at + 5 * row)), a5)
        a6 = multiply_add(x, widen(load_half(kind, at + 6 * row)), a6)
        a7 = multiply_add(x, widen(load_half(kind, at + 7 * row)), a7)
    fours = add_pairs(add_pairs(a0, a1), add_pairs(a2, a3)), add_pairs(add_pairs(a4, a5), add_pairs(a6, a7))
    twos = add_pairs(fours[0], fours[1])
    store_vector(out, lower(add_pairs(twos, twos)))


@njit(**OPTIONS)
def _weigh(kind, weights, v, size, d, out):
    """out [D] += weights [8] . values of eight consecutive tokens."""
    row = size * d
    w0, w1, w2, w3 = (
        load_float(weights),
        load_float(weights + 4),
        load_float(weights + 8),
        load_float(weights + 12),
    )
    w4, w5, w6, w7 = (
        load_float(weights + 16),
        load_float(weights + 20),
        load_float(weights + 24),
        load_float(weights + 28),
    )
    j = 0
    while j + FULL <= d:
        at = v + size * j
        a = load_full(np.float32, out + 4 * j)
        a = multiply_add(w0, load_full(kind, at), a)
        a = multiply_add(w1, load_full(kind, at + row), a)
        a = multiply_add(w2, load_full(kind, at + 2 * row), a)
        a = multiply_add(w3, load_full(kind, at + 3 * row), a)
        a = multiply_add(w4, load_full(kind, at + 4 * row), a)
        a = multiply_add(w5, load_full(kind, at + 5 * row), a)
        a = multiply_add(w6, load_full(kind, at + 6 * row), a)
        a = multiply_add(w7, load_full(kind, at + 7 * row), a)
        store_vector(out + 4 * j, a)
        j += FULL
    if j < d:
        at = v + size * j
        b = load_half(np.float32, out + 4 * j)
        b = multiply_add(w0, load_half(kind, at), b)
        b = multiply_add(w1, load_half(kind, at + row), b)
        b = multiply_add(w2, load_half(kind, at + 2 * row), b)
        b = multiply_add(w3, load_half(kind, at + 3 * row), b)
        b = multiply_add(w4, load_half(kind, at + 4 * row), b)
        b = multiply_add(w5, load_half(kind, at + 5 * row), b)
        b = multiply_add(w6, load_half(kind, at + 6 * row), b)
        b = multiply_add(w7, load_half(kind, at + 7 * row), b)
        store_vector(out + 4 * j, b)


@njit(**OPTIONS)
def _add(kind, weight, v, size, d, out):
    """out [D] += weight * the values of one token."""
    j = 0
    while j + FULL <= d:
        a = multiply_add(weight, load_full(kind, v + size * j), load_full(np.float32, out + 4 * j))
        store_vector(out + 4 * j, a)
        j += FULL
    if j < d:
        b = multiply_add(weight, load_half(kind, v + size * j), load_half(np.float32, out + 4 * j))
        store_vector(out + 4 * j, b)


@njit(**OPTIONS)
def _softmax(scores, count):
    """scores [count] -> exp(scores - their largest), in place; (largest, sum). Writes up to the next full vector."""
    end = -(-count // FULL) * FULL
    for i in range(count, end):
        store_float(scores + 4 * i, np.float32(-np.inf))
    top = np.float32(-np.inf)
    for i in range(0, end, FULL):
        top = max(top, largest(load_full(np.float32, scores + 4 * i)))
    norm = zeros()
    for i in range(0, end, FULL):
        weights = exp_of_difference(load_full(np.float32, scores + 4 * i), top)
        store_vector(scores + 4 * i, weights)
        norm = multiply_add(np.float32(1), weights, norm)
    return top, total(norm)


@njit(**OPTIONS)
def _fetch(address, size):
    for at in range(0, size, 64):
        prefetch(address + at)


@njit(**OPTIONS)
def _attend(kind, q, k, v, page_bytes, table, first, stop, group, d, s, scores, out, stats):
    """G queries over the context tokens first : stop of one key head.

    q, out: [G, D] float32; out is the sum of the values, weighted by exp(score - the largest score).
    k, v: addresses of this head in page 0; table: [M] int32 pages of the row.
    scores: [G, SPAN] float32, scratch. stats: [G, 2] float32, (largest score, sum of the weights).
    """
    size = 4 if kind is np.float32 else 2
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
        while i + 8 <= run:
            _fetch(ahead + i * row, 8 * row)
            for g in range(group):
                _dots(kind, q + 4 * g * d, base + i * row, size, d, to + 4 * (g * SPAN + i))
            i += 8
        while i < run:
            for g in range(group):
                store_float(to + 4 * (g * SPAN + i), total(_dot(kind, q + 4 * g * d, base + i * row, size, d)))
            i += 1
        at += run

    for g in range(group):
        top, norm = _softmax(scores + 4 * g * SPAN, stop - first)
        store_float(stats + 8 * g, top)
        store_float(stats + 8 * g + 4, norm)
        for j in range(0, d, HALF):
            store_vector(out + 4 * (g * d + j), lower(zeros()))

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
        while i + 8 <= run:
            _fetch(ahead + i * row, 8 * row)
            for g in range(group):
                _weigh(kind, to + 4 * (g * SPAN + i), base + i * row, size, d, out + 4 * g * d)
            i += 8
        while i < run:
            for g in range(group):
                _add(kind, load_float(to + 4 * (g * SPAN + i)), base + i * row, size, d, out + 4 * g * d)
            i += 1
        at += run


# --- a job: all items of a call, shared by the threads ----------------------------------------------------------------

# Words of a job, a block of memory: counters that the threads share, then what stays as the handler wrote it.
HOLDERS, NEXT, DONE, ITEMS = 0, 8, 16, 24
Q, KEYS, VALUES, TABLES, LENGTHS, OUT = 32, 40, 48, 56, 64, 72  # addresses of the arguments and the result
ROWS, WIDTH, HEADS, GROUP, SIZE, BLOCK, PAGES = 80, 88, 96, 104, 112, 120, 128  # B, M, K, G, D, S, P
STATS, PARTS = 136, 144  # addresses within the job: [spans, K, G, 2] and [spans, K, G, D] float32
STARTS = 152  # [B + 1] spans of all rows before this one


@njit(**OPTIONS)
def _work(kind, job):
    """Take items until none is left."""
    heads, group, d, s = load_word(job + HEADS), load_word(job + GROUP), load_word(job + SIZE), load_word(job + BLOCK)
    head_bytes = (4 if kind is np.float32 else 2) * s * d
    of_row = 4 * group * d * heads
    scores = 0
    row = 0
    while True:
        item = fetch_add(job + NEXT, 1)
        if item >= load_word(job + ITEMS):
            break
        if scores == 0:
            scores = malloc(4 * group * SPAN)
        unit, head = item // heads, item % heads
        while load_word(job + STARTS + 8 * (row + 1)) <= unit:
            row += 1
        start = load_word(job + STARTS + 8 * row)
        first = (unit - start) * SPAN
        length = load_int(load_word(job + LENGTHS) + 4 * row)
        single = length <= SPAN
        stats = load_word(job + STATS) + 8 * group * item
        out = load_word(job + OUT) + of_row * row + 4 * group * d * head
        part = out if single else load_word(job + PARTS) + 4 * group * d * item
        _attend(
            kind,
            load_word(job + Q) + of_row * row + 4 * group * d * head,
            load_word(job + KEYS) + head_bytes * head,
            load_word(job + VALUES) + head_bytes * head,
            head_bytes * heads,
            load_word(job + TABLES) + 4 * load_word(job + WIDTH) * row,
            first,
            min(first + SPAN, length),
            group,
            d,
            s,
            scores,
            part,
            stats,
        )
        if single:
            for g in range(group):
                _scale(out + 4 * g * d, np.float32(1) / load_float(stats + 8 * g + 4), d)
        fetch_add(job + DONE, 1)
    if scores != 0:
        free(scores)


@njit(**OPTIONS)
def _scale(out, factor, d):
    for j in range(0, 4 * d, 4 * HALF):
        store_vector(out + j, multiply_add(factor, load_half(np.float32, out + j), lower(zeros())))


@njit(**OPTIONS)
def _merge(job):
    """Rows of several spans: the online softmax of their parts, in the order of the context."""
    heads, group, d = load_word(job + HEADS), load_word(job + GROUP), load_word(job + SIZE)
    for row in range(load_word(job + ROWS)):
        start, end = load_word(job + STARTS + 8 * row), load_word(job + STARTS + 8 * (row + 1))
        for query in range(heads * group):
            out = load_word(job + OUT) + 4 * d * (row * heads * group + query)
            if end - start == 1:
                continue
            for j in range(0, 4 * d, 4 * HALF):
                store_vector(out + j, lower(zeros()))
            top, norm = np.float32(-np.inf), np.float32(0)
            for unit in range(start, end):
                top = max(top, load_float(load_word(job + STATS) + 8 * (unit * heads * group + query)))
            for unit in range(start, end):
                stats = load_word(job + STATS) + 8 * (unit * heads * group + query)
                share = np.float32(math.exp(load_float(stats) - top))
                norm += share * load_float(stats + 4)
                part = load_word(job + PARTS) + 4 * d * (unit * heads * group + query)
                _add(np.float32, share, part, 4, d, out)
            if end > start:
                _scale(out, np.float32(1) / norm, d)


@njit(**OPTIONS)
def _let_go(job):
    if fetch_add(job + HOLDERS, -1) == 1:
        free(job)


@njit(**OPTIONS)
def _help_float32(job):
    _work(np.float32, job)
    _let_go(job)


@njit(**OPTIONS)
def _help_bfloat16(job):
    _work(np.uint16, job)
    _let_go(job)


# --- XLA's side (xla/ffi/api/c_api.h, version 0.3): byte offsets in its structs on machines of 64 bits ----------------

FFI_MAJOR, FFI_MINOR = 0, 3
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGUMENTS, FRAME_RESULTS = 8, 16, 24, 72, 112
EXTENSION_TYPE, EXTENSION_METADATA, METADATA = 8, 1, 24  # the type's offset, its value for metadata, and theirs
METADATA_MAJOR, METADATA_MINOR, METADATA_TRAITS, METADATA_STATE = 24, 28, 32, 40
BUFFER_DATA, BUFFER_DIMS = 24, 40
API_ERROR_DESTROY, API_SCHEDULE, API_NUM_THREADS = 64, 136, 144
ARGUMENT_BYTES = 40  # the longest of the argument structs below


@njit(**OPTIONS)
def _describe(extension):
    """Answer XLA's question which version of its interface this was written for."""
    metadata = load_word(extension + METADATA)
    store_int(metadata + METADATA_MAJOR, np.int32(FFI_MAJOR))
    store_int(metadata + METADATA_MINOR, np.int32(FFI_MINOR))
    store_int(metadata + METADATA_TRAITS, np.int32(0))
    store_word(metadata + METADATA_STATE, 0)


@njit(**OPTIONS)
def _argument(frame, index):
    return load_word(load_word(frame + FRAME_ARGUMENTS) + 8 * index)


@njit(**OPTIONS)
def _dim(buffer, axis):
    return load_word(load_word(buffer + BUFFER_DIMS) + 8 * axis)


@njit(**OPTIONS)
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


@njit(**OPTIONS)
def _destroy(api, error):
    request = malloc(ARGUMENT_BYTES)
    store_word(request, 24)
    store_word(request + 8, 0)
    store_word(request + 16, error)
    call(load_word(api + API_ERROR_DESTROY), request)
    free(request)


@njit(**OPTIONS)
def _ask_for_help(frame, task, job, helpers):
    api = load_word(frame + FRAME_API)
    request = malloc(ARGUMENT_BYTES)
    store_word(request, 40)  # the struct's size; then: extensions, context, task, its argument
    store_word(request + 8, 0)
    store_word(request + 16, load_word(frame + FRAME_CONTEXT))
    store_word(request + 24, task)
    store_word(request + 32, job)
    for _ in range(helpers):
        fetch_add(job + HOLDERS, 1)
        error = call(load_word(api + API_SCHEDULE), request)
        if error != 0:
            _destroy(api, error)
            _let_go(job)
    free(request)


@njit(**OPTIONS)
def _job(frame):
    """List the work of a call: q [B, K, G, D], keys and values [P, K, S, D], block tables [B, M], lengths [B]."""
    q, keys, tables, lengths = _argument(frame, 0), _argument(frame, 1), _argument(frame, 3), _argument(frame, 4)
    rows, heads, group, d = _dim(q, 0), _dim(q, 1), _dim(q, 2), _dim(q, 3)
    at = load_word(lengths + BUFFER_DATA)
    units, several = 0, 0
    for row in range(rows):
        spans = -(-load_int(at + 4 * row) // SPAN)
        units += spans
        several = max(several, spans)
    stats = STARTS + 8 * (rows + 1)
    parts = stats + 8 * units * heads * group
    job = malloc(parts + (4 * units * heads * group * d if several > 1 else 0))
    store_word(job + HOLDERS, 1)
    store_word(job + NEXT, 0)
    store_word(job + DONE, 0)
    store_word(job + ITEMS, units * heads)
    for index in range(5):
        store_word(job + Q + 8 * index, load_word(_argument(frame, index) + BUFFER_DATA))
    store_word(job + OUT, load_word(load_word(load_word(frame + FRAME_RESULTS)) + BUFFER_DATA))
    store_word(job + ROWS, rows)
    store_word(job + WIDTH, _dim(tables, 1))
    store_word(job + HEADS, heads)
    store_word(job + GROUP, group)
    store_word(job + SIZE, d)
    store_word(job + BLOCK, _dim(keys, 2))
    store_word(job + STATS, job + stats)
    store_word(job + PARTS, job + parts)
    units = 0
    for row in range(rows):
        store_word(job + STARTS + 8 * row, units)
        units += -(-load_int(at + 4 * row) // SPAN)
    store_word(job + STARTS + 8 * rows, units)
    return job


@njit(**OPTIONS)
def _handle(kind, frame, task):
    extension = load_word(frame + FRAME_EXTENSION)
    if extension != 0 and load_int(extension + EXTENSION_TYPE) == EXTENSION_METADATA:
        _describe(extension)
        return 0
    job = _job(frame)
    items = load_word(job + ITEMS)
    _ask_for_help(frame, task, job, min(_threads(frame), items) - 1)
    _work(kind, job)
    while fetch_add(job + DONE, 0) < items:
        sched_yield()
    _merge(job)
    _let_go(job)
    return 0


def _float32(frame):
    return _handle(np.float32, frame, address_of(_help_float32))


def _bfloat16(frame):
    return _handle(np.uint16, frame, address_of(_help_bfloat16))


HANDLERS = {"float32": _float32, "bfloat16": _bfloat16}


def compile_handler(dtype: str) -> int:
    """The address of the handler for pages of a dtype."""
    compiled = cfunc(types.intp(types.intp), cache=True, nopython=True)(HANDLERS[dtype])
    _kept.append(compiled)
    return compiled.address


_kept = []  # XLA holds bare addresses
