"""Layers against their formulas in float64."""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx

from pagedjax.device.formats import int8
from pagedjax.device.layers import LayerNorm, Linear, RMSNorm, rope, rope_frequencies, rope_table
from pagedjax.device.models.decoder import DecoderConfig, Experts, LayerKind, SparseMLP

pytestmark = pytest.mark.few_optimisations
# features in and out, tokens, head size, heads
H = 24
OUT = 40
T = 7
D = 8
N = 3


def draws(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def filled(values: np.ndarray, dtype: str = "float32") -> nnx.Param:
    return nnx.Param(jnp.asarray(values, dtype))


class Layers(chex.TestCase):
    @chex.variants(with_jit=True)
    @parameterized.product(dtype=["float32", "bfloat16"], bias=[False, True])
    def test_linear_is_a_product_and_a_bias(self, dtype: str, bias: bool):
        layer = Linear(H, OUT, bias=bias, dtype=dtype)
        weight, added, x = (
            jnp.asarray(draws(i, *s), dtype) for i, s in enumerate([(OUT, H), (OUT,), (T, H)])
        )
        layer.weight[...] = weight
        if layer.bias is not None:
            layer.bias[...] = added
        y = self.variant(layer)(x)
        exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
        exact = exact + np.asarray(added, np.float64) if bias else exact
        chex.assert_shape(y, (T, OUT))
        chex.assert_type(y, dtype)
        tolerance = {"float32": 1e-5, "bfloat16": 0.05}[dtype]
        chex.assert_trees_all_close(
            np.asarray(y, np.float64), exact, atol=tolerance, rtol=tolerance
        )

    @chex.variants(with_jit=True)
    def test_the_sum_of_a_16_bit_product_is_rounded_once(self):
        """A sum in bfloat16 would stop at 256: 256 + 1 is 256."""
        layer = Linear(1024, 1, dtype="bfloat16")
        layer.weight[...] = jnp.ones((1, 1024), jnp.bfloat16)
        y = self.variant(layer)(jnp.ones((1, 1024), jnp.bfloat16))
        chex.assert_trees_all_equal(y, jnp.full((1, 1), 1024, jnp.bfloat16))

    @chex.variants(with_jit=True)
    def test_an_int8_product_is_off_by_half_a_scale_for_each_weight(self):
        weight = draws(0, OUT, H).astype(np.float32)
        x = draws(1, T, H).astype(np.float32)
        numbers, scales = int8.pack(weight)
        layer = Linear(H, OUT, dtype="float32", stored="int8")
        chex.assert_type(layer.weight[...], jnp.int8)
        layer.weight[...] = jnp.asarray(numbers)
        layer.weight_scales[...] = jnp.asarray(scales)
        y = self.variant(layer)(x)
        bound = np.abs(x).sum(-1, keepdims=True) * scales / 2 + 1e-5
        assert (np.abs(np.asarray(y) - x @ weight.T) <= bound).all()
        chex.assert_shape(y, (T, OUT))

    @chex.variants(with_jit=True)
    @parameterized.product(plus_one=[False, True], dtype=["float32", "bfloat16"])
    def test_rms_norm_is_its_formula(self, plus_one: bool, dtype: str):
        layer = RMSNorm(H, eps=1e-5, dtype=dtype, plus_one=plus_one)
        weight = jnp.asarray(draws(0, H), dtype)
        layer.weight = nnx.Param(weight)
        x = jnp.asarray(draws(1, T, N, H) * 100, dtype)
        y = self.variant(layer)(x)
        wide = np.asarray(x, np.float64)
        factor = np.asarray(weight, np.float64) + plus_one
        exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * factor
        chex.assert_shape(y, (T, N, H))
        chex.assert_type(y, dtype)
        tolerance = {"float32": 1e-5, "bfloat16": 0.01}[dtype]
        chex.assert_trees_all_close(
            np.asarray(y, np.float64), exact, atol=tolerance, rtol=tolerance
        )

    @chex.variants(with_jit=True)
    def test_layer_norm_has_mean_and_variance_of_its_parameters(self):
        layer = LayerNorm(H, eps=0.0, dtype="float32")
        layer.weight = filled(np.full(H, 3.0))
        layer.bias = filled(np.full(H, 5.0))
        y = self.variant(layer)(jnp.asarray(draws(0, T, H) * 7 + 11))
        y = np.asarray(y)
        chex.assert_trees_all_close(y.mean(-1), np.full(T, 5.0, np.float32), atol=1e-5)
        chex.assert_trees_all_close(y.std(-1), np.full(T, 3.0, np.float32), atol=1e-4)

    @chex.variants(with_jit=True)
    def test_rope_is_a_rotation_of_complex_numbers(self):
        """Su et al. 2021, equation 14: pair i of position m is multiplied by exp(i m theta_i)."""
        positions = np.array([0, 1, 2, 5, 60, 61, 127])
        freqs = rope_frequencies(D, 10000.0, None)
        angles = jnp.asarray(rope_table(freqs, 128)[:, positions])
        x = draws(0, T, N, D)
        y = self.variant(rope)(jnp.asarray(x, jnp.float32), angles)
        turned = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * np.exp(
            1j * np.outer(positions, freqs)
        )[:, None]
        chex.assert_trees_all_close(
            y, np.concatenate([turned.real, turned.imag], -1).astype(np.float32), atol=1e-4
        )

    @chex.variants(with_jit=True)
    def test_scores_of_rotated_vectors_depend_on_their_distance_alone(self):
        table = rope_table(rope_frequencies(D, 10000.0, None), 128)
        x = jnp.asarray(draws(0, 1, 2, D), jnp.float32)

        def score(m: int, n: int) -> jax.Array:
            turned = self.variant(rope)
            q, k = (
                turned(a, jnp.asarray(table[:, [at]])) for a, at in ((x[:, :1], m), (x[:, 1:], n))
            )
            return (q * k).sum()

        chex.assert_trees_all_close(score(10, 3), score(107, 100), atol=1e-4)

    def test_arrays_that_do_not_fit_are_named_when_a_layer_is_traced(self):
        layer = Linear(H, OUT, dtype="float32")
        x = jax.ShapeDtypeStruct((T, H + 1), jnp.float32)
        with pytest.raises(
            ValueError, match=rf"x is \({T}, {H + 1}\); the weight \[{OUT}, {H}\] needs \[T, {H}\]"
        ):
            jax.eval_shape(layer, x)
        with pytest.raises(
            ValueError, match=rf"angles has shape .* it must be \[2, {T}, {D // 2}\]"
        ):
            jax.eval_shape(
                rope, jax.ShapeDtypeStruct((T, N, D), jnp.float32), jnp.zeros((2, T + 1, D // 2))
            )


def sparse(dtype: str) -> SparseMLP:
    sizes = {
        "vocab_size": 16,
        "hidden": H,
        "intermediate": 16,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 4,
        "max_len": 8,
    }
    kinds = (LayerKind(sparse=True),)
    experts = Experts(6, 2, 16, True)
    config = DecoderConfig(**sizes, tied=True, eps=1e-5, kinds=kinds, ropes=(), experts=experts)
    mlp = SparseMLP(config, dtype)
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
