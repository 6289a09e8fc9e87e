"""What a step's outputs mean: requested log-probabilities, and how beam searches continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pagedjax.device.step import StepOutput
from pagedjax.engine.lookahead import SentStep
from pagedjax.engine.requests import SequenceData
from pagedjax.host import beams
from pagedjax.host.beams import Search
from pagedjax.host.drafts import Sample
from pagedjax.host.types import BeamResult, Choice, Plan, TokenLogprobs


def advance_searches(
    plan: Plan, searches: Mapping[int, Search], output: StepOutput
) -> tuple[dict[int, Search], dict[str, Choice], tuple[BeamResult, ...]]:
    """Advance the beam searches whose beams have all been computed.

    Args:
        searches: by the group of their beams.

    Returns:
        (searches, how beams continue, by the id of the first beam, results of the searches that
        ended)
    """
    after, choices, ended = dict(searches), {}, []
    for group, search in searches.items() if plan.preempted else ():
        # its beams will offer again what they offered
        if not set(search.names).isdisjoint(plan.preempted):
            after[group] = search._replace(offers=())
    rows = [i for i, seq in enumerate(plan.seqs) if seq.request.beams] if searches else []
    host, first = jax.device_get(output.sampled) if rows else None, first_samples(plan)
    for i in rows:
        group = plan.seqs[i].group
        if group is None or plan.starts[i] + plan.counts[i] < plan.lengths[i]:
            continue
        search = after[group]
        _, _, ids, logprobs = _pick(
            host, first[i], beams.candidates(search.params, len(search.stops))
        )
        search = beams.offer(search, plan.seqs[i].request_id, ids, logprobs)
        if search.complete:
            search, choice = beams.advance(search)
            if choice:
                choices[search.names[0]] = choice
            else:
                ended.append(BeamResult(search.names[0], search.finished))
        after[group] = search
    return after, choices, tuple(ended)


def logprobs(
    plan: Plan,
    sequences: Mapping[str, SequenceData],
    sent: SentStep,
    rows: Sequence[int],
    sampled: Sequence[Sample],
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities that the rows of this step asked for, prompt tokens before the sampled one.

    Args:
        rows: the rows of the sent step that are the plan's.
        sampled: as for `scheduler.commit`.
    """
    output = sent.output
    wanted = [(i, seq.request.request_id) for i, seq in enumerate(plan.seqs)]
    wanted = [
        (i, r, sequences[r]) for i, r in wanted if r in sequences and not plan.seqs[i].request.beams
    ]
    found: list[TokenLogprobs] = []
    if any(data.params.prompt_logprobs is not None for _, _, data in wanted):
        host = jax.device_get(output.prompt)
        cu_q_lens = sent.cu_q_lens
        for i, name, data in wanted:
            start, top = plan.starts[i], data.params.prompt_logprobs
            if top is None:
                continue
            for j in range(start, min(start + plan.counts[i], data.prompt_len - 1)):
                token, at = int(data.tokens[j + 1]), int(cu_q_lens[rows[i]]) + j - start
                found.append(TokenLogprobs(name, True, j + 1, token, *_pick(host, at, top)))
    if any(data.params.logprobs is not None for _, _, data in wanted):
        host = jax.device_get(output.sampled)
        first = first_samples(plan) if plan.drafts else rows
        for i, name, data in wanted:
            top, tokens = data.params.logprobs, sampled[i]
            if top is not None and plan.starts[i] + plan.counts[i] >= plan.lengths[i]:
                at = plan.lengths[i] - data.prompt_len
                for j, token in enumerate(tokens if isinstance(tokens, tuple) else (tokens,)):
                    found.append(
                        TokenLogprobs(name, False, at + j, token, *_pick(host, first[i] + j, top))
                    )
    return tuple(found)


def first_samples(plan: Plan) -> Sequence[int]:
    """Of each row, the place of its first sample in the step's samples: a row with k drafts has k +
    1 of them.
    """
    return (
        np.cumsum([0, *(k + 1 for k in plan.drafts)]).tolist()
        if plan.drafts
        else range(len(plan.seqs))
    )


def _pick(host: Any, i: int, top: int) -> tuple[float, int, tuple[int, ...], tuple[float, ...]]:
    ids, logprobs = host.top_ids[i, :top], host.top_logprobs[i, :top]
    there = ids >= 0  # a vocabulary may be smaller than what is asked for
    return (
        float(host.logprobs[i]),
        int(host.ranks[i]),
        tuple(ids[there].tolist()),
        tuple(logprobs[there].tolist()),
    )
