"""The section `replicas` of a config: how many engines there are, and when some join, leave or
fail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Change:
    """A change of the number of replicas: some join, or some leave, or some fail.

    One of the three counts is above 0.

    at: seconds from the start of the run. A replica that joins is ready then, with an empty cache.
        The replicas that joined last leave or fail first. A replica that leaves gets no requests,
        and ends those that it has. A replica that fails makes no further step; its requests are
        routed again and computed anew.
    """

    at: float
    join: int = 0
    leave: int = 0
    fail: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.at < math.inf:
            raise ValueError(f"at is {self.at!r}; it must be at least 0 seconds, and finite")
        counts = (self.join, self.leave, self.fail)
        if min(counts) < 0 or sum(count > 0 for count in counts) != 1:
            raise ValueError(
                f"join, leave and fail are {counts}; one of them must be above 0, and the others 0"
            )

    @property
    def difference(self) -> int:
        """How many more replicas there are after this change; below 0: fewer."""
        return self.join - self.leave - self.fail


@dataclass(frozen=True)
class Replicas:
    """Equal engines, and the router that gives each request to one of them (pagedjax/routing).

    count: the number of replicas at the start.
    known_blocks: hashes of blocks that the router remembers of each replica; None: as many as a
        replica has blocks.
    changes: replicas that join or go while the run lasts, in the order of their times.
    """

    count: int = 1
    router: str = "prefix"
    known_blocks: int | None = None
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count is {self.count}; it must be at least 1")
        if self.known_blocks is not None and self.known_blocks < 0:
            raise ValueError(
                f"known_blocks is {self.known_blocks}; it must be at least 0, or null for the "
                "blocks of a replica"
            )
        if any(a.at > b.at for a, b in pairwise(self.changes)):
            raise ValueError(
                f"changes are at {[change.at for change in self.changes]} seconds; list them by "
                "time"
            )
        present = self.count
        for change in self.changes:
            present += change.difference
            if present < 1:
                raise ValueError(
                    f"changes leave {present} replicas at {change.at:g} s; at least 1 must be "
                    "present"
                )

    @property
    def total(self) -> int:
        """The number of replicas that are present at some time."""
        return self.count + sum(change.join for change in self.changes)

    def count_until(self, end: float) -> int:
        """The number of replicas that are present at some time before `end`, in seconds."""
        return self.count + sum(change.join for change in self.changes if change.at < end)
