"""Objects that stay are set aside, and are freed all the same once they are garbage."""

from __future__ import annotations

from tests import fresh_python

# In a process of its own: here a look through all objects takes seconds.
PROGRAM = """
import gc
import weakref

from tests import garbage


class Circle:
    def __init__(self) -> None:
        self.itself = self


others = [[i] for i in range(10_000)]
circle = Circle()
seen = weakref.ref(circle)
garbage.collect()
assert gc.get_freeze_count() > 10_000
assert not [one for one in gc.get_objects() if one is circle], "a collection would look at it"
del circle
gc.collect()
assert seen() is not None, "a collection in between does not look at it"
looked_at = garbage._looked_at
garbage.collect_now_and_then()
assert garbage._looked_at == looked_at, "the next look waits"
assert seen() is not None
garbage.PAUSE = 0
garbage.collect_now_and_then()
assert seen() is None

garbage.PAUSE = 1000
garbage.start()
assert gc.get_threshold() == garbage.THRESHOLDS
seen = weakref.ref(Circle())
garbage.collect_newer_now_and_then()
assert seen() is not None, "the next look at newer objects waits too"
garbage.PAUSE_OF_NEWER = 0
garbage.collect_newer_now_and_then()
assert seen() is None
frozen = gc.get_freeze_count()
seen = weakref.ref(Circle())
later = [[i] for i in range(10_000)]
garbage.collect_now_and_then()
assert seen() is None
assert gc.get_freeze_count() > frozen + 9_000, "what is left after a module is set aside"
"""


def test_objects_are_set_aside_now_and_then_and_freed_when_they_are_garbage():
    fresh_python.output_of(PROGRAM)
