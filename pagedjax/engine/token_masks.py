"""Structured outputs in the engine: masks of a step's samples, drafts that a grammar forces, and
matchers that fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pagedjax.engine.requests import SequenceData
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import FinishReason, Plan
from pagedjax.structured.matcher import MaskRow, masks

log = logging.getLogger("pagedjax.engine")

Propose = Callable[[np.ndarray, int], Sequence[int] | np.ndarray]


def of_samples(plan: Plan, mine: Sequence[SequenceData]) -> Mapping[int, bytes]:
    """By the index of the sample, the mask of each sample of a row that has a grammar and samples
    in this step.

    Args:
        mine: the records of the plan's rows. Drafts are in their tokens, behind the known ones.
    """
    if not any([data.matcher for data in mine]):  # as in most steps
        return {}
    rows, drafts, at = [], plan.drafts or (0,) * len(mine), 0
    for data, start, count, length, k in zip(
        mine, plan.starts, plan.counts, plan.lengths, drafts, strict=True
    ):
        if data.matcher is not None and start + count >= length:
            guessed = data.tokens[length : length + k]
            rows.append(MaskRow(data.matcher, _output(data, length), guessed, at, data.stop_ids))
        at += k + 1
    if not rows:
        return {}
    found = masks(rows, at)
    return {
        row.first + i: found[row.first + i].tobytes()
        for row in rows
        for i in range(1 + len(row.drafts))
    }


def drafts(data: SequenceData, length: int, k: int, propose: Propose) -> Sequence[int] | np.ndarray:
    """At most k drafts: the tokens that the grammar forces, then those of (tokens, k) -> drafts
    that it allows.

    A forced token is a draft like any other: it is accepted because nothing else can be sampled. So
    a text that must come takes one step (jump-forward decoding).
    """
    tokens = data.tokens[:length]
    if data.matcher is None:
        return propose(tokens, k)[:k]
    output = _output(data, length)
    found = data.matcher.forced(output, k)
    if len(found) < k:
        found = [
            *found,
            *propose(np.concatenate([tokens, np.array(found, np.int32)]), k - len(found)),
        ][:k]
    return found[: data.matcher.allowed(output, found)]


def failed(
    plan: Plan,
    mine: Sequence[SequenceData],
    sequences: Mapping[str, SequenceData],
    after: SchedulerState,
) -> dict[str, FinishReason]:
    """The unfinished sequences of a plan whose matcher has failed, with the reason that they end
    for.

    The matchers take the new tokens here. The log says why one has failed.

    Args:
        mine: the records of the plan's rows, from before the step.
        sequences: those of the unfinished sequences after it.
        after: the state after the commit, whose running sequences know their lengths.
    """
    names = [seq.request_id for seq, data in zip(plan.seqs, mine, strict=True) if data.matcher]
    names = [name for name in names if name in sequences]
    if not names:
        return {}
    lengths = {
        seq.request_id: length
        for seq, length in zip(after.running.seqs, after.running.lengths, strict=True)
    }
    found: dict[str, FinishReason] = {}
    for name in names:
        matcher, length = sequences[name].matcher, lengths.get(name)
        if (
            matcher
            and length is not None
            and matcher.after(_output(sequences[name], length)) is None
        ):
            log.warning(
                "request %r is cancelled: its structured output failed: %s", name, matcher.error
            )
            found[name] = "abort"
    return found


def _output(data: SequenceData, length: int) -> np.ndarray:
    return data.tokens[data.prompt_len : length]
