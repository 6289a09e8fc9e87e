"""What attention weighs values with: every form of pages, against numpy and against attention
itself.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import IMPLS, paged_attention
from pallas_kernels.paged_attention.probabilities import probabilities
from pallas_kernels.shared.page_bits import stored

pytestmark = pytest.mark.few_optimisations
LENS = np.array([11, 1, 0, 4])
TABLES = np.array([[3, 5, 1], [2, 0, 0], [0, 0, 0], [4, 0, 0]])
S = 4
K = 2
N = 6
D = 16
HEADS = (4, 0, 3)


def case(dtype: str, row: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """(queries, pages with NaN where no row of theirs has a token, the keys of each row)."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(4, N, D)).astype(np.float32)
    pages = np.full((7, K, S, D), np.nan, np.float32)
    keys = []
    for table, length in zip(TABLES, LENS, strict=True):
        row_keys = rng.normal(size=(length, K, D)).astype(np.float32)
        for i, key in enumerate(row_keys):
            pages[table[i // S], :, i % S] = key
        keys.append(row_keys)
    if dtype in ("uint8", "uint16"):
        pages = np.asarray(jax.jit(stored, static_argnums=1)(pages, jnp.dtype(dtype)))
        kind = jnp.dtype({"uint8": "float8_e4m3fn", "uint16": "bfloat16"}[dtype])
        keys = [array.astype(kind).astype(np.float32) for array in keys]
    return q, pages.reshape(7, K, -1, row), keys


@pytest.mark.parametrize(
    ("dtype", "row", "window", "soft_cap"),
    [
        ("float32", D, None, None),
        ("float32", 2 * D, 3, None),
        ("uint16", D, None, 1.5),
        ("uint8", 4 * D, 2, 0.7),
    ],
)
def test_probabilities_are_a_softmax_of_what_the_query_sees(dtype, row, window, soft_cap):
    q, pages, keys = case(dtype, row)
    options = {"scale": 0.4, "window": window, "soft_cap": soft_cap}
    arrays = TABLES.astype(np.int32), LENS.astype(np.int32)
    output = jax.jit(lambda *a: probabilities(*a, HEADS, **options))(q, pages, *arrays)
    chex.assert_shape(output, (4, 3, 12))
    chex.assert_type(output, jnp.float32)
    output = np.asarray(output)
    for i, length in enumerate(LENS):
        expected = np.zeros((3, 12), np.float32)
        for j, head in enumerate(HEADS if length else ()):
            scores = keys[i][:, head // 3] @ np.asarray(q[i, head]) * 0.4
            scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
            first = max(length - window, 0) if window else 0
            weights = np.exp(scores[first:] - scores[first:].max())
            expected[j, first:length] = weights / weights.sum()
        chex.assert_trees_all_close(output[i], expected, atol=1e-6)


def test_every_implementation_has_them_and_they_are_what_it_weighs_with():
    """With the values of a token all equal to a basis vector, attention gives its weights."""
    assert all(impl.probabilities is probabilities for impl in IMPLS.values())
    q, pages, _ = case("float32", D)
    values = np.zeros((7, K, S, D), np.float32)
    for table, length in zip(TABLES, LENS, strict=True):
        for i in range(length):
            values[table[i // S], :, i % S, i] = 1.0
    tables = TABLES.astype(np.int32)
    lens = LENS.astype(np.int32)
    cu = np.array([0, 1, 2, 2, 3], np.int32)
    rows = np.array([0, 1, 3])
    weights = paged_attention(
        q[rows], pages, values, tables, lens, cu, scale=0.4, impl="xla", window=5
    )
    output = jax.jit(lambda *a: probabilities(*a, range(N), scale=0.4, window=5))(
        q, pages, tables, lens
    )
    chex.assert_trees_all_close(np.asarray(weights)[:, :, :12], np.asarray(output)[rows], atol=1e-6)
