"""What a decode step cannot be faster than: the time of its memory traffic and of its matrix products, alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax.models import Model

Run = Callable[[], Any]  # runs to the end; times itself nowhere


def _ready(function: Callable[..., Any], *args: Any) -> Run:
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*args))
    return lambda: jax.block_until_ready(compiled(*args))


def read_weights(model: Model) -> Run:
    """Every weight once: one matrix-vector product a matrix, which does nothing but stream it."""
    matrices = [w for w in jax.tree.leaves(model.params) if w.ndim == 2]
    vectors = [jnp.ones(w.shape[1], w.dtype) for w in matrices]
    return _ready(lambda ws, xs: [(w @ x).sum() for w, x in zip(ws, xs, strict=True)], matrices, vectors)


def weight_products(model: Model, batch: int) -> Run:
    """The step's products with weights, in its own orientation, chained through nothing but their shapes."""
    matrices = [w for w in jax.tree.leaves(model.params) if w.ndim == 2]
    columns = {n: jnp.ones((n, batch), matrices[0].dtype) for n in {w.shape[1] for w in matrices}}
    return _ready(lambda ws, xs: [w @ xs[w.shape[1]] for w in ws], matrices, columns)


def attention_products(model: Model, batch: int, context: int) -> Run:
    """q k^T and p v of every layer over contiguous keys and values, tokens minor and features minor as the cache."""
    c = model.config
    group = c.heads // c.kv_heads
    dtype = model.dtype
    q = jnp.ones((batch, c.kv_heads, group, c.head_dim), dtype)
    p = jnp.ones((batch, c.kv_heads, group, context), dtype)
    keys = [jnp.ones((batch, c.kv_heads, c.head_dim, context), dtype) + i for i in range(c.layers)]
    values = [jnp.ones((batch, c.kv_heads, context, c.head_dim), dtype) + i for i in range(c.layers)]

    def products(q, p, keys, values):
        scores = [jnp.einsum("bkgd,bkdc->bkgc", q, k) for k in keys]
        return scores, [jnp.einsum("bkgc,bkcd->bkgd", p, v) for v in values]

    return _ready(products, q, p, keys, values)
