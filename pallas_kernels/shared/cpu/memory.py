"""Primitives of CPU kernels: loads and stores at addresses, atomics, C functions.

Addresses are plain integers.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir

from pallas_kernels.shared.cpu.translate import (
    FLOAT,
    INT32,
    WORD,
    CFunction,
    compiled,
    external_function,
    instruction,
)

malloc: Any = CFunction("malloc", WORD, WORD)
free: Any = CFunction("free", ir.VoidType(), WORD)
sched_yield: Any = CFunction("sched_yield", INT32)


def pointer(builder, address, pointee):
    return builder.inttoptr(address, pointee.as_pointer())


def _access(kind):
    """Returns (load, store) of a number of a type at an address. Loaded integers become words."""

    @instruction
    def load(builder, address):
        value = builder.load(pointer(builder, address, kind))
        return value if kind in (WORD, FLOAT) else builder.sext(value, WORD)

    @instruction
    def store(builder, address, value):
        value = value if kind in (WORD, FLOAT) else builder.trunc(value, kind)
        builder.store(value, pointer(builder, address, kind))

    return load, store


load_float, store_float = _access(FLOAT)
load_int, store_int = _access(INT32)
load_word, store_word = _access(WORD)
load_byte, store_byte = _access(ir.IntType(8))


@compiled
def copy_bytes(source, out, count):
    for i in range(count):
        store_byte(out + i, load_byte(source + i))


@instruction
def fetch_add(builder, address, value):
    """Adds to a word, atomically, and returns its old value. No access to memory is moved across
    it.
    """
    return builder.atomic_rmw("add", pointer(builder, address, WORD), value, "seq_cst")


@instruction
def load_published(builder, address):
    """Loads a word that another thread added to. What that thread wrote before is then visible."""
    return builder.load_atomic(pointer(builder, address, WORD), "acquire", 8)


@instruction
def publish(builder, address, value):
    """Stores a word. A thread that sees it with `load_published` also sees what was written before."""
    builder.store_atomic(value, pointer(builder, address, WORD), "release", 8)


@instruction
def compare_exchange(builder, address, expected, value):
    """Stores a word if the word there is `expected`, atomically, and returns the old one. No access
    to memory is moved across it.
    """
    result = builder.cmpxchg(pointer(builder, address, WORD), expected, value, "seq_cst", "seq_cst")
    return builder.extract_value(result, 0)


@instruction
def pause(builder):
    """Tells the CPU that this thread waits in a loop. Other CPUs than x86 go on at once."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(external_function(builder.module, kind, "llvm.x86.sse2.pause"), [])


AWAKE = 500  # looks at a counter before a thread gives its CPU away: 5 to 20 microseconds


@compiled
def wait_for(counter, count):
    """Waits until threads have added so much to a word. What they wrote before is then visible.

    Most waits are shorter than a microsecond. A thread that gives its CPU away may get it back
    milliseconds later, if another process waits for a CPU.
    """
    looks = 0
    while load_published(counter) < count:
        if looks < AWAKE:
            pause()
            looks += 1
        else:
            sched_yield()


@instruction
def call(builder, function, *arguments):
    """Calls the C function at an address: words -> word."""
    kind = ir.FunctionType(WORD, [WORD] * len(arguments))
    return builder.call(pointer(builder, function, kind), arguments)


@instruction
def run(builder, function, argument):
    """Calls the C function at an address, which has no result, with a word."""
    kind = ir.FunctionType(ir.VoidType(), [WORD])
    builder.call(pointer(builder, function, kind), [argument])
