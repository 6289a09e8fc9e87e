"""Decode attention that reads pages where they lie: numba code behind XLA's typed FFI. `cpu` imports it when chosen.

    handler   XLA calls it with a call frame. It lists the work, asks XLA's own thread pool for helpers, works, waits
              for what helpers have begun, and merges rows of more than one span.
    work      takes items until none is left: an item is (row, span of SPAN context tokens, key head). Helpers and the
              handler's own thread run the same loop, so a long context is shared out and a short one is nobody's wait.
    attend    one item: scores of the span into a scratch, their softmax, the weighted sum of the values.

Nothing waits for a helper that has not begun: the handler's thread would do all items alone. So it cannot deadlock,
however many engines share the pool. A helper that begins too late finds no item; what it looks at is the job, which
lives in memory of its own until the last of them lets go of it.

Addresses are plain integers: numba's arrays would check each index for a negative one, and loops with that do not
vectorise. Head sizes are multiples of 8; all else is read from the call frame, so that two programs (float32 and
bfloat16 pages) serve every shape. numba keeps them on disk once compiled.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

SPAN = 256  # context tokens of an item

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


@instruction
def address_of(typing, function):
    """The address of a C function `void (word)` that calls a jitted function of one word."""
    dispatcher = function.dispatcher

    def generate(context, builder, signature, args):
        dispatcher.compile((types.intp,))
        made = dispatcher.overloads[(types.intp,)]
        context.active_code_library.add_linking_library(made.library)
        name = f"task_{made.fndesc.mangled_name}"
        task = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [WORD]), name)
        task.linkage = "internal"
        body = ir.IRBuilder(task.append_basic_block())
        target = context.declare_function(builder.module, made.fndesc)
        context.call_conv.call_function(body, target, made.fndesc.restype, made.fndesc.argtypes, [task.args[0]])
        body.ret_void()
        return builder.ptrtoint(task, WORD)

    return types.intp(function), generate


# --- vectors ----------------------------------------------------------------------------------------------------------
# Built as vector code, so that nothing hangs on what a vectoriser recognises. `kind` is the type that numba sees in
# the pages: float32, or uint16 for bfloat16 numbers, which are the upper halves of float32 numbers.


def _lanes(count):
    return ir.VectorType(FLOAT, count)


def _shuffle(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes)))


def _splat(builder, value, lanes):
    undefined = ir.Constant(_lanes(lanes), ir.Undefined)
    return _shuffle(builder, builder.insert_element(undefined, value, ir.Constant(INT32, 0)), undefined, [0] * lanes)


def _load(builder, kind, base, index, lanes):
    """`lanes` numbers from index `index` of an array at address `base`, as float32."""
    address = builder.add(base, builder.mul(index, ir.Constant(WORD, kind.bitwidth // 8)))
    if kind == types.float32:
        return builder.load(_pointer(builder, address, _lanes(lanes)), align=4)
    short, wide = ir.VectorType(ir.IntType(16), lanes), ir.VectorType(INT32, lanes)
    number = builder.zext(builder.load(_pointer(builder, address, short), align=2), wide)
    return builder.bitcast(builder.shl(number, ir.Constant(wide, [16] * lanes)), _lanes(lanes))


def _store(builder, value, base, index):
    address = builder.add(base, builder.mul(index, ir.Constant(WORD, 4)))
    builder.store(value, _pointer(builder, address, value.type), align=4)


def _multiply_add(builder, a, b, c):
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _pieces(builder, size, piece):
    """piece(index, lanes) for every 16 of `size` elements, a multiple of 8, and for the 8 that may be left."""
    full = builder.and_(size, ir.Constant(WORD, -FULL))
    with cgutils.for_range_slice(builder, ir.Constant(WORD, 0), full, ir.Constant(WORD, FULL)) as (index, _):
        piece(index, FULL)
    with builder.if_then(builder.icmp_signed("<", full, size)):
        piece(full, HALF)


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
    def scores(typing, kind, q, k, d, out):
        """out [count] = q [D] . k [count, D]: one pass over the keys; sums over lanes share their shuffles."""

        def generate(context, builder, signature, args):
            _, q, k, d, out = args
            zeros = ir.Constant(_lanes(FULL), None)
            sums = [cgutils.alloca_once_value(builder, zeros) for _ in range(count)]

            def piece(index, lanes):
                x = _load(builder, types.float32, q, index, lanes)
                for token, accumulated in enumerate(sums):
                    at = builder.add(index, builder.mul(d, ir.Constant(WORD, token)))
                    y, old = _load(builder, kind.dtype, k, at, lanes), builder.load(accumulated)
                    if lanes == FULL:
                        new = _multiply_add(builder, x, y, old)
                    else:
                        part = _shuffle(builder, builder.fmul(x, y), ir.Constant(_lanes(HALF), None), range(FULL))
                        new = builder.fadd(part, old)
                    builder.store(new, accumulated)

            _pieces(builder, d, piece)
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

        return types.void(kind, types.intp, types.intp, types.intp, types.intp), generate

    return scores


def _weigh(count):
    @instruction
    def weigh(typing, kind, weights, v, d, out):
        """out [D] += weights [count] . v [count, D]."""

        def generate(context, builder, signature, args):
            _, weights, v, d, out = args
            addresses = [builder.add(weights, ir.Constant(WORD, 4 * token)) for token in range(count)]
            scalars = [builder.load(_pointer(builder, address, FLOAT)) for address in addresses]

            def piece(index, lanes):
                total = _load(builder, types.float32, out, index, lanes)
                for token, weight in enumerate(scalars):
                    at = builder.add(index, builder.mul(d, ir.Constant(WORD, token)))
                    y = _load(builder, kind.dtype, v, at, lanes)
                    total = _multiply_add(builder, _splat(builder, weight, lanes), y, total)
                _store(builder, total, out, index)

            _pieces(builder, d, piece)
            return context.get_dummy_value()

        return types.void(kind, types.intp, types.intp, types.intp, types.intp), generate

    return weigh


TOGETHER = HALF  # tokens that are scored and weighed at a time, where a page has so many left
scores_together, score_one = _scores(TOGETHER), _scores(1)
weigh_together, weigh_one = _weigh(TOGETHER), _weigh(1)


@instruction
def scale(typing, out, factor, d):
    """out [D] *= factor."""

    def generate(context, builder, signature, args):
        out, factor, d = args

        def piece(index, lanes):
            old = _load(builder, types.float32, out, index, lanes)
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
        vector = _load(builder, types.float32, args[0], ir.Constant(WORD, 0), FULL)
        return _fold(builder, vector, lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))

    return types.float32(types.intp), generate


# 2**f for f in [-0.5, 0.5], by powers of f from the seventh down: Taylor's, whose error is below float32's there
POWERS = [math.log(2) ** i / math.factorial(i) for i in range(7, -1, -1)]


@instruction
def exponentials(typing, numbers, top):
    """16 float32 numbers x -> exp(x - top), in place, and their sum; 0 where the difference is below -87.

    exp(x) is 2**(whole + part) with part in [-0.5, 0.5]: a polynomial, and a whole number added to the exponent.
    """

    def generate(context, builder, signature, args):
        vector, integers = _lanes(FULL), ir.VectorType(INT32, FULL)

        def constant(value):
            return ir.Constant(vector, [float(np.float32(value))] * FULL)

        start = ir.Constant(WORD, 0)
        power = builder.fsub(_load(builder, types.float32, args[0], start, FULL), _splat(builder, args[1], FULL))
        power = builder.fmul(power, constant(1 / math.log(2)))
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
        result = builder.select(tiny, constant(0), builder.fmul(result, builder.bitcast(exponent, vector)))
        _store(builder, result, args[0], start)
        return _fold(builder, result, builder.fadd)

    return types.float32(types.intp, types.float32), generate


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


# --- one item ---------------------------------------------------------------------------------------------------------


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


@compiled
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
        while i + TOGETHER <= run:
            _fetch(ahead + i * row, TOGETHER * row)
            for g in range(group):
                scores_together(kind, q + 4 * g * d, base + i * row, d, to + 4 * (g * SPAN + i))
            i += TOGETHER
        while i < run:
            for g in range(group):
                score_one(kind, q + 4 * g * d, base + i * row, d, to + 4 * (g * SPAN + i))
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
                weigh_together(kind, to + 4 * (g * SPAN + i), base + i * row, d, out + 4 * g * d)
            i += TOGETHER
        while i < run:
            for g in range(group):
                weigh_one(kind, to + 4 * (g * SPAN + i), base + i * row, d, out + 4 * g * d)
            i += 1
        at += run


# --- a job: all items of a call, shared by the threads ----------------------------------------------------------------

# Words of a job, a block of memory: counters that the threads share, then what stays as the handler wrote it.
HOLDERS, NEXT, DONE, ITEMS = 0, 8, 16, 24
Q, KEYS, VALUES, TABLES, LENGTHS, OUT = 32, 40, 48, 56, 64, 72  # addresses of the arguments and the result
ROWS, WIDTH, HEADS, GROUP, SIZE, BLOCK, PAGES = 80, 88, 96, 104, 112, 120, 128  # B, M, K, G, D, S, P
STATS, PARTS = 136, 144  # addresses within the job: [spans, K, G, 2] and [spans, K, G, D] float32
STARTS = 152  # [B + 1] spans of all rows before this one


@compiled
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
                scale(out + 4 * g * d, np.float32(1) / load_float(stats + 8 * g + 4), d)
        fetch_add(job + DONE, 1)
    if scores != 0:
        free(scores)


@compiled
def _merge(job):
    """Rows of several spans: the online softmax of their parts, in the order of the context."""
    heads, group, d = load_word(job + HEADS), load_word(job + GROUP), load_word(job + SIZE)
    for row in range(load_word(job + ROWS)):
        start, end = load_word(job + STARTS + 8 * row), load_word(job + STARTS + 8 * (row + 1))
        for query in range(heads * group):
            out = load_word(job + OUT) + 4 * d * (row * heads * group + query)
            if end - start == 1:
                continue
            clear(out, d)
            top, norm = np.float32(-np.inf), np.float32(0)
            for unit in range(start, end):
                top = max(top, load_float(load_word(job + STATS) + 8 * (unit * heads * group + query)))
            for unit in range(start, end):
                stats = load_word(job + STATS) + 8 * (unit * heads * group + query)
                share = np.float32(math.exp(load_float(stats) - top))
                norm += share * load_float(stats + 4)
                part = load_word(job + PARTS) + 4 * d * (unit * heads * group + query)
                store_float(stats, share)
                weigh_one(np.float32, stats, part, d, out)
            if end > start:
                scale(out, np.float32(1) / norm, d)


@compiled
def _let_go(job):
    if fetch_add(job + HOLDERS, -1) == 1:
        free(job)


@compiled
def _help_float32(job):
    _work(np.float32, job)
    _let_go(job)


@compiled
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


@compiled
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


@compiled
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
    signature = types.intp(types.intp)
    try:
        handler = cfunc(signature, cache=True)(HANDLERS[dtype])
    except RuntimeError:  # no folder to keep it in
        handler = cfunc(signature)(HANDLERS[dtype])
    _kept.append(handler)
    address = handler.address
    assert address is not None
    return address


_kept: list[Any] = []  # XLA holds bare addresses
