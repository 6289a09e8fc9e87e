"""Sums over the last axis whose bits depend on the numbers of a row alone: not on other rows, and not on how many.

XLA chooses the order of a sum by the shape of its array. On a CPU a row's sum therefore differs by the number of rows,
and batch-invariant engines need one that does not (docs/design/batch-invariance.md).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

TERMS = 16  # of one sum that is written out


def row_sums(x: jax.Array) -> jax.Array:
    """[..., N] float32 -> [...], exact float32: no product, which a TPU would round to bfloat16 and a GPU to TF32."""
    return jax.lax.platform_dependent(x, cpu=_ordered, default=lambda x: x.sum(-1))


def row_means(x: jax.Array) -> jax.Array:
    """[..., N] float32 -> [..., 1]."""
    return row_sums(x)[..., None] / x.shape[-1]


def _ordered(x: jax.Array) -> jax.Array:
    """TERMS numbers that are N / TERMS apart are added in turn, and again their sums, until one is left.

    XLA keeps the order of additions that are written out, and not that within a reduction. The barriers keep it from
    writing the whole tree as one expression.
    """
    while (n := x.shape[-1]) > 1:
        terms = min(TERMS, n)
        width = -(-n // terms)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width * terms - n)])
        total = x[..., :width]
        for i in range(1, terms):
            total = total + x[..., i * width : (i + 1) * width]
        x = jax.lax.optimization_barrier(total) if width > 1 else total
    return x[..., 0]
