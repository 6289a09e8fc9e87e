"""`mlfq`: a skip-join multi-level feedback queue (FastServe; Wu et al. 2023, arXiv 2305.05920).

There are `levels` queues. A sequence at level i has a quantum of `quantum * ratio**i` tokens of
work. When the quantum is used up, the sequence is demoted to the next level. The last level has no
limit. A generated token is one token of work. A prompt token is `prompt_work` of one, and counts
once, at the first admission. A long prompt would use up the quanta of several levels at once. So a
request joins the first level whose quantum holds its prompt and one token (skip-join). Lower levels
are offered first, and within a level the earlier arrival. If a sequence does not fit, running
sequences of higher levels are evicted for it, those of the highest level first.

The paper measures work in the time of iterations. Here work is counted in tokens, so that a run
replays without a clock. FastServe keeps the cache of an evicted sequence in host memory
(`preemption="swap"`). Without a swap space the sequence is computed again, which is not counted as
work.

Ageing: a sequence waits for its next token. After `patience` steps of waiting it is promoted to
level 0, with a full quantum. A step that sends it back to the queue counts as a step of waiting.
Otherwise a sequence that is sent back before each token would never be promoted.

Why every request ends: take the oldest unfinished request. If it generates no token for `patience`
steps of waiting, it is promoted to level 0, and is the first there. The sequences that run at level
0 end, or use up their quanta and are demoted. Demoted ones are evicted for it. At level 0 nothing
evicts it, and `preempt` takes it last, until it has generated `quantum` tokens. So each promotion
gives it at least one token, and it ends. By induction each request becomes the oldest. Under a load
of short requests, a long request advances by `quantum` tokens in about `patience` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Annotated, NamedTuple

from immutables import Map

from pagedjax.host.policies.eviction import by_rank, make_way, most_urgent
from pagedjax.host.policies.policy import Policy, name_with
from pagedjax.host.types import (
    TOKEN_EVENTS,
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


class Job(NamedTuple):
    """A sequence in the queues.

    work: tokens of the quantum of its level that are used up.
    prompt: prompt tokens that have not been counted as work.
    since: the step in which it began to wait; None: it runs.
    waited: steps of earlier waits since its last token, or since its first admission if that came
        later. The wait that began at `since` is not in it.
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
        """The jobs, with numbers that lead to the same decisions made equal.

        - `waited` has all steps of waiting, those since `since` too. It is at most `patience`,
          because a longer wait changes nothing.
        - `waited` is 0 at level 0, because nothing there is promoted. A job leaves level 0 by a
          token or by its first admission, and either sets `waited` anew.
        - `since` is 0 for a job that was not offered yet, and 1 for another job that waits.
        - `work` is 0 at the last level, which has no quantum to use up.
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


def _after_events(
    memory: Queues, events: Sequence[PolicyEvent], quanta: Sequence[float], prompt_work: float
) -> Map[str, Job]:
    """The unfinished jobs after the events of a step.

    Args:
        quanta: of each level, in tokens.
    """

    def worked(job: Job, work: float) -> Job:
        """A job after some work: at the next level if its quantum is used up."""
        work += job.work
        if work < quanta[job.level]:
            return job._replace(work=work)
        return job._replace(level=job.level + 1, work=0.0)

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
        elif isinstance(event, TOKEN_EVENTS):
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
    return jobs.finish()


@cache
def _policy(levels: int, quantum: int, ratio: int, prompt_work: float, patience: int) -> Policy:
    quanta = [quantum * ratio**level for level in range(levels - 1)] + [float("inf")]

    def observe(memory: Queues, events: Sequence[PolicyEvent], now: float | None) -> Queues:
        step = memory.step + 1
        unfinished = _after_events(memory, events, quanta, prompt_work)
        promoted = {
            name: job._replace(level=0, work=0.0)
            for name, job in unfinished.items()
            if job.since is not None and job.level and waited_in_all(job, step) >= patience
        }
        return memory._replace(step=step, jobs=unfinished.update(promoted))

    def evict(memory: Queues, waiting: Sequence[Seq], running: Running) -> list[str]:
        first = most_urgent(waiting, partial(rank, memory))
        if first is None:
            return []
        job = memory.jobs[first.request_id]
        if job.since == memory.step:
            return []  # it was not offered yet
        return make_way(
            first,
            running.seqs,
            rank=partial(rank, memory),
            evictable=lambda seq: memory.jobs[seq.request_id].level > job.level,
        )

    order, preempt = by_rank(rank)
    name = name_with(mlfq, levels, quantum, ratio, prompt_work, patience)
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
