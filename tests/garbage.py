"""Python looks for garbage among all objects that it has, again and again. A process of thousands
of tests has millions that stay: what JAX traced, pytest's own, the engines of fixtures. So they are
set aside now and then.

By itself Python looks through the oldest objects whenever they became a quarter more, which visits
each new one four times: a twentieth of the time of the default run. Here that is done between
tests, by the time that they took.
"""

from __future__ import annotations

import gc
import time

# seconds of CPU between two looks through all objects, each of which takes two or three
PAUSE = 130.0
PAUSE_OF_NEWER = 60.0  # between two looks through those that are not set aside
# of young objects as of Python 3.11, some times larger; of the oldest: never
THRESHOLDS = (5000, 20, 10_000)

_looked_at = time.process_time()
_looked_at_newer = time.process_time()


def start() -> None:
    """From now on the oldest objects are looked through by this module's functions alone."""
    gc.set_threshold(*THRESHOLDS)


def collect() -> None:
    """Free what is garbage among all objects, and set the others aside: later collections look at
    newer ones alone.
    """
    global _looked_at
    gc.unfreeze()
    collect_newer()
    gc.freeze()
    _looked_at = time.process_time()


def collect_newer() -> None:
    """Free what is garbage among the objects that are not set aside."""
    global _looked_at_newer
    gc.collect()
    _looked_at_newer = time.process_time()


def set_aside() -> None:
    """As `collect`, of newer objects alone: until the next `collect`, no collection looks at what
    is left of them.
    """
    collect_newer()
    gc.freeze()


def collect_now_and_then() -> None:
    """At the end of a module, when its fixtures are gone: what is left stays, and is set aside."""
    if time.process_time() - _looked_at > PAUSE:
        collect()
    elif time.process_time() - _looked_at_newer > PAUSE_OF_NEWER:
        set_aside()


def collect_newer_now_and_then() -> None:
    """Within a module, which may make and forget many engines."""
    if time.process_time() - _looked_at_newer > PAUSE_OF_NEWER:
        collect_newer()
