"""How a token is chosen: the best of the logits; or a draw, by inversion, from weights that the
logits give and one uniform number.

The uniform number depends only on (engine seed, request seed, output position). So a request gets
the same tokens beside any other requests, and with any drafts unless those are accepted by
rejection sampling.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.device.batch import SamplingBatch
from pagedjax.device.row_features.chain import RowChain
from pagedjax.device.row_features.feature import RowContext
from pagedjax.device.row_reductions import row_maxima, row_sums

PIECE = 128  # tokens; a row's vocabulary is searched piece by piece, then within one piece


def best_tokens(logits: jax.Array) -> jax.Array:
    """[B] the argmax of each row of [B, V]; of equal logits, the first one.

    It finds the piece with the largest maximum, and then the argmax within that piece. On a CPU an
    argmax is a scalar loop, and a maximum is not (64 requests, 49,152 tokens: 7.4 and 0.4 ms).
    """
    b, v = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -v % PIECE)), constant_values=-jnp.inf)
    pieces = padded.reshape(b, -1, PIECE)
    piece = jnp.argmax(pieces.max(-1), axis=-1)
    within = jnp.take_along_axis(pieces, piece[:, None, None], axis=1)[:, 0]
    return (piece * PIECE + jnp.argmax(within, axis=-1)).astype(jnp.int32)


def weights(logits: jax.Array, s: SamplingBatch, context: RowContext, chain: RowChain) -> jax.Array:
    """[B, V] unnormalised probabilities, after temperature and the options of the stage "probs".

    Args:
        logits: [B, V], after the options of the stage "logits".
    """
    return chain.apply("probs", temperature_weights(logits, s), s.features, context)


def temperature_weights(logits: jax.Array, s: SamplingBatch) -> jax.Array:
    """[B, V] unnormalised probabilities from logits [B, V], after temperature; a greedy row has
    those of temperature 1.
    """
    # The best logit is subtracted before the division. After it, a low temperature would multiply
    # the rounding error.
    below = logits - row_maxima(logits)
    relative = jnp.exp(below / jnp.where(s.temperature > 0, s.temperature, 1.0)[:, None])
    # On a CPU the bits of an exponential depend on what is computed with it (row_reductions.py), and
    # a row must draw the same token beside rows with options. A GPU need not store the weights.
    return jax.lax.platform_dependent(
        relative, cpu=jax.lax.optimization_barrier, default=lambda x: x
    )


def draw(weights: jax.Array, s: SamplingBatch, seed: jax.Array, stream: int = 0) -> jax.Array:
    """[B] a token of each row of weights [B, V].

    Args:
        seed: [] uint32, the engine's.
        stream: as in `uniform`.
    """
    return at_quantile(weights, uniform(s, seed, stream))


def uniform(s: SamplingBatch, seed: jax.Array, stream: int = 0) -> jax.Array:
    """[B] numbers in [0, 1), by request and position.

    Args:
        stream: another stream has independent numbers for the same request and position.
    """
    root = jax.random.key(seed)

    def number(request_seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(root, request_seed), position)
        return jax.random.uniform(jax.random.fold_in(key, stream) if stream else key)

    return jax.vmap(number)(s.seed, s.position)


def at_quantile(weights: jax.Array, share: jax.Array) -> jax.Array:
    """[B] the first token of each row at which the running sum of its weights [B, V] is more than a
    share [B] of their whole sum.
    """
    v = weights.shape[-1]
    pieces = jnp.pad(weights, ((0, 0), (0, -v % PIECE))).reshape(len(weights), -1, PIECE)
    sums = row_sums(pieces)
    ends = jnp.cumsum(sums, axis=-1)
    target = share * ends[:, -1]
    piece = _first_above(ends, target, sums)

    def of_piece(x: jax.Array) -> jax.Array:  # [B, pieces] -> [B]
        return jnp.take_along_axis(x, piece[:, None], axis=-1)[:, 0]

    within = jnp.take_along_axis(pieces, piece[:, None, None], axis=1)[:, 0]
    inner = jnp.cumsum(within, axis=-1)
    # The piece is searched by the share of its sum that is left, not by the difference. So a sum
    # that is rounded in another way than the running sum does not favour the tokens at the end of
    # the piece.
    remaining_share = (target - of_piece(ends - sums)) / of_piece(sums)
    drawn = piece * PIECE + _first_above(inner, remaining_share * inner[:, -1], within)
    return jnp.minimum(drawn, v - 1)  # a row of NaN, too, gives a token of the vocabulary


def _first_above(ends: jax.Array, target: jax.Array, weights: jax.Array) -> jax.Array:
    """[B] the index of the first positive weight whose running sum `ends` is above the target; else
    of the last positive weight. So rounding never gives a token whose weight is zero.
    """
    positive = weights > 0
    passed = positive & (ends > target[:, None])
    last = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    return jnp.where(passed.any(-1), jnp.argmax(passed, axis=-1), last).astype(jnp.int32)
