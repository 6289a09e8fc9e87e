"""Products by XLA, on every platform, over weights as they are stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.linear.implementation import Epilogue, Implementation, LowRank, Matrix, Norm
from pallas_kernels.linear.reference import finished, normalised, owner, with_added


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
    x = normalised(x, norm)
    if epilogue.low is not None:
        first, last = rows or (0, matrix.outputs)
        epilogue = with_added(epilogue, _low_rank(x, epilogue.low, first, last))
    if rows is not None:
        weight = weight[slice(*rows)]
        epilogue = epilogue._replace(
            **{
                name: vector[slice(*rows)]
                for name, vector in (("scales", epilogue.scales), ("bias", epilogue.bias))
                if vector is not None
            }
        )
    factor = weight.astype(x.dtype)
    if sizes is None or matrix.count == 1:  # padding is computed too
        y = jax.lax.platform_dependent(x, factor, cpu=_columns, default=_rows)
        return finished(y, epilogue, jnp.zeros(0, jnp.int32)).astype(dtype)
    each = factor.reshape(matrix.count, -1, matrix.inputs).swapaxes(1, 2)
    y = jax.lax.ragged_dot(x, each, sizes, preferred_element_type=jnp.float32)
    return finished(y, epilogue, owner(sizes, len(x))).astype(dtype)


def _low_rank(x: jax.Array, low: LowRank, first: int, last: int) -> jax.Array:
    """[T, last - first] float32: the products of low rank of these outputs, of tokens that are sorted by slot."""
    ranks = slice(*low.ranks(first, last))
    a, b = low.a[:, ranks, : x.shape[1]].swapaxes(1, 2), low.b[:, ranks, first:last]
    options = {"preferred_element_type": jnp.float32}
    h = jax.lax.ragged_dot(x[low.order], a, low.sizes, **options).astype(x.dtype)
    y = jax.lax.ragged_dot(h, b, low.sizes, **options)
    return jnp.zeros_like(y).at[low.order].set(y, unique_indices=True)


def _product(a: jax.Array, b: jax.Array, over: tuple[int, int]) -> jax.Array:
    axes = ((over[:1], over[1:]), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def _rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    return _product(x, weight, (1, 1))


def _columns(x: jax.Array, weight: jax.Array) -> jax.Array:
    """XLA's CPU product packs its right operand: with the weight on the left, it packs the few tokens of a decode.

    The weight on the right would be packed in every step: SmolLM2's products took 64 ms in place of 36 with 8 tokens.
    The barriers keep transpositions out of the product, which would be a scalar loop with them. In 16 bits a transposed
    operand makes XLA widen the whole weight, so the tokens stay rows there.
    """
    wide = x.dtype == jnp.float32
    y = (
        _product(weight, jax.lax.optimization_barrier(x.T), (1, 0))
        if wide
        else _product(weight, x, (1, 1))
    )
    return jax.lax.optimization_barrier(y).T


IMPLEMENTATION = Implementation("xla", multiply, low_rank=True)
