"""What a step's outputs mean: requested log-probabilities, and how searches continue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from pagedjax.engine.outcome import Outcome
from pagedjax.host.searches import Offer, RunningSearch
from pagedjax.host.types import BeamResult, Choice, TokenLogprobs


def advance_searches(
    searches: Mapping[int, RunningSearch], outcome: Outcome
) -> tuple[Mapping[int, RunningSearch], dict[str, Choice], tuple[BeamResult, ...]]:
    """Advance the searches whose branches have all been computed.

    Args:
        searches: by the group of their branches.

    Returns:
        (searches, how branches continue, by the id of the first one, results of the searches that
        ended)
    """
    plan = outcome.plan
    after = dict(searches)
    choices: dict[str, Choice] = {}
    results: list[BeamResult] = []
    for group, search in searches.items():
        # a preempted branch will offer again what it offered
        if not set(search.names).isdisjoint(plan.preempted):
            after[group] = search.without_offers()
    rows = [i for i, seq in enumerate(plan.seqs) if seq.request.beams]
    candidates = jax.device_get(outcome.sent.output.sampled) if rows else None
    first_samples = outcome.first_samples
    for i in rows:
        seq = plan.seqs[i]
        if seq.group is None or not outcome.reaches_end(i):
            continue
        search = after[seq.group]
        _, _, ids, logprobs = _ranked(candidates, first_samples[i], search.candidates)
        search = search.offer(seq.request_id, Offer(ids, logprobs))
        if search.complete:
            search, choice = search.advance()
            if choice:
                choices[search.names[0]] = choice
            else:
                results.append(BeamResult(search.names[0], search.search.finished))
        after[seq.group] = search
    return after, choices, tuple(results)


def logprobs(outcome: Outcome) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities that rows asked for: of prompt tokens, then of sampled ones."""
    return (*_of_prompts(outcome), *_of_samples(outcome))


def _of_prompts(outcome: Outcome) -> Iterator[TokenLogprobs]:
    plan = outcome.plan
    rows = [i for i, data in enumerate(outcome.data) if data.params.prompt_logprobs is not None]
    rows = [i for i in rows if not plan.seqs[i].request.beams]
    if not rows:
        return
    ranked = jax.device_get(outcome.sent.output.prompt)
    first_tokens = outcome.first_tokens
    for i in rows:
        data = outcome.data[i]
        count = data.params.prompt_logprobs
        assert count is not None
        start = plan.starts[i]
        end = min(start + plan.counts[i], data.prompt_len - 1)
        for position in range(start, end):  # each token predicts the one behind it
            token = int(data.tokens[position + 1])
            entry = _ranked(ranked, first_tokens[i] + position - start, count)
            yield TokenLogprobs(plan.seqs[i].request_id, True, position + 1, token, *entry)


def _of_samples(outcome: Outcome) -> Iterator[TokenLogprobs]:
    plan = outcome.plan
    rows = [i for i, data in enumerate(outcome.data) if data.params.logprobs is not None]
    rows = [i for i in rows if not plan.seqs[i].request.beams]
    if not rows:
        return
    ranked = jax.device_get(outcome.sent.output.sampled)
    first_samples = outcome.first_samples
    for i in rows:
        if not outcome.reaches_end(i):
            continue
        data = outcome.data[i]
        count = data.params.logprobs
        assert count is not None
        sample = outcome.sampled[i]
        tokens = sample if isinstance(sample, tuple) else (sample,)
        num_output = plan.lengths[i] - data.prompt_len
        for j, token in enumerate(tokens):
            entry = _ranked(ranked, first_samples[i] + j, count)
            yield TokenLogprobs(plan.seqs[i].request_id, False, num_output + j, token, *entry)


def _ranked(
    ranked: Any, i: int, count: int
) -> tuple[float, int, tuple[int, ...], tuple[float, ...]]:
    """(log-probability, rank, ids of the most likely tokens, their log-probabilities) of token i.

    Args:
        ranked: a `Ranked` on the host.
        count: of most likely tokens; a vocabulary may be smaller.
    """
    ids = ranked.top_ids[i, :count]
    logprobs = ranked.top_logprobs[i, :count]
    real = ids >= 0
    return (
        float(ranked.logprobs[i]),
        int(ranked.ranks[i]),
        tuple(ids[real].tolist()),
        tuple(logprobs[real].tolist()),
    )
