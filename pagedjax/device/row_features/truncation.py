"""`min_p`, `top_k` and `top_p`: options that forbid unlikely tokens.

No vocabulary is sorted. top_k and top_p keep the tokens above a threshold, which is found by
bisection over the bits of a float: 31 comparisons of the whole row, and the threshold is exact.
All tokens whose weight equals the threshold are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.device.row_features.feature import RowContext, RowFeature
from pagedjax.device.row_reductions import row_sums


def _min_p(weights: jax.Array, rows: Mapping[str, jax.Array], context: RowContext) -> jax.Array:
    # the best token's weight is 1
    return jnp.where(weights >= rows["min_p"][:, None], weights, 0.0)


def _top_k(weights: jax.Array, rows: Mapping[str, jax.Array], context: RowContext) -> jax.Array:
    """Zero the weights outside the k largest."""
    k = jnp.where(rows["top_k"] > 0, rows["top_k"], weights.shape[-1])
    bits = _bits(weights)
    threshold = _largest_threshold(bits, lambda keep: keep.sum(-1) >= k)
    return jnp.where(bits >= threshold[:, None], weights, 0.0)


def _top_p(weights: jax.Array, rows: Mapping[str, jax.Array], context: RowContext) -> jax.Array:
    """Zero the weights outside the smallest set whose sum is at least top_p times that of all."""
    top_p = rows["top_p"]
    bits = _bits(weights)
    # a row without top_p keeps all tokens: a rounding error must not cut one
    share = jnp.where(top_p < 1.0, top_p * row_sums(weights), 0.0)
    threshold = _largest_threshold(
        bits, lambda keep: row_sums(jnp.where(keep, weights, 0.0)) >= share
    )
    return jnp.where((bits >= threshold[:, None]) | (top_p >= 1.0)[:, None], weights, 0.0)


def _bits(weights: jax.Array) -> jax.Array:
    """The bits of the weights as integers. Weights are at least 0, so their bits have the same
    order.
    """
    return jax.lax.bitcast_convert_type(weights, jnp.int32)


def _largest_threshold(bits: jax.Array, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """[B] for each row, the largest threshold t with holds(bits >= t).

    Args:
        bits: [B, V], at least 0.
        holds: (mask [B, V]) -> [B] bool. It is true at t = 0; where it is false at a t, it is false
            at every larger t.
    """

    def halve(_, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # holds(low), not holds(high)
        middle = low + (high - low) // 2
        ok = holds(bits >= middle[:, None])
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    start = jnp.zeros(len(bits), jnp.int32), bits.max(-1) + 1
    return jax.lax.fori_loop(0, 31, halve, start)[0]


def _feature(
    name: str, off: np.generic, cuts: Callable[[Any], bool], apply: Callable[..., jax.Array]
) -> RowFeature:
    """The feature of a parameter.

    Args:
        off: the parameter's value that forbids nothing.
        cuts: (value) -> whether it may forbid a token.
    """
    value_of = attrgetter(name)
    return RowFeature(
        name=name,
        stage="probs",
        off={name: off},
        read=lambda p, _: {name: value_of(p)} if cuts(value_of(p)) and p.temperature > 0 else None,
        apply=apply,
        params=(name,),
        reads_tokens=False,
    )


MIN_P = _feature("min_p", np.float32(0), lambda value: value > 0, _min_p)
TOP_K = _feature("top_k", np.int32(0), lambda value: value > 0, _top_k)
TOP_P = _feature("top_p", np.float32(1), lambda value: value < 1, _top_p)
