"""Drafts in the results of a run with `engine.speculative`: counts of a step, and the numbers of
its summary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pagedjax.host.types import Event, Plan, Verified

# of a step record; steps.jsonl has them only with speculation
COLUMNS = ("drafts", "accepted", "decodes")


class Acceptance(NamedTuple):
    """Drafts that were verified, the accepted ones, and rows with drafts."""

    drafts: int
    accepted: int
    rows: int


def acceptance_of(events: Iterable[Event]) -> Acceptance:
    verified = [event for event in events if isinstance(event, Verified)]
    return Acceptance(
        drafts=sum(sum(event.drafts) for event in verified),
        accepted=sum(sum(event.accepted) for event in verified),
        rows=sum(len(event.request_ids) for event in verified),
    )


class DraftCounts(NamedTuple):
    drafts: int
    accepted: int  # of them
    decodes: int  # rows that compute one known token, the last one, behind the prompt; and drafts


def draft_counts(plan: Plan, events: Iterable[Event]) -> DraftCounts:
    """The drafts of a step that were verified, and its decode rows."""
    drafts, accepted, _ = acceptance_of(events)
    return DraftCounts(drafts, accepted, decodes(plan))


def decodes(plan: Plan) -> int:
    """The decode rows of a step; see `DraftCounts`."""
    drafts = plan.drafts or (0,) * len(plan.seqs)
    rows = zip(plan.seqs, plan.lengths, plan.starts, plan.counts, drafts, strict=True)
    last_tokens = [
        (seq, start)
        for seq, length, start, count, num_drafts in rows
        if count - num_drafts == 1 and start + 1 == length
    ]
    return sum(start >= seq.request.prompt_len for seq, start in last_tokens)


def summary(counts: DraftCounts) -> dict[str, Any]:
    """The section `speculation` of a summary, from the sums over all steps.

    A decode row gives one token and one for each accepted draft. None: `acceptance` without a
    draft, `tokens_per_decode` without a decode row.
    """
    acceptance = counts.accepted / counts.drafts if counts.drafts else None
    tokens = counts.decodes + counts.accepted
    return {
        "drafts": counts.drafts,
        "accepted": counts.accepted,
        "acceptance": acceptance,
        "tokens_per_decode": tokens / counts.decodes if counts.decodes else None,
    }
