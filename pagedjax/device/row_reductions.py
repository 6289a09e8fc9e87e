"""Reductions of rows whose bits depend on the numbers of a row alone: not on other rows, and not on
how many.

On a CPU XLA chooses how it reduces by the shape of an array: the order of the additions, and
whether a library computes the reduction together with what follows it, with an exponential of its
own. So a row's sum, and exp(x - max), differ by the number of rows. Batch-invariant engines need
reductions that do not (docs/design/batch-invariance.md): here their terms are written out.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

TERMS = 16  # of one reduction that is written out


def row_sums(x: jax.Array) -> jax.Array:
    """[..., N] float32 -> [...], exact float32: no product, which a TPU would round to bfloat16 and
    a GPU to TF32.
    """
    return lax.platform_dependent(
        x, cpu=lambda x: _written_out(x, lax.add, 0), default=lambda x: x.sum(-1)
    )


def row_means(x: jax.Array) -> jax.Array:
    """[..., N] float32 -> [..., 1]."""
    return row_sums(x)[..., None] / x.shape[-1]


def row_maxima(x: jax.Array) -> jax.Array:
    """[..., N] float32 -> [..., 1]. A maximum is exact in any order; it matters to what follows
    it.
    """
    cpu = lambda x: _written_out(x, lax.max, -jnp.inf)  # noqa: E731
    return lax.platform_dependent(x, cpu=cpu, default=lambda x: x.max(-1))[..., None]


def softmax(x: jax.Array) -> jax.Array:
    """[..., N] float32 -> [..., N], over the last axis."""
    shares = jnp.exp(x - lax.stop_gradient(row_maxima(x)))
    return shares / row_sums(shares)[..., None]


def log_softmax(x: jax.Array) -> jax.Array:
    """[..., N] float32 -> [..., N], over the last axis."""
    below = x - lax.stop_gradient(row_maxima(x))
    return below - jnp.log(row_sums(jnp.exp(below)))[..., None]


def weighted_sums(x: jax.Array, weights: jax.Array) -> jax.Array:
    """x [T, K, H], weights [T, K], float32 -> [T, H]. K is small: its terms are written out."""
    total = x[:, 0] * weights[:, :1]
    for i in range(1, x.shape[1]):
        total = total + x[:, i] * weights[:, i : i + 1]
    return total


def _written_out(
    x: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array], neutral: float
) -> jax.Array:
    """TERMS numbers that are N / TERMS apart are combined in turn, and again the results, until one
    is left.

    XLA keeps the order of operations that are written out, and not that within a reduction. The
    barriers keep it from writing the whole tree as one expression.
    """
    while (n := x.shape[-1]) > 1:
        terms = min(TERMS, n)
        width = -(-n // terms)
        padded = [(0, 0, 0)] * (x.ndim - 1) + [(0, width * terms - n, 0)]
        x = lax.pad(x, jnp.asarray(neutral, x.dtype), padded)
        total = lax.slice_in_dim(x, 0, width, axis=-1)
        for i in range(1, terms):
            total = combine(total, lax.slice_in_dim(x, i * width, (i + 1) * width, axis=-1))
        x = lax.optimization_barrier(total) if width > 1 else total
    return x[..., 0]
