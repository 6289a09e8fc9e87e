"""Speculative sampling: a draft is accepted with probability min(1, p / q), else another token is
drawn.

Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1); Chen et al. 2023. p is the model's
probability of the draft, and q is the drafter's. Both are taken after temperature and all options
of the request. A rejected draft is replaced by a token drawn from norm(max(0, p - q)). Then each
token has the model's distribution, whatever the drafter's distribution is.

The random numbers that draw drafts, accept them and replace them are independent. If a draft and
its acceptance shared a number, the result would be biased (vllm#47386). For the same reason a
drafter must not learn from outputs that were drawn with the same numbers, such as those of another
request with the same seed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.device.batch import SamplingBatch
from pagedjax.device.draws import at_quantile, best_tokens, draw, uniform, weights
from pagedjax.device.extras import Drafted
from pagedjax.device.row_features.chain import RowChain
from pagedjax.device.row_features.feature import RowContext
from pagedjax.device.row_reductions import row_sums

# streams of `uniform`; a row without a draft uses the stream 0
DRAFT = 1
ACCEPT = 2
REPLACE = 3


def draw_drafts(
    logits: jax.Array, s: SamplingBatch, context: RowContext, seed: jax.Array, chain: RowChain
) -> tuple[jax.Array, jax.Array]:
    """[B] drafts from a drafter's logits [B, V], and the weights [B, V] that they were drawn from.

    The weights of a greedy batch are zeros: nothing is drawn, and its samples read no weights.
    """
    logits = chain.apply("logits", logits, s.features, context)
    best = best_tokens(logits)

    def sample_drafts(
        logits: jax.Array, s: SamplingBatch, context: RowContext
    ) -> tuple[jax.Array, jax.Array]:
        row_weights = weights(logits, s, context, chain)
        return jnp.where(s.temperature > 0, draw(row_weights, s, seed, DRAFT), best), row_weights

    def greedy(
        logits: jax.Array, s: SamplingBatch, context: RowContext
    ) -> tuple[jax.Array, jax.Array]:
        return best, jnp.zeros(logits.shape)

    return jax.lax.cond(jnp.any(s.temperature > 0), sample_drafts, greedy, logits, s, context)


def draw_or_accept(
    model_weights: jax.Array, s: SamplingBatch, seed: jax.Array, drafted: Drafted
) -> jax.Array:
    """[B] tokens: the draft where it is accepted, a draw from the remaining distribution where it
    is rejected, and a plain draw in a row without a draft.

    Args:
        model_weights: [B, V] unnormalised.
        drafted: the rows' drafts.
    """
    has_draft = drafted.tokens >= 0
    token = jnp.maximum(drafted.tokens, 0)
    p = normalised(model_weights)
    q = _draft_probabilities(drafted, token, model_weights.shape[-1])

    def at_draft(x: jax.Array) -> jax.Array:  # [B, V] -> [B]
        return jnp.take_along_axis(x, token[:, None], axis=-1)[:, 0]

    accepted = uniform(s, seed, ACCEPT) * at_draft(q) < at_draft(p)
    remainder = jnp.maximum(p - q, 0.0)
    # q >= p everywhere means q == p: nothing remains, and only rounding has rejected the draft.
    # Then the weights are unscaled, as in a plain draw.
    remainder = jnp.where(
        has_draft[:, None] & (remainder.sum(-1, keepdims=True) > 0), remainder, model_weights
    )
    replacement = at_quantile(
        remainder, jnp.where(has_draft, uniform(s, seed, REPLACE), uniform(s, seed))
    )
    return jnp.where(has_draft & accepted, token, replacement)


def normalised(row_weights: jax.Array) -> jax.Array:
    """[B, V] probabilities from weights; zeros for a row without weights."""
    total = row_sums(row_weights)[:, None]
    return jnp.where(total > 0, row_weights / jnp.where(total > 0, total, 1.0), 0.0)


def _draft_probabilities(drafted: Drafted, token: jax.Array, v: int) -> jax.Array:
    """[B, V] the probabilities that drafts were drawn with. A drafter without probabilities is sure
    of its draft.
    """
    one_hot = jnp.arange(v) == token[:, None]
    if drafted.probs is None:
        return one_hot.astype(jnp.float32)
    q = normalised(drafted.probs)
    # If the request allows no token of the drafter's vocabulary, the row has no weights, and its
    # draft is always the same.
    return jnp.where((q.sum(-1) > 0)[:, None], q, one_hot)
