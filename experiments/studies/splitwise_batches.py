"""Splitwise's batches of prompts as a policy: whole prompts, 2,048 tokens of them in a step, or one
longer prompt.

Section IV-B of the paper and `max_batch_tokens` of its simulator's start states. Its limit counts
decodes of the step too, and stops some of them for a step to keep it; here decodes go on.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedjax.host.policies import FCFS, Cached
from pagedjax.host.types import Running, Seq

MOST = 2048  # tokens of prompts in a step


def _order(waiting: tuple[Seq, ...], running: Running, cached: Cached) -> Sequence[Seq]:
    """The first of the queue, and as many after it as keep the sum of their tokens within MOST."""
    total = 0
    for i, seq in enumerate(waiting):
        total += seq.length
        if total > MOST:
            return waiting[: max(i, 1)]
    return waiting


WHOLE = FCFS._replace(name="whole prompts, 2048 tokens", order=_order)
