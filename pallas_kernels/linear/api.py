"""The contract of all implementations of products with weights, and the list of them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.linear import pallas_tpu, reference, xla
from pallas_kernels.linear.cpu import implementation as cpu
from pallas_kernels.linear.implementation import Epilogue, Implementation, LowRank, Matrix, Norm
from pallas_kernels.linear.pallas_gpu import implementation as pallas_gpu

IMPLS: dict[str, Implementation] = {
    impl.name: impl
    for impl in (
        reference.IMPLEMENTATION,
        xla.IMPLEMENTATION,
        cpu.IMPLEMENTATION,
        cpu.ROUNDED,
        pallas_gpu.IMPLEMENTATION,
        pallas_tpu.IMPLEMENTATION,
    )
}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


# Traced once for all layers that call it. norm: the weight of a `Norm`; low: the arrays of a
# `LowRank`.
@partial(
    jax.jit,
    static_argnames=("matrix", "impl", "eps", "plus_one", "activation", "rows", "parts", "dtype"),
)
def _linear(
    x,
    weight,
    sizes,
    norm,
    scales,
    bias,
    residual,
    low,
    *,
    matrix,
    impl,
    eps,
    plus_one,
    activation,
    rows,
    parts,
    dtype,
):
    normalised = None if norm is None else Norm(norm, eps, plus_one)
    if low is not None:
        low = LowRank(*low, parts=parts)
    epilogue = Epilogue(scales, bias, low, activation, residual)
    return impl.multiply(x, weight, matrix, normalised, epilogue, rows, sizes, dtype)


def linear(
    x: jax.Array,
    weight: jax.Array,
    matrix: Matrix,
    *,
    impl: str | Implementation,
    norm: Norm | None = None,
    scales: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    rows: tuple[int, int] | None = None,
    sizes: jax.Array | None = None,
    low: LowRank | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Computes y = x W^T, and what comes directly before and after it.

    x is normalised in float32 and rounded to its dtype. Sums are in float32, over the inputs in one
    order that depends on the shape of the weight alone. Scales, bias, `low`, activation and
    residual follow in float32, in this order; then the result is rounded, once.

    Args:
        x: [T, K] float32, bfloat16 or float16.
        weight: W [M, K] of x's dtype or int8, or in the blocks that the matrix names, as
            `Implementation.pack` of the implementation made it.
        matrix: W's shape.
        impl: one of IMPLS, by name, or a record of your own. It has no default, because a fallback
            gives no error.
        norm: of x, before the product.
        scales: [M] float32, of an int8 weight.
        bias: [M] of x's dtype.
        activation: one of ACTIVATIONS, of the gates of a gated weight: y = activation(gate) * up.
        residual: [T, width] of x's dtype.
        rows: (first, last + 1) of W: only these outputs are computed. Not for a gated weight, and
            not for several matrices.
        sizes: [count] int32: the number of tokens of each matrix, whose tokens come in the order of
            the matrices. With one matrix: how many tokens are not padding; None is all. Results of
            padding may be any finite numbers. No size is negative and their sum is at most T, which
            is not checked.
        low: products of low rank that are added, before the activation. Not for several matrices.
        dtype: of the result; None is x's. float32 leaves it unrounded.

    Returns:
        [T, width], or [T, last - first] for `rows`.

    Raises:
        ValueError: an unknown impl or activation, shapes that do not match, and options that
            exclude each other; the message names the values.
    """
    if isinstance(impl, str) and impl not in IMPLS:
        raise ValueError(f"impl is {impl!r}; it must be one of {', '.join(map(repr, IMPLS))}")
    chosen = IMPLS[impl] if isinstance(impl, str) else impl
    _check(x, matrix, norm, scales, bias, activation, residual, rows, sizes)
    if low is not None:
        _check_low(x, matrix, low, chosen)
    return _linear(
        x,
        weight,
        sizes,
        norm.weight if norm else None,
        scales,
        bias,
        residual,
        low and tuple(low[:-1]),
        matrix=matrix,
        impl=chosen,
        eps=norm.eps if norm else 0.0,
        plus_one=norm.plus_one if norm else False,
        activation=activation,
        rows=rows,
        parts=low.parts if low else None,
        dtype=jnp.dtype(dtype or x.dtype).name,
    )


def _check(x, matrix, norm, scales, bias, activation, residual, rows, sizes) -> None:
    m = matrix.outputs
    k = matrix.inputs
    gated = matrix.gated
    count = matrix.count
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"x is {x.shape}; the weight [{m}, {k}] needs [T, {k}]")
    if m % (count * (2 if gated else 1)):
        raise ValueError(
            f"{m} outputs cannot be {count} matrices{' with gates' * gated} of equal size"
        )
    if activation not in (None, *ACTIVATIONS):
        raise ValueError(
            f"activation is {activation!r}; it must be one of {', '.join(map(repr, ACTIVATIONS))}"
        )
    if gated != (activation is not None):
        raise ValueError(
            f"the weight is {'' if gated else 'not '}gated and the activation {activation!r}; "
            "need both"
        )
    if count > 1 and sizes is None:
        raise ValueError(f"sizes is missing; the weight has {count} matrices")
    width = matrix.width if rows is None else rows[1] - rows[0]
    shapes = {
        "norm": (norm.weight if norm else None, (k,)),
        "scales": (scales, (m,)),
        "bias": (bias, (m,)),
    }
    shapes |= {"residual": (residual, (x.shape[0], width)), "sizes": (sizes, (count,))}
    for name, (array, shape) in shapes.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} is {array.shape}; x {x.shape} and the weight [{m}, {k}] need {shape}"
            )
    if sizes is not None and sizes.dtype != jnp.int32:
        raise ValueError(f"sizes is {sizes.dtype}; it must be int32")
    if rows is not None and (gated or count > 1 or not 0 <= rows[0] < rows[1] <= m):
        raise ValueError(f"rows is {rows}; it must be within [0, {m}], of one matrix without gates")


def _check_low(x, matrix: Matrix, low: LowRank, impl: Implementation) -> None:
    m = matrix.outputs
    k = matrix.inputs
    if matrix.count > 1:
        raise ValueError(
            f"low is given, and the weight has {matrix.count} matrices; it goes with one"
        )
    s, r = low.a.shape[:2]
    padded = -(-k // 16) * 16  # as `LowRank.a`
    b_shape = jax.eval_shape(
        lambda b: impl.pack_low(b, matrix), jax.ShapeDtypeStruct((s, r, m), x.dtype)
    ).shape
    shapes = {
        "a": (low.a, (s, r, padded)),
        "slots": (low.slots, x.shape[:1]),
        "order": (low.order, x.shape[:1]),
    }
    for name, (array, shape) in (shapes | {"sizes": (low.sizes, (s,))}).items():
        if array.shape != shape:
            raise ValueError(
                f"low.{name} is {array.shape}; x {x.shape} and {s} slots of rank {r} need {shape}"
            )
        dtype = jnp.dtype(x.dtype if name == "a" else jnp.int32)
        if array.dtype != dtype:
            raise ValueError(f"low.{name} is {array.dtype}; it must be {dtype.name}")
    if low.b.shape != b_shape or low.b.dtype != x.dtype:
        raise ValueError(
            f"low.b is {low.b.dtype} {low.b.shape}; impl {impl.name!r} needs {x.dtype} {b_shape}"
        )
    if list(low.parts) != sorted(set(low.parts)) or low.parts[-1] != m or r % (4 * len(low.parts)):
        raise ValueError(
            f"low.parts is {low.parts}; they must ascend to {m}, "
            f"and the rank {r} be a multiple of 4 for each"
        )
