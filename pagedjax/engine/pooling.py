"""Hidden states of prompts that are pooled: what each step adds, and what becomes of them at the
end.

A pooled prompt is a request that samples nothing. It goes through the same steps as every other
request, in chunks, under the same budget. The state of a last token is an output of every step. The
states of all tokens are a side output (device/side_outputs.py): other programs return them, which
run in steps with a row that asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from immutables import Map

from pagedjax.device.side_outputs import NOTHING, SideOutputs
from pagedjax.engine.outcome import NewRequest, Outcome, Reader, Reading
from pagedjax.options.params import PoolingParams

MIN_LENGTH = 1e-12  # a normalised vector is divided by at least this, so that zeros stay zeros


class Pool(NamedTuple):
    """What is known of one prompt.

    side_outputs: what its steps must return: the last hidden states, if it needs more than the
        state of its last token.
    parts: for "MEAN" the sum of the states so far, [1, H] float64; else the states that are pooled,
        [n, H] float32. H is the number of hidden dimensions.
    """

    params: PoolingParams
    side_outputs: SideOutputs
    parts: tuple[np.ndarray, ...] = ()


def start(request: NewRequest) -> Mapping[str, Pool]:
    """The pool of a new prompt.

    Raises:
        ValueError: more dimensions than the model has.
    """
    params = request.submitted.params
    assert isinstance(params, PoolingParams)
    hidden = request.runtime.model.config.hidden
    if params.dimensions is not None and params.dimensions > hidden:
        raise ValueError(
            f"dimensions is {params.dimensions}, but the model's hidden states have {hidden} "
            "numbers"
        )
    after_final_norm = SideOutputs(hidden=(request.runtime.model.config.layers,))
    side_outputs = NOTHING if params.kind == "LAST" else after_final_norm
    return {request.submitted.names[0]: Pool(params, side_outputs)}


def advance(pools: Map[str, Pool], outcome: Outcome) -> Reading:
    """Take the states of a step. The result is the vectors of the prompts that are computed now:
    (request id, [H] or [tokens, H] float32).
    """
    plan = outcome.plan
    rows = outcome.rows_of(pools)
    if not rows:
        return Reading(pools)
    output = outcome.sent.output
    last_states = np.asarray(output.hidden)
    all_states = None
    if any([pools[plan.seqs[i].request_id].params.kind != "LAST" for i in rows]):
        assert output.taps is not None, "`side_outputs` chose the program"
        after_final_norm = max(output.taps.hidden)
        all_states = np.asarray(output.taps.hidden[after_final_norm])
    first_samples = outcome.first_samples
    first_tokens = outcome.first_tokens
    pooled = []
    for i in rows:
        request_id = plan.seqs[i].request_id
        pool = pools[request_id]
        if pool.params.kind != "LAST":
            assert all_states is not None
            states = all_states[first_tokens[i] : first_tokens[i] + plan.counts[i]]
            pool = added(pool, plan.starts[i], states)
        elif outcome.reaches_end(i):
            pool = added(pool, plan.starts[i], last_states[first_samples[i]][None])
        if outcome.reaches_end(i):
            pooled.append((request_id, vectors(pool, plan.lengths[i])))
        pools = pools.set(request_id, pool)
    return Reading(pools, tuple(pooled))


POOLS = Reader(
    "pooled", PoolingParams, read=advance, start=start, side_outputs=lambda pool: pool.side_outputs
)


def added(pool: Pool, first: int, states: np.ndarray) -> Pool:
    """The pool with the states [n, H] of its tokens from `first` on. With first = 0 the prompt is
    computed again, so earlier parts are dropped.
    """
    parts = pool.parts if first else ()
    match pool.params.kind:
        case "MEAN":  # in float64, so that the chunks make no difference
            total = states.sum(0, dtype=np.float64, keepdims=True)
            return pool._replace(parts=(sum(parts, total),))
        case "CLS":
            return pool._replace(parts=parts or (states[:1].astype(np.float32),))
        case "LAST":
            return pool._replace(parts=(states[-1:].astype(np.float32),))
    return pool._replace(parts=(*parts, states.astype(np.float32)))


def vectors(pool: Pool, tokens: int) -> np.ndarray:
    """What a user gets for a whole prompt of `tokens` tokens: [H] float32, or [tokens, H] of kind
    "ALL".
    """
    params = pool.params
    states = np.concatenate(pool.parts)[:, : params.dimensions].astype(np.float64)
    if params.kind == "MEAN":
        states = states / tokens
    if params.normalized:
        lengths = np.linalg.norm(states, axis=1, keepdims=True)
        states = states / np.maximum(lengths, MIN_LENGTH)
    states = states.astype(np.float32)
    return states if params.kind == "ALL" else states[0]
