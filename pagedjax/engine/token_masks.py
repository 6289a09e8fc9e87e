"""Structured outputs in the engine: a reader that knows the matcher of each sequence.

The reader gives the masks of a step's samples and the drafts that a grammar forces. It reads the
new tokens, and ends the sequences whose matcher has failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from immutables import Map

from pagedjax.engine.outcome import NewRequest, Outcome, Reader, Reading
from pagedjax.engine.requests import SequenceData
from pagedjax.host.types import FinishReason, Plan
from pagedjax.options.params import SamplingParams
from pagedjax.text.structured.matcher import MaskRow, Matcher, masks

log = logging.getLogger("pagedjax.engine")

Matchers = Map[str, Matcher]  # by sequence id
# (known tokens [length], most drafts) -> drafts
Propose = Callable[[np.ndarray, int], Sequence[int] | np.ndarray]


def start(request: NewRequest) -> Mapping[str, Matcher]:
    """A matcher for each branch of a new request."""
    grammar = request.submitted.grammar
    assert grammar is not None, "`prepare` refuses structured_outputs without one"
    return {name: grammar.matcher() for name in request.submitted.names}


def of_samples(
    matchers: Matchers, plan: Plan, sequences: Mapping[str, SequenceData]
) -> Mapping[int, bytes]:
    """Returns sample index -> mask, for the samples of the rows that have a matcher and sample in
    this step.

    A mask is the bytes of uint32 words with one bit for each token, set if the token is allowed.

    Args:
        sequences: the records, by id. Drafts are in their tokens, behind the known ones.
    """
    mask_rows = []
    drafts = plan.drafts or (0,) * len(plan.seqs)
    first = 0  # the index of a row's first sample
    for seq, start, count, length, k in zip(
        plan.seqs, plan.starts, plan.counts, plan.lengths, drafts, strict=True
    ):
        matcher = matchers.get(seq.request_id)
        if matcher is not None and start + count >= length:
            data = sequences[seq.request_id]
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
    matcher: Matcher | None, data: SequenceData, length: int, k: int, propose: Propose
) -> Sequence[int] | np.ndarray:
    """At most k drafts: the tokens that the grammar forces, then those that `propose` gives, up to
    the first one that the grammar does not allow.

    A forced token is a draft like any other: it is accepted because nothing else can be sampled. So
    a text that must come takes one step (jump-forward decoding).
    """
    if matcher is None:
        return propose(data.tokens[:length], k)[:k]
    output = _output(data, length)
    tokens_ahead = matcher.forced(output, k)
    if len(tokens_ahead) < k:
        text = np.concatenate([data.tokens[:length], np.array(tokens_ahead, np.int32)])
        proposed = propose(text, k - len(tokens_ahead))
        tokens_ahead = [*tokens_ahead, *proposed][:k]
    return tokens_ahead[: matcher.allowed(output, tokens_ahead)]


def read(matchers: Matchers, outcome: Outcome) -> Reading:
    """Let the matchers take the new tokens. A sequence whose matcher has failed is ended, unless
    this step ends it anyway. The log says why a matcher has failed.
    """
    plan = outcome.plan
    ends: dict[str, FinishReason] = {}
    for i in outcome.rows_of(matchers):
        seq = plan.seqs[i]
        matcher = matchers[seq.request_id]
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
    """Whether the step after this plan cannot be predicted: a row has a matcher, and its grammar
    needs the token that this plan samples.
    """
    return any(seq.request_id in matchers for seq in plan.seqs)


MASKS = Reader(
    "token masks",
    SamplingParams,
    read=read,
    options=("structured_outputs",),
    start=start,
    masks=of_samples,
    decides=decides,
)


def matchers_in(readers: Mapping[str, Matchers]) -> Matchers:
    """The matchers among the entries of all readers."""
    return readers.get(MASKS.name, Map())


def _output(data: SequenceData, length: int) -> np.ndarray:
    return data.tokens[data.prompt_len : length]
