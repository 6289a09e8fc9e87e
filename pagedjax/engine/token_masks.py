"""Structured outputs in the engine: a reader that knows the matcher of each sequence.

It gives the masks of a step's samples and the drafts that a grammar forces. It reads the tokens
that come, and ends the sequences whose matcher has failed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from immutables import Map

from pagedjax.engine.outcome import NewRequest, Outcome, Propose, Reader, Reading
from pagedjax.engine.requests import SequenceData
from pagedjax.host.types import FinishReason, Plan
from pagedjax.options.params import SamplingParams
from pagedjax.text.structured.matcher import Grammar, MaskRow, Matcher, masks

log = logging.getLogger("pagedjax.engine")

Matchers = Map[str, Matcher]


def start(request: NewRequest) -> Mapping[str, Matcher]:
    """A matcher for each branch of a new request."""
    grammar = request.submitted.grammar
    assert grammar is not None, "`prepare` refuses structured_outputs without one"
    return {name: grammar.matcher() for name in request.submitted.names}


def of_samples(matchers: Matchers, plan: Plan, rows: Sequence[SequenceData]) -> Mapping[int, bytes]:
    """By the index of the sample, the mask of each sample of a row that has a matcher and samples
    in this step.

    Args:
        rows: the records of the plan's rows. Drafts are in their tokens, behind the known ones.
    """
    mask_rows = []
    drafts = plan.drafts or (0,) * len(rows)
    first = 0
    for seq, data, start, count, length, k in zip(
        plan.seqs, rows, plan.starts, plan.counts, plan.lengths, drafts, strict=True
    ):
        matcher = matchers.get(seq.request_id)
        if matcher is not None and start + count >= length:
            guesses = data.tokens[length : length + k]
            output = _output(data, length)
            mask_rows.append(MaskRow(matcher, output, guesses, first, data.stop_ids))
        first += k + 1
    if not mask_rows:
        return {}
    table = masks(mask_rows, first)
    samples = [row.first + i for row in mask_rows for i in range(1 + len(row.drafts))]
    return {sample: table[sample].tobytes() for sample in samples}


def drafts(
    matcher: Matcher, data: SequenceData, length: int, k: int, propose: Propose
) -> Sequence[int] | np.ndarray:
    """At most k drafts: the tokens that the grammar forces, then those of (tokens, k) -> drafts
    that it allows.

    A forced token is a draft like any other: it is accepted because nothing else can be sampled. So
    a text that must come takes one step (jump-forward decoding).
    """
    output = _output(data, length)
    tokens_ahead = matcher.forced(output, k)
    if len(tokens_ahead) < k:
        text = np.concatenate([data.tokens[:length], np.array(tokens_ahead, np.int32)])
        proposed = propose(text, k - len(tokens_ahead))
        tokens_ahead = [*tokens_ahead, *proposed][:k]
    return tokens_ahead[: matcher.allowed(output, tokens_ahead)]


def read(matchers: Matchers, outcome: Outcome) -> Reading:
    """Let the matchers take the new tokens. A sequence whose matcher has failed ends, unless this
    step ends it. The log says why a matcher has failed.
    """
    plan = outcome.plan
    ends: dict[str, FinishReason] = {}
    for i, seq in enumerate(plan.seqs):
        matcher = matchers.get(seq.request_id)
        if matcher is None:
            continue
        length = plan.lengths[i]
        output = _output(outcome.data[i], length)
        if outcome.reaches_end(i):
            tokens = outcome.tokens_of(i)
            if seq.finish_reason(length + len(tokens), tokens[-1]):
                continue
            output = np.append(output, tokens)
        if matcher.after(output) is None:
            log.warning(
                "request %r is cancelled: its structured output failed: %s",
                seq.request_id,
                matcher.error,
            )
            ends[seq.request_id] = "abort"
    return Reading(matchers, ends=ends)


def decides(matchers: Matchers, plan: Plan) -> bool:
    """Whether a row has a matcher: what its grammar allows next depends on the token that is not
    known yet.
    """
    return any(seq.request_id in matchers for seq in plan.seqs)


MASKS = Reader(
    "token masks",
    SamplingParams,
    read=read,
    options=("structured_outputs",),
    start=start,
    masks=of_samples,
    drafts=drafts,
    decides=decides,
)


def grammar_of(readers: Mapping[str, Matchers], name: str) -> Grammar | None:
    """The grammar of a sequence; None without structured outputs.

    Args:
        readers: the entries of all readers.
    """
    matcher = readers.get(MASKS.name, Map()).get(name)
    return matcher.grammar if matcher else None


def _output(data: SequenceData, length: int) -> np.ndarray:
    return data.tokens[data.prompt_len : length]
