"""Drafts in frames: which rows had some, which were accepted, and the tokens that were kept.

A recording has the number of a row's drafts, and the tokens that were kept: the accepted drafts and
one more. It does not have the tokens of rejected drafts, so no frame has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagedjax.host.types import Event, Plan, Sampled, Verified
from pagedjax.viewer.picture import Batch

Verdicts = tuple[int, ...]  # (drafts, accepted)


def drafted(rows: Batch, plan: Plan) -> Batch:
    """The rows of a plan, with the number of drafts behind each row that has some."""
    if not plan.drafts:
        return rows
    pairs = zip(rows, plan.drafts, strict=True)
    return tuple([(*row, num_drafts) if num_drafts else row for row, num_drafts in pairs])


def drafts_of(row: Sequence[int]) -> int:
    """The number of drafts of a row of a frame."""
    return row[4] if len(row) > 4 else 0


def offered(plan: Plan) -> Mapping[str, int]:
    """The offers with which `scheduler.schedule` gives this plan again: by sequence id, the number
    of drafts that the sequence got.
    """
    return {seq.request.request_id: k for seq, k in zip(plan.seqs, plan.drafts, strict=False) if k}


def outcome(plan: Plan, events: Iterable[Event], before: Verdicts) -> dict[str, Any]:
    """Returns the keys `sampled`, `accepted` and `verified` of a frame, if the step has them.

    Args:
        before: how many drafts earlier steps had, and how many of them were accepted.
    """
    tokens: dict[str, list[int]] = {}
    accepted: dict[str, int] = {}
    for event in events:
        if isinstance(event, Sampled):
            for name, token in zip(event.request_ids, event.token_ids, strict=True):
                tokens.setdefault(name, []).append(token)
        elif isinstance(event, Verified):
            accepted |= dict(zip(event.request_ids, event.accepted, strict=True))
            before = (before[0] + sum(event.drafts), before[1] + sum(event.accepted))
    names = [seq.request.request_id for seq in plan.seqs]
    entries: dict[str, Any] = {}
    if tokens:
        sampled: dict[str, Any] = {
            name: ids if name in accepted else ids[-1] for name, ids in tokens.items()
        }
        entries["sampled"] = [sampled.get(name) for name in names]
    if accepted:
        entries["accepted"] = [accepted.get(name) for name in names]
        entries["verified"] = list(before)
    return entries


def token_list(sampled: int | Sequence[int] | None) -> list[int]:
    """An entry of `sampled` as a list of tokens; none if it is null."""
    if sampled is None:
        return []
    return [sampled] if isinstance(sampled, int) else list(sampled)
