"""`srtf`: the shortest predicted remaining time first, with preemption (Fu et al. 2024, "Efficient
LLM Scheduling by Learning to Rank", arXiv 2408.15792).

A sequence's rank is its `predicted` output tokens less those that it has. Predictions need not be
lengths: only their order matters, as long as a generated token counts as one. If the first of the
queue does not fit, running sequences that have at least `margin` more tokens left are evicted for
it, the longest first. A prediction that was too short counts as no token left.

The guard against starvation: a sequence that has waited for `patience` steps in all is urgent from
then on. Urgent ones come before all others, in order of arrival, and are never evicted.

The bound: once a request is urgent, only older requests come before it. So it waits `patience`
steps in all, and for the running urgent ones and the older requests to end.

Why every request ends: take the oldest unfinished request. It waits for at most `patience` steps
before it is urgent, or it runs and advances. To be sent back counts as a step of waiting: else one
that is sent back before each token would never be urgent. When it is urgent, it is the first,
everything that is not urgent is evicted for it, and `preempt` takes it last. The urgent ones that
run end or are preempted. By induction each request becomes the oldest.

A request without a prediction counts as `default` tokens; without a default it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Annotated, NamedTuple

from immutables import Map

from pagedjax.host.policies.eviction import by_rank, make_way, most_urgent
from pagedjax.host.policies.policy import Policy, name_with
from pagedjax.host.types import (
    Admitted,
    Finished,
    PolicyEvent,
    Preempted,
    Resumed,
    Running,
    Seq,
    Submitted,
)
from pagedjax.options.config import Integers


class Wait(NamedTuple):
    """How long a sequence has waited.

    steps: in all, without the present wait.
    since: the step in which the present wait began; None: it runs.
    """

    steps: int
    since: int | None


class Waits(NamedTuple):
    """The memory: the number of the step, the unfinished sequences by id, and the urgent ones."""

    step: int = 0
    waits: Map[str, Wait] = Map()
    urgent: frozenset[str] = frozenset()

    def folded(self) -> Map[str, tuple[int | None, bool]]:
        """What decides about the future: of each sequence, the steps that it has waited in all
        (None: it is urgent), and whether it was not offered yet.

        A step of waiting adds one to them, wherever it stands, so the number of the step and the
        parts of the sum are left out. An urgent sequence stays urgent until it ends.
        """
        folded = Map[str, tuple[int | None, bool]]().mutate()
        for name, wait in self.waits.items():
            steps = wait.steps if wait.since is None else wait.steps + self.step - wait.since
            folded[name] = (None if name in self.urgent else steps, wait.since == self.step)
        return folded.finish()


def srtf(
    patience: Annotated[int, Integers(1)] = 256,
    margin: Annotated[int, Integers(1)] = 16,
    default: int | None = None,
) -> Policy:
    """The policy.

    Args:
        patience: steps that a sequence waits in all before it is urgent.
        margin: tokens that a running sequence has left beyond those of the one that it makes way
            for. What it has computed may have to be computed again.
        default: the tokens of a request without a prediction; None: such a request is an error.
    """
    return _policy(patience, margin, default)


@cache
def _policy(patience: int, margin: int, default: int | None) -> Policy:
    def remaining(seq: Seq) -> int:
        """Predicted output tokens that a sequence has not generated yet."""
        if seq.request.predicted is None and default is not None:
            return max(0, default - seq.num_output)
        return max(0, seq.predicted - seq.num_output)

    def rank(memory: Waits, seq: Seq) -> tuple[bool, int, int]:
        """The place of a sequence: the smaller, the sooner it runs."""
        if seq.request_id in memory.urgent:
            return False, 0, seq.arrival
        return True, remaining(seq), seq.arrival

    def observe(memory: Waits, events: Sequence[PolicyEvent], now: float | None) -> Waits:
        step = memory.step + 1
        waits = memory.waits.mutate()
        urgent = set(memory.urgent)
        for event in events:
            if isinstance(event, Submitted):
                waits[event.seq.request_id] = Wait(0, step)
                waits.update(dict.fromkeys(event.seq.request.forks, Wait(0, None)))
            elif isinstance(event, Finished):
                waits.pop(event.request_id, None)
                urgent.discard(event.request_id)
            elif isinstance(event, Preempted):
                # the step that sent it back counts, so that evictions alone make it urgent
                waits[event.request_id] = Wait(waits[event.request_id].steps + 1, step)
            elif isinstance(event, (Admitted, Resumed)):
                wait = waits[event.request_id]
                if wait.since is not None:
                    steps = wait.steps + memory.step - wait.since
                    waits[event.request_id] = Wait(steps, None)
        unfinished = waits.finish()
        for name, wait in unfinished.items():
            if wait.since is not None and wait.steps + step - wait.since >= patience:
                urgent.add(name)
        return Waits(step, unfinished, frozenset(urgent))

    def evict(memory: Waits, waiting: Sequence[Seq], running: Running) -> list[str]:
        first = most_urgent(waiting, partial(rank, memory))
        if first is None or memory.waits[first.request_id].since == memory.step:
            return []  # it was not offered yet
        is_urgent = first.request_id in memory.urgent
        tokens = remaining(first) + margin

        def evictable(seq: Seq) -> bool:
            if seq.request_id in memory.urgent:
                return False
            return is_urgent or remaining(seq) >= tokens

        return make_way(first, running.seqs, partial(rank, memory), evictable)

    order, preempt = by_rank(rank)
    name = name_with(srtf, patience, margin, default)
    return Policy(
        name, order, preempt=preempt, init=Waits, observe=observe, evict=evict, show=shown
    )


def shown(memory: Waits) -> str:
    """How many steps each waiting sequence has waited, the longest first."""
    steps = {
        name: wait.steps + memory.step - wait.since
        for name, wait in memory.waits.items()
        if wait.since is not None
    }
    lines = [
        f"{name}: waited {count} steps{', urgent' if name in memory.urgent else ''}"
        for name, count in sorted(steps.items(), key=lambda item: (-item[1], item[0]))
    ]
    return "\n".join(lines) or "nothing waits"
