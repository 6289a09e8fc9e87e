"""What may not come between: Ctrl-C in a short block of code, and other threads in one turn of an
engine.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C waits for the end of the block. Pressed a second time, it interrupts at once.

    Python interrupts only the main thread; in other threads this does nothing.
    """
    before = (
        signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread()
        else None
    )
    # None: not the main thread, or a handler that was not set from Python, which cannot be restored
    if before is None or getattr(before, "defers", False):  # a block around this one waits
        yield
        return
    pressed = []

    def press(number: int, _: FrameType | None) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            signal.signal(signal.SIGINT, before)
            signal.raise_signal(signal.SIGINT)

    press.defers = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if len(pressed) == 1:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def ignored() -> Iterator[None]:
    """Ctrl-C does nothing in the block."""
    before = (
        signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread()
        else None
    )
    if before is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


class Turns:
    """A lock that a thread may enter again, and that threads get in turn.

    A thread that leaves the lock and enters it again, as one that runs step after step does, lets a
    thread in that waits: it has to pass the door, which the waiting thread holds. With a plain lock
    the others could wait for the whole of its call.

    Ctrl-C waits until the lock is entered, and leaves it again. Both locks may be entered again,
    because Python may close an abandoned stream at any time in any thread.
    """

    def __init__(self) -> None:
        self._door = threading.RLock()
        self._lock: Any = threading.RLock()

    def __enter__(self) -> None:
        if self._lock._is_owned():
            self._lock.acquire()
            return
        acquired = False
        try:
            with deferred(), self._door:
                acquired = self._lock.acquire()
        except BaseException:
            if acquired:
                self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@contextmanager
def of_both(one: Turns, other: Turns) -> Iterator[None]:
    """A turn of two engines. All threads take the two in one order, so that none waits for another
    for ever.
    """
    first, second = sorted((one, other), key=id)
    with first, second:
        yield


def in_turn(method: Callable[P, R]) -> Callable[P, R]:
    """A method of an object with `turns` that is one turn."""

    @wraps(method)
    def turn(*args: P.args, **options: P.kwargs) -> R:
        engine: Any = args[0]
        with engine.turns:
            return method(*args, **options)

    return turn
