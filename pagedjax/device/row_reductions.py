"""Reductions of rows whose bits depend on the numbers of a row alone, and not on the other rows or
their number.

On a CPU the shape of an array decides how XLA reduces it. It decides the order of the additions. It
also decides whether a library computes the reduction together with what follows it, with another
exponential function. So the bits of a row's sum, and of exp(x - max), depend on the number of rows.
Batch-invariant engines need reductions whose bits do not (docs/design/batch-invariance.md). So the
terms of the reductions here are written out.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TERMS = 16  # numbers that one written-out expression combines
FLOAT32_MAX = float(np.finfo(np.float32).max)


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
    """[..., N] float32 -> [..., 1]. A maximum has the same bits in any order. It is written out
    because XLA may compute a reduction together with what follows it.
    """
    cpu = lambda x: _written_out(x, lax.max, -jnp.inf)  # noqa: E731
    return lax.platform_dependent(x, cpu=cpu, default=lambda x: x.max(-1))[..., None]


def reciprocal_sqrt(x: jax.Array) -> jax.Array:
    """1 / sqrt(x), float32. On a CPU, XLA of JAX 0.12 computes `rsqrt` of a few numbers otherwise
    than that of many. It would make `rsqrt` of a quotient, too, so the barrier keeps the two apart.
    """
    return lax.platform_dependent(
        x, cpu=lambda x: 1 / lax.optimization_barrier(lax.sqrt(x)), default=lax.rsqrt
    )


def softmax(x: jax.Array) -> jax.Array:
    """[..., N] float32 -> [..., N], over the last axis."""
    shares = jnp.exp(_below_maximum(x))
    return shares / row_sums(shares)[..., None]


def log_softmax(x: jax.Array) -> jax.Array:
    """[..., N] float32 -> [..., N], over the last axis."""
    below = _below_maximum(x)
    return below - jnp.log(row_sums(jnp.exp(below)))[..., None]


def _below_maximum(x: jax.Array) -> jax.Array:
    """x - max, over the last axis. On a CPU it is computed apart from its exponential function: the
    compiler of JAX 0.12 would round the two together for some numbers of rows.
    """
    return lax.platform_dependent(
        x - lax.stop_gradient(row_maxima(x)),
        cpu=lax.optimization_barrier,
        default=lambda x: x,
    )


def weighted_sums(x: jax.Array, weights: jax.Array) -> jax.Array:
    """x [T, K, H], weights [T, K], float32 -> [T, H]. K is small, and its terms are written out."""
    total = x[:, 0] * weights[:, :1]
    for i in range(1, x.shape[1]):
        total = total + x[:, i] * weights[:, i : i + 1]
    return total


def rounded(product: jax.Array, largest: float = FLOAT32_MAX) -> jax.Array:
    """A product of float32 in -largest to largest, as it is. The clipping changes nothing. It keeps
    the compiler from computing the product and a later sum in one rounding, as it would in some
    programs and not in others (docs/design/batch-invariance.md).
    """
    return jnp.clip(product, -largest, largest)


def _written_out(
    x: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array], neutral: float
) -> jax.Array:
    """Combines TERMS numbers that are N / TERMS places apart, one after the other. Then it combines
    the N / TERMS results in the same way, until one number is left.

    XLA keeps the order of operations that are written out, but not the order within a reduction.
    The barriers keep XLA from making one expression of all of them.
    """
    while (n := x.shape[-1]) > 1:
        terms = min(TERMS, n)
        width = -(-n // terms)
        padding = [(0, 0, 0)] * (x.ndim - 1) + [(0, width * terms - n, 0)]
        x = lax.pad(x, jnp.asarray(neutral, x.dtype), padding)
        total = lax.slice_in_dim(x, 0, width, axis=-1)
        for i in range(1, terms):
            total = combine(total, lax.slice_in_dim(x, i * width, (i + 1) * width, axis=-1))
        x = lax.optimization_barrier(total) if width > 1 else total
    return x[..., 0]
