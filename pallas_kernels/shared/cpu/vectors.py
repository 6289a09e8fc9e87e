"""Vector code for CPU kernels: vectors of 8 or 16 float32 numbers, whatever lengths the CPU has.

It is generated as vector code and does not depend on a vectoriser. `size` is the bytes of a stored
number: 4 of float32, 2 of bfloat16, 1 of float8_e4m3fn. A bfloat16 number is the upper half of a
float32 number. A float8_e4m3fn number is read as a float16: with its bits in their places there, it
is 2^8 times too small, also if it is subnormal. (As a float32 it would be subnormal too, which
XLA's threads treat as zero.)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from pallas_kernels.shared.cpu.memory import pointer
from pallas_kernels.shared.cpu.translate import FLOAT, INT32, WORD, external_function

HALF = 8  # lanes of half a vector
FULL = 16  # lanes of a vector


# --- variables, loops and cases of generated code -------------------------------------------------


def variable(builder: Any, kind: Any, value: Any = None) -> Any:
    """Returns a variable of generated code, for `builder.load` and `builder.store`.

    LLVM makes a register of it.
    """
    with builder.goto_entry_block():
        place = builder.alloca(kind)
    if value is not None:
        builder.store(value, place)
    return place


@contextlib.contextmanager
def each_index(builder: Any, stop: Any, start: Any = None, step: int = 1) -> Iterator[Any]:
    """Generates a loop over range(start, stop, step), whose body is the `with` block.

    The step is above 0; start is 0 by default.
    """
    index = variable(builder, WORD, ir.Constant(WORD, 0) if start is None else start)
    header, body, after = (builder.append_basic_block() for _ in range(3))
    builder.branch(header)
    builder.position_at_end(header)
    value = builder.load(index)
    builder.cbranch(builder.icmp_signed("<", value, stop), body, after)
    builder.position_at_end(body)
    yield value
    builder.store(builder.add(value, ir.Constant(WORD, step), flags=("nsw",)), index)
    builder.branch(header)
    builder.position_at_end(after)


def each_case(
    builder: Any, value: Any, cases: Sequence[int], generate: Callable[[int], None]
) -> None:
    """Generates code that compares `value` with each case, and runs generate(case) if they match.

    If `value` is a constant, only the code of its case is generated.
    """
    if isinstance(value, ir.Constant):
        assert value.constant in cases
        generate(value.constant)
        return
    for case in cases:
        with builder.if_then(builder.icmp_signed("==", value, ir.Constant(WORD, case))):
            generate(case)


# --- vectors --------------------------------------------------------------------------------------


def float_vector(lanes):
    """Returns the type of a vector of float32 numbers."""
    return ir.VectorType(FLOAT, lanes)


def shuffle(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes)))


def splat(builder, value, lanes):
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    return shuffle(
        builder,
        builder.insert_element(undefined, value, ir.Constant(INT32, 0)),
        undefined,
        [0] * lanes,
    )


def uniform(type_, value):
    """Returns a constant vector of equal numbers."""
    return ir.Constant(type_, [value] * type_.count)


def constant(value):
    """Returns a constant vector of 16 equal float32 numbers."""
    return ir.Constant(float_vector(FULL), [float(np.float32(value))] * FULL)


def load(builder, base, index, lanes, size=4):
    """Loads `lanes` numbers from index `index` of an array at address `base`, as float32."""
    address = builder.add(base, builder.mul(index, ir.Constant(WORD, size)))
    if size == 4:
        return builder.load(pointer(builder, address, float_vector(lanes)), align=4)
    stored = ir.VectorType(ir.IntType(8 * size), lanes)
    bits = builder.load(pointer(builder, address, stored), align=size)
    if size == 2:
        wide = ir.VectorType(INT32, lanes)
        return builder.bitcast(
            builder.shl(builder.zext(bits, wide), uniform(wide, 16)), float_vector(lanes)
        )
    wide = ir.VectorType(ir.IntType(16), lanes)
    bits = builder.zext(bits, wide)
    sign = builder.shl(builder.and_(bits, uniform(wide, 0x80)), uniform(wide, 8))
    magnitude = builder.shl(builder.and_(bits, uniform(wide, 0x7F)), uniform(wide, 7))
    half = builder.bitcast(builder.or_(sign, magnitude), ir.VectorType(ir.HalfType(), lanes))
    return builder.fmul(
        builder.fpext(half, float_vector(lanes)), uniform(float_vector(lanes), 256.0)
    )


def load_one(builder, base, index):
    """Loads one float32 number."""
    address = builder.add(base, builder.mul(index, ir.Constant(WORD, 4)))
    return builder.load(pointer(builder, address, FLOAT))


def store(builder, value, base, index):
    address = builder.add(base, builder.mul(index, ir.Constant(WORD, 4)))
    builder.store(value, pointer(builder, address, value.type), align=4)


def each_piece(builder, size, piece, longest=FULL):
    """Generates loops over `size` elements, a multiple of 8: `longest` at a time, then 16, then 8.

    Calls piece(index, lanes) for the body of each loop.
    """
    start = ir.Constant(WORD, 0)
    for lanes in sorted({longest, FULL, HALF}, reverse=True):
        end = builder.and_(size, ir.Constant(WORD, -lanes))
        with each_index(builder, end, start, lanes) as index:
            piece(index, lanes)
        start = end


def columns_of(builder, vectors):
    """Returns the columns of a matrix from its rows, 16 vectors of 16 numbers."""
    vectors = list(vectors)
    for step in (1, 2, 4, 8):  # swap the blocks of `step` numbers beside the diagonal
        lower = [i + (FULL - step if i & step else 0) for i in range(FULL)]
        upper = [i + (FULL if i & step else step) for i in range(FULL)]
        for i in range(FULL):
            if i & step:
                continue
            j = i + step
            a = vectors[i]
            b = vectors[j]
            vectors[i] = shuffle(builder, a, b, lower)
            vectors[j] = shuffle(builder, a, b, upper)
    return vectors


def fold(builder, value, combine):
    """Combines the numbers of a vector into one, by halves."""
    lanes = value.type.count
    while lanes > 1:
        lanes //= 2
        value = combine(
            *(shuffle(builder, value, value, range(first, first + lanes)) for first in (0, lanes))
        )
    return builder.extract_element(value, ir.Constant(INT32, 0))


def multiply_add(builder, a, b, c):
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, BFloat)

    def __hash__(self):
        return hash(BFloat)


def dot_pairs(builder, a, b, c):
    """Returns c + the sum of two products: of the two bfloat16 numbers in each lane of a and b.

    It is for CPUs with avx512bf16 and avx512vl. The instruction treats subnormal numbers as zeros,
    as XLA's threads do.
    """
    lanes = c.type.count
    if lanes > FULL:
        half = lanes // 2
        parts = [[shuffle(builder, x, x, range(i, i + half)) for x in (a, b, c)] for i in (0, half)]
        lower, upper = (dot_pairs(builder, *part) for part in parts)
        return shuffle(builder, lower, upper, range(lanes))
    pairs = ir.VectorType(BFloat(), 2 * lanes)
    kind = ir.FunctionType(c.type, [c.type, pairs, pairs])
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
    dot = external_function(builder.module, kind, name)
    return builder.call(dot, [c, builder.bitcast(a, pairs), builder.bitcast(b, pairs)])


# Coefficients of Taylor's polynomial of 2**f, from that of f**7 down. For f in [-0.5, 0.5] its
# error is below float32's.
COEFFICIENTS = [math.log(2) ** i / math.factorial(i) for i in range(7, -1, -1)]


def polynomial(builder, x, coefficients):
    result = constant(coefficients[0])
    for coefficient in coefficients[1:]:
        result = multiply_add(builder, result, x, constant(coefficient))
    return result


def integer_and_fraction(builder, power):
    """Returns (integer, fraction) of 16 float32 numbers: power = integer + fraction.

    The fraction is in [-0.5, 0.5].
    """
    vector = float_vector(FULL)
    floor = external_function(
        builder.module, ir.FunctionType(vector, [vector]), "llvm.floor.v16f32"
    )
    integer = builder.call(floor, [builder.fadd(power, constant(0.5))])
    return integer, builder.fsub(power, integer)


def two_to(builder, exponent):
    """Returns 2**exponent: the integer is put in the place of a float32 number's exponent."""
    integers = ir.VectorType(INT32, FULL)
    biased = builder.add(builder.fptosi(exponent, integers), ir.Constant(integers, [127] * FULL))
    return builder.bitcast(
        builder.shl(biased, ir.Constant(integers, [23] * FULL)), float_vector(FULL)
    )


def exponential(builder, x, coefficients=COEFFICIENTS):
    """Returns exp(x) of 16 float32 numbers of at most 0; 0 where they are below -87.

    It is 2**integer times a polynomial of the fraction.
    """
    power = builder.fmul(x, constant(1 / math.log(2)))
    integer, fraction = integer_and_fraction(builder, power)
    result = polynomial(builder, fraction, coefficients)
    tiny = builder.fcmp_ordered("<", power, constant(-126))
    scaled = builder.fmul(result, two_to(builder, builder.select(tiny, constant(0), integer)))
    return builder.select(tiny, constant(0), scaled)
