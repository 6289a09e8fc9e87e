"""Given tokens in the engine (`SamplingParams.trace_decode_token_ids`, and `Engine.add(given=...)`):
a reader that knows which token each sample of a sequence has to be.

The mask of such a sample allows one token, so the step samples it in place of another one, and all
that follows has it: the next step on the device, the cache, hashes of blocks. Log-probabilities are
those of the logits before the mask. A mask depends on the position alone, so steps can be
predicted. The programs are those of every engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from immutables import Map

from pagedjax.engine.outcome import NewRequest, Outcome, Reader, Reading
from pagedjax.engine.requests import SequenceData
from pagedjax.host.types import Plan
from pagedjax.options.params import SamplingParams


class GivenTokens(NamedTuple):
    """token_ids: of the output, from its beginning. words: of 32 bits in a mask."""

    token_ids: Sequence[int]
    words: int


def start(request: NewRequest) -> Mapping[str, GivenTokens]:
    """The given tokens of the sequences of a new request that have some, by their ids."""
    words = -(-request.runtime.request_rules.vocab_size // 32)
    return {
        name: GivenTokens(data.given_token_ids, words)
        for name, data in request.prepared.sequences.items()
        if data.given_token_ids is not None
    }


def of_samples(
    entries: Map[str, GivenTokens], plan: Plan, sequences: Mapping[str, SequenceData]
) -> Mapping[int, bytes]:
    """By the index of a sample, the mask that allows its given token alone. Behind the last given
    token nothing is forbidden.
    """
    masks = {}
    first_sample = 0
    drafts = plan.drafts or (0,) * len(plan.seqs)
    for seq, start, count, length, k in zip(
        plan.seqs, plan.starts, plan.counts, plan.lengths, drafts, strict=True
    ):
        entry = entries.get(seq.request_id)
        if entry is not None and start + count >= length:
            position = length - sequences[seq.request_id].prompt_len
            if position < len(entry.token_ids):
                masks[first_sample] = _mask(entry.token_ids[position], entry.words)
        first_sample += k + 1
    return masks


def _mask(token: int, words: int) -> bytes:
    """The mask that allows one token (`token_mask`)."""
    mask = np.zeros(words, np.uint32)
    mask[token // 32] = 1 << token % 32
    return mask.tobytes()


def read(entries: Map[str, GivenTokens], outcome: Outcome) -> Reading:
    """Nothing of a step changes what is given."""
    return Reading(entries)


GIVEN_TOKENS = Reader(
    "given tokens",
    SamplingParams,
    read=read,
    options=("trace_decode_token_ids", "given"),
    start=start,
    masks=of_samples,
)
