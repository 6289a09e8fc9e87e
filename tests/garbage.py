"""Python looks for garbage among all objects that it has, again and again. A process of thousands of tests has millions
that stay: what JAX traced, pytest's own, the engines of fixtures. So they are set aside now and then.
"""

from __future__ import annotations

import gc
import time

PAUSE = 150.0  # seconds of CPU between two looks through all objects, each of which takes two or three

_looked_at = time.process_time()


def collect() -> None:
    """Free what is garbage among all objects, and set the others aside: later collections look at newer ones alone."""
    global _looked_at
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    _looked_at = time.process_time()


def set_aside() -> None:
    """Until the next `collect`, no collection looks at the objects that there are now. It takes no time."""
    gc.freeze()


def collect_now_and_then() -> None:
    if time.process_time() - _looked_at > PAUSE:
        collect()
