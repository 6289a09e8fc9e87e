"""How rarely a process that exists to run an engine collects garbage.

Python looks for circles of objects that nothing refers to. It does so after each 700 new objects,
and from time to time among all objects of the process: those of JAX, of models and of modules, some
100,000, which stay until the end. A step makes no circles, so that this finds nothing, costs a
tenth of the host's time or more, and now and then stops all requests for a tenth of a second
(`python -m experiments.bench.host` prints it).
"""

from __future__ import annotations

import gc
from collections.abc import Callable

# New objects before a collection of these, such collections before one of those that they left, and
# those before one of all: some thousand steps, some ten thousand, and some million.
THRESHOLDS = (50_000, 20, 100)

_frozen_by_python = gc.get_freeze_count()  # 3.12 sets some hundred objects aside


def collect_rarely() -> Callable[[], None]:
    """Free what is garbage, set all other objects aside, and collect rarely from now on. Returns a
    function that undoes it.

    Call it when the engines of a process are ready. No collection looks at the objects that are
    alive then, so an engine that is dropped later may keep its memory until that is undone.

    Nothing happens in a process that has set objects aside already: it minds its garbage itself.
    """
    if gc.get_freeze_count() > _frozen_by_python:
        return lambda: None
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)

    def undo() -> None:
        gc.unfreeze()
        gc.set_threshold(*thresholds)

    return undo
