"""Programs that are compiled behind the steps: an engine serves as soon as the program of the
largest step is there.

One thread compiles the others, one at a time. A step is padded to the next larger bucket whose
program exists.

Steps are several times as slow meanwhile. A lower priority of the thread would change nothing,
because XLA compiles in the threads that also compute steps. So the thread prefers pauses between
requests, unless programs are on disk.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary, ref

from pagedjax.config import Resolved
from pagedjax.device.batch import Shapes, StepShape
from pagedjax.engine import compilations
from pagedjax.engine.programs import Build, Shape

PAUSE = 2.0  # seconds without a step, after which a compilation begins
PATIENCE = 6.0  # seconds after which it begins in any case
LOADED = 1.0  # seconds: what takes less was on disk, and so is the next one, most likely
log = logging.getLogger("pagedjax.engine")
# by id: a dict has no hash
_started: WeakValueDictionary[int, BackgroundPrograms] = WeakValueDictionary()


class BackgroundPrograms(dict[Shape, Any]):
    """Programs by their shape; at first that of the largest step alone.

    Attributes:
        present: the shapes of an engine, with those buckets alone whose programs are in here. It is
            replaced as a whole when a program comes in, so that a step which reads it once is
            consistent.
        stepped_at: seconds of time.monotonic when a step last read it.
    """

    def __init__(
        self,
        build: Build,
        config: Resolved,
        programs: Mapping[Shape, Any],
        shapes: Shapes,
        on_disk: bool = False,
    ) -> None:
        """
        Args:
            build, config: as in `programs.compile_all`.
            programs: what is compiled already.
            shapes: of all programs.
            on_disk: the others are on disk, most likely.
        """
        super().__init__(programs)
        self.shapes = shapes
        self.present = self._present()
        self._build, self._config = build, config
        self._waiting = deque(
            in_order([shape for shape in shapes.steps if shape not in self], shapes.max_seqs)
        )
        self._on_disk = compilations.disk_cache_active()
        self._quick = on_disk  # whether the next one needs no pause
        self._stopped = threading.Event()
        self.stepped_at = time.monotonic()
        self._began = time.perf_counter()
        self._thread = threading.Thread(
            target=_compile_all, args=(ref(self),), name="pagedjax-compile", daemon=True
        )

    @property
    def missing(self) -> int:
        """Programs that are not there yet. One that could not be compiled stays missing."""
        return len(self.shapes.steps) - len(self)

    @property
    def compiling(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to compile. At the end of Python the program under way is waited for, because XLA
        cannot be interrupted and fails if Python ends meanwhile."""
        self._thread.start()
        _started[id(self)] = self

    def stop(self) -> None:
        """Begin no other program. The one under way continues, and comes in."""
        self._stopped.set()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread ends."""
        self._thread.join(seconds)

    def compile_next(self) -> bool:
        """Wait for a pause, and compile the next program, in the thread. Returns False if there is
        none.

        A program that comes after a quick one is not waited for.
        """
        latest = time.monotonic() + (0 if self._quick else PATIENCE)
        while self._waiting and (now := time.monotonic()) < min(self.stepped_at + PAUSE, latest):
            if self._stopped.wait(min(self.stepped_at + PAUSE, latest) - now):
                break
        if self._stopped.is_set() or not self._waiting:
            return False
        shape = self._waiting.popleft()
        began = time.perf_counter()
        try:
            with compilations.disk_cache(self._on_disk), compilations.uncounted():
                program = self._build(shape, self._config)
        except Exception:
            self._quick = False
            log.exception(
                "the program for %d tokens cannot be compiled; steps use the next larger one",
                shape.tokens,
            )
        else:
            self[shape] = program
            self.present = self._present()  # after the program, so that a step finds it
            self._quick = time.perf_counter() - began < LOADED
        if not self._waiting:
            del self._build  # and with it the blank batches
            made, several, seconds = (
                len(self),
                len(self.shapes.steps),
                time.perf_counter() - self._began,
            )
            log.info("%d of %d programs are there, the last after %.0f s", made, several, seconds)
        return True

    def _present(self) -> Shapes:
        found = [shape for shape in self.shapes.steps if shape in self]
        mixed, alone = (
            tuple(one.tokens for one in found if one.decodes_alone == kind)
            for kind in (False, True)
        )
        return self.shapes._replace(tokens=mixed, decode_buckets=alone)


def in_order(shapes: Sequence[StepShape], most_seqs: int) -> list[StepShape]:
    """The order in which programs are compiled.

    The first one holds `most_seqs` tokens, because most steps are decodes alone. Then comes the
    middle one of those on each side of it, and so on, so that no step is far from its own bucket
    for long. A bucket's program for decodes alone comes after its other one, because a step has
    only buckets with that one.
    """
    sizes = sorted({shape.tokens for shape in shapes})
    at = bisect_left(sizes, most_seqs)
    found, parts = sizes[at : at + 1], deque([sizes[:at], sizes[at + 1 :]])
    while parts:
        if part := parts.popleft():
            middle = len(part) // 2
            found.append(part[middle])
            parts += [part[:middle], part[middle + 1 :]]
    return [
        shape for size in found for shape in sorted(one for one in shapes if one.tokens == size)
    ]


def _compile_all(programs: ref[BackgroundPrograms]) -> None:
    """What the thread runs. It keeps no engine alive, except while it compiles."""

    def compile_next() -> bool:
        alive = programs()
        return alive is not None and alive.compile_next()

    while compile_next():
        pass


@atexit.register  # after JAX, so that it runs before JAX's own end
def _end() -> None:
    """At the end of Python: stop all threads, and wait for the programs under way."""
    for programs in list(_started.values()):
        programs.stop()
    for programs in list(_started.values()):
        programs.join()
