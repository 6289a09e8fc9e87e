"""`min_p`, `top_k` and `top_p`: options that forbid unlikely tokens.

No vocabulary is sorted. top_k and top_p keep the tokens above a threshold, which is found by
bisection over the bits of a float: 31 comparisons of the whole row, and the threshold is exact.
All tokens whose weight equals the threshold are kept. Each option raises the threshold that the
options before it have left, so a step writes the weights once, behind all of them.
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


def _min_p(weights: jax.Array, cutoff: jax.Array, rows: Mapping[str, jax.Array]) -> jax.Array:
    # the best token's weight is 1
    return bits_of(rows["min_p"])


def _top_k(weights: jax.Array, cutoff: jax.Array, rows: Mapping[str, jax.Array]) -> jax.Array:
    """The weights outside the k largest are zeroed."""
    k = jnp.where(rows["top_k"] > 0, rows["top_k"], weights.shape[-1])
    # Fewer than k weights may be left. Then the threshold is not above the least of them.
    return _largest_threshold(bits_of(weights), lambda keep: keep.sum(-1) >= k)


def _top_p(weights: jax.Array, cutoff: jax.Array, rows: Mapping[str, jax.Array]) -> jax.Array:
    """The weights outside the smallest set whose sum is at least top_p times that of all are
    zeroed.
    """
    top_p = rows["top_p"]
    bits = bits_of(weights)
    is_left = bits >= cutoff[:, None]

    def sums_of(keep: jax.Array) -> jax.Array:
        return row_sums(jnp.where(keep & is_left, weights, 0.0))

    share = top_p * sums_of(is_left)
    threshold = _largest_threshold(bits, lambda keep: sums_of(keep) >= share)
    # a row without top_p keeps all tokens: a rounding error must not cut one
    return jnp.where(top_p < 1.0, threshold, 0)


def cut(weights: jax.Array, cutoff: jax.Array) -> jax.Array:
    """The weights [B, V], with zeros in the place of those whose bits are below `cutoff` [B]."""
    return jnp.where(bits_of(weights) >= cutoff[:, None], weights, 0.0)


def bits_of(weights: jax.Array) -> jax.Array:
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
    name: str, off: np.generic, cuts: Callable[[Any], bool], threshold: Callable[..., jax.Array]
) -> RowFeature:
    """The feature of a parameter.

    Args:
        off: the parameter's value that forbids nothing.
        cuts: (value) -> whether it may forbid a token.
        threshold: as in `RowFeature`.
    """
    value_of = attrgetter(name)

    def apply(weights: jax.Array, rows: Mapping[str, jax.Array], context: RowContext) -> jax.Array:
        return cut(weights, threshold(weights, jnp.zeros(len(weights), jnp.int32), rows))

    return RowFeature(
        name=name,
        stage="probs",
        off={name: off},
        read=lambda p, _: {name: value_of(p)} if cuts(value_of(p)) and p.temperature > 0 else None,
        apply=apply,
        params=(name,),
        reads_tokens=False,
        threshold=threshold,
    )


MIN_P = _feature("min_p", np.float32(0), lambda value: value > 0, _min_p)
TOP_K = _feature("top_k", np.int32(0), lambda value: value > 0, _top_k)
TOP_P = _feature("top_p", np.float32(1), lambda value: value < 1, _top_p)
