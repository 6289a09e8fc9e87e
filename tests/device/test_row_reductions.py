"""Reductions whose bits depend on the numbers of a row alone, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.device.batch import blank_sampling
from pagedjax.device.draws import at_quantile, weights
from pagedjax.device.layers import rms_normed
from pagedjax.device.linear import find
from pagedjax.device.models.mlp import Experts, SparseMLP
from pagedjax.device.row_features.chain import DEFAULT
from pagedjax.device.row_features.feature import RowContext
from pagedjax.device.row_reductions import (
    log_softmax,
    reciprocal_sqrt,
    row_maxima,
    row_means,
    row_sums,
    softmax,
    weighted_sums,
)
from tests.device.test_layers import sparse_config

ROWS = 64
FEWER = (1, 3, 33)  # rows alone: one, within a vector's width, and more than half


def numbers(*shape: int) -> np.ndarray:
    return 3 * np.random.default_rng(shape[-1]).standard_normal(shape, np.float32)


def assert_rows_are_independent(function: Callable[..., Any], *arrays: np.ndarray) -> None:
    """Some rows alone have the bits that they have among all."""
    compiled = jax.jit(function)
    all_rows = jax.tree.map(np.asarray, compiled(*arrays))
    for rows in FEWER:
        few_rows = compiled(*(x[4 : 4 + rows] for x in arrays))
        chex.assert_trees_all_equal(
            few_rows, jax.tree.map(lambda x, rows=rows: x[4 : 4 + rows], all_rows)
        )


def normed(x: jax.Array) -> jax.Array:
    """As a norm and a residual. Of widths that are no multiple of a vector, the compiler rounds the
    last numbers of `x * y + x` once or twice as it likes."""
    return x * row_means(x * x) + x


def rms_unit(x: jax.Array) -> jax.Array:
    return rms_normed(x, eps=1e-5)


def test_a_reciprocal_square_root_is_that_of_float64():
    x = np.abs(numbers(1000)) + 1e-6
    exact = 1 / np.sqrt(x.astype(np.float64))
    chex.assert_trees_all_close(
        np.asarray(reciprocal_sqrt(jnp.asarray(x)), np.float64), exact, rtol=2e-7
    )


@pytest.mark.parametrize(
    ("function", "width"),
    [
        *((row_sums, width) for width in (1, 5000)),
        *((softmax, 7), (softmax, 576), (normed, 576), (rms_unit, 64)),
        (lambda x: jnp.cumsum(jnp.abs(x), -1), 384),
        *(
            pytest.param(function, width, marks=pytest.mark.slow)
            for function, width in (
                *((row_sums, width) for width in (7, 64)),
                *((f, width) for f in (softmax, log_softmax) for width in (64, 49152)),
                *((log_softmax, width) for width in (7, 576)),
                *((f, 576) for f in (row_means, row_maxima)),
                (lambda x: jnp.cumsum(jnp.abs(x), -1), 128),
            )
        ),
    ],
)
def test_bits_do_not_depend_on_the_number_of_rows(function, width):
    assert_rows_are_independent(function, numbers(ROWS, width))


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [320, 49152])
def test_weights_and_draws_do_not_depend_on_the_number_of_rows(vocabulary):
    def drawn(
        logits: jax.Array, temperature: jax.Array, share: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        b = len(logits)
        none = (
            jnp.zeros((1, 16), jnp.int32),
            jnp.zeros((b, 1), jnp.int32),
            *jnp.zeros((3, b), jnp.int32),
        )
        sampling = blank_sampling(b)._replace(temperature=temperature)
        row_weights = weights(logits, sampling, RowContext(*none), DEFAULT)
        return row_weights, at_quantile(row_weights, share)

    rng = np.random.default_rng(0)
    shares = rng.random((2, ROWS)).astype(np.float32)
    assert_rows_are_independent(drawn, numbers(ROWS, vocabulary), *shares)


@pytest.mark.slow
def test_experts_do_not_depend_on_the_number_of_tokens():
    """64 experts: XLA computes a softmax over so many in another way than one over few."""
    config = sparse_config(64, Experts(64, 8, 32, normalised=True), linear="cpu")
    module = SparseMLP(config, "float32")
    for linear in (module.up, module.down, module.router.weight):
        matrix = linear.matrix
        stored = numbers(matrix.outputs, matrix.inputs) / np.float32(np.sqrt(matrix.inputs))
        linear.value = jnp.asarray(find("cpu").pack(stored, matrix))
    graphdef, state = nnx.split(module)

    def run(x: jax.Array) -> Any:
        return nnx.merge(graphdef, state).routed(x, norm=lambda x: x)

    assert_rows_are_independent(run, numbers(ROWS, 64))


def test_values_are_those_of_float64():
    x = numbers(3, 4, 1000)
    exact = x.astype(np.float64)
    functions = row_sums, row_means, row_maxima, softmax, log_softmax
    small = numbers(3, 4, 8)
    arguments = x[:, :, :8], small[:, :, 0]
    results, mixed = jax.jit(lambda x, y: ([reduce(x) for reduce in functions], weighted_sums(*y)))(
        x, arguments
    )
    sums, means, maxima, exponentials, logarithms = map(np.asarray, results)
    chex.assert_shape(sums, (3, 4))
    chex.assert_shape((means, maxima), (3, 4, 1))
    chex.assert_trees_all_close(sums, exact.sum(-1).astype(np.float32), atol=1e-3)
    chex.assert_trees_all_close(means[..., 0], exact.mean(-1).astype(np.float32), atol=1e-6)
    chex.assert_trees_all_equal(maxima[..., 0], x.max(-1))
    shares = np.exp(exact) / np.exp(exact).sum(-1, keepdims=True)
    chex.assert_trees_all_close(exponentials, shares.astype(np.float32), atol=1e-6)
    chex.assert_trees_all_close(logarithms, np.log(shares).astype(np.float32), atol=1e-5)
    chex.assert_trees_all_close(mixed, np.einsum("tkh,tk->th", *arguments), atol=1e-5)
