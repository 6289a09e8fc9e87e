"""Products of the CPU kernel with gradients, over weights as a trainer stores them.

The weights are packed in each call. Results have the bits of the implementation "cpu". Gradients
are those of the implementation "xla", which computes the same product with sums in another order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.linear import xla
from pallas_kernels.linear.cpu import implementation as cpu
from pallas_kernels.linear.cpu import panels
from pallas_kernels.linear.implementation import Epilogue, Implementation, LowRank, Matrix, Norm


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
    """See `api.linear`. It can be differentiated in reverse mode.

    Raises:
        ValueError: as `cpu.multiply`.
    """
    scales, bias, low, activation, residual = epilogue
    norm_weight = None
    norm_options = None
    if norm is not None:
        norm_weight = norm.weight
        norm_options = (norm.eps, norm.plus_one)
    low_arrays = None
    low_parts = None
    if low is not None:
        *low_fields, low_parts = low
        low_arrays = tuple(low_fields)
    options = matrix, norm_options, low_parts, activation, rows, dtype
    arrays = x, weight, norm_weight, scales, bias, low_arrays, residual, sizes
    return _product(options, *arrays)


def _call(
    function: Any, options: Any, x, weight, norm, scales, bias, low, residual, sizes
) -> jax.Array:
    """Calls `multiply` of an implementation with static options and arrays."""
    matrix, norm_options, parts, activation, rows, dtype = options
    normalised = None if norm_options is None else Norm(norm, *norm_options)
    added = None if low is None else LowRank(*low, parts=parts)
    epilogue = Epilogue(scales, bias, added, activation, residual)
    return function(x, weight, matrix, normalised, epilogue, rows, sizes, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    options: Any, x: jax.Array, weight: jax.Array, norm, scales, bias, low, residual, sizes
) -> jax.Array:
    matrix = options[0]
    packed = panels.panels_of(jnp, weight, gated=matrix.gated, matrices=matrix.count)
    if low is not None:
        low = low[0], cpu.pack_low(low[1], matrix), *low[2:]
    return _call(cpu.multiply, options, x, packed, norm, scales, bias, low, residual, sizes)


def _forward(options: Any, *arrays: Any) -> tuple[jax.Array, Any]:
    return _product(options, *arrays), arrays


def _backward(options: Any, arrays: Any, cotangent: jax.Array) -> Any:
    return jax.vjp(partial(_call, xla.multiply, options), *arrays)[1](cotangent)


_product.defvjp(_forward, _backward)
IMPLEMENTATION = Implementation(
    "cpu_differentiable", multiply, cpu.obstacle, prepare=cpu.prepare, invariant=True, low_rank=True
)
