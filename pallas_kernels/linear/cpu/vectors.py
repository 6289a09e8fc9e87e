"""Arithmetic of the products on arrays at addresses.

A tile is `columns` tokens, at most COLUMNS, by the 32 outputs of a panel. Its sums stay in
registers while the inputs are added one after the other, so an output has the same bits in a tile
of any width.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from llvmlite import ir

from pallas_kernels.linear.blocks import BLOCKS, DIGIT_BITS
from pallas_kernels.linear.cpu import small_floats
from pallas_kernels.shared.cpu.compiler import has
from pallas_kernels.shared.cpu.memory import pointer
from pallas_kernels.shared.cpu.translate import FLOAT, INT32, WORD, external_function, instruction
from pallas_kernels.shared.cpu.vectors import (
    FULL,
    columns_of,
    constant,
    dot_pairs,
    each_case,
    each_index,
    exponential,
    float_vector,
    fold,
    load,
    load_one,
    multiply_add,
    splat,
    store,
    uniform,
    variable,
)

PANEL = 32  # outputs of a panel
# The sums of a tile fill the registers: 24 of 32 with AVX-512, 12 of 16 (half as long) without.
WIDE_CPU = has("avx512f")
COLUMNS = 12 if WIDE_CPU else 6
VECTORS = 2 if WIDE_CPU else 1  # of 16 outputs that are summed together
PAIRS = has("avx512bf16") and WIDE_CPU  # the CPU multiplies pairs of bfloat16 numbers
# A weight's dtype, as the bytes of a number; that of blocks is their code
FLOAT32 = 4
BFLOAT16 = 2
INT8 = 1
BLOCKS_BY_CODE = {blocks.code: blocks for blocks in BLOCKS.values()}


def byte_at(builder, address, index, size):
    """Returns the address of a number: that of index 0, and `index` times `size` bytes."""
    return builder.add(address, builder.mul(index, ir.Constant(WORD, size)))


# The weights of input (or pair of inputs) `index`, for 16 outputs: `vector` is 0 or 1, the half of
# the panel at address w. Each function returns a list: a vector of float32 for each input.


def _float_weights(builder, w, index, vector):
    address = builder.add(w, ir.Constant(WORD, 64 * vector))
    return [load(builder, byte_at(builder, address, index, 4 * PANEL), ir.Constant(WORD, 0), FULL)]


def _signed_numbers(builder, address):
    """Returns 16 signed bytes as float32."""
    bits = builder.load(pointer(builder, address, ir.VectorType(ir.IntType(8), FULL)), align=1)
    return builder.sitofp(builder.sext(bits, ir.VectorType(INT32, FULL)), float_vector(FULL))


def _int8_weights(builder, w, index, vector):
    address = byte_at(builder, builder.add(w, ir.Constant(WORD, FULL * vector)), index, PANEL)
    return [_signed_numbers(builder, address)]


def _pairs(builder, w, index, vector):
    """Returns 16 pairs of bfloat16 numbers, of inputs 2i and 2i + 1, as 32-bit integers."""
    address = byte_at(builder, builder.add(w, ir.Constant(WORD, 64 * vector)), index, 4 * PANEL)
    return builder.load(pointer(builder, address, ir.VectorType(INT32, FULL)), align=4)


def _widened_pairs(builder, w, index, vector):
    bits = _pairs(builder, w, index, vector)
    even = builder.shl(bits, uniform(bits.type, 16))
    odd = builder.and_(bits, uniform(bits.type, 0xFFFF0000))
    return [builder.bitcast(x, float_vector(FULL)) for x in (even, odd)]


# Numbers of 4 bits are in words of eight. A digit that is in the mantissa of a float32 number, at bit
# `place`, is added to the power of two whose mantissa has 1 there. That is the digit with the bits
# of the exponent; then the power is subtracted, which is exact. The last three digits are not in
# the mantissa, so the word is shifted.

# The highest bits of numbers of 5 or 6 bits come to their digits where these are in bytes, those of
# even inputs and those of odd ones. Then a byte is a number. The last one is not in the mantissa.

WORD_NUMBERS = 8
MANTISSA_BITS = 23
DIGITS_IN_MANTISSA = 5
SHIFTED_DIGITS = 3  # by so many digits
BYTES_OF_WORD = 4  # numbers of 8 bits are in words of four
BYTES_IN_MANTISSA = 3
WORDS = ir.VectorType(INT32, FULL)


def digit_bytes(builder, blocks, numbers, part, vector):
    """Returns the digits of 8 inputs of a block for 16 outputs, as bytes of int32: those of even
    inputs, then those of odd ones.

    numbers: address of those of the block, of less than 8 bits. part: which 8 inputs.
    """
    place = ir.Constant(WORD, 4 * FULL * vector)
    address = byte_at(builder, builder.add(numbers, place), part, 4 * PANEL)
    words = builder.load(pointer(builder, address, WORDS), align=4)
    mask = uniform(WORDS, 0x0F0F0F0F)
    even = builder.and_(words, mask)
    odd = builder.and_(builder.lshr(words, uniform(WORDS, DIGIT_BITS)), mask)
    count = blocks.bits_apart
    if count == 0:
        return even, odd
    assert blocks.inputs * count == 32, "a block has one word of bits that are apart"
    address = builder.add(
        numbers, ir.Constant(WORD, PANEL * blocks.digit_bytes + 4 * FULL * vector)
    )
    highest = builder.load(pointer(builder, address, WORDS), align=4)
    shift = builder.mul(builder.trunc(part, INT32), ir.Constant(INT32, count))
    highest = builder.lshr(highest, splat(builder, shift, FULL))
    mask = uniform(WORDS, 0x10101010 * (2**count - 1))
    beside_even = builder.and_(builder.shl(highest, uniform(WORDS, DIGIT_BITS)), mask)
    return builder.or_(even, beside_even), builder.or_(odd, builder.and_(highest, mask))


def _numbers_in_bytes(builder, blocks, numbers, part, vector):
    """Returns the numbers of 8 inputs of a block of 5 or 6 bits, for 16 outputs: a vector for each.

    The operands are those of `digit_bytes`.
    """
    by_parity = []
    for digits in digit_bytes(builder, blocks, numbers, part, vector):
        shifted = builder.lshr(digits, uniform(WORDS, 8))
        vectors = []
        for byte in range(BYTES_OF_WORD):
            in_mantissa = byte < BYTES_IN_MANTISSA
            place = 8 * byte if in_mantissa else 8 * (byte - 1)
            power = float(2 ** (MANTISSA_BITS - place))
            exponent = int(np.float32(power).view(np.int32))
            mask = uniform(WORDS, (2**blocks.bits - 1) << place)
            bits = builder.and_(digits if in_mantissa else shifted, mask)
            bits = builder.or_(bits, uniform(WORDS, exponent))
            number = builder.bitcast(bits, float_vector(FULL))
            vectors.append(builder.fsub(number, constant(power + blocks.zero)))
        by_parity.append(vectors)
    return [number for pair in zip(*by_parity, strict=True) for number in pair]


def _digits(builder, address, zero):
    """Returns the digits of 16 words, less `zero`: a vector of float32 for each of 8 inputs."""
    integers = ir.VectorType(INT32, FULL)
    words = builder.load(pointer(builder, address, integers), align=4)
    shifted = builder.lshr(words, uniform(integers, DIGIT_BITS * SHIFTED_DIGITS))
    vectors = []
    for digit in range(WORD_NUMBERS):
        in_mantissa = digit < DIGITS_IN_MANTISSA
        place = DIGIT_BITS * (digit if in_mantissa else digit - SHIFTED_DIGITS)
        power = float(2 ** (MANTISSA_BITS - place))
        exponent = int(np.float32(power).view(np.int32))
        bits = builder.and_(words if in_mantissa else shifted, uniform(integers, 15 << place))
        number = builder.bitcast(builder.or_(bits, uniform(integers, exponent)), float_vector(FULL))
        vectors.append(builder.fsub(number, constant(power + zero)))
    return vectors


def _signed_bytes(builder, address):
    """Returns the signed bytes of 16 words: a vector of float32 for each of 4 inputs.

    A byte whose highest bit is inverted is the number plus 128, and it is in the lowest bits of the
    mantissa, as above.
    """
    integers = ir.VectorType(INT32, FULL)
    words = builder.load(pointer(builder, address, integers), align=4)
    exponent = int(np.float32(2**MANTISSA_BITS).view(np.int32))
    vectors = []
    for byte in range(BYTES_OF_WORD):
        bits = builder.lshr(words, uniform(integers, 8 * byte)) if byte else words
        bits = builder.and_(bits, uniform(integers, 0xFF))
        bits = builder.xor(bits, uniform(integers, exponent | 0x80))
        number = builder.bitcast(bits, float_vector(FULL))
        vectors.append(builder.fsub(number, constant(2**MANTISSA_BITS + 128)))
    return vectors


def _halves(builder, address):
    """Returns 16 float16 numbers as float32. All of them are finite."""
    halves = ir.VectorType(ir.IntType(16), FULL)
    bits = builder.load(pointer(builder, address, halves), align=2)
    return small_floats.half_numbers(builder, bits)


def _scales(builder, blocks, address, vector):
    """Returns 16 scales or offsets of blocks. address: of those of a panel."""
    address = builder.add(address, ir.Constant(WORD, FULL * blocks.scale_bytes * vector))
    if blocks.scale == "e8m0":
        return small_floats.powers(builder, address)
    if blocks.scale_bytes == 2:
        return _halves(builder, address)
    return load(builder, address, ir.Constant(WORD, 0), FULL)


def each_part(builder, blocks, block, vectors):
    """Generates code for each part of a block of a panel; a block without parts is one.

    Yields (number of the part, (scales, offsets or None) of each of the vectors, address of the
    part's numbers). With parts, the code is in a loop.
    """
    scales_bytes = ir.Constant(WORD, PANEL * blocks.scale_bytes)
    scales = [_scales(builder, blocks, block, v) for v in vectors]
    offsets = [None for _ in vectors]
    end = builder.add(block, scales_bytes)
    if blocks.offset:
        offsets = [_scales(builder, blocks, end, v) for v in vectors]
        end = builder.add(end, scales_bytes)
    if blocks.parts == 1:
        yield ir.Constant(WORD, 0), list(zip(scales, offsets, strict=True)), end
        return
    all_numbers = builder.add(end, ir.Constant(WORD, PANEL * blocks.factor_bytes))
    of_offsets = builder.add(end, ir.Constant(WORD, PANEL * blocks.parts))
    with each_index(builder, ir.Constant(WORD, blocks.parts)) as part:
        part_scales = _with_factors(builder, scales, end, part, vectors)
        part_offsets = offsets
        if blocks.offset:
            part_offsets = _with_factors(builder, offsets, of_offsets, part, vectors)
        numbers = byte_at(builder, all_numbers, part, PANEL * blocks.part.number_bytes)
        yield part, list(zip(part_scales, part_offsets, strict=True)), numbers


def _with_factors(builder, scales, factors, part, vectors):
    """Returns scales [16] of some vectors times the factors of a part."""
    products = []
    for scale, vector in zip(scales, vectors, strict=True):
        place = builder.add(factors, ir.Constant(WORD, FULL * vector))
        number = _signed_numbers(builder, byte_at(builder, place, part, PANEL))
        products.append(builder.fmul(scale, number))
    return products


def _block_weights(builder, blocks, numbers, index, vector, scale, offset):
    """Returns the weights of 8 inputs of a block, for 16 outputs: a vector for each input.

    numbers: address of those of the block. index: of the 8 inputs.
    """
    start = builder.add(
        numbers,
        builder.mul(index, ir.Constant(WORD, WORD_NUMBERS * PANEL * blocks.digit_bits // 8)),
    )
    if blocks.bits_apart:
        vectors = _numbers_in_bytes(builder, blocks, numbers, index, vector)
    elif blocks.bits == 4:
        address = builder.add(start, ir.Constant(WORD, 4 * FULL * vector))
        if blocks.numbers == "e2m1":
            words = builder.load(pointer(builder, address, ir.VectorType(INT32, FULL)), align=4)
            vectors = [
                small_floats.doubled_e2m1(builder, words, digit) for digit in range(WORD_NUMBERS)
            ]
        else:
            vectors = _digits(builder, address, blocks.zero)
    elif blocks.numbers == "e4m3":
        places = [PANEL * i + FULL * vector for i in range(WORD_NUMBERS)]
        vectors = [
            small_floats.e4m3(builder, builder.add(start, ir.Constant(WORD, place)))
            for place in places
        ]
    else:
        vectors = []
        for word in range(0, WORD_NUMBERS, BYTES_OF_WORD):
            address = builder.add(start, ir.Constant(WORD, PANEL * word + 4 * FULL * vector))
            vectors += _signed_bytes(builder, address)
    if offset is None:
        return [builder.fmul(number, scale) for number in vectors]
    return [multiply_add(builder, number, scale, offset) for number in vectors]


def _fetch(builder, address, written, level):
    """Fetches a line.

    written: 1 if the line will be stored to, else 0. level: 3 is the nearest cache, 2 the next.
    """
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    fetch = external_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(
        fetch,
        [builder.inttoptr(address, byte), *(ir.Constant(INT32, i) for i in (written, level, 1))],
    )


LINE_BYTES = 64  # of a cache line


def fetch_lines(builder, next_weight, index, stride, step_bytes):
    """Fetches the lines that a step is to fetch."""
    line = builder.add(next_weight, builder.mul(index, stride))
    for start in range(0, step_bytes, LINE_BYTES):
        _fetch(builder, builder.add(line, ir.Constant(WORD, start)), 0, 2)


def _add_products(builder, columns, x, place, row, totals, add):
    """totals [columns][vectors] += an input of the tokens, at `place` of x, times its weights."""
    for c in range(columns):
        number = load_one(builder, x, builder.add(place, ir.Constant(WORD, c)))
        number = splat(builder, number, FULL)
        for weights, total in zip(row, totals[c], strict=True):
            builder.store(add(builder, number, weights, builder.load(total)), total)


def _add_inputs(builder, kind, columns, vectors, w, x, count, totals, next_weight, stride):
    """Adds the products of all inputs (or pairs) of a panel, one after the other."""
    native = kind == BFLOAT16 and PAIRS  # an instruction multiplies pairs
    step_inputs = 2 if kind == BFLOAT16 and not PAIRS else 1  # inputs of a step of the loop
    weights = {FLOAT32: _float_weights, INT8: _int8_weights, BFLOAT16: _widened_pairs}[kind]
    with each_index(builder, count) as index:
        fetch_lines(builder, next_weight, index, stride, 2 * LINE_BYTES)
        rows = [(_pairs if native else weights)(builder, w, index, v) for v in vectors]
        place = builder.mul(index, ir.Constant(WORD, columns * step_inputs))
        for part in range(step_inputs):
            input_place = builder.add(place, ir.Constant(WORD, part * columns))
            row = rows if native else [parts[part] for parts in rows]
            add = dot_pairs if native else multiply_add
            _add_products(builder, columns, x, input_place, row, totals, add)


def _add_blocks(builder, blocks, columns, vectors, w, x, count, totals, next_weight, stride):
    """Adds the products of all inputs of a panel, one after the other, block by block."""
    step_bytes = PANEL * blocks.bytes
    with each_index(builder, count) as index:
        fetch_lines(builder, next_weight, index, stride, step_bytes)
        block = byte_at(builder, w, index, step_bytes)
        block_place = builder.mul(index, ir.Constant(WORD, columns * blocks.inputs))
        cell = blocks.part
        for part, panel_scales, numbers in each_part(builder, blocks, block, vectors):
            part_place = builder.mul(part, ir.Constant(WORD, columns * cell.inputs))
            first_place = builder.add(block_place, part_place)
            with each_index(builder, ir.Constant(WORD, cell.inputs // WORD_NUMBERS)) as word:
                rows = [
                    _block_weights(builder, cell, numbers, word, v, scale, offset)
                    for v, (scale, offset) in zip(vectors, panel_scales, strict=True)
                ]
                word_place = builder.mul(word, ir.Constant(WORD, columns * WORD_NUMBERS))
                place = builder.add(first_place, word_place)
                for i, row in enumerate(zip(*rows, strict=True)):
                    input_place = builder.add(place, ir.Constant(WORD, columns * i))
                    _add_products(builder, columns, x, input_place, row, totals, multiply_add)


def _add_tile(builder, kind, columns, w, x, count, sums, next_weight, stride):
    """Generates the sums of a tile, see `multiply`. totals: [columns][vectors] variables."""
    zero = ir.Constant(WORD, 0)
    for first in range(0, 2, VECTORS):
        vectors = range(first, first + VECTORS)
        places = [
            [builder.add(sums, ir.Constant(WORD, 4 * (PANEL * c + FULL * v))) for v in vectors]
            for c in range(columns)
        ]
        totals = [[variable(builder, float_vector(FULL)) for _ in vectors] for _ in range(columns)]
        for row, row_places in zip(totals, places, strict=True):
            for total, place in zip(row, row_places, strict=True):
                builder.store(load(builder, place, zero, FULL), total)
        operands = w, x, count, totals, next_weight, stride
        if kind in BLOCKS_BY_CODE:
            _add_blocks(builder, BLOCKS_BY_CODE[kind], columns, vectors, *operands)
        else:
            _add_inputs(builder, kind, columns, vectors, *operands)
        for row, row_places in zip(totals, places, strict=True):
            for total, place in zip(row, row_places, strict=True):
                store(builder, builder.load(total), place, zero)


@instruction
def multiply(builder, kind, columns, w, x, count, sums, next_weight, stride):
    """sums [columns, 32] += x [count, columns] . w [count, 32], as float32.

    kind: of the weight, a constant. x: float32, or pairs of bfloat16 if the CPU multiplies those.
    count: of inputs; of pairs of them if the weight is bfloat16; of blocks.
    next_weight: memory that is needed next; every step fetches two lines, or as many bytes as a
        block has, `stride` bytes further.
    """

    def add_tile(width):
        _add_tile(builder, kind.constant, width, w, x, count, sums, next_weight, stride)

    each_case(builder, columns, range(1, COLUMNS + 1), add_tile)


@instruction
def widen_blocks(builder, kind, w, count, out):
    """out [inputs, 32] = the weights of `count` blocks of a panel, as float32."""
    blocks = BLOCKS_BY_CODE.get(kind.constant)
    if blocks is None:
        return
    with each_index(builder, count) as index:
        block = byte_at(builder, w, index, PANEL * blocks.bytes)
        block_out = byte_at(builder, out, index, 4 * PANEL * blocks.inputs)
        cell = blocks.part
        for part, panel_scales, numbers in each_part(builder, blocks, block, (0, 1)):
            part_out = byte_at(builder, block_out, part, 4 * PANEL * cell.inputs)
            with each_index(builder, ir.Constant(WORD, cell.inputs // WORD_NUMBERS)) as word:
                word_out = byte_at(builder, part_out, word, 4 * PANEL * WORD_NUMBERS)
                for v, (scale, offset) in enumerate(panel_scales):
                    weights = _block_weights(builder, cell, numbers, word, v, scale, offset)
                    for i, vector in enumerate(weights):
                        store(builder, vector, word_out, ir.Constant(WORD, PANEL * i + FULL * v))


def _prefetch(written):
    @instruction
    def fetch(builder, address):
        """Fetches a line into the nearest cache."""
        _fetch(builder, address, written, 3)

    return fetch


prefetch = _prefetch(0)
prefetch_written = _prefetch(1)


# --- before the products: rows of inputs ----------------------------------------------------------


def _each_vector(builder, size, piece):
    """Calls piece(index) for every 16 of `size` numbers; the last ones may be past `size`."""
    with each_index(builder, size, step=FULL) as index:
        piece(index)


@instruction
def widen(builder, size, source, out, count):
    """out [count] = source [count] as float32, for a multiple of 16 numbers. size: 4 or 2 bytes."""

    def widen_all(size):
        _each_vector(
            builder, count, lambda i: store(builder, load(builder, source, i, FULL, size), out, i)
        )

    each_case(builder, size, (4, 2), widen_all)


@instruction
def sum_of_squares(builder, x, count):
    """Returns the sum of the squares of x [count], padded with zeros to a multiple of 16."""
    total = variable(builder, float_vector(FULL), constant(0))

    def piece(i):
        y = load(builder, x, i, FULL)
        builder.store(multiply_add(builder, y, y, builder.load(total)), total)

    _each_vector(builder, count, piece)
    return fold(builder, builder.load(total), builder.fadd)


@instruction
def square_root(builder, x):
    kind = ir.FunctionType(FLOAT, [FLOAT])
    return builder.call(external_function(builder.module, kind, "llvm.sqrt.f32"), [x])


@instruction
def scale_by(builder, x, factor, weights, count):
    """x [count] = x * factor * weights, in place, for a multiple of 16 numbers."""
    factor = splat(builder, factor, FULL)

    def piece(i):
        y = builder.fmul(load(builder, x, i, FULL), factor)
        store(builder, builder.fmul(y, load(builder, weights, i, FULL)), x, i)

    _each_vector(builder, count, piece)


def _rounded(builder, x):
    """Returns the bits of the bfloat16 numbers that are nearest to 16 float32 numbers.

    Ties go to even; a NaN stays one.
    """
    integers = ir.VectorType(INT32, FULL)
    bits = builder.bitcast(x, integers)
    odd = builder.and_(builder.lshr(bits, uniform(integers, 16)), uniform(integers, 1))
    nearest = builder.add(bits, builder.add(odd, uniform(integers, 0x7FFF)))
    nearest = builder.select(
        builder.fcmp_unordered("uno", x, x), uniform(integers, 0x7FC00000), nearest
    )
    return builder.trunc(
        builder.lshr(nearest, uniform(integers, 16)), ir.VectorType(ir.IntType(16), FULL)
    )


@instruction
def narrow(builder, x, out, count):
    """out [count] bfloat16 = x [count], for a multiple of 16 numbers; may be in place."""

    def piece(i):
        narrow = _rounded(builder, load(builder, x, i, FULL))
        address = builder.add(out, builder.mul(i, ir.Constant(WORD, 2)))
        builder.store(narrow, pointer(builder, address, narrow.type), align=2)

    _each_vector(builder, count, piece)


@instruction
def transpose(builder, rows, row_bytes, out, columns):
    """Transposes 16 rows of 16 words to 16 rows of `columns` words.

    The rows are `row_bytes` apart; the new rows follow each other. Of each new row a whole vector
    is written, and the next row over its end. So up to 16 words behind the last row are changed.
    """
    starts = [builder.add(rows, builder.mul(row_bytes, ir.Constant(WORD, i))) for i in range(FULL)]
    vectors = [load(builder, start, ir.Constant(WORD, 0), FULL) for start in starts]
    for i, vector in enumerate(columns_of(builder, vectors)):
        store(builder, vector, out, builder.mul(columns, ir.Constant(WORD, i)))


# --- products of low rank -------------------------------------------------------------------------

# Up to BATCH_TOKENS tokens of one slot are computed together, so that factors are read once for all
# of them. The numbers of a token are added in the same order, whatever other tokens are beside it.
BATCH_TOKENS = 4
DOTS = 4  # rows of `a` at a time


def _rows_at(builder, address, stride, number):
    return [builder.add(address, builder.mul(stride, ir.Constant(WORD, i))) for i in range(number)]


@instruction
def dots(builder, tokens, x_size, x, x_stride, size, rows, stride, count, out, out_stride):
    """out [tokens, 4] = the products of rows x [tokens, count] with 4 rows.

    count: a multiple of 16.
    x_size, size: bytes of a number of x and of the rows, constants. Strides are in bytes.
    """

    def sums(number):
        token_rows = _rows_at(builder, x, x_stride, number)
        starts = _rows_at(builder, rows, stride, DOTS)
        totals = [[variable(builder, float_vector(FULL)) for _ in starts] for _ in token_rows]
        for total in itertools.chain(*totals):
            builder.store(constant(0), total)

        def piece(i):
            factors = [load(builder, start, i, FULL, size.constant) for start in starts]
            for token, row_totals in zip(token_rows, totals, strict=True):
                numbers = load(builder, token, i, FULL, x_size.constant)
                for factor, total in zip(factors, row_totals, strict=True):
                    builder.store(
                        multiply_add(builder, numbers, factor, builder.load(total)), total
                    )

        _each_vector(builder, count, piece)
        for place, row_totals in zip(
            _rows_at(builder, out, out_stride, number), totals, strict=True
        ):
            for i, total in enumerate(row_totals):
                dot = fold(builder, builder.load(total), builder.fadd)
                builder.store(
                    dot,
                    pointer(builder, builder.add(place, ir.Constant(WORD, 4 * i)), dot.type),
                )

    each_case(builder, tokens, range(1, BATCH_TOKENS + 1), sums)


@instruction
def add_rows(builder, tokens, size, sums, factors, stride, rows, count):
    """sums [tokens, 32][:, :16] += factors [tokens, count] . rows [count, 16].

    count: an even number.
    size: bytes of a number of the rows, a constant. stride: of the tokens' factors (float32), in
        bytes.
    """
    zero = ir.Constant(WORD, 0)

    def products(number):
        token_factors = _rows_at(builder, factors, stride, number)
        # even, odd rows
        totals = [[variable(builder, float_vector(FULL)) for _ in range(2)] for _ in token_factors]
        for total in itertools.chain(*totals):
            builder.store(constant(0), total)
        with each_index(builder, count, step=2) as index:
            for parity in range(2):
                place = builder.add(index, ir.Constant(WORD, parity))
                row = load(
                    builder, rows, builder.mul(place, ir.Constant(WORD, FULL)), FULL, size.constant
                )
                for token, total in zip(token_factors, totals, strict=True):
                    factor = splat(builder, load_one(builder, token, place), FULL)
                    sum_ = multiply_add(builder, factor, row, builder.load(total[parity]))
                    builder.store(sum_, total[parity])
        places = _rows_at(builder, sums, ir.Constant(WORD, 4 * PANEL), number)
        for place, (even, odd) in zip(places, totals, strict=True):
            total = builder.fadd(builder.load(even), builder.load(odd))
            store(builder, builder.fadd(load(builder, place, zero, FULL), total), place, zero)

    each_case(builder, tokens, range(1, BATCH_TOKENS + 1), products)


# --- after the products: sums of a tile -----------------------------------------------------------


@instruction
def scale_and_add(builder, sums, scales, bias, columns):
    """sums [columns, 32] = sums * scales [32] + bias [32], in place."""
    starts = [ir.Constant(WORD, 0), ir.Constant(WORD, FULL)]
    factors, offsets = (
        [load(builder, vector, start, FULL) for start in starts] for vector in (scales, bias)
    )
    with each_index(builder, columns) as index:
        row = builder.add(sums, builder.mul(index, ir.Constant(WORD, 4 * PANEL)))
        for start, factor, offset in zip(starts, factors, offsets, strict=True):
            y = builder.fadd(builder.fmul(load(builder, row, start, FULL), factor), offset)
            store(builder, y, row, start)


SILU = 1
GELU_TANH = 2
# gelu_tanh(x) = x * sigmoid(GELU[0] * (x + GELU[1] * x**3))
GELU = (2 * math.sqrt(2 / math.pi), 0.044715)


def _sigmoid(builder, x):
    """1 / (1 + exp(-x)), from exp(-|x|): the other half is its mirror image."""
    positive = builder.fcmp_ordered(">=", x, constant(0))
    e = exponential(builder, builder.select(positive, builder.fsub(constant(0), x), x))
    over = builder.fdiv(constant(1), builder.fadd(constant(1), e))
    return builder.select(positive, over, builder.fmul(e, over))


@instruction
def gate(builder, kind, sums, columns):
    """sums [columns, 0 : 16] = activation(sums[:, 0 : 16]) * sums[:, 16 : 32], in place.

    kind: SILU or GELU_TANH.
    """
    curved = builder.icmp_signed("==", kind, ir.Constant(WORD, GELU_TANH))
    with each_index(builder, columns) as index:
        row = builder.add(sums, builder.mul(index, ir.Constant(WORD, 4 * PANEL)))
        x, y = (load(builder, row, ir.Constant(WORD, at), FULL) for at in (0, FULL))
        cubic = builder.fmul(builder.fmul(x, x), x)
        inner = builder.fmul(constant(GELU[0]), multiply_add(builder, cubic, constant(GELU[1]), x))
        share = _sigmoid(builder, builder.select(curved, inner, x))
        store(builder, builder.fmul(builder.fmul(x, share), y), row, ir.Constant(WORD, 0))


@instruction
def add_16(builder, size, sums, addends):
    """sums [16] += addends [16], which has numbers of 4 or 2 bytes."""
    start = ir.Constant(WORD, 0)

    def add(size):
        y = builder.fadd(
            load(builder, sums, start, FULL), load(builder, addends, start, FULL, size)
        )
        store(builder, y, sums, start)

    each_case(builder, size, (4, 2), add)


def _write(builder, size, x, out):
    """Stores 16 float32 numbers at an address, as float32 or bfloat16 by the size of a number."""
    with builder.if_else(builder.icmp_signed("==", size, ir.Constant(WORD, 4))) as (
        float32_branch,
        bfloat16_branch,
    ):
        with float32_branch:
            store(builder, x, out, ir.Constant(WORD, 0))
        with bfloat16_branch:
            narrow = _rounded(builder, x)
            builder.store(narrow, pointer(builder, out, narrow.type), align=2)


@instruction
def write_16(builder, size, sums, out):
    """out [16] = sums [16], as float32 or bfloat16 by the size of a number."""
    _write(builder, size, load(builder, sums, ir.Constant(WORD, 0), FULL), out)


@instruction
def write_columns(builder, size, sums, out, stride, columns):
    """out [columns, 16] = sums [columns, 32][:, :16].

    The rows are `stride` bytes apart in the result.
    """
    with each_index(builder, columns) as index:
        x = load(builder, sums, builder.mul(index, ir.Constant(WORD, PANEL)), FULL)
        _write(builder, size, x, builder.add(out, builder.mul(index, stride)))


@instruction
def clear(builder, sums, columns):
    """sums [columns, 32] = 0."""
    with each_index(builder, columns) as index:
        row = builder.mul(index, ir.Constant(WORD, PANEL))
        for start in (0, FULL):
            store(builder, constant(0), sums, builder.add(row, ir.Constant(WORD, start)))
