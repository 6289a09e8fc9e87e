"""The CPU kernel's products with gradients: bits of "cpu", gradients of "xla"."""

from __future__ import annotations

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import IMPLS, Implementation, linear
from tests.pallas_kernels.test_linear import CASES, case

pytest.importorskip("llvmlite")
from pallas_kernels.linear.cpu.differentiable import IMPLEMENTATION

pytestmark = pytest.mark.few_optimisations
NAMES = [
    "odd sizes",
    "norm plus one",
    "gates of odd width",
    "rows within a panel",
    "experts",
    "bias and residual",
]
FLOATS = "x", "weight", "norm", "bias", "residual"


def call(
    arguments: dict[str, Any], impl: str | Implementation, floats: dict[str, Any]
) -> jax.Array:
    options = arguments | floats
    if options["norm"] is not None and "norm" in floats:
        options["norm"] = arguments["norm"]._replace(weight=floats["norm"])
    x = options.pop("x")
    weight = options.pop("weight")
    matrix = options.pop("matrix")
    return linear(x, weight, matrix, impl=impl, **options)


def floats_of(arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    floats = {name: arguments[name] for name in FLOATS if arguments[name] is not None}
    if arguments["norm"] is not None:
        floats["norm"] = arguments["norm"].weight
    return floats


@pytest.mark.default_cases(
    "odd sizes-float32",
    "gates of odd width-bfloat16",
    "experts-float32",
    "rows within a panel-float32",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_of_the_kernel_and_gradients_those_of_xla(name, dtype):
    arguments = case(**CASES[name], dtype=dtype)
    floats = floats_of(arguments)
    packed = IMPLS["cpu"].pack(np.asarray(arguments["weight"]), arguments["matrix"])
    expected = np.asarray(call(arguments, "cpu", floats | {"weight": packed}))

    def total(
        impl: str | Implementation, floats: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        y = call(arguments, impl, floats)
        return jnp.sin(y.astype(jnp.float32)).sum(), y

    def results(floats: dict[str, jax.Array]) -> Any:
        """(result and gradients of the kernel, gradients of XLA), in one program."""
        kernel_total = partial(total, IMPLEMENTATION)
        (_, y), gradients = jax.value_and_grad(kernel_total, has_aux=True)(floats)
        xla_gradients, _ = jax.grad(partial(total, "xla"), has_aux=True)(floats)
        return y, gradients, xla_gradients

    result, gradients, xla_gradients = jax.tree.map(np.asarray, jax.jit(results)(floats))
    chex.assert_trees_all_equal(result, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, xla_gradients)
    chex.assert_tree_all_finite(gradients)
    assert all(float(np.abs(x.astype(np.float32)).max()) > 0.01 for x in jax.tree.leaves(gradients))
    limit = 1e-4 if dtype == "float32" else 0.1
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(xla_gradients), strict=True)
    for gradient, xla_gradient in pairs:
        expected = np.asarray(xla_gradient, np.float32)
        largest = np.abs(expected).max()
        scaled = np.asarray(gradient, np.float32) / largest
        chex.assert_trees_all_close(scaled, expected / largest, rtol=0, atol=limit)
