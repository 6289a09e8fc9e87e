"""Trampolines: small functions that XLA gets in place of handlers that are not compiled yet.

XLA needs the address of a function when it compiles a program. It asks that function for the
version of its interface, and calls it when the program runs. A trampoline answers the question
itself, and passes a call to its handler. While there is no handler, the trampoline sleeps and looks
again. It does so in XLA's thread, without Python's lock. If the handler could not be compiled, the
trampoline returns the reason as an error.

SPARE trampolines are made at once, which takes milliseconds. To make them one by one would be slow:
later, the compilation of a handler may hold LLVM for a second.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from llvmlite import ir

from pallas_kernels.shared.cpu import compiler, object_files, team
from pallas_kernels.shared.cpu.memory import call, fetch_add, load_published
from pallas_kernels.shared.cpu.translate import INT32, WORD, CFunction, Translation, compiled_apart
from pallas_kernels.shared.cpu.xla_call import failure, is_query

SPARE = 20  # trampolines that are made at once: more than a model needs
WAIT = 500  # microseconds between two looks

usleep: Any = CFunction("usleep", INT32, WORD)  # the C type is of 32 bits, in the same register


@compiled_apart
def _enter(frame, cell, team):
    """Calls the handler once it exists, or returns its error.

    team: address of the helpers' places (`team.py`).
    cell: address of two words: the address of the handler, and the address of the reason why there
        is none. A word is 0 until its value is known.
    """
    if is_query(frame):
        return 0
    handler = load_published(cell)
    while handler == 0:
        message = load_published(cell + 8)
        if message != 0:
            return failure(frame, message)
        usleep(WAIT)
        handler = load_published(cell)
    return call(handler, frame, team)


@compiled_apart
def _publish(place, word):
    """Sets a word that is 0. A thread that sees it also sees all that was written before it."""
    return fetch_add(place, word)


class Trampoline:
    """A function that XLA may have. Its address never changes."""

    def __init__(self, address: int, cell: np.ndarray, publish: Any) -> None:
        self.address = address
        self._cell = cell
        self._publish = publish
        self._message: Any = None

    def lead_to(self, handler: int) -> None:
        """Passes calls to the handler at an address, calls that already wait too."""
        self._publish(self._cell.ctypes.data, handler)

    def fail(self, reason: str) -> None:
        """Makes calls return an error, calls that already wait too."""
        self._message = ctypes.create_string_buffer(reason.encode())
        self._publish(self._cell.ctypes.data + 8, ctypes.addressof(self._message))


_lock = threading.Lock()
_spare: list[Trampoline] = []
_cells: list[Any] = []  # keeps the cells in memory: compiled code has only their addresses
_team = np.zeros((team.PLACES + 1, team.PLACE_BYTES // 8), np.int64)
TEAM = -(-_team.ctypes.data // team.PLACE_BYTES) * team.PLACE_BYTES  # begins with a cache line


def take() -> Trampoline:
    """Returns a trampoline that nobody else has."""
    with _lock:
        if not _spare:
            _spare.extend(_make_trampolines())
        return _spare.pop()


def _make_trampolines() -> list[Trampoline]:
    cells = np.zeros((SPARE, 8), np.int64)  # each has a cache line of its own
    translation = Translation()
    names = [object_files.symbol(f"trampoline_{i}") for i in range(SPARE)]
    enter = translation.translation_of(_enter, [WORD, WORD, WORD], {})
    for name, cell in zip(names, cells, strict=True):
        trampoline = ir.Function(translation.module, ir.FunctionType(WORD, [WORD]), name)
        builder = ir.IRBuilder(trampoline.append_basic_block())
        addresses = [ir.Constant(WORD, address) for address in (cell.ctypes.data, TEAM)]
        builder.ret(builder.call(enter, [trampoline.args[0], *addresses]))
    publish = object_files.symbol("publish")
    translation.export(_publish, publish, {})
    code = compiler.object_code(translation, level=1)
    *addresses, publish = object_files.load(code, *names, publish)
    _cells.append(cells)
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(publish)
    pairs = zip(addresses, cells, strict=True)
    return [Trampoline(address, cell, function) for address, cell in pairs]
