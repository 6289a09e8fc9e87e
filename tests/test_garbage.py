"""Objects that stay are set aside, and garbage among later ones is freed now and then."""

from __future__ import annotations

from tests import fresh_python

# In a process of its own: what is set aside stays so.
PROGRAM = """
import gc
import weakref

from tests import garbage


class Circle:
    def __init__(self) -> None:
        self.itself = self


garbage.start()
assert gc.get_threshold() == garbage.THRESHOLDS
circle = Circle()
garbage.set_aside()
assert not [each for each in gc.get_objects() if each is circle], "a collection would look at it"
seen = weakref.ref(Circle())
garbage.collect_now_and_then()
assert seen() is not None, "the next collection waits"
garbage.PAUSE = 0
garbage.collect_now_and_then()
assert seen() is None
gc.unfreeze()
garbage.collect()
assert not [each for each in gc.get_objects() if each is circle], "it is set aside again"
"""


def test_objects_are_set_aside_once_and_others_are_freed_now_and_then():
    fresh_python.output_of(PROGRAM)
