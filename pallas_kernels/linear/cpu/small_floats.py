"""Small floats as float32 vectors: numbers and scales of blocks (pallas_kernels/linear/blocks.py)."""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from pallas_kernels.linear.blocks import DOUBLED
from pallas_kernels.shared.cpu.compiler import has
from pallas_kernels.shared.cpu.memory import pointer
from pallas_kernels.shared.cpu.translate import INT32, external_function
from pallas_kernels.shared.cpu.vectors import FULL, constant, float_vector, uniform

HAS_HALVES = has("f16c") or has("neon")  # the CPU converts float16 numbers
HAS_TABLES = has("avx512f")  # an instruction looks up 16 numbers in a table of 16
BYTES = ir.VectorType(ir.IntType(8), FULL)
HALVES = ir.VectorType(ir.IntType(16), FULL)
INTEGERS = ir.VectorType(INT32, FULL)
# A float8_e4m3fn number is a float16 number whose exponent is 8 less, and an "e2m1" number is one
# whose exponent is 14 less. So subnormal ones are read as float16 numbers are.
E4M3_FACTOR = 2.0**8
E2M1_FACTOR = 2.0**14


def half_numbers(builder, bits):
    """Returns 16 float16 numbers [int16] as float32. All of them are finite."""
    if HAS_HALVES:
        numbers = builder.bitcast(bits, ir.VectorType(ir.HalfType(), FULL))
        return builder.fpext(numbers, float_vector(FULL))
    bits = builder.zext(bits, INTEGERS)
    magnitude = builder.and_(bits, uniform(INTEGERS, 0x7FFF))
    sign = builder.shl(builder.and_(bits, uniform(INTEGERS, 0x8000)), uniform(INTEGERS, 16))
    normal = builder.bitcast(builder.shl(magnitude, uniform(INTEGERS, 13)), float_vector(FULL))
    normal = builder.fmul(normal, constant(2.0**112))
    # XLA's threads would treat the bits of a subnormal number as zero
    subnormal = builder.sitofp(magnitude, float_vector(FULL))
    subnormal = builder.fmul(subnormal, constant(2.0**-24))
    is_normal = builder.icmp_signed(">=", magnitude, uniform(INTEGERS, 0x400))
    number = builder.bitcast(builder.select(is_normal, normal, subnormal), INTEGERS)
    return builder.bitcast(builder.or_(number, sign), float_vector(FULL))


def _bytes(builder, address):
    return builder.load(pointer(builder, address, BYTES), align=1)


def powers(builder, address):
    """Returns half of the powers of two [16] of "e8m0" bytes, as `blocks.parts_of` has them."""
    exponents = builder.shl(builder.zext(_bytes(builder, address), INTEGERS), uniform(INTEGERS, 23))
    return builder.fmul(builder.bitcast(exponents, float_vector(FULL)), constant(0.5))


def e4m3(builder, address):
    """Returns 16 float8_e4m3fn numbers as float32. None is NaN."""
    bits = builder.shl(builder.sext(_bytes(builder, address), HALVES), uniform(HALVES, 7))
    bits = builder.and_(bits, uniform(HALVES, 0xBFFF))  # without the second copy of the sign
    return builder.fmul(half_numbers(builder, bits), constant(E4M3_FACTOR))


def doubled_e2m1(builder, words, digit):
    """Returns twice the "e2m1" numbers of a digit of 16 words [int32], as float32."""
    bits = builder.lshr(words, uniform(INTEGERS, 4 * digit))
    if HAS_TABLES:
        numbers = [*DOUBLED, *(-np.float32(number) for number in DOUBLED)]
        table = ir.Constant(float_vector(FULL), [float(number) for number in numbers])
        kind = ir.FunctionType(float_vector(FULL), [float_vector(FULL), INTEGERS])
        name = "llvm.x86.avx512.permvar.sf.512"
        return builder.call(external_function(builder.module, kind, name), [table, bits])
    sign = builder.shl(builder.and_(bits, uniform(INTEGERS, 8)), uniform(INTEGERS, 12))
    magnitude = builder.shl(builder.and_(bits, uniform(INTEGERS, 7)), uniform(INTEGERS, 9))
    halves = builder.trunc(builder.or_(sign, magnitude), HALVES)
    return builder.fmul(half_numbers(builder, halves), constant(2 * E2M1_FACTOR))
