"""Layers against their formulas in float64."""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.device.layers import LayerNorm, Linear, RMSNorm
from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.mlp import Experts, SparseMLP
from pagedjax.device.rope import rotate
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations
# features in and out, tokens, head size, heads
H = 24
OUT = 40
T = 7
D = 8
N = 3


def draws(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def test_the_sum_of_a_16_bit_product_is_rounded_once():
    """A sum in bfloat16 would stop at 256: 256 + 1 is 256."""
    layer = Linear(1024, 1, dtype="bfloat16")
    layer.weight[...] = jnp.ones((1, 1024), jnp.bfloat16)
    y = jax.jit(layer)(jnp.ones((1, 1024), jnp.bfloat16))
    chex.assert_trees_all_equal(y, jnp.full((1, 1), 1024, jnp.bfloat16))


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm_is_its_formula(plus_one: bool, dtype: str):
    layer = RMSNorm(H, eps=1e-5, dtype=dtype, plus_one=plus_one)
    weight = jnp.asarray(draws(0, H), dtype)
    layer.weight = nnx.Param(weight)
    x = jnp.asarray(draws(1, T, N, H) * 100, dtype)
    y = jax.jit(layer)(x)
    wide = np.asarray(x, np.float64)
    factor = np.asarray(weight, np.float64) + plus_one
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * factor
    chex.assert_shape(y, (T, N, H))
    chex.assert_type(y, dtype)
    tolerance = {"float32": 1e-5, "bfloat16": 0.01}[dtype]
    chex.assert_trees_all_close(np.asarray(y, np.float64), exact, atol=tolerance, rtol=tolerance)


def test_layer_norm_has_mean_and_variance_of_its_parameters():
    layer = LayerNorm(H, eps=0.0, dtype="float32")
    layer.weight = nnx.Param(jnp.full(H, 3.0))
    layer.bias = nnx.Param(jnp.full(H, 5.0))
    y = jax.jit(layer)(jnp.asarray(draws(0, T, H) * 7 + 11))
    y = np.asarray(y)
    chex.assert_trees_all_close(y.mean(-1), np.full(T, 5.0, np.float32), atol=1e-5)
    chex.assert_trees_all_close(y.std(-1), np.full(T, 3.0, np.float32), atol=1e-4)


def test_arrays_that_do_not_fit_are_named_when_a_layer_is_traced():
    layer = Linear(H, OUT, dtype="float32")
    x = jax.ShapeDtypeStruct((T, H + 1), jnp.float32)
    with refused(rf"x is \({T}, {H + 1}\); the weight \[{OUT}, {H}\] needs \[T, {H}\]"):
        jax.eval_shape(layer, x)
    with refused(rf"angles has shape .* it must be \[2, {T}, {D // 2}\]"):
        jax.eval_shape(
            rotate, jax.ShapeDtypeStruct((T, N, D), jnp.float32), jnp.zeros((2, T + 1, D // 2))
        )


def sparse_config(hidden: int, experts: Experts, **options) -> DecoderConfig:
    """Of one layer, which is a mixture of experts."""
    return DecoderConfig(
        vocab_size=16,
        hidden=hidden,
        intermediate=16,
        heads=2,
        kv_heads=1,
        head_dim=4,
        max_len=8,
        tied=True,
        eps=1e-5,
        kinds=(LayerKind(sparse=True),),
        ropes=(),
        experts=experts,
        **options,
    )


def sparse(dtype: str) -> SparseMLP:
    mlp = SparseMLP(sparse_config(H, Experts(6, 2, 16, True)), dtype)
    for i, weight in enumerate((mlp.router.weight, mlp.up, mlp.down)):
        weight[...] = jnp.asarray(draws(i, *weight.shape) / 3, dtype)
    return mlp


def test_the_router_is_exact_on_every_device():
    """By default a TPU rounds the factors of a product to bfloat16, and a GPU to TF32: another
    expert would be chosen.

    A CPU is exact in any case, so the test reads the program and not its result.
    """
    traced = jax.make_jaxpr(partial(sparse("float32"), norm=lambda x: x))(jnp.zeros((T, H)))
    products = [equation for equation in traced.eqns if equation.primitive.name == "dot_general"]
    assert len(products) == 1, (
        "the router's; products with experts are traced apart, and their sum is no product"
    )
    highest = jax.lax.Precision.HIGHEST
    assert products[0].params["precision"] in (highest, (highest, highest))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixture_is_the_weighted_sum_of_its_experts(dtype: str):
    mlp = sparse(dtype)
    x = jnp.asarray(draws(9, T, H), dtype)
    y = nnx.jit(lambda mlp, x: mlp(x, norm=lambda x: x))(mlp, x)
    wide = np.asarray(x, np.float64)
    router, up, down = (
        np.asarray(w[...], np.float64) for w in (mlp.router.weight, mlp.up, mlp.down)
    )
    up = up.reshape(6, 32, H)
    down = down.reshape(6, H, 16)
    logits = wide @ router.T
    exact = np.zeros((T, H))
    for t in range(T):
        best = np.argsort(-logits[t])[:2]
        shares = np.exp(logits[t, best])
        for expert, share in zip(best, shares / shares.sum(), strict=True):
            gate, value = np.split(up[expert] @ wide[t], 2)
            exact[t] += share * (down[expert] @ (gate / (1 + np.exp(-gate)) * value))
    chex.assert_shape(y, (T, H))
    chex.assert_type(y, dtype)
    tolerance = {"float32": 1e-4, "bfloat16": 0.06}[dtype]
    chex.assert_trees_all_close(np.asarray(y, np.float64), exact, atol=tolerance, rtol=tolerance)
