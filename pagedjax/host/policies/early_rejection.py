"""`early_rejection`: who would miss its targets is turned away at once (Mooncake; Qin et al. 2024,
arXiv 2407.00079).

In the first step after its arrival, a request is rejected if one of two predictions is above its
target. What is accepted is served first come, first served, and is never rejected later.

- Its first token: the known tokens that wait before it, those that running prompts still lack, and
  its own prompt, at the rate of prompt tokens so far. The target is `ttft_s`.
- The gaps between its tokens: the seconds of a step for each running sequence so far, times the
  sequences that will run when its prompt is computed ("early rejection based on prediction").
  Sequences run then that run or wait now, without those that are predicted to have ended.
  Without predictions of lengths all of them stay. The target is `itl_s`.

Targets of a service class come before the defaults. Before the first measured steps nothing is
rejected. Both rates are running means, which move by `speed` of the difference in each step.

Why every request ends: a rejected one ends at once, and the others are served in order of arrival,
while the latest arrival is preempted (`fcfs`). The bound is that of `fcfs`: none overtakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from immutables import Map

from pagedjax.host.policies.policy import Cached, Policy, arrival_of, name_with
from pagedjax.host.types import (
    Admitted,
    Beamed,
    Finished,
    Forked,
    PolicyEvent,
    Preempted,
    Resumed,
    Running,
    Sampled,
    Seq,
    Submitted,
)


class Job(NamedTuple):
    """An unfinished sequence.

    prompt: prompt tokens that are not computed; 0 when it has sampled.
    left: output tokens that it is predicted to have left; None: nothing is predicted.
    runs: whether it runs.
    """

    prompt: int
    left: int | None
    runs: bool


class Load(NamedTuple):
    """The memory.

    jobs: unfinished sequences by id.
    new: ids of those that came since the last step.
    now: time of the last step; None: there was none, or nothing was unfinished then.
    token_s: seconds of a prompt token; 0: none was measured.
    row_s: seconds of a step for each of its sequences; 0: none was measured.
    prompt_s: seconds of the steps with prompts, since the last prompt that was computed.
    """

    jobs: Map[str, Job] = Map()
    new: frozenset[str] = frozenset()
    now: float | None = None
    token_s: float = 0.0
    row_s: float = 0.0
    prompt_s: float = 0.0


def early_rejection(
    ttft_s: float = 10.0,
    itl_s: float = 1.0,
    targets: tuple[tuple[str, float, float], ...] = (),
    speed: float = 0.1,
) -> Policy:
    """The policy.

    Args:
        ttft_s: seconds to the first token, at most.
        itl_s: seconds between tokens, at most.
        targets: (service class, ttft_s, itl_s) of classes with their own.
        speed: of the running means, above 0 and at most 1.

    Raises:
        ValueError: a target is not above 0, or `speed` is outside of its bounds.
    """
    rows = tuple([(str(name), float(ttft), float(itl)) for name, ttft, itl in targets])
    for seconds in (ttft_s, itl_s, *[number for row in rows for number in row[1:]]):
        if not seconds > 0:
            raise ValueError(f"early_rejection has a target of {seconds!r} s; it must be above 0")
    if not 0 < speed <= 1:
        raise ValueError(f"early_rejection has speed {speed!r}; it must be above 0 and at most 1")
    return _policy(float(ttft_s), float(itl_s), rows, float(speed))


@cache
def _policy(
    ttft_s: float, itl_s: float, targets: tuple[tuple[str, float, float], ...], speed: float
) -> Policy:
    targets_of = {name: (ttft, itl) for name, ttft, itl in targets}

    def observe(memory: Load, events: Sequence[PolicyEvent], now: float | None) -> Load:
        assert now is not None, "the policy is timed"
        next_memory = after_events(memory, events, now)
        if next_memory.new and len(next_memory.new) == len(next_memory.jobs):
            # what ran has ended, and the engine may have been idle since then
            return next_memory._replace(prompt_s=0.0)
        return after_events(measured(memory, events, now, speed), events, now)

    def reject(memory: Load, waiting: Sequence[Seq]) -> list[str]:
        ids: list[str] = []
        jobs_before = {name: job for name, job in memory.jobs.items() if name not in memory.new}
        for seq in sorted(waiting, key=arrival_of):
            name = seq.request_id
            if name not in memory.new:
                continue
            first, gap = predicted(memory, jobs_before, memory.jobs[name])
            targets = targets_of.get(seq.request.service_class, (ttft_s, itl_s))
            if first > targets[0] or gap > targets[1]:
                ids.append(name)
            else:
                jobs_before[name] = memory.jobs[name]
        return ids

    def order(memory: Load, waiting: Sequence[Seq], running: Running, cached: Cached) -> list[Seq]:
        return sorted(waiting, key=arrival_of)

    name = name_with(
        "early_rejection",
        (ttft_s, 10.0, "ttft_s"),
        (itl_s, 1.0, "itl_s"),
        (targets, (), "targets"),
        (speed, 0.1, "speed"),
    )
    return Policy(
        name,
        order,
        init=Load,
        observe=observe,
        reject=reject,
        show=shown,
        timed=True,
        bound=0,
    )


def predicted(memory: Load, before: dict[str, Job], job: Job) -> tuple[float, float]:
    """Seconds to a request's first token, and then between its tokens.

    Args:
        before: the sequences before it, by id.
    """
    tokens = job.prompt + sum([other.prompt for other in before.values()])
    first = memory.token_s * tokens
    rows = 1 + len(before)
    step_s = memory.row_s * max(1, sum([other.runs for other in before.values()]))
    if step_s:
        steps = first / step_s
        ended = [
            other for other in before.values() if other.left is not None and other.left < steps
        ]
        rows -= len(ended)
    return first, memory.row_s * rows


def measured(memory: Load, events: Sequence[PolicyEvent], now: float, speed: float) -> Load:
    """The memory with the times of the step that ended. Events are those since it began."""
    if memory.now is None:
        return memory
    seconds = now - memory.now
    prompts = 0
    rows = 0
    for event in events:
        if isinstance(event, Sampled):
            rows += len(set(event.request_ids))
            jobs = [memory.jobs.get(name) for name in event.request_ids]
            prompts += sum([job.prompt for job in jobs if job is not None])
    if prompts or any([job.runs and job.prompt for job in memory.jobs.values()]):
        prompt_s = memory.prompt_s + seconds
        if not prompts:
            return memory._replace(prompt_s=prompt_s)
        token_s = moved(memory.token_s, prompt_s / prompts, speed)
        return memory._replace(token_s=token_s, prompt_s=0.0)
    if not rows:
        return memory
    return memory._replace(row_s=moved(memory.row_s, seconds / rows, speed))


def moved(mean: float, value: float, speed: float) -> float:
    """A running mean with a new value; the first value is the mean."""
    return mean + speed * (value - mean) if mean else value


def after_events(memory: Load, events: Sequence[PolicyEvent], now: float) -> Load:
    """The memory with the sequences after some events."""
    jobs = memory.jobs.mutate()
    new: set[str] = set()
    for event in events:
        if isinstance(event, Submitted):
            request = event.seq.request
            jobs[request.request_id] = Job(request.prompt_len, request.predicted, False)
            new.add(request.request_id)
        elif isinstance(event, Finished):
            jobs.pop(event.request_id, None)
            new.discard(event.request_id)
        elif isinstance(event, (Admitted, Resumed, Preempted)):
            job = jobs[event.request_id]
            jobs[event.request_id] = job._replace(runs=not isinstance(event, Preempted))
        elif isinstance(event, (Forked, Beamed)):
            jobs.update(dict.fromkeys(event.request_ids, Job(0, None, True)))
        elif isinstance(event, Sampled):
            for name in event.request_ids:
                job = jobs.get(name)
                if job is not None:
                    left = None if job.left is None else max(0, job.left - 1)
                    jobs[name] = Job(0, left, job.runs)
    return memory._replace(jobs=jobs.finish(), new=frozenset(new), now=now if jobs else None)


def shown(memory: Load) -> str:
    """The rates, and how many sequences there are."""
    running = sum([job.runs for job in memory.jobs.values()])
    tokens = sum([job.prompt for job in memory.jobs.values()])
    return (
        f"{running} of {len(memory.jobs)} sequences run, {tokens} prompt tokens to compute\n"
        f"a prompt token takes {memory.token_s:.6f} s, a step {memory.row_s:.6f} s a sequence"
    )
