"""Products by XLA, on every platform, over weights as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.linear.blocks import Blocks, restored
from pallas_kernels.linear.implementation import Epilogue, Implementation, LowRank, Matrix, Norm
from pallas_kernels.linear.reference import owners_of, result_of, rms_norm, with_products

PANEL_ROWS = 2048  # of a matrix in blocks, which are restored at a time


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
    if matrix.count == 1:
        sums_dtype = dtype if _is_all_the_result(epilogue) else "float32"

        def sums_of(first: int, last: int) -> Callable[[jax.Array], jax.Array]:
            stored = weight if rows is None else weight[first:last]
            return partial(_one_matrix_of, weight=stored, blocks=matrix.blocks, dtype=sums_dtype)

        return around(sums_of, x, matrix, norm, epilogue, rows, dtype)
    assert sizes is not None
    x = rms_norm(x, norm)
    if matrix.blocks is not None:
        weight = restored(weight, matrix.blocks, jnp)
    factor = weight.astype(x.dtype)
    matrices = factor.reshape(matrix.count, -1, matrix.inputs).swapaxes(1, 2)
    y = jax.lax.ragged_dot(x, matrices, sizes, preferred_element_type=jnp.float32)
    return result_of(y, epilogue, owners_of(sizes, len(x))).astype(dtype)


def around(
    sums_of: Callable[[int, int], Callable[[jax.Array], jax.Array]],
    x: jax.Array,
    matrix: Matrix,
    norm: Norm | None,
    epilogue: Epilogue,
    rows: tuple[int, int] | None,
    dtype: str,
) -> jax.Array:
    """Returns the result of one matrix: what comes before and after its sums, by XLA. Padding is
    computed too.

    sums_of: (first, last) -> the function of x [T, K], after its norm, to the sums [T, last -
        first] of these outputs: in float32, or in `dtype` if the epilogue does nothing.
    """
    x = rms_norm(x, norm)
    first, last = rows or (0, matrix.outputs)
    if epilogue.low is not None:
        epilogue = with_products(epilogue, _low_rank(x, epilogue.low, first, last))
    sums = sums_of(first, last)
    if rows is not None:
        if epilogue.scales is not None:
            epilogue = epilogue._replace(scales=epilogue.scales[first:last])
        if epilogue.bias is not None:
            epilogue = epilogue._replace(bias=epilogue.bias[first:last])
    return result_of(sums(x), epilogue, jnp.zeros(0, jnp.int32)).astype(dtype)


def _is_all_the_result(epilogue: Epilogue) -> bool:
    """Returns whether the sums are the result: nothing is done with them but rounding."""
    return all(part is None for part in epilogue)


def _one_matrix_of(x: jax.Array, weight: jax.Array, blocks: Blocks | None, dtype: str) -> jax.Array:
    """Returns [T, M] of a dtype, for a weight [M, K] or [M, bytes] as it is stored."""
    if blocks is None:
        return _one_matrix(x, weight.astype(x.dtype), dtype)
    return _by_panels(x, weight, blocks, dtype)


def _one_matrix(x: jax.Array, weight: jax.Array, dtype: str) -> jax.Array:
    """Returns [T, M] of a dtype, for x [T, K] and a weight [M, K] of one dtype.

    Sums are in float32 and rounded once. On a GPU the product itself rounds them, because XLA would
    store the sums in float32 and read them again. XLA's own kernels sum in float32 there, also the
    parts of a product that is split over its inputs. Other platforms may sum in the result's dtype.
    """
    return jax.lax.platform_dependent(
        x,
        weight,
        cpu=lambda x, weight: _columns(x, weight).astype(dtype),
        cuda=lambda x, weight: _product(x, weight, (1, 1), dtype),
        default=lambda x, weight: _product(x, weight, (1, 1)).astype(dtype),
    )


def _by_panels(x: jax.Array, rows: jax.Array, blocks: Blocks, dtype: str) -> jax.Array:
    """Returns [T, M] of a dtype, for x [T, K] and a weight in blocks, [M, bytes].

    PANEL_ROWS rows are restored at a time, so that there is never a whole matrix of floats.
    """

    def product_of(panel: jax.Array) -> jax.Array:
        return _one_matrix(x, restored(panel, blocks, jnp).astype(x.dtype), dtype)

    panels = len(rows) // PANEL_ROWS
    whole = panels * PANEL_ROWS
    products = []
    if panels:
        y = jax.lax.map(product_of, rows[:whole].reshape(panels, PANEL_ROWS, -1))
        products.append(y.swapaxes(0, 1).reshape(len(x), whole))
    if whole < len(rows):
        products.append(product_of(rows[whole:]))
    return products[0] if len(products) == 1 else jnp.concatenate(products, axis=1)


def _low_rank(x: jax.Array, low: LowRank, first: int, last: int) -> jax.Array:
    """Returns [T, last - first] float32: the products of low rank of these outputs.

    They are computed for tokens in the order of their slots.
    """
    ranks = slice(*low.ranks(first, last))
    a = low.a[:, ranks, : x.shape[1]].swapaxes(1, 2)
    b = low.b[:, ranks, first:last]
    h = jax.lax.ragged_dot(x[low.order], a, low.sizes, preferred_element_type=jnp.float32)
    y = jax.lax.ragged_dot(h.astype(x.dtype), b, low.sizes, preferred_element_type=jnp.float32)
    return jnp.zeros_like(y).at[low.order].set(y, unique_indices=True)


def _product(
    a: jax.Array, b: jax.Array, over: tuple[int, int], dtype: str = "float32"
) -> jax.Array:
    """Returns the product of two matrices, of a dtype. over: the axis of each that is summed."""
    axes = ((over[:1], over[1:]), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.dtype(dtype))


def _columns(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns [T, M] float32 with the weight as the left operand of the product.

    XLA's CPU product packs its right operand, which here is the few tokens of a decode. A weight on
    the right would be packed in every step: with 8 tokens SmolLM2's products took 64 ms and not 36.
    The barriers keep the transpositions out of the product, which would be a scalar loop with them.
    In 16 bits a transposed operand makes XLA widen the whole weight, so the tokens stay rows there.
    """
    y = (
        _product(weight, jax.lax.optimization_barrier(x.T), (1, 0))
        if x.dtype == jnp.float32
        else _product(weight, x, (1, 1))
    )
    return jax.lax.optimization_barrier(y).T


IMPLEMENTATION = Implementation("xla", multiply, low_rank=True, blocks=True)
