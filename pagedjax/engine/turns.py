"""Turns: what several threads ask of one engine is done one thing after another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from pagedjax.engine import interrupts

P = ParamSpec("P")
R = TypeVar("R")


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
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            self._depth += 1
            return
        try:
            with interrupts.deferred():
                with self._door:
                    self._lock.acquire()
                self._owner = threading.get_ident()
                self._depth = 1
        except BaseException:
            if self._owner == threading.get_ident():
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._lock.release()


def in_turn(method: Callable[P, R]) -> Callable[P, R]:
    """A method of an object with `turns` that is one turn."""

    @wraps(method)
    def turn(*args: P.args, **options: P.kwargs) -> R:
        engine: Any = args[0]
        with engine.turns:
            return method(*args, **options)

    return turn
