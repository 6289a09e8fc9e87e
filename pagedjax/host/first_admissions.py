"""Finds the first admission of each sequence in a stream of events. The hits of prefix caching are
the cached tokens of first admissions.

A sequence that was preempted, or that lost its blocks by a restart or a failed step, is admitted
again. Then it finds its own blocks, which is no hit.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagedjax.host.types import BRANCH_EVENTS, Admitted, Event, Finished


class FirstAdmissions:
    """Remembers the sequences that have been admitted and are not finished."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def among(self, events: Iterable[Event]) -> list[Admitted]:
        """The first admissions among the next events of an engine, in their order.

        A branch begins on the blocks of its leader, so its own admission is never a first
        admission.
        """
        first: list[Admitted] = []
        for event in events:
            if isinstance(event, Admitted):
                if event.request_id not in self._known:
                    first.append(event)
                self._known.add(event.request_id)
            elif isinstance(event, BRANCH_EVENTS):
                self._known.update(event.request_ids)
            elif isinstance(event, Finished):
                self._known.discard(event.request_id)
        return first

    def left(self, request_id: str) -> None:
        """Forget a sequence that has left for another engine."""
        self._known.discard(request_id)
