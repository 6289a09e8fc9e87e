"""How many draft tokens a server accepted, from its `/metrics`.

Reads the names of vLLM and those of this project.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from pagedjax.server.load_client import metrics_page

COUNTER = re.compile(
    r"^\w+:spec_decode_num_(draft|accepted)_tokens(?:_per_pos)?_total(?:\{([^}]*)\})? (\S+)$", re.M
)


class Drafts(NamedTuple):
    """Counts since the server began.

    tokens: draft tokens that were verified.
    accepted: those that were accepted; `by_position`: by their place in a draft.
    """

    tokens: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    def __sub__(self, earlier: Drafts) -> Drafts:
        """The counts since `earlier`, which may have fewer positions."""
        padding = (0,) * (len(self.by_position) - len(earlier.by_position))
        pairs = zip(self.by_position, earlier.by_position + padding, strict=True)
        by_position = tuple(count - before for count, before in pairs)
        return Drafts(self.tokens - earlier.tokens, self.accepted - earlier.accepted, by_position)


def read(text: str) -> Drafts:
    """The counts in a page of metrics; zeros if the server does not speculate."""
    tokens = accepted = 0
    positions: Counter[int] = Counter()
    for kind, labels, value in COUNTER.findall(text):
        count = int(float(value))
        position = re.search(r'position="(\d+)"', labels)
        if position:
            positions[int(position[1])] += count
        elif kind == "draft":
            tokens += count
        else:
            accepted += count
    by_position = tuple(positions[i] for i in range(max(positions, default=-1) + 1))
    return Drafts(tokens, accepted, by_position)


def fetch(base: str, api_key: str | None) -> Drafts:
    """The counts of the server at `base` (its address with /v1); zeros if it has no metrics."""
    return read(metrics_page.fetch(base, api_key))


def line(drafts: Drafts) -> str:
    """A line for the table of a load run."""
    share = 100 * drafts.accepted / drafts.tokens
    counts = ", ".join(map(str, drafts.by_position))
    positions = f"; accepted by position: {counts}" if counts else ""
    return (
        f"speculation    {drafts.accepted} of {drafts.tokens} draft tokens accepted "
        f"({share:.1f} %){positions}"
    )
