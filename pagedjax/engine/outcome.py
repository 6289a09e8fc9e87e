"""`Outcome`: what a step computed, for those who read more of it than tokens.

Log-probabilities, beam searches (results.py), pooled states (pooling.py), taps (taps.py) and
grammars (token_masks.py) are its readers: each takes what it knows and the outcome, and returns
what it knows now, and what the step's result has of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pagedjax.engine.lookahead import SentStep
from pagedjax.engine.requests import SequenceData
from pagedjax.host.drafts import Sample
from pagedjax.host.types import Plan


class Outcome(NamedTuple):
    """What a step computed.

    sent: the step that computed the plan, with its output on the device.
    rows: of each row of the plan, its row in the sent step.
    sampled: as for `scheduler.commit`.
    data: of each row of the plan, the record of its sequence from before the step.
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

    def reaches_end(self, row: int) -> bool:
        """Whether a row computed its last known token, so that its sample is a new token."""
        plan = self.plan
        return plan.starts[row] + plan.counts[row] >= plan.lengths[row]
