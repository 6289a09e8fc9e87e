"""Drafts in the results of a run with `engine.speculative`: counts of a step, and the numbers of
its summary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pagedjax.host.types import Event, Plan, Verified

# columns of a step record that steps.jsonl has only with speculation
COLUMNS = ("drafts", "accepted", "decodes")


class Acceptance(NamedTuple):
    """How many drafts were verified and how many were accepted, and the rows with drafts."""

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
    """Counts of a step, or sums of them.

    decodes: decode rows. Such a row computes the last known token of a sequence, which is not of
        the prompt, and maybe drafts.
    """

    drafts: int
    accepted: int
    decodes: int


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

    A decode row gives one token, and one more for each accepted draft. `acceptance` is None without
    a draft, and `tokens_per_decode` is None without a decode row.
    """
    acceptance = counts.accepted / counts.drafts if counts.drafts else None
    tokens = counts.decodes + counts.accepted
    return {
        "drafts": counts.drafts,
        "accepted": counts.accepted,
        "acceptance": acceptance,
        "tokens_per_decode": tokens / counts.decodes if counts.decodes else None,
    }
