"""Fills its result with zeros, mostly by giving its memory back to the system."""

from __future__ import annotations

from typing import Any

from pallas_kernels.shared.cpu.memory import load_int, store_byte
from pallas_kernels.shared.cpu.translate import INT32, WORD, CFunction, compiled_apart, instruction
from pallas_kernels.shared.cpu.xla_call import argument, data, dim, result

PAGE = 1 << 16  # bytes: a multiple of the system's pages
DONTNEED = 4  # madvise on Linux: the next access to an anonymous page finds zeros

madvise: Any = CFunction("madvise", INT32, WORD, WORD, WORD)


@instruction
def widened(builder, value):
    """Returns an integer of 32 bits as a word."""
    return builder.sext(value, WORD)


@compiled_apart
def _clear(first, last):
    """Writes zeros to the bytes first : last."""
    for address in range(first, last):
        store_byte(address, 0)


@compiled_apart
def handle(frame, team):
    """What XLA calls, with a call frame and the helpers' places. Returns 0: no error.

    Operand: [2] int32, the bytes of a number and the number of axes of the result.
    """
    sizes = data(argument(frame, 0))
    out = result(frame, 0)
    size = load_int(sizes)
    for axis in range(load_int(sizes + 4)):
        size *= dim(out, axis)
    first = data(out)
    last = first + size
    first_page = -(-first // PAGE) * PAGE
    last_page = last // PAGE * PAGE
    if last_page <= first_page:
        _clear(first, last)
        return 0
    _clear(first, first_page)
    _clear(last_page, last)
    if widened(madvise(first_page, last_page - first_page, DONTNEED)) != 0:
        _clear(first_page, last_page)
    return 0
