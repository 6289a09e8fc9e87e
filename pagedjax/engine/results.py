"""What a step's outputs mean: requested log-probabilities, and how searches continue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from immutables import Map

from pagedjax.engine.outcome import Entries, NewRequest, Outcome, Reader, Reading
from pagedjax.host.searches import Offer, RunningSearch
from pagedjax.host.types import BeamResult, Choice, FinishReason, TokenLogprobs
from pagedjax.options.params import BeamSearchParams, SamplingParams


def start_search(request: NewRequest) -> Mapping[str, RunningSearch | None]:
    """The search of a new request, by the id of its first branch."""
    return {request.submitted.names[0]: request.prepared.search}


def advance_searches(searches: Map[str, RunningSearch], outcome: Outcome) -> Reading:
    """Advance the searches whose branches have all been computed. The result has a `BeamResult` for
    each search that ended.

    Args:
        searches: by the id of their first branch.
    """
    plan = outcome.plan
    choices: dict[str, Choice] = {}
    results: list[BeamResult] = []
    first_branches: dict[str, str] = {}
    for first_branch, search in searches.items():
        first_branches |= dict.fromkeys(search.names, first_branch)
        # a preempted branch will offer again what it offered
        if not set(search.names).isdisjoint(plan.preempted):
            searches = searches.set(first_branch, search.without_offers())
    rows = outcome.rows_of(first_branches)
    candidates = jax.device_get(outcome.sent.output.sampled) if rows else None
    first_samples = outcome.first_samples
    for i in rows:
        seq = plan.seqs[i]
        if not outcome.reaches_end(i):
            continue
        first_branch = first_branches[seq.request_id]
        search = searches[first_branch]
        _, _, ids, logprobs = _ranked(candidates, first_samples[i], search.candidates)
        search = search.offer(seq.request_id, Offer(ids, logprobs))
        if search.complete:
            search, choice = search.advance()
            if choice:
                choices[first_branch] = choice
            else:
                results.append(BeamResult(first_branch, search.search.finished))
        searches = searches.set(first_branch, search)
    ends: dict[str, FinishReason] = {
        result.request_id: result.sequences[0].reason for result in results
    }
    return Reading(searches, tuple(results), choices, ends)


def without_offers(searches: Map[str, RunningSearch]) -> Map[str, RunningSearch]:
    """The searches, whose branches will offer their continuations again."""
    return Map({name: search.without_offers() for name, search in searches.items()})


def read_logprobs(entries: Entries, outcome: Outcome) -> Reading:
    """The result is the log-probabilities that rows asked for: of prompt tokens, then of sampled
    tokens.
    """
    return Reading(
        entries, (*_prompt_logprobs(entries, outcome), *_sample_logprobs(entries, outcome))
    )


SEARCHES = Reader(
    "beams",
    BeamSearchParams,
    read=advance_searches,
    start=start_search,
    restarted=without_offers,
    decides=lambda searches, plan: True,
)
LOGPROBS = Reader(
    "logprobs", SamplingParams, read=read_logprobs, options=("logprobs", "prompt_logprobs")
)


def _rows_asking(option: str, entries: Entries, outcome: Outcome) -> list[tuple[int, int]]:
    """The rows of the plan whose requests set an option, with its value."""
    rows = [(i, getattr(outcome.data[i].params, option)) for i in outcome.rows_of(entries)]
    return [(i, count) for i, count in rows if count is not None]


def _prompt_logprobs(entries: Entries, outcome: Outcome) -> Iterator[TokenLogprobs]:
    plan = outcome.plan
    rows = _rows_asking("prompt_logprobs", entries, outcome)
    if not rows:
        return
    ranked = jax.device_get(outcome.sent.output.prompt)
    first_tokens = outcome.first_tokens
    for i, count in rows:
        data = outcome.data[i]
        start = plan.starts[i]
        end = min(start + plan.counts[i], data.prompt_len - 1)
        for position in range(start, end):  # each token predicts the one behind it
            token = int(data.tokens[position + 1])
            entry = _ranked(ranked, first_tokens[i] + position - start, count)
            yield TokenLogprobs(plan.seqs[i].request_id, True, position + 1, token, *entry)


def _sample_logprobs(entries: Entries, outcome: Outcome) -> Iterator[TokenLogprobs]:
    plan = outcome.plan
    rows = _rows_asking("logprobs", entries, outcome)
    if not rows:
        return
    ranked = jax.device_get(outcome.sent.output.sampled)
    first_samples = outcome.first_samples
    for i, count in rows:
        if not outcome.reaches_end(i):
            continue
        num_output = plan.lengths[i] - outcome.data[i].prompt_len
        for j, token in enumerate(outcome.tokens_of(i)):
            entry = _ranked(ranked, first_samples[i] + j, count)
            yield TokenLogprobs(plan.seqs[i].request_id, False, num_output + j, token, *entry)


def _ranked(
    ranked: Any, i: int, count: int
) -> tuple[float, int, tuple[int, ...], tuple[float, ...]]:
    """(log-probability, rank, ids of the most likely tokens, their log-probabilities) of token i.

    Args:
        ranked: a `Ranked` on the host.
        count: the number of most likely tokens; a vocabulary may be smaller.
    """
    ids = ranked.top_ids[i, :count]
    logprobs = ranked.top_logprobs[i, :count]
    is_token = ids >= 0
    return (
        float(ranked.logprobs[i]),
        int(ranked.ranks[i]),
        tuple(ids[is_token].tolist()),
        tuple(logprobs[is_token].tolist()),
    )
