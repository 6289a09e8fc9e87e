"""Python looks for garbage among all objects that it has, again and again. A process of thousands
of tests has millions that stay: modules, and what pytest collected. They are set aside before the
first test, so that looking through all others takes a tenth of the time.

By itself Python looks through the oldest objects whenever they became a quarter more, which visits
each new one four times: a twentieth of the time of the default run. Here that is done between
tests, by the time that they took.
"""

from __future__ import annotations

import gc
import time

PAUSE = 60.0  # seconds of CPU between two collections
# of young objects as of Python 3.11, some times larger; of the oldest: never
THRESHOLDS = (5000, 20, 10_000)

_collected = time.process_time()
_set_aside = 0  # objects


def start() -> None:
    """From now on the oldest objects are looked through by this module's functions alone."""
    gc.set_threshold(*THRESHOLDS)


def set_aside() -> None:
    """Free what is garbage, and set all other objects aside: no later collection looks at them, so
    that none frees them.
    """
    global _set_aside
    collect()
    gc.freeze()
    _set_aside = gc.get_freeze_count()


def collect() -> None:
    """Free what is garbage among the objects that are not set aside."""
    global _collected
    gc.collect()
    # A test has brought them back. Python 3.12 sets some hundred objects aside by itself.
    if gc.get_freeze_count() < _set_aside // 2:
        gc.freeze()
    _collected = time.process_time()


def collect_now_and_then() -> None:
    """Between two tests, of which a module may have many that make and forget engines."""
    if time.process_time() - _collected > PAUSE:
        collect()
