"""`Outcome`: what a step computed, and `Reader`: what reads more of it than tokens.

Log-probabilities, beam searches (results.py), pooled states (pooling.py), taps (taps.py),
structured outputs (token_masks.py) and given tokens (given_tokens.py) are readers; readers.py lists
them. A reader takes its entries and the outcome. It returns its new entries, and its part of the
step's result. It also says what the device must compute for it, and which tokens the next samples
may have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from immutables import Map

from pagedjax.device.side_outputs import NOTHING, SideOutputs
from pagedjax.engine.lookahead import SentStep
from pagedjax.engine.requests import EngineRequest, PreparedRequest, SequenceData
from pagedjax.engine.runtime import Runtime
from pagedjax.host.drafts import Sample
from pagedjax.host.types import Choice, FinishReason, Plan

Entries = Map[str, Any]  # what one reader keeps, by the id of a sequence


class Outcome(NamedTuple):
    """What a step computed.

    sent: the step that computed the plan, with its output on the device.
    rows: of each row of the plan, its row in the sent step.
    sampled: the argument of `scheduler.commit`.
    data: of each row of the plan, the record of its sequence from before the step; () if nothing
        reads the outcome.
    """

    plan: Plan
    sent: SentStep
    rows: Sequence[int]
    sampled: Sequence[Sample]
    data: Sequence[SequenceData]

    @property
    def first_samples(self) -> Sequence[int]:
        """Of each row of the plan, the index of its first sample in the sent step.

        A row with k drafts has k + 1 samples.
        """
        if not self.plan.drafts:
            return self.rows
        return np.cumsum([0, *(k + 1 for k in self.plan.drafts)]).tolist()

    @property
    def first_tokens(self) -> Sequence[int]:
        """Of each row of the plan, the index of its first token in the sent step."""
        begins = self.sent.cu_q_lens
        return [int(begins[row]) for row in self.rows]

    def rows_of(self, entries: Mapping[str, Any]) -> list[int]:
        """The rows of the plan whose sequences have entries."""
        return [i for i, seq in enumerate(self.plan.seqs) if seq.request_id in entries]

    def reaches_end(self, row: int) -> bool:
        """Whether a row computed its last known token, so that its sample is a new token."""
        plan = self.plan
        return plan.starts[row] + plan.counts[row] >= plan.lengths[row]

    def tokens_of(self, row: int) -> tuple[int, ...]:
        """What a row sampled: with drafts, the accepted ones and one more token."""
        sample = self.sampled[row]
        return sample if isinstance(sample, tuple) else (sample,)


class NewRequest(NamedTuple):
    """A request that the scheduler has accepted.

    submitted: as it came to the engine.
    """

    runtime: Runtime
    submitted: EngineRequest
    prepared: PreparedRequest


class Reading(NamedTuple):
    """What a reader has read.

    entries: its entries after the step.
    result: its part of `StepResult.outputs`; a false value, such as (), is left out.
    choices: how beams continue, by the id of the first beam.
    ends: sequences that end now, and why.
    """

    entries: Entries
    result: Any = ()
    choices: Mapping[str, Choice] = Map()
    ends: Mapping[str, FinishReason] = Map()


def asked(request: NewRequest) -> Mapping[str, Any]:
    """The entries of a reader that needs to know only which sequences ask."""
    return dict.fromkeys(request.submitted.names, True)


def no_side_outputs(entry: Any) -> SideOutputs:
    """What every step computes is enough for a reader."""
    return NOTHING


def unchanged(entries: Entries) -> Entries:
    """What a reader knows does not depend on the content of the cache."""
    return entries


class Reader(NamedTuple):
    """An output of steps beside tokens, or what must read tokens before the next step.

    Attributes:
        name: the name of its result in `StepResult.outputs`, and of its entries in
            `EngineState.readers`.
        params: the parameters of the requests that may ask for it.
        read: (entries, outcome) -> `Reading`. It is called in each step while it has entries,
            before the commit.
        options: fields of the parameters, or of an `EngineRequest`, one of which is set when a
            request asks; (): all requests with such parameters ask.
        start: (new request that asks) -> its entries, by the id of a sequence. It may refuse the
            request with a ValueError. An entry is deleted when its sequence ends.
        side_outputs: (entry) -> what the device must compute in the steps of that sequence.
        restarted: (entries) -> the entries when running sequences return to the queue.
        masks: (entries, plan, records of the sequences) -> for each sample that may not have all
            tokens, the mask of those that it may have, by the index of the sample. None: samples
            may have all tokens.
        decides: (entries, plan) -> whether the step after that plan needs what is read of it, and
            cannot be predicted. None: it never does.
    """

    name: str
    params: type
    read: Callable[[Entries, Outcome], Reading]
    options: tuple[str, ...] = ()
    start: Callable[[NewRequest], Mapping[str, Any]] = asked
    side_outputs: Callable[[Any], SideOutputs] = no_side_outputs
    restarted: Callable[[Entries], Entries] = unchanged
    masks: Callable[[Entries, Plan, Mapping[str, SequenceData]], Mapping[int, bytes]] | None = None
    decides: Callable[[Entries, Plan], bool] | None = None
