"""What attention weighs values with: every form of pages, against numpy and against attention
itself.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import IMPLS
from pallas_kernels.paged_attention.probabilities import probabilities
from pallas_kernels.shared.page_bits import stored
from tests.pallas_kernels.test_paged_attention import make, run, scatter, softmax

pytestmark = pytest.mark.few_optimisations
D = 16
HEADS = (4, 0, 3)
# a row without tokens among others; NaN where no row has a token
CASE = scatter(
    make([(1, 11), (1, 1), (0, 0), (1, 4)], t=4, b=4, s=4, m=3, g=3), garbage=np.nan
)._replace(scale=0.4)
QUERIES = CASE.q[[0, 1, 3, 2]]  # of the rows


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
    pages = CASE.k_pages
    keys = CASE.k
    if dtype != "float32":
        pages = np.asarray(jax.jit(stored, static_argnums=1)(pages, jnp.dtype(dtype)))
        kind = jnp.dtype({"uint8": "float8_e4m3fn", "uint16": "bfloat16"}[dtype])
        keys = keys.astype(kind).astype(np.float32)
    pages = pages.reshape(*pages.shape[:2], -1, row)
    options = {"scale": 0.4, "window": window, "soft_cap": soft_cap}
    output = jax.jit(lambda *a: probabilities(*a, HEADS, **options))(
        QUERIES, pages, CASE.block_tables, CASE.seq_lens
    )
    chex.assert_shape(output, (4, 3, 12))
    chex.assert_type(output, jnp.float32)
    output = np.asarray(output)
    for i, length in enumerate(CASE.seq_lens):
        expected = np.zeros((3, 12), np.float32)
        for j, head in enumerate(HEADS if length else ()):
            scores = keys[i, :length, head // 3] @ QUERIES[i, head] * 0.4
            scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
            first = max(length - window, 0) if window else 0
            expected[j, first:length] = softmax(scores[first:])
        chex.assert_trees_all_close(output[i], expected, atol=1e-6)


def test_every_implementation_has_them_and_they_are_what_it_weighs_with():
    """With the values of a token all equal to a basis vector, attention gives its weights."""
    assert all(impl.probabilities is probabilities for impl in IMPLS.values())
    bases = np.broadcast_to(np.eye(12, D, dtype=np.float32)[:, None], CASE.v.shape)
    weights = run(scatter(CASE._replace(v=bases), garbage=0.0)._replace(window=5), "xla")
    output = jax.jit(lambda *a: probabilities(*a, range(6), scale=0.4, window=5))(
        QUERIES, CASE.k_pages, CASE.block_tables, CASE.seq_lens
    )
    chex.assert_trees_all_close(weights[:3, :, :12], np.asarray(output)[[0, 1, 3]], atol=1e-6)
