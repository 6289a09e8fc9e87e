"""`early_rejection`: who would miss its targets is turned away at once (Mooncake; Qin et al. 2024,
arXiv 2407.00079).

In the first step after its arrival, a request is rejected if one of two predictions is above its
target. What is accepted is served first come, first served, and is never rejected later.

- Its first token: the known tokens that wait before it, those that running prompts still lack, and
  its own prompt, at the rate of prompt tokens so far. The target is `ttft_s`.
- The gaps between its tokens: the seconds of a step with the sequences that will run when its
  prompt is computed ("early rejection based on prediction"). Sequences run then that run or wait
  now, without those that are predicted to have ended. Without predictions of lengths all of them
  stay. The target is `itl_s`.

A step takes a base, most of which is the time to read the weights, and more seconds for each of its
sequences. Both are fitted to the steps so far, see `StepTimes`: once to those without prompts, and
once to those with a prompt, which are longer. A gap is their mean, by the share of each.

Targets of a service class come before the defaults. Before the first measured steps nothing is
rejected. All means are running means, which move by `speed` of the difference in each step.

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
    BRANCH_EVENTS,
    Admitted,
    Finished,
    PolicyEvent,
    Preempted,
    Resumed,
    Running,
    Sampled,
    Seq,
    Submitted,
)

VARIANCE = 0.01  # a spread of a tenth of a sequence tells little


class Job(NamedTuple):
    """An unfinished sequence.

    prompt: prompt tokens that are not computed; 0 when it has sampled.
    remaining: output tokens that are predicted to come; None: nothing is predicted.
    runs: whether it runs.
    """

    prompt: int
    remaining: int | None
    runs: bool


class StepTimes(NamedTuple):
    """Running means of steps of a kind: a regression of their seconds on their sequences.

    The slope is the covariance by the variance. It is at least 0, and at most the mean seconds by
    the mean sequences, so that the base is at least 0 too. So a prediction lies between the mean
    and what is in proportion to the sequences.

    While steps have equally many sequences, the slope is not known. Then it is 0: more sequences
    are predicted to take the same time. Only sequences that are accepted show what they cost. If
    the guess were that seconds are in proportion, an engine whose step takes more than half the
    target would reject the second sequence for ever, and never see that it costs little. The price:
    a burst that comes before any step with two sequences is accepted, if first tokens are in time.
    The variance is taken to be VARIANCE larger than it is, so that the slope goes to 0 when the
    spread is forgotten, and noise is not divided by nearly nothing.

    sequences: the mean of those that got a token after their first; 0: no step was measured.
    seconds: their mean.
    variance: of the sequences.
    covariance: of the sequences and the seconds.
    """

    sequences: float = 0.0
    seconds: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0


class Load(NamedTuple):
    """The memory.

    jobs: unfinished sequences by id.
    new: ids of those that came since the last step.
    now: time of the last step; None: there was none, or nothing was unfinished then.
    token_s: seconds of a prompt token; 0: none was measured.
    plain: the steps without prompts.
    mixed: the steps with prompts, in which a sequence got a token after its first.
    mixed_share: the share of `mixed` of both, a running mean.
    prompt_s: seconds of the steps with prompts, since the last prompt that was computed.
    """

    jobs: Map[str, Job] = Map()
    new: frozenset[str] = frozenset()
    now: float | None = None
    token_s: float = 0.0
    plain: StepTimes = StepTimes()
    mixed: StepTimes = StepTimes()
    mixed_share: float = 0.0
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

    name = name_with(early_rejection, ttft_s, itl_s, targets, speed)
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
    earlier = before.values()
    tokens = job.prompt + sum([job_before.prompt for job_before in earlier])
    first = memory.token_s * tokens
    rows = 1 + len(before)
    step_s = gap_seconds(memory, max(1, sum([job_before.runs for job_before in earlier])))
    if step_s:
        steps = first / step_s
        remaining = [job_before.remaining for job_before in earlier]
        rows -= sum([number is not None and number < steps for number in remaining])
    return first, gap_seconds(memory, rows)


def gap_seconds(memory: Load, sequences: int) -> float:
    """The predicted seconds between tokens if so many sequences run; 0 if nothing was measured."""
    plain = step_seconds(memory.plain, sequences)
    mixed = step_seconds(memory.mixed, sequences)
    return (1 - memory.mixed_share) * plain + memory.mixed_share * mixed


def step_seconds(steps: StepTimes, sequences: int) -> float:
    """The predicted seconds of a step of this kind; 0 if none was measured."""
    if not steps.sequences:
        return 0.0
    largest_slope = steps.seconds / steps.sequences
    slope = min(max(0.0, steps.covariance / (steps.variance + VARIANCE)), largest_slope)
    return steps.seconds + slope * (sequences - steps.sequences)


def with_step(steps: StepTimes, sequences: int, seconds: float, speed: float) -> StepTimes:
    """The means with a step more; the first step is the mean."""
    if not steps.sequences:
        return StepTimes(float(sequences), seconds)
    more_sequences = sequences - steps.sequences
    more_seconds = seconds - steps.seconds
    past_weight = 1 - speed
    return StepTimes(
        steps.sequences + speed * more_sequences,
        steps.seconds + speed * more_seconds,
        past_weight * (steps.variance + speed * more_sequences * more_sequences),
        past_weight * (steps.covariance + speed * more_sequences * more_seconds),
    )


def with_gaps(
    memory: Load, sequences: int, seconds: float, has_prompts: bool, speed: float
) -> Load:
    """The memory with a step in which so many sequences got a token after their first.

    A kind of steps without a share is forgotten, as with a speed of 1.
    """
    is_first = not (memory.plain.sequences or memory.mixed.sequences)
    share_speed = 1.0 if is_first else speed
    mixed_share = memory.mixed_share + share_speed * (has_prompts - memory.mixed_share)
    plain = memory.plain if mixed_share < 1 else StepTimes()
    mixed = memory.mixed if mixed_share > 0 else StepTimes()
    if has_prompts:
        mixed = with_step(mixed, sequences, seconds, speed)
    else:
        plain = with_step(plain, sequences, seconds, speed)
    return memory._replace(plain=plain, mixed=mixed, mixed_share=mixed_share)


def measured(memory: Load, events: Sequence[PolicyEvent], now: float, speed: float) -> Load:
    """The memory with the times of the step that ended. Events are those since it began."""
    if memory.now is None:
        return memory
    seconds = now - memory.now
    prompts = 0
    sequences = 0
    for event in events:
        if isinstance(event, Sampled):
            names = set(event.request_ids)
            prompt_tokens = [job.prompt for job in map(memory.jobs.get, names) if job is not None]
            prompts += sum(prompt_tokens)
            sequences += prompt_tokens.count(0)
    has_prompts = prompts > 0 or any([job.runs and job.prompt for job in memory.jobs.values()])
    if sequences:
        memory = with_gaps(memory, sequences, seconds, has_prompts, speed)
    if not has_prompts:
        return memory
    prompt_s = memory.prompt_s + seconds
    if not prompts:
        return memory._replace(prompt_s=prompt_s)
    token_s = moved(memory.token_s, prompt_s / prompts, speed)
    return memory._replace(token_s=token_s, prompt_s=0.0)


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
        elif isinstance(event, BRANCH_EVENTS):
            jobs.update(dict.fromkeys(event.request_ids, Job(0, None, True)))
        elif isinstance(event, Sampled):
            for name in event.request_ids:
                job = jobs.get(name)
                if job is not None:
                    remaining = None if job.remaining is None else max(0, job.remaining - 1)
                    jobs[name] = Job(0, remaining, job.runs)
    return memory._replace(jobs=jobs.finish(), new=frozenset(new), now=now if jobs else None)


def shown(memory: Load) -> str:
    """The rates, and how many sequences there are."""
    running = sum([job.runs for job in memory.jobs.values()])
    tokens = sum([job.prompt for job in memory.jobs.values()])
    base_s = gap_seconds(memory, 0)
    one_more = gap_seconds(memory, 1) - base_s
    return (
        f"{running} of {len(memory.jobs)} sequences run, {tokens} prompt tokens to compute\n"
        f"a prompt token takes {memory.token_s:.6f} s, a step {base_s:.6f} s "
        f"and {one_more:.6f} s for each of its sequences"
    )
