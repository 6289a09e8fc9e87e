"""Ctrl-C that waits for the end of a short block of code, or that another process handles."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C waits for the end of the block. Pressed a second time, it interrupts at once.

    Python interrupts only the main thread; in other threads this does nothing.
    """
    before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if before is None:  # or a handler that was not set from Python, which cannot be restored
        yield
        return
    pressed = []

    def press(number: int, _: FrameType | None) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            signal.signal(signal.SIGINT, before)
            signal.raise_signal(signal.SIGINT)

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
    before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if before is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
