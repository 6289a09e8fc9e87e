"""`mlfq`: a skip-join multi-level feedback queue (FastServe; Wu et al. 2023, arXiv 2305.05920).

There are `levels` queues. A sequence of level i has `quantum * ratio**i` tokens of work before it
is demoted to the next level; the last level has no end. Work is a token for each generated token,
and `prompt_work` for each prompt token at the first admission. So that a long prompt does not use
up the quanta of the first levels, a request joins the first level whose quantum holds its prompt
and one token (skip-join). Lower levels are offered first, and in a level the earlier arrival. If a
sequence does not fit, running ones of higher levels are evicted for it, the highest first.

The paper measures work in the time of iterations; here it is counted in tokens, so that a run
replays without a clock. FastServe keeps the cache of an evicted sequence in host memory
(`preemption="swap"`); without a swap space it is computed again, which is no work here.

Ageing: a sequence that waited for `patience` steps since it last generated a token is promoted to
level 0, with a quantum of its own. To be sent back to the queue counts as a step of waiting: else
one that is sent back before each token would never be promoted.

Why every request ends: take the oldest unfinished request. If it generates no token, it is at level
0 after `patience` steps of waiting, and the first there. The sequences that run at level 0 end or
are demoted by their quanta, and then they are evicted for it. At level 0 nothing evicts it, and
`preempt` takes it last, until it has generated `quantum` tokens. So it generates a token at least
each time, and ends. By induction each request becomes the oldest. Under a load of short requests a
long one advances by `quantum` tokens in about `patience` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, NamedTuple

from immutables import Map

from pagedjax.host.policies.eviction import make_way, most_urgent
from pagedjax.host.policies.policy import Cached, Policy, name_with
from pagedjax.host.types import (
    Admitted,
    Beamed,
    Finished,
    PolicyEvent,
    Preempted,
    Resumed,
    Running,
    Sampled,
    Seq,
    Submitted,
)
from pagedjax.options.config import Integers


class Job(NamedTuple):
    """A sequence in the queues.

    work: tokens at this level.
    prompt: prompt tokens that are no work yet.
    since: the step in which it began to wait; None: it runs.
    waited: steps since its last token (its first admission, if that is later), without this wait.
    """

    level: int
    work: float
    prompt: int
    since: int | None
    waited: int = 0


class Queues(NamedTuple):
    """The memory: the number of the step, and the unfinished sequences by id.

    levels, patience: as `mlfq` has them.
    """

    step: int = 0
    jobs: Map[str, Job] = Map()
    levels: int = 4
    patience: int = 256

    def folded(self) -> Map[str, Job]:
        """What decides about the future: the jobs, where `waited` is the whole sum, and `since` is
        0 for a job that was not offered yet, and else 1.

        Longer than `patience` is as long. At level 0 nothing is promoted, and a job leaves it by a
        token or its first admission, with which the sum begins anew. Work at the last level ends no
        quantum.
        """
        last = self.levels - 1
        jobs = self.jobs.mutate()
        for name, job in self.jobs.items():
            waited = min(waited_in_all(job, self.step), self.patience) if job.level else 0
            job = job._replace(waited=waited)
            if job.since is not None:
                job = job._replace(since=min(self.step - job.since, 1))
            jobs[name] = job if job.level < last else job._replace(work=0.0)
        return jobs.finish()


def waited_in_all(job: Job, step: int) -> int:
    """Steps that a job has waited since its last token."""
    return job.waited if job.since is None else job.waited + step - job.since


def mlfq(
    levels: Annotated[int, Integers(1)] = 4,
    quantum: Annotated[int, Integers(1)] = 16,
    ratio: Annotated[int, Integers(2)] = 4,
    prompt_work: float = 0.0625,
    patience: Annotated[int, Integers(1)] = 256,
) -> Policy:
    """The policy.

    Args:
        levels: the number of queues.
        quantum: tokens of work at level 0.
        ratio: of the quanta of two levels that follow each other.
        prompt_work: work of a prompt token, in generated tokens.
        patience: steps that a sequence waits for a token before it is promoted to level 0.

    Raises:
        ValueError: `prompt_work` is negative.
    """
    if not prompt_work >= 0:
        raise ValueError(f"mlfq has prompt_work {prompt_work!r}; it must be at least 0")
    return _policy(levels, quantum, ratio, float(prompt_work), patience)


@cache
def _policy(levels: int, quantum: int, ratio: int, prompt_work: float, patience: int) -> Policy:
    quanta = [quantum * ratio**level for level in range(levels - 1)] + [float("inf")]

    def worked(job: Job, work: float) -> Job:
        """A job after some work: its level, when it has used up the quantum of others."""
        work += job.work
        if work < quanta[job.level]:
            return job._replace(work=work)
        return job._replace(level=job.level + 1, work=0.0)

    def observe(memory: Queues, events: Sequence[PolicyEvent], now: float | None) -> Queues:
        step = memory.step + 1
        jobs = memory.jobs.mutate()
        for event in events:
            if isinstance(event, Submitted):
                request = event.seq.request
                work = prompt_work * request.prompt_len
                level = next(i for i, tokens in enumerate(quanta) if work + 1 <= tokens)
                jobs[event.seq.request_id] = Job(level, 0.0, request.prompt_len, step)
                for name in request.forks:
                    jobs[name] = Job(level, work, 0, None)
            elif isinstance(event, Finished):
                jobs.pop(event.request_id, None)
            elif isinstance(event, (Sampled, Beamed)):
                for name in event.request_ids:
                    if name in jobs:
                        jobs[name] = worked(jobs[name], 1.0)._replace(waited=0)
            elif isinstance(event, Preempted):
                job = jobs[event.request_id]
                jobs[event.request_id] = job._replace(since=step, waited=job.waited + 1)
            elif isinstance(event, (Admitted, Resumed)):
                job = jobs[event.request_id]
                waited = 0 if job.prompt else waited_in_all(job, memory.step)
                job = worked(job, prompt_work * job.prompt)
                jobs[event.request_id] = job._replace(prompt=0, since=None, waited=waited)
        unfinished = jobs.finish()
        promoted = {
            name: job._replace(level=0, work=0.0)
            for name, job in unfinished.items()
            if job.since is not None and job.level and waited_in_all(job, step) >= patience
        }
        return memory._replace(step=step, jobs=unfinished.update(promoted))

    def order(
        memory: Queues, waiting: Sequence[Seq], running: Running, cached: Cached
    ) -> list[Seq]:
        return sorted(waiting, key=lambda seq: rank(memory, seq))

    def preempt(memory: Queues, running: Sequence[Seq]) -> Seq:
        return max(running, key=lambda seq: rank(memory, seq))

    def evict(memory: Queues, waiting: Sequence[Seq], running: Running) -> list[str]:
        first = most_urgent(waiting, lambda seq: rank(memory, seq))
        if first is None:
            return []
        job = memory.jobs[first.request_id]
        if job.since == memory.step:
            return []  # it was not offered yet
        return make_way(
            first,
            running.seqs,
            rank=lambda seq: rank(memory, seq),
            evictable=lambda seq: memory.jobs[seq.request_id].level > job.level,
        )

    name = name_with(
        "mlfq",
        (levels, 4, "levels"),
        (quantum, 16, "quantum"),
        (ratio, 4, "ratio"),
        (prompt_work, 0.0625, "prompt_work"),
        (patience, 256, "patience"),
    )
    return Policy(
        name,
        order,
        preempt=preempt,
        init=lambda: Queues(levels=levels, patience=patience),
        observe=observe,
        evict=evict,
        show=lambda memory: shown(memory, levels),
    )


def rank(memory: Queues, seq: Seq) -> tuple[int, int]:
    """The place of a sequence: the smaller, the sooner it runs."""
    return memory.jobs[seq.request_id].level, seq.arrival


def shown(memory: Queues, levels: int) -> str:
    """The sequences of each level; those that wait are in parentheses."""
    lines = []
    for level in range(levels):
        names = [
            name if job.since is None else f"({name})"
            for name, job in sorted(memory.jobs.items())
            if job.level == level
        ]
        lines.append(f"level {level}: {' '.join(names) or 'none'}")
    return "\n".join(lines)
