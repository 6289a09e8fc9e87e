"""Code that must not be interrupted: Ctrl-C waits for a short block (`deferred`), and other threads
wait for one turn of an engine (`Turns`).
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
# `getsignal` and `signal` without their conversions to enums, which take 30 us in each step. A
# handler may then be an integer.
_plain_signal: Any = importlib.import_module("_signal")
_handler_of: Callable[[int], Any] = _plain_signal.getsignal
_set_handler: Callable[[int, Any], Any] = _plain_signal.signal
SIGINT = int(signal.SIGINT)


@contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C waits for the end of the block. Pressed a second time, it interrupts at once.

    Python interrupts only the main thread; in other threads this does nothing.
    """
    handler = _replaceable_handler()
    if handler is None or getattr(handler, "defers", False):  # an outer block defers already
        yield
        return
    signals = []

    def remember(number: int, _: FrameType | None) -> None:
        signals.append(number)
        if len(signals) > 1:
            _set_handler(SIGINT, handler)
            signal.raise_signal(SIGINT)

    remember.defers = True  # type: ignore[attr-defined]
    _set_handler(SIGINT, remember)
    try:
        yield
    finally:
        _set_handler(SIGINT, handler)
        if len(signals) == 1:
            signal.raise_signal(SIGINT)


@contextmanager
def ignored() -> Iterator[None]:
    """Ctrl-C does nothing in the block."""
    handler = _replaceable_handler()
    if handler is not None:
        _set_handler(SIGINT, int(signal.SIG_IGN))
    try:
        yield
    finally:
        if handler is not None:
            _set_handler(SIGINT, handler)


def _replaceable_handler() -> Any:
    """Returns the present handler of Ctrl-C; None in other threads than the main one, and if it was
    not set from Python, because then it could not be restored.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return _handler_of(SIGINT)


class Turns:
    """A lock that its thread may enter again, and that threads get in turn.

    A thread that runs step after step leaves the lock and enters it again. With a plain lock the
    other threads could wait until the end of its call. So there is a second lock, the door: a
    thread takes it before it waits for the lock, and gives it back when it has the lock. A thread
    that wants to enter again must wait for the door, so the waiting thread comes first.

    Ctrl-C waits until the lock is entered, and then the lock is released. Both locks are reentrant,
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
def of_both(first: Turns, second: Turns) -> Iterator[None]:
    """A turn of two engines. All threads take the two in the same order, so that no two threads
    wait for each other for ever.
    """
    first, second = sorted((first, second), key=id)
    with first, second:
        yield


def in_turn(method: Callable[P, R]) -> Callable[P, R]:
    """Returns the method as one turn of its object, which has `turns`."""

    @wraps(method)
    def turn(*args: P.args, **options: P.kwargs) -> R:
        engine: Any = args[0]
        with engine.turns:
            return method(*args, **options)

    return turn
