"""Products of blocks of integers with tokens whose numbers are rounded to 8 bits.

Each group of neighbouring inputs of a token has one factor, max |x| / 127, and a signed byte for
each input, round(x / factor), as in llama.cpp's Q8_0 and Q8_1. A weight is scale * (digit - zero) +
offset with a digit from 0 to 255. So a group adds to an output:

    scale * factor * (sum of digit * byte - zero * sum of bytes) + offset * factor * sum of bytes

Its sums are sums of integers: they are exact. Groups are added in float32, one after the other, so
an output has the same bits in a tile of any width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from pallas_kernels.linear.blocks import Blocks
from pallas_kernels.linear.cpu.groups import (
    WORD_BYTES,
    block_words,
    digit_zero,
    group_inputs,
    group_words,
)
from pallas_kernels.linear.cpu.vectors import (
    BLOCKS_BY_CODE,
    COLUMNS,
    PANEL,
    VECTORS,
    WIDE_CPU,
    byte_at,
    digit_bytes,
    each_part,
    fetch_lines,
)
from pallas_kernels.shared.cpu.compiler import has
from pallas_kernels.shared.cpu.memory import pointer
from pallas_kernels.shared.cpu.translate import INT32, WORD, external_function, instruction
from pallas_kernels.shared.cpu.vectors import (
    FULL,
    constant,
    each_case,
    each_index,
    float_vector,
    fold,
    load,
    load_one,
    multiply_add,
    shuffle,
    splat,
    store,
    uniform,
    variable,
)

MOST = 127  # of the absolute value of a byte
# A group whose numbers are all smaller is zeros: its factor may have no inverse in float32
SMALLEST = 1e-30
# Sums of so many columns and vectors wait in registers; those of more wait in memory
MOST_IN_REGISTERS = 8
INTEGERS = ir.VectorType(INT32, FULL)
ROUNDING = 1.5 * 2.0**23  # added to a number, it leaves the nearest integer in the lowest bits
# Inputs in the order in which words of digits of 4 bits have them: even ones, then odd ones
FOUR_BIT_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _integers(builder: Any, x: Any) -> Any:
    return builder.bitcast(x, INTEGERS)


def _largest(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", a, b), a, b)


def _byte_order(blocks: Blocks) -> list[int]:
    if blocks.bits == 8:
        return list(range(FULL))
    return [start + place for start in (0, len(FOUR_BIT_ORDER)) for place in FOUR_BIT_ORDER]


def _round_group(builder: Any, blocks: Blocks, source: Any, out: Any) -> None:
    """Writes the words of a group of float32 numbers. The addresses may be equal."""
    zero = ir.Constant(WORD, 0)
    vectors = [
        load(builder, source, ir.Constant(WORD, start), FULL)
        for start in range(0, group_inputs(blocks), FULL)
    ]
    # As integers, the bits of larger absolute values are larger, and those of NaN are the largest
    without_sign = uniform(INTEGERS, 0x7FFFFFFF)
    sizes = [builder.and_(_integers(builder, vector), without_sign) for vector in vectors]
    size = sizes[0]
    for vector_size in sizes[1:]:
        size = _largest(builder, size, vector_size)
    largest_bits = fold(builder, size, lambda a, b: _largest(builder, a, b))
    smallest_bits = ir.Constant(INT32, int(np.float32(SMALLEST).view(np.int32)))
    is_zero = builder.icmp_signed("<", largest_bits, smallest_bits)
    largest = splat(builder, builder.bitcast(largest_bits, ir.FloatType()), FULL)
    zeros = constant(0)
    factor = builder.select(is_zero, zeros, builder.fdiv(largest, constant(MOST)))
    inverse = builder.select(is_zero, zeros, builder.fdiv(constant(MOST), largest))
    total = uniform(INTEGERS, 0)
    place = out
    for vector in vectors:
        shifted = builder.fadd(builder.fmul(vector, inverse), constant(ROUNDING))
        rounding_bits = int(np.float32(ROUNDING).view(np.int32))
        numbers = builder.sub(_integers(builder, shifted), uniform(INTEGERS, rounding_bits))
        total = builder.add(total, numbers)
        signed = builder.trunc(numbers, ir.VectorType(ir.IntType(8), FULL))
        signed = shuffle(builder, signed, signed, _byte_order(blocks))
        words = builder.bitcast(signed, ir.VectorType(INT32, FULL // WORD_BYTES))
        store(builder, words, place, zero)
        place = builder.add(place, ir.Constant(WORD, FULL))
    first = ir.Constant(INT32, 0)
    factor = builder.extract_element(factor, first)
    total = fold(builder, total, builder.add)
    words = [factor]
    if digit_zero(blocks):
        words.append(builder.mul(total, ir.Constant(INT32, -digit_zero(blocks))))
    if blocks.offset:
        words.append(builder.fmul(factor, builder.sitofp(total, ir.FloatType())))
    for i, word in enumerate(words):
        store(builder, word, place, ir.Constant(WORD, i))


@instruction
def round_row(builder, kind, row, inputs):
    """Replaces the float32 numbers of a row by its words.

    kind: the code of the blocks with which the row is multiplied, a constant. inputs: in whole
        groups.
    """
    blocks = BLOCKS_BY_CODE[kind.constant]
    size = ir.Constant(WORD, group_inputs(blocks))
    with each_index(builder, builder.sdiv(inputs, size)) as index:
        # the words of a group are fewer than its inputs, so no number is lost before it is read
        source = byte_at(builder, row, index, 4 * group_inputs(blocks))
        _round_group(builder, blocks, source, byte_at(builder, row, index, 4 * group_words(blocks)))


# --- the product ----------------------------------------------------------------------------------


def _word(builder: Any, address: Any) -> Any:
    """Returns an int32 at an address, in all lanes."""
    return splat(builder, builder.load(pointer(builder, address, INT32), align=4), FULL)


def _dots_of_pairs(builder: Any, digits: Any, numbers: Any) -> list[Any]:
    """Sums of four products as two sums of two, by an instruction that multiplies int16 pairs."""
    half = FULL // 2
    shorts = ir.VectorType(ir.IntType(16), FULL)
    kind = ir.FunctionType(ir.VectorType(INT32, half), [shorts, shorts])
    dot = external_function(builder.module, kind, "llvm.x86.avx2.pmadd.wd")
    halves = []
    for lanes in (range(half), range(half, FULL)):
        low_digits = builder.bitcast(shuffle(builder, digits, digits, lanes), shorts)
        low_numbers = builder.bitcast(shuffle(builder, numbers, numbers, lanes), shorts)
        even = builder.call(
            dot,
            [
                builder.and_(low_digits, uniform(shorts, 0xFF)),
                builder.ashr(builder.shl(low_numbers, uniform(shorts, 8)), uniform(shorts, 8)),
            ],
        )
        odd = builder.call(
            dot,
            [
                builder.lshr(low_digits, uniform(shorts, 8)),
                builder.ashr(low_numbers, uniform(shorts, 8)),
            ],
        )
        halves.append(builder.add(even, odd))
    return halves


def _add_dots(builder: Any, digits: Any, numbers: Any, totals: Any) -> Any:
    """Returns totals [16] int32 + the products of four digits and four signed bytes in each lane.

    digits: bytes from 0 to 255.
    """
    if WIDE_CPU and has("avx512vnni"):
        kind = ir.FunctionType(INTEGERS, [INTEGERS] * 3)
        dot = external_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        return builder.call(dot, [totals, digits, numbers])
    if has("avx2"):
        lower, upper = _dots_of_pairs(builder, digits, numbers)
        return builder.add(totals, shuffle(builder, lower, upper, range(FULL)))
    for byte in range(WORD_BYTES):
        bits = 8 * (WORD_BYTES - 1 - byte)
        digit = builder.lshr(builder.shl(digits, uniform(INTEGERS, bits)), uniform(INTEGERS, 24))
        number = builder.ashr(builder.shl(numbers, uniform(INTEGERS, bits)), uniform(INTEGERS, 24))
        totals = builder.add(totals, builder.mul(digit, number))
    return totals


def _digit_words(
    builder: Any, blocks: Blocks, numbers: Any, unit: Any, vector: int
) -> Sequence[Any]:
    """Returns the digits of 16 words of a panel: a vector of bytes for each four inputs.

    numbers: address of the panel's numbers of the group. unit: which [32] words.
    """
    if blocks.bits < 8:
        return digit_bytes(builder, blocks, numbers, unit, vector)
    place = ir.Constant(WORD, 4 * FULL * vector)
    address = byte_at(builder, builder.add(numbers, place), unit, 4 * PANEL)
    words = builder.load(pointer(builder, address, INTEGERS), align=4)
    return [builder.xor(words, uniform(INTEGERS, 0x80808080))]


def _add_group(
    builder: Any,
    blocks: Blocks,
    columns: int,
    vectors: range,
    numbers: Any,
    x: Any,
    panel_scales: list[tuple[Any, Any]],
    totals: list[list[Any]],
) -> None:
    """Adds the products of a group.

    numbers: address of the panel's numbers of the group. x: address of its words.
    totals: [columns][vectors] variables, or addresses.
    """
    sums = [[variable(builder, INTEGERS) for _ in vectors] for _ in range(columns)]
    bytes_end = group_inputs(blocks) // WORD_BYTES
    zero_place = bytes_end + 1

    def word_at(word: int, column: int) -> Any:
        return builder.add(x, ir.Constant(WORD, 4 * (columns * word + column)))

    for c, row in enumerate(sums):
        start = uniform(INTEGERS, 0)
        if digit_zero(blocks):
            start = _word(builder, word_at(zero_place, c))
        for total in row:
            builder.store(start, total)
    unit_words = 8 // blocks.digit_bits  # words of x for a vector of words of the panel
    units = bytes_end // unit_words
    with each_index(builder, ir.Constant(WORD, units)) as unit:
        digits = [_digit_words(builder, blocks, numbers, unit, v) for v in vectors]
        unit_x = byte_at(builder, x, unit, 4 * columns * unit_words)
        for word, words_of_vectors in enumerate(zip(*digits, strict=True)):
            for c, row in enumerate(sums):
                place = builder.add(unit_x, ir.Constant(WORD, 4 * (columns * word + c)))
                number = _word(builder, place)
                for digit, total in zip(words_of_vectors, row, strict=True):
                    sum_ = _add_dots(builder, digit, number, builder.load(total))
                    builder.store(sum_, total)
    index = ir.Constant(WORD, 0)
    for c, row in enumerate(sums):
        factor = splat(builder, load_one(builder, word_at(bytes_end, c), index), FULL)
        bytes_sum = None
        if blocks.offset:
            offset_place = zero_place + (digit_zero(blocks) != 0)
            bytes_sum = splat(builder, load_one(builder, word_at(offset_place, c), index), FULL)
        for (scale, offset), dots, total in zip(panel_scales, row, totals[c], strict=True):
            number = builder.sitofp(builder.load(dots), float_vector(FULL))
            in_memory = total.type == WORD
            sum_ = load(builder, total, index, FULL) if in_memory else builder.load(total)
            sum_ = multiply_add(builder, number, builder.fmul(scale, factor), sum_)
            if offset is not None:
                sum_ = multiply_add(builder, offset, bytes_sum, sum_)
            if in_memory:
                store(builder, sum_, total, index)
            else:
                builder.store(sum_, total)


def _groups(
    builder: Any, blocks: Blocks, block: Any, vectors: range
) -> Iterator[tuple[Any, list[tuple[Any, Any]], Any]]:
    """Generates code for each group of a block of a panel. Yields (number of the group, (scales,
    offsets or None) of each of the vectors, address of the group's numbers).
    """
    count = blocks.part.inputs // group_inputs(blocks)
    for part, panel_scales, numbers in each_part(builder, blocks, block, vectors):
        if count == 1:
            yield part, panel_scales, numbers
            continue
        assert blocks.parts == 1, "a part is one group"
        with each_index(builder, ir.Constant(WORD, count)) as group:
            group_bytes = PANEL * group_inputs(blocks) * blocks.bits // 8
            yield group, panel_scales, byte_at(builder, numbers, group, group_bytes)


def _add_tile(builder, blocks, columns, w, x, count, sums, next_weight, stride):
    """Generates the sums of a tile, see `multiply_rounded`."""
    zero = ir.Constant(WORD, 0)
    step_bytes = PANEL * blocks.bytes
    for first in range(0, 2, VECTORS):
        vectors = range(first, first + VECTORS)
        places = [
            [builder.add(sums, ir.Constant(WORD, 4 * (PANEL * c + FULL * v))) for v in vectors]
            for c in range(columns)
        ]
        in_registers = columns * VECTORS <= MOST_IN_REGISTERS
        totals = places
        if in_registers:
            totals = [
                [variable(builder, float_vector(FULL)) for _ in vectors] for _ in range(columns)
            ]
            for row, row_places in zip(totals, places, strict=True):
                for total, place in zip(row, row_places, strict=True):
                    builder.store(load(builder, place, zero, FULL), total)
        with each_index(builder, count) as index:
            fetch_lines(builder, next_weight, index, stride, step_bytes)
            block = byte_at(builder, w, index, step_bytes)
            block_x = byte_at(builder, x, index, 4 * columns * block_words(blocks))
            for group, panel_scales, numbers in _groups(builder, blocks, block, vectors):
                group_x = byte_at(builder, block_x, group, 4 * columns * group_words(blocks))
                _add_group(
                    builder,
                    blocks.part,
                    columns,
                    vectors,
                    numbers,
                    group_x,
                    panel_scales,
                    totals,
                )
        if in_registers:
            for row, row_places in zip(totals, places, strict=True):
                for total, place in zip(row, row_places, strict=True):
                    store(builder, builder.load(total), place, zero)


@instruction
def multiply_rounded(builder, kind, columns, w, x, count, sums, next_weight, stride):
    """sums [columns, 32] += x . w, for `count` blocks of a panel.

    kind: the code of the blocks, a constant. x: the words of the tokens, [words, columns].
    next_weight, stride: as in `vectors.multiply`.
    """

    def add_tile(width):
        blocks = BLOCKS_BY_CODE[kind.constant]
        _add_tile(builder, blocks, width, w, x, count, sums, next_weight, stride)

    each_case(builder, columns, range(1, COLUMNS + 1), add_tile)
