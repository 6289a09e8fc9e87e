"""Programs that are compiled while steps run: an engine serves as soon as it has the program of the
largest step.

One thread compiles the others, one at a time. A step is padded to the next larger bucket whose
program exists.

While a program is compiled, steps are several times as slow. A lower priority of the thread would
change nothing, because XLA compiles in the threads that also compute steps. So the thread waits for
a pause between requests, unless programs are on disk.
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
from weakref import WeakValueDictionary, finalize, ref

from pagedjax.device.batch import Shapes, StepShape
from pagedjax.engine import compilations
from pagedjax.engine.programs import Build, Shape
from pagedjax.options.config import Resolved

PAUSE = 2.0  # seconds without a step, after which a compilation begins
PATIENCE = 6.0  # seconds after which it begins in any case
LOADED = 1.0  # seconds: a program that takes less was on disk, and so is probably the next one
log = logging.getLogger("pagedjax.engine")
# by id, because a dict has no hash
_started: WeakValueDictionary[int, BackgroundPrograms] = WeakValueDictionary()


class BackgroundPrograms(dict[Shape, Any]):
    """Programs by their shape; at first only that of the largest step.

    Attributes:
        present: the shapes of the engine, with only those buckets that have a program here. A new
            program replaces the whole value, so that a step which reads it once is consistent.
        stepped_at: seconds of time.monotonic when a step last read `present`.
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
            build, config: the arguments of `programs.compile_all`.
            programs: the programs that are compiled already.
            shapes: of all programs.
            on_disk: whether the missing ones are probably on disk.
        """
        super().__init__(programs)
        self.shapes = shapes
        self.present = self._present_shapes()
        self._build = build
        self._config = config
        self._waiting = deque(
            in_order([shape for shape in shapes.steps if shape not in self], shapes.max_seqs)
        )
        self._uses_disk_cache = compilations.disk_cache_active()
        self._skips_pause = on_disk  # before the next compilation
        self._stopped = threading.Event()
        self.stepped_at = time.monotonic()
        self._created_at = time.perf_counter()
        self._thread = threading.Thread(
            target=_compile_all, args=(ref(self),), name="pagedjax-compile", daemon=True
        )

    @property
    def missing(self) -> int:
        """The number of programs that are not compiled yet. One that could not be compiled stays
        missing.
        """
        return len(self.shapes.steps) - len(self)

    @property
    def compiling(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to compile. Python waits at its end for the program that is being compiled, because
        XLA cannot be interrupted and fails if Python ends meanwhile.
        """
        self._thread.start()
        _started[id(self)] = self

    def stop(self) -> None:
        """Begin no other program. The one that is being compiled is finished, and is used."""
        self._stopped.set()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread ends."""
        self._thread.join(seconds)

    def compile_next(self) -> bool:
        """Wait for a pause, and compile the next program, in the thread. After a quick compilation
        there is no wait. Returns False if no program is left, or `stop` was called.
        """
        if self._waiting and not self._skips_pause:
            self._wait_for_pause()
        if self._stopped.is_set() or not self._waiting:
            return False
        shape = self._waiting.popleft()
        started_at = time.perf_counter()
        try:
            with compilations.disk_cache(self._uses_disk_cache), compilations.uncounted():
                program = self._build(shape, self._config)
        except Exception:
            self._skips_pause = False
            log.exception(
                "the program for %d tokens cannot be compiled; steps use the next larger one",
                shape.tokens,
            )
        else:
            self[shape] = program
            self.present = self._present_shapes()  # after the program, so that a step finds it
            self._skips_pause = time.perf_counter() - started_at < LOADED
        if not self._waiting:
            del self._build  # and with it the blank batches
            log.info(
                "%d of %d programs are there, the last after %.0f s",
                len(self),
                len(self.shapes.steps),
                time.perf_counter() - self._created_at,
            )
        return True

    def _wait_for_pause(self) -> None:
        """Wait until no step has run for PAUSE seconds; at most PATIENCE seconds, and not after
        `stop`.
        """
        latest = time.monotonic() + PATIENCE
        while True:
            seconds = min(self.stepped_at + PAUSE, latest) - time.monotonic()
            if seconds <= 0 or self._stopped.wait(seconds):
                return

    def _present_shapes(self) -> Shapes:
        shapes = [shape for shape in self.shapes.steps if shape in self]
        return self.shapes._replace(
            tokens=_buckets(shapes, decodes_alone=False),
            decode_buckets=_buckets(shapes, decodes_alone=True),
            span_buckets=tuple(shape.tokens for shape in shapes if shape.span > 1),
        )


def _buckets(shapes: Sequence[StepShape], *, decodes_alone: bool) -> tuple[int, ...]:
    """The tokens of the shapes of single steps of a kind."""
    steps = [shape for shape in shapes if shape.span == 1]
    return tuple(shape.tokens for shape in steps if shape.decodes_alone == decodes_alone)


def in_order(shapes: Sequence[StepShape], most_seqs: int) -> list[StepShape]:
    """Returns the shapes in the order in which their programs are compiled.

    The first bucket holds `most_seqs` tokens, because most steps are decodes alone. Then come the
    middle of the smaller buckets and the middle of the larger buckets, and so on, so that no step
    is far from its own bucket for long. A bucket's program for mixed steps comes before its program
    for decodes alone, which serves fewer steps.
    """
    sizes = sorted({shape.tokens for shape in shapes})
    first = bisect_left(sizes, most_seqs)
    order = sizes[first : first + 1]
    ranges = deque([sizes[:first], sizes[first + 1 :]])
    while ranges:
        part = ranges.popleft()
        if part:
            middle = len(part) // 2
            order.append(part[middle])
            ranges += [part[:middle], part[middle + 1 :]]
    return sorted(shapes, key=lambda shape: (order.index(shape.tokens), shape))


def _compile_all(programs: ref[BackgroundPrograms]) -> None:
    """Compile all programs, in the thread. It keeps no engine alive, except while it compiles."""

    def compile_next() -> bool:
        referent = programs()
        return referent is not None and referent.compile_next()

    while compile_next():
        pass


# At its end Python runs the registered functions, the last one first. Two of them would break a
# compilation that still runs. JAX's own function ends its caches. The function of
# `weakref.finalize` runs all finalizers, and JAX has one for each constant of a trace: a trace
# would lose its constants. So `_stop_all` must run before both, and is registered after them: JAX
# registered its function at its import, and the first call of `finalize` registers the other.
finalize(_started, int)


@atexit.register
def _stop_all() -> None:
    """Stop all threads, and wait for the programs that are being compiled."""
    for programs in list(_started.values()):
        programs.stop()
    for programs in list(_started.values()):
        programs.join()
