"""The definition of `linear`, in float32 throughout: for tests, and to read."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.linear.implementation import Epilogue, Implementation, Matrix, Norm

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def multiply(
    x: jax.Array,
    weight: jax.Array,
    matrix: Matrix,
    norm: Norm | None,
    epilogue: Epilogue,
    rows: tuple[int, int] | None,
    sizes: jax.Array | None,
    dtype: str,
) -> jax.Array:
    """See `api.linear`."""
    factors = normalised(x, norm).astype(jnp.float32)
    if epilogue.low is not None:
        a, b = (one.astype(jnp.float32) for one in epilogue.low[:2])
        a, b, slots = a[..., : matrix.inputs], b[..., : matrix.outputs], epilogue.low.slots
        h = jnp.einsum("tk,trk->tr", factors, a[slots], precision="highest")
        added = jnp.einsum("tr,trm->tm", h, b[slots], precision="highest")
        epilogue = with_added(epilogue, added)
    each = weight.astype(jnp.float32).reshape(matrix.count, -1, matrix.inputs)
    y = jnp.einsum("tk,emk->tem", factors, each, precision="highest")
    own = jnp.zeros(len(x), jnp.int32) if sizes is None else owner(sizes, len(x))
    y = jnp.take_along_axis(y, own[:, None, None], axis=1)[:, 0]
    return finished(y, epilogue, own, rows).astype(dtype)


def owner(sizes: jax.Array, tokens: int) -> jax.Array:
    """[T] the matrix of each token."""
    return jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=tokens)


def normalised(x: jax.Array, norm: Norm | None) -> jax.Array:
    """[T, K] x after its norm, in x's dtype."""
    if norm is None:
        return x
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + norm.eps)
    weight = norm.weight.astype(jnp.float32)
    return (y * (1 + weight if norm.plus_one else weight)).astype(x.dtype)


def with_added(epilogue: Epilogue, added: jax.Array) -> Any:
    """The epilogue with the products of low rank, [T, M] float32, in the place of their factors."""
    return epilogue._replace(low=added)


def finished(
    y: jax.Array, epilogue: Any, own: jax.Array, rows: tuple[int, int] | None = None
) -> jax.Array:
    """[T, width] float32 from the sums [T, M of one matrix] of all rows.

    own: [T] the matrix of each token.
    epilogue: with the products of low rank, [T, M], in the place of their factors.
    """
    scales, bias, added, activation, residual = epilogue
    for vector, combine in ((scales, jnp.multiply), (bias, jnp.add)):
        if vector is not None:
            each = vector.astype(jnp.float32).reshape(-1, y.shape[1])
            y = combine(y, each[0] if len(each) == 1 else each[own])
    if added is not None:
        y = y + added
    if activation is not None:
        gate, up = jnp.split(y, 2, axis=1)
        y = ACTIVATIONS[activation](gate) * up
    if rows is not None:
        y = y[:, slice(*rows)]
    return y if residual is None else y + residual.astype(jnp.float32)


IMPLEMENTATION = Implementation("reference", multiply, low_rank=True)
