"""Objects that stay are set aside, and are freed all the same once they are garbage."""

from __future__ import annotations

import gc
import weakref

from tests import garbage


class Circle:
    def __init__(self) -> None:
        self.itself = self


def test_objects_are_set_aside_and_freed_when_they_are_garbage():
    circle = Circle()
    seen = weakref.ref(circle)
    garbage.collect()
    assert gc.get_freeze_count() > 10_000
    assert not [one for one in gc.get_objects() if one is circle], "a collection would look at it"
    del circle
    gc.collect()
    assert seen() is not None, "a collection in between does not look at it"
    garbage.collect()
    assert seen() is None


def test_the_next_look_waits():
    garbage.collect()
    looked_at = garbage._looked_at
    garbage.collect_now_and_then()
    assert garbage._looked_at == looked_at
