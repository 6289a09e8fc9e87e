"""The definition of `linear`, in float32 throughout: for tests, and to read."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.linear.blocks import restored
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
    factors = rms_norm(x, norm).astype(jnp.float32)
    if epilogue.low is not None:
        a = epilogue.low.a.astype(jnp.float32)
        b = epilogue.low.b.astype(jnp.float32)
        a = a[..., : matrix.inputs]
        b = b[..., : matrix.outputs]
        slots = epilogue.low.slots
        h = jnp.einsum("tk,trk->tr", factors, a[slots], precision="highest")
        added = jnp.einsum("tr,trm->tm", h, b[slots], precision="highest")
        epilogue = with_products(epilogue, added)
    if matrix.blocks is not None:
        weight = restored(weight, matrix.blocks, jnp)
    matrices = weight.astype(jnp.float32).reshape(matrix.count, -1, matrix.inputs)
    y = jnp.einsum("tk,emk->tem", factors, matrices, precision="highest")
    owners = jnp.zeros(len(x), jnp.int32) if sizes is None else owners_of(sizes, len(x))
    y = jnp.take_along_axis(y, owners[:, None, None], axis=1)[:, 0]
    return result_of(y, epilogue, owners, rows).astype(dtype)


def owners_of(sizes: jax.Array, tokens: int) -> jax.Array:
    """Returns [T]: the matrix of each token."""
    return jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=tokens)


def rms_norm(x: jax.Array, norm: Norm | None) -> jax.Array:
    """Returns x [T, K] after its norm, in x's dtype."""
    if norm is None:
        return x
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + norm.eps)
    weight = norm.weight.astype(jnp.float32)
    return (y * (1 + weight if norm.plus_one else weight)).astype(x.dtype)


def with_products(epilogue: Epilogue, added: jax.Array) -> Any:
    """Returns the epilogue with the products of low rank in the place of their factors.

    added: [T, M] float32.
    """
    return epilogue._replace(low=added)


def result_of(
    y: jax.Array, epilogue: Any, owners: jax.Array, rows: tuple[int, int] | None = None
) -> jax.Array:
    """Returns [T, width] float32 from the sums [T, M of one matrix] of all rows.

    owners: [T] the matrix of each token.
    epilogue: with the products of low rank, [T, M], in the place of their factors.
    """
    scales, bias, added, activation, residual = epilogue
    for vector, combine in ((scales, jnp.multiply), (bias, jnp.add)):
        if vector is not None:
            vectors = vector.astype(jnp.float32).reshape(-1, y.shape[1])
            y = combine(y, vectors[0] if len(vectors) == 1 else vectors[owners])
    if added is not None:
        y = y + added
    if activation is not None:
        gate, up = jnp.split(y, 2, axis=1)
        y = ACTIVATIONS[activation](gate) * up
    if rows is not None:
        y = y[:, slice(*rows)]
    return y if residual is None else y + residual.astype(jnp.float32)


IMPLEMENTATION = Implementation("reference", multiply, low_rank=True, blocks=True)
