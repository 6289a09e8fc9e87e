"""A process that exists to run an engine sets its objects aside, once, and collects rarely."""

from __future__ import annotations

import gc

from pagedjax.engine import garbage
from tests import fresh_python

# In a process of its own: the tests' process has set objects aside.
PROGRAM = """
import gc
import weakref

from pagedjax.engine import garbage


class Circle:
    def __init__(self) -> None:
        self.itself = self


before = gc.get_threshold()
stays = Circle()
seen = weakref.ref(Circle())
undo = garbage.collect_rarely()
assert seen() is None, "what is garbage is freed"
assert gc.get_threshold() == garbage.THRESHOLDS
assert not [each for each in gc.get_objects() if each is stays], "a collection would look at it"
later = Circle()
garbage.collect_rarely()()
assert gc.get_threshold() == garbage.THRESHOLDS, "a second call changes nothing, nor does its undoing"
assert [each for each in gc.get_objects() if each is later]
undo()
assert gc.get_threshold() == before
assert [each for each in gc.get_objects() if each is stays]
"""


def test_objects_are_set_aside_until_it_is_undone():
    fresh_python.output_of(PROGRAM)


def test_a_process_that_set_objects_aside_before_is_left_alone():
    """So a test that runs a command keeps no engine alive."""
    thresholds = gc.get_threshold()
    undo = garbage.collect_rarely()
    assert gc.get_threshold() == thresholds
    undo()
    assert gc.get_freeze_count() > 100_000
