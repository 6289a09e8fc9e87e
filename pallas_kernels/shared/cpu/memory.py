"""Primitives of CPU kernels: loads and stores at addresses, atomics, C functions, links between its parts.

Addresses are plain integers. numba's arrays check each index for a negative one, and loops with this check are not
vectorised.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from pallas_kernels.shared.cpu.object_files import symbol

# Only compiled code calls these functions. Wrappers for Python double the time to compile them. Wrappers, and errors
# such as a division by zero, also refer to functions that only a process with numba has.
OPTIONS: Any = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
compiled: Any = njit(**OPTIONS)
instruction: Any = intrinsic  # typed as Any: its results are called without the first argument
FLOAT, INT32, WORD = ir.FloatType(), ir.IntType(32), ir.IntType(64)

malloc = types.ExternalFunction("malloc", types.intp(types.intp))
free = types.ExternalFunction("free", types.void(types.intp))
sched_yield = types.ExternalFunction("sched_yield", types.int32())


def pointer(builder, address, pointee):
    return builder.inttoptr(address, pointee.as_pointer())


def _access(numba_type, llvm_type):
    """Returns (load, store) of a scalar at an address."""

    @instruction
    def load(typing, address):
        def generate(context, builder, signature, args):
            return builder.load(pointer(builder, args[0], llvm_type))

        return numba_type(types.intp), generate

    @instruction
    def store(typing, address, value):
        def generate(context, builder, signature, args):
            builder.store(args[1], pointer(builder, args[0], llvm_type))
            return context.get_dummy_value()

        return types.void(types.intp, numba_type), generate

    return load, store


load_float, store_float = _access(types.float32, FLOAT)
load_int, store_int = _access(types.int32, INT32)
load_word, store_word = _access(types.intp, WORD)


load_byte, store_byte = _access(types.int8, ir.IntType(8))


@compiled
def copy_bytes(source, out, count):
    for i in range(count):
        store_byte(out + i, load_byte(source + i))


@instruction
def fetch_add(typing, address, value):
    """Adds to a word, atomically, and returns its old value. Orders all memory accesses around it."""

    def generate(context, builder, signature, args):
        return builder.atomic_rmw("add", pointer(builder, args[0], WORD), args[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


@instruction
def call(typing, function, argument):
    """Calls the C function at an address: word -> word."""

    def generate(context, builder, signature, args):
        return builder.call(pointer(builder, args[0], ir.FunctionType(WORD, [WORD])), [args[1]])

    return types.intp(types.intp, types.intp), generate


def linked(name, words, result: Any = types.void):
    """Declares a C function of `words` words with its own object code. Returns (function to call, `define`).

    numba optimises a function again in each of its callers, so callers of this one are linked to it by name. A compiled
    function that begins with a call of `define` becomes its body.
    """
    arguments = [types.intp] * words
    returned = ir.VoidType() if result == types.void else WORD

    @instruction
    def define(typing):
        def generate(context, builder, signature, args):
            function = ir.Function(builder.module, ir.FunctionType(returned, [WORD] * words), symbol(name))
            inside, native = ir.IRBuilder(function.append_basic_block()), builder.function
            convention = context.call_conv
            _, value = convention.call_function(inside, native, result, arguments, function.args, attrs=("noinline",))
            if result == types.void:
                inside.ret_void()
            else:
                inside.ret(value)
            return context.get_dummy_value()

        return types.void(), generate

    return types.ExternalFunction(symbol(name), result(*arguments)), define


def address_of(part):
    """Returns an instruction that gives the address of a linked function of one word."""

    @instruction
    def address(typing):
        def generate(context, builder, signature, args):
            kind = ir.FunctionType(ir.VoidType(), [WORD])
            return builder.ptrtoint(cgutils.get_or_insert_function(builder.module, kind, part.symbol), WORD)

        return types.intp(), generate

    return address
