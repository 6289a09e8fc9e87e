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
from pagedjax.text.structured.matcher import MaskRow, masks

log = logging.getLogger("pagedjax.engine")

Propose = Callable[[np.ndarray, int], Sequence[int] | np.ndarray]


def of_samples(plan: Plan, rows: Sequence[SequenceData]) -> Mapping[int, bytes]:
    """By the index of the sample, the mask of each sample of a row that has a grammar and samples
    in this step.

    Args:
        rows: the records of the plan's rows. Drafts are in their tokens, behind the known ones.
    """
    mask_rows = []
    drafts = plan.drafts or (0,) * len(rows)
    first = 0
    for data, start, count, length, k in zip(
        rows, plan.starts, plan.counts, plan.lengths, drafts, strict=True
    ):
        if data.matcher is not None and start + count >= length:
            guesses = data.tokens[length : length + k]
            output = _output(data, length)
            mask_rows.append(MaskRow(data.matcher, output, guesses, first, data.stop_ids))
        first += k + 1
    if not mask_rows:
        return {}
    table = masks(mask_rows, first)
    samples = [row.first + i for row in mask_rows for i in range(1 + len(row.drafts))]
    return {sample: table[sample].tobytes() for sample in samples}


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
    tokens_ahead = data.matcher.forced(output, k)
    if len(tokens_ahead) < k:
        text = np.concatenate([tokens, np.array(tokens_ahead, np.int32)])
        proposed = propose(text, k - len(tokens_ahead))
        tokens_ahead = [*tokens_ahead, *proposed][:k]
    return tokens_ahead[: data.matcher.allowed(output, tokens_ahead)]


def failed(
    plan: Plan,
    rows: Sequence[SequenceData],
    sequences: Mapping[str, SequenceData],
    after: SchedulerState,
) -> dict[str, FinishReason]:
    """The unfinished sequences of a plan whose matcher has failed, with the reason that they end
    for.

    The matchers take the new tokens here. The log says why one has failed.

    Args:
        rows: the records of the plan's rows, from before the step.
        sequences: those of the unfinished sequences after it.
        after: the state after the commit, whose running sequences know their lengths.
    """
    names = [seq.request_id for seq, data in zip(plan.seqs, rows, strict=True) if data.matcher]
    names = [name for name in names if name in sequences]
    if not names:
        return {}
    running = zip(after.running.seqs, after.running.lengths, strict=True)
    lengths = {seq.request_id: length for seq, length in running}
    reasons: dict[str, FinishReason] = {}
    for name in names:
        matcher = sequences[name].matcher
        if matcher is None or name not in lengths:
            continue
        if matcher.after(_output(sequences[name], lengths[name])) is None:
            log.warning(
                "request %r is cancelled: its structured output failed: %s", name, matcher.error
            )
            reasons[name] = "abort"
    return reasons


def _output(data: SequenceData, length: int) -> np.ndarray:
    return data.tokens[data.prompt_len : length]
