"""A Llama with random weights, at the smallest size."""

from __future__ import annotations

import chex
import jax
import pytest

from experiments.bench import random_llama


@pytest.mark.slow
def test_random_model_is_reproducible_and_has_the_shape():
    shape = random_llama.SHAPES["small"]
    model, repeated, of_other_seed = (
        random_llama.random_model(shape, "float32", seed).params for seed in (0, 0, 1)
    )
    chex.assert_trees_all_equal(model, repeated)
    chex.assert_trees_all_equal_shapes_and_dtypes(model, of_other_seed)
    chex.assert_tree_all_finite(model)
    matrices = [
        x for x in jax.tree.leaves(model) if x.ndim == 2 and x.shape[0] >= shape["hidden_size"]
    ]
    chex.assert_type(matrices, "float32")
    assert all(0.019 < float(x.std()) < 0.021 for x in matrices[:3])
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(model, of_other_seed)
