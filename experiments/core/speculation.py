"""Drafts in the results of a run with `engine.speculative`: counts of a step, and the numbers of
its summary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from pagedjax.host.types import Event, Plan, Verified

# of a step record; steps.jsonl has them only with speculation
COLUMNS = ("drafts", "accepted", "decodes")


class DraftCounts(NamedTuple):
    drafts: int
    accepted: int  # of them
    decodes: int  # rows that compute one known token, the last one, behind the prompt; and drafts


class Counted(Protocol):
    """A step record."""

    @property
    def drafts(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def decodes(self) -> int: ...


def counted(plan: Plan, events: Iterable[Event]) -> DraftCounts:
    """The drafts of a step that were verified, and its decode rows."""
    verified = [event for event in events if isinstance(event, Verified)]
    return DraftCounts(
        drafts=sum(sum(event.drafts) for event in verified),
        accepted=sum(sum(event.accepted) for event in verified),
        decodes=decodes(plan),
    )


def decodes(plan: Plan) -> int:
    drafts = plan.drafts or (0,) * len(plan.seqs)
    rows = zip(plan.seqs, plan.lengths, plan.starts, plan.counts, drafts, strict=True)
    ones = [
        (seq, start)
        for seq, length, start, count, k in rows
        if count - k == 1 and start + 1 == length
    ]
    return sum(start >= seq.request.prompt_len for seq, start in ones)


def sums(steps: Iterable[Counted]) -> DraftCounts:
    """Over all steps."""
    counts = [(step.drafts, step.accepted, step.decodes) for step in steps]
    return (
        DraftCounts(*(sum(column) for column in zip(*counts, strict=True)))
        if counts
        else DraftCounts(0, 0, 0)
    )


def summary(counts: Counted) -> dict[str, Any]:
    """Of the sums over all steps. A decode row gives one token and one for each accepted draft.

    None: `acceptance` without a draft, `tokens_per_decode` without a decode row.
    """
    return {
        "drafts": counts.drafts,
        "accepted": counts.accepted,
        "acceptance": counts.accepted / counts.drafts if counts.drafts else None,
        "tokens_per_decode": (counts.decodes + counts.accepted) / counts.decodes
        if counts.decodes
        else None,
    }
