"""Speculation in the engine: drafts are written behind the known tokens, and verified by the
target's own samples.

A step samples the token after the known ones and after each draft. A draft is accepted if it equals
the token that was sampled in its place, and if all drafts before it are accepted. With the strict
rule each token is sampled with the same random number of (seed, position) as without speculation.
So tokens are the same for any drafter at any temperature (drafter-invariant speculation, arXiv
2408.07978); a drafter only decides how many tokens a step gives. With the rule "rejection" a sample
depends on its draft (device/rejection.py).

    candidates(...)   before `schedule`: which sequences should have drafts, and how many
    offer(...)        then: asks the drafter, writes its drafts, counts them
    verified(...)     after the step: of each row the accepted drafts, and one more token
    learned(...)      after `commit`: acceptance and times, from which
                      `candidates` chooses how many drafts pay
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from immutables import Map

from pagedjax.engine import token_masks
from pagedjax.engine.drafters import Drafter
from pagedjax.engine.drafters.drafter import called, proposed
from pagedjax.engine.requests import SequenceData
from pagedjax.engine.token_masks import Matchers
from pagedjax.host.drafts import Sample, cut_at_the_end
from pagedjax.host.types import NO_DRAFTS, Finished, Plan, Running, StepResult, Verified
from pagedjax.options.config import Speculative

WEIGHT = 0.1  # of a new time in a running average
HALF_LIFE = 64  # verified drafts after which an older one counts half in the average acceptance
# after so many steps without drafts, one draft is tried again, and what was known before counts
# half
RETRY = 32
NO_MATCHERS: Matchers = Map()
FIRST_GUESS = 0.7  # the share of accepted drafts that is assumed before any draft was verified


class Drafting(NamedTuple):
    """What an engine has learned about its drafts.

    memory: the drafter's own. The drafter may change it.
    acceptance: the share of accepted drafts among those whose predecessors were accepted, as a
        running average.
    tried: the number of drafts in that average, where old drafts count less.
    warm: the sizes (padded tokens) of steps that have run. The first step of a size takes two to
        three times as long on a CPU, so its time is not kept: it would forbid the drafts that could
        correct it.
    seconds: by the padded tokens of a step, the running average of its time, without the time of
        drafts on the device.
    draft_seconds: by the number of rows, rounded up to a bucket, the running average of the time of
        one draft on the device.
    idle: the number of steps since the last step with drafts.
    """

    drafter: Drafter
    options: Speculative = Speculative()
    memory: Any = None
    acceptance: float = FIRST_GUESS
    tried: float = 8.0  # the first guess counts as so many drafts
    warm: frozenset[int] = frozenset()
    seconds: Mapping[int, float] = {}
    draft_seconds: Mapping[int, float] = {}
    idle: int = 0


def start(drafter: Drafter, options: Speculative) -> Drafting:
    """Nothing learned yet."""
    return Drafting(drafter, options, called(drafter, "start"))


def offer(
    drafting: Drafting,
    draftable: Sequence[tuple[str, int]],
    k: int,
    sequences: Mapping[str, SequenceData],
    vocab_size: int,
    matchers: Matchers = NO_MATCHERS,
) -> Mapping[str, int]:
    """Writes drafts behind the known tokens, and returns the number of drafts for the next step, by
    sequence id.

    A drafter on the device offers as many drafts as it may. It makes them after `schedule`, when
    they have slots (`send`). A sequence whose tokens are given has no drafts: each of its tokens is
    to have a decode step of its own.

    Args:
        draftable, k: what `candidates` returned.
        matchers: the matchers of structured outputs.

    Raises:
        ValueError: the drafter gave what is no token of the model's vocabulary, or raised.
    """
    if not k:
        return NO_DRAFTS
    draftable = [
        (name, length) for name, length in draftable if sequences[name].given_token_ids is None
    ]
    if drafting.drafter.propose is None:
        return {name: k for name, _ in draftable}
    offered = {}
    for name, length in draftable:
        data = sequences[name]
        propose_for = partial(proposed, drafting.drafter, drafting.memory, name)
        drafts = np.asarray(token_masks.drafts(matchers.get(name), data, length, k, propose_for))
        if not len(drafts):
            continue
        if drafts.dtype.kind not in "iu" or drafts.min() < 0 or drafts.max() >= vocab_size:
            raise ValueError(
                f"drafter {drafting.drafter.name!r} drafted {drafts.tolist()} for {name!r}; the "
                f"vocabulary is 0 to {vocab_size - 1}, in integers; use a drafter with the model's "
                "own tokenizer"
            )
        data.tokens[length : length + len(drafts)] = drafts
        offered[name] = len(drafts)
    return offered


def candidates(
    drafting: Drafting, running: Running, buckets: Sequence[int]
) -> tuple[list[tuple[str, int]], int]:
    """The sequences that may have drafts, with their lengths; and how many drafts each should have.

    These are the decodes that have generated a token: from then on the tokens of a sequence are in
    an array of their own, with places for drafts.
    """
    draftable = [
        (seq.request.request_id, length)
        for seq, length, computed in zip(*running, strict=True)
        if length - computed == 1 and length > seq.request.prompt_len and not seq.request.beams
    ]
    num_tokens = drafting.options.num_tokens
    if not (drafting.options.adaptive and draftable):
        return draftable, num_tokens
    prompt_tokens = sum(running.lengths) - sum(running.computed) - len(draftable)
    return draftable, paying(drafting, num_tokens, len(draftable), prompt_tokens, buckets)


def paying(
    drafting: Drafting, limit: int, num_decodes: int, prompt_tokens: int, buckets: Sequence[int]
) -> int:
    """The number of drafts of each decode that gives the most tokens a second (Liu et al. 2024,
    arXiv 2406.14066).

    A decode with k drafts, each accepted with probability a, gives (1 - a^(k+1)) / (1 - a) tokens
    in expectation (Leviathan et al. 2023, equation 1). A step costs what steps of its padded size
    took (`cost`), and each draft what drafts took on the device.

    Args:
        limit: the most drafts of a decode.
        num_decodes: the number of sequences that may have drafts.
        prompt_tokens: the number of prompt tokens to compute. They come before drafts, so a step
            that is full of prompt tokens has no drafts.
        buckets: the padded tokens of steps, ascending.
    """

    def bucket(number: int) -> int:
        return buckets[min(bisect_left(buckets, number), len(buckets) - 1)]

    a = min(drafting.acceptance, 0.999)  # below 1, because 1 - a is a divisor
    best = 0
    rate = 0.0
    for k in range(limit + 1):
        tokens = num_decodes * (1 + k) + prompt_tokens
        if k and tokens > buckets[-1]:
            break
        seconds = cost(drafting.seconds, bucket(tokens))
        if seconds is None:  # time steps without drafts first
            return 0
        seconds += k * draft_cost(drafting.draft_seconds, bucket(num_decodes))
        tokens_per_second = num_decodes * (1 - a ** (k + 1)) / (1 - a) / seconds
        if tokens_per_second > rate * 1.001:  # at least 0.1 % more
            best = k
            rate = tokens_per_second
    if best == 0 and drafting.idle >= RETRY:
        return 1
    return best


def draft_cost(seconds: Mapping[int, float], rows: int) -> float:
    """The time of one draft of `rows` padded rows on the device. 0 if no draft was timed, so that a
    draft is tried.
    """
    timed = cost(seconds, rows)
    if timed is None and seconds:  # only larger drafts were timed
        return seconds[min(seconds)]
    return timed or 0.0


def cost(seconds: Mapping[int, float], size: int) -> float | None:
    """The time of a step of `size` padded tokens; None if no step of that size or a smaller one was
    timed.

    The time of a size that was never run is on the line between the times of its neighbours. A size
    above the largest costs as much as the largest, so it is tried.
    """
    below = max((t for t in seconds if t <= size), default=None)
    above = min((t for t in seconds if t >= size), default=None)
    if below is None:
        return None
    if above is None or above == below:
        return seconds[below]
    return seconds[below] + (seconds[above] - seconds[below]) * (size - below) / (above - below)


def verified(
    plan: Plan, sequences: Mapping[str, SequenceData], tokens: np.ndarray
) -> tuple[Sample, ...]:
    """What each row sampled. A row with drafts has its tokens up to the first token that differs
    from its draft or ends the sequence; that token is the last.

    Args:
        tokens: [R] the samples of the step.
    """
    samples: list[Sample] = []
    first = 0
    for seq, length, k in zip(plan.seqs, plan.lengths, plan.drafts, strict=True):
        sampled = tokens[first : first + k + 1].tolist()
        first += k + 1
        if not k:
            samples.append(sampled[0])
            continue
        drafts = sequences[seq.request.request_id].tokens[length : length + k].tolist()
        accepted = 0
        while accepted < k and sampled[accepted] == drafts[accepted]:
            accepted += 1
        samples.append(tuple(sampled[: accepted + 1]))
    return cut_at_the_end(plan, samples)


def learned(drafting: Drafting, result: StepResult) -> Drafting:
    """What a step taught: the share of accepted drafts, and its time."""
    event = next((event for event in result.events if isinstance(event, Verified)), None)
    if event is None:
        drafting = drafting._replace(idle=drafting.idle + bool(result.plan.seqs))
    else:
        # the first rejected draft was tried, and those behind it were not
        pairs = zip(event.accepted, event.drafts, strict=True)
        num_tried = sum(min(accepted + 1, k) for accepted, k in pairs)
        weight_of_past = 0.5 if drafting.idle >= RETRY else 1.0
        tried_before = drafting.tried * 0.5 ** (num_tried / HALF_LIFE) * weight_of_past
        accepted_drafts = drafting.acceptance * tried_before + sum(event.accepted)
        drafting = drafting._replace(
            acceptance=accepted_drafts / (tried_before + num_tried),
            tried=tried_before + num_tried,
            idle=0,
        )
    if result.compilations:
        return drafting
    size = result.padded_tokens
    if size in drafting.warm:
        step_seconds = result.finished - result.started - result.draft_seconds
        drafting = drafting._replace(seconds=_averaged(drafting.seconds, size, step_seconds))
    else:
        drafting = drafting._replace(warm=drafting.warm | {size})
    if not result.draft_seconds:
        return drafting
    seconds_of_draft = result.draft_seconds / max(result.plan.drafts)
    return drafting._replace(
        draft_seconds=_averaged(drafting.draft_seconds, result.draft_rows, seconds_of_draft)
    )


def _averaged(seconds: Mapping[int, float], size: int, new: float) -> Mapping[int, float]:
    """The running averages with a new time of steps of a size."""
    mean = seconds.get(size, new)
    return {**seconds, size: mean + WEIGHT * (new - mean)}


def show_output(drafting: Drafting, name: str, data: SequenceData, num_output: int) -> None:
    """Show the drafter the output of a sequence that ends or leaves: its first tokens behind the
    prompt.
    """
    output = data.tokens[data.prompt_len : data.prompt_len + num_output]
    called(drafting.drafter, "finished", drafting.memory, name, output)


def show_ended_outputs(
    drafting: Drafting, events: Mapping[str, Finished], sequences: Mapping[str, SequenceData]
) -> None:
    """Show the drafter the outputs of sequences that have ended, by their ids."""
    for name, event in events.items():
        data = sequences.get(name)
        if data is not None and event.num_output:
            show_output(drafting, name, data, event.num_output)
