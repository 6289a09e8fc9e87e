"""Splitwise's batches of prompts as a policy: whole prompts of at most 2,048 tokens together in a
step, or one longer prompt.

The limit is in section IV-B of the paper, and is `max_batch_tokens` in the start states of its
simulator. There it counts the decodes of the step too, and some of them may have to pause for a
step. Here all decodes go on.
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
