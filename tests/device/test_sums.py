"""Sums whose bits depend on the numbers of a row alone."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.device.sampling import log_softmax
from pagedjax.device.sums import row_means, row_sums

ROWS = 24


def normed(x: jax.Array) -> jax.Array:
    """As a norm and a residual. Of widths that are no multiple of a vector, the compiler rounds the last numbers of
    `x * y + x` once or twice as it likes."""
    return x * row_means(x * x) + x


@pytest.mark.parametrize(
    ("function", "width"),
    [
        *((row_sums, width) for width in (1, 7, 64, 5000)),
        *((function, width) for function in (row_means, log_softmax) for width in (7, 576)),
        *((normed, width) for width in (64, 576)),
    ],
)
def test_bits_do_not_depend_on_the_number_of_rows(function, width):
    x = np.random.default_rng(width).standard_normal((ROWS, width)).astype(np.float32)
    compiled = jax.jit(function)
    whole = np.asarray(compiled(x))
    for rows in (1, 2, 3, 5, 8, 16):
        chex.assert_trees_all_equal(np.asarray(compiled(x[4 : 4 + rows])), whole[4 : 4 + rows])


def test_sums_and_means_are_those_of_float64():
    x = np.random.default_rng(0).standard_normal((3, 4, 1000)).astype(np.float32)
    sums, means = jax.jit(row_sums)(jnp.asarray(x)), jax.jit(row_means)(jnp.asarray(x))
    chex.assert_shape(sums, (3, 4))
    chex.assert_shape(means, (3, 4, 1))
    chex.assert_trees_all_close(sums, x.astype(np.float64).sum(-1).astype(np.float32), atol=1e-4)
    chex.assert_trees_all_close(means[..., 0], x.astype(np.float64).mean(-1).astype(np.float32), atol=1e-6)
