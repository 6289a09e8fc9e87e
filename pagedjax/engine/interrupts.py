"""Ctrl-C where it can do no harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, so that what belongs together changes together.

    Pressed again, it interrupts at once. Only the main thread is ever interrupted; in others this does nothing.
    """
    before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if before is None:  # also where a handler was not set from Python, and cannot be set again
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
