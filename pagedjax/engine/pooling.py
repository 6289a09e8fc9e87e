"""Hidden states of prompts that are pooled: what each step adds, and what becomes of them at the
end.

A pooled prompt is a request that samples nothing. It goes through the same steps as every other
request, in chunks, under the same budget. The state of a last token is an output of every step. The
states of all tokens are a tap (device/taps.py): other programs return them, which run in steps with
a row that wants them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from immutables import Map

from pagedjax.device.taps import NOTHING, Wanted
from pagedjax.engine.lookahead import SentStep
from pagedjax.engine.results import first_samples
from pagedjax.host.types import Plan
from pagedjax.params import PoolingParams

LEAST_LENGTH = 1e-12  # of a vector that is normalised, so that zeros stay zeros

Pooled = tuple[tuple[str, np.ndarray], ...]  # (request id, [H] or [tokens, H] float32)


class Pool(NamedTuple):
    """What is known of one prompt.

    parts: of "MEAN" the sum of the states so far, [1, H] float64; else the wanted states, [n, H]
        float32.
    """

    params: PoolingParams
    parts: tuple[np.ndarray, ...] = ()


def start(params: PoolingParams, hidden: int) -> Pool:
    """The pool of a new prompt.

    Args:
        hidden: H of the model.

    Raises:
        ValueError: more dimensions than the model has.
    """
    if params.dimensions is not None and params.dimensions > hidden:
        raise ValueError(
            f"dimensions is {params.dimensions}, but the model's hidden states have {hidden} numbers"
        )
    return Pool(params)


def wanted(params: PoolingParams, layers: int) -> Wanted:
    """What a prompt wants of steps beside samples: the last hidden states, if it needs more than
    that of its last token."""
    return NOTHING if params.kind == "LAST" else Wanted(hidden=(layers,))


def advance(
    plan: Plan, pools: Map[str, Pool], sent: SentStep, rows: Sequence[int]
) -> tuple[Map[str, Pool], Pooled]:
    """Take the states of a step.

    Args:
        sent: the step that computed the plan.
        rows: the rows of the sent step that are the plan's.

    Returns:
        (pools, vectors of the prompts that are computed now)
    """
    mine = [(i, seq.request_id) for i, seq in enumerate(plan.seqs) if seq.request_id in pools]
    if not mine:
        return pools, ()
    output, done = sent.output, []
    hidden = np.asarray(output.hidden)
    states = None
    if any([pools[name].params.kind != "LAST" for _, name in mine]):
        assert output.taps is not None, "`wanted` chose the program"
        states = np.asarray(output.taps.hidden[max(output.taps.hidden)])  # after the final norm
    samples = first_samples(plan) if plan.drafts else rows
    cu_q_lens = sent.cu_q_lens
    for i, name in mine:
        pool, first, count = pools[name], plan.starts[i], plan.counts[i]
        ends = first + count >= plan.lengths[i]
        if pool.params.kind != "LAST":
            assert states is not None
            at = cu_q_lens[rows[i]]
            pool = added(pool, first, states[at : at + count])
        elif ends:
            pool = added(pool, first, hidden[samples[i]][None])
        if ends:
            done.append((name, vectors(pool, plan.lengths[i])))
        pools = pools.set(name, pool)
    return pools, tuple(done)


def added(pool: Pool, first: int, states: np.ndarray) -> Pool:
    """The pool with the states [n, H] of its tokens from `first` on. A prompt that is computed
    again begins again.
    """
    kept = pool.parts if first else ()
    match pool.params.kind:
        case "MEAN":  # in float64, so that the chunks make no difference
            return pool._replace(parts=(sum(kept, states.sum(0, dtype=np.float64, keepdims=True)),))
        case "CLS":
            return pool._replace(parts=kept or (states[:1].astype(np.float32),))
        case "LAST":
            return pool._replace(parts=(states[-1:].astype(np.float32),))
    return pool._replace(parts=(*kept, states.astype(np.float32)))


def vectors(pool: Pool, tokens: int) -> np.ndarray:
    """[H], or of "token_embed" [tokens, H] float32: what a user gets of a whole prompt of so many
    tokens.
    """
    params = pool.params
    found = np.concatenate(pool.parts)[:, : params.dimensions].astype(np.float64)
    if params.kind == "MEAN":
        found = found / tokens
    if params.normalized:
        found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), LEAST_LENGTH)
    found = found.astype(np.float32)
    return found if params.kind == "ALL" else found[0]
