"""Who runs first and who makes way: what policies with a rank have in common.

A policy sees neither the budget nor the free blocks. It knows that a sequence does not fit when it
is still in the queue at the second step after it came or was sent back there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from pagedjax.host.policies.policy import Cached
from pagedjax.host.types import Running, Seq

Rank = Callable[[Seq], Any]  # the smaller, the more urgent


def by_rank(rank: Callable[[Any, Seq], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`order` and `preempt` of a policy that offers the least rank first and preempts it last.

    Args:
        rank: (memory, sequence) -> its rank.
    """

    def order(memory: Any, waiting: Sequence[Seq], running: Running, cached: Cached) -> list[Seq]:
        return sorted(waiting, key=partial(rank, memory))

    def preempt(memory: Any, running: Sequence[Seq]) -> Seq:
        return max(running, key=partial(rank, memory))

    return order, preempt


def make_way(
    blocked: Seq, running: Sequence[Seq], rank: Rank, evictable: Callable[[Seq], bool]
) -> list[str]:
    """The ids of running sequences that leave for a waiting one: the least urgent first, until they
    have as many rows and tokens as it needs.

    Args:
        evictable: whether a sequence may be evicted for it. Branches go together, so none goes if
            one of them may not.
    """
    staying = {seq.group for seq in running if seq.group is not None and not evictable(seq)}
    ids: list[str] = []
    tokens = 0
    rows = 0
    for seq in sorted(running, key=rank, reverse=True):
        if tokens >= blocked.length and rows >= blocked.num_rows:
            break
        if seq.group in staying or not evictable(seq):
            continue
        ids.append(seq.request_id)
        tokens += seq.length
        rows += seq.num_rows
    return ids


def most_urgent(seqs: Iterable[Seq], rank: Rank) -> Seq | None:
    """The sequence with the least rank; None of none."""
    return min(seqs, key=rank, default=None)
