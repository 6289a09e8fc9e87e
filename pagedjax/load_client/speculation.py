"""How many draft tokens a server accepted, from its `/metrics` under the names of vLLM and of this project."""

from __future__ import annotations

import re
from typing import NamedTuple

import httpx

COUNTER = re.compile(
    r"^\w+:spec_decode_num_(draft|accepted)_tokens(?:_per_pos)?_total(?:\{([^}]*)\})? (\S+)$", re.M
)


class Drafts(NamedTuple):
    """Counts since the server began.

    tokens: draft tokens that were verified; accepted: those that were accepted, and by their place in a draft.
    """

    tokens: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    def __sub__(self, other: Drafts) -> Drafts:
        before = other.by_position + (0,) * (len(self.by_position) - len(other.by_position))
        positions = tuple(a - b for a, b in zip(self.by_position, before, strict=True))
        return Drafts(self.tokens - other.tokens, self.accepted - other.accepted, positions)


def read(text: str) -> Drafts:
    """The counts in a page of metrics; zeros if the server does not speculate."""
    tokens = accepted = 0
    positions: dict[int, int] = {}
    for kind, labels, value in COUNTER.findall(text):
        place = re.search(r'position="(\d+)"', labels)
        if place:
            positions[int(place[1])] = positions.get(int(place[1]), 0) + int(float(value))
        elif kind == "draft":
            tokens += int(float(value))
        else:
            accepted += int(float(value))
    return Drafts(
        tokens, accepted, tuple(positions.get(i, 0) for i in range(max(positions, default=-1) + 1))
    )


def fetch(base: str, api_key: str | None) -> Drafts:
    """The counts of the server at `base` (its address with /v1); zeros if it has no metrics.

    Metrics are a courtesy of the server: a load test must not fail without them.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(base.removesuffix("/v1") + "/metrics", headers=headers, timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL):
        return Drafts()
    return read(answer.text) if answer.status_code == 200 else Drafts()


def line(drafts: Drafts) -> str:
    """A line for the table of a load run."""
    share = 100 * drafts.accepted / drafts.tokens
    places = ", ".join(str(count) for count in drafts.by_position)
    shown = f"; accepted by position: {places}" if places else ""
    return f"speculation    {drafts.accepted} of {drafts.tokens} draft tokens accepted ({share:.1f} %){shown}"
