"""The bits of a mask decide which tokens keep their logits."""

from __future__ import annotations

import chex
import jax
import numpy as np
import pytest

from pagedjax.device.row_features.feature import RowContext
from pagedjax.device.row_features.token_mask import token_mask

pytestmark = pytest.mark.few_optimisations


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 320, 1000])
def test_a_bit_is_a_token(vocab):
    rng = np.random.default_rng(vocab)
    allowed = rng.random((5, vocab)) < 0.3
    padded = np.zeros((5, -(-vocab // 32) * 32), bool)
    padded[:, :vocab] = allowed
    words = np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)
    logits = rng.standard_normal((5, vocab), np.float32)
    context: RowContext = None  # type: ignore  # masks do not read it
    masked = jax.jit(token_mask(vocab).apply)(logits, {"allowed": words}, context)
    chex.assert_shape(masked, (5, vocab))
    chex.assert_trees_all_equal(masked, np.where(allowed, logits, -np.inf))


def test_a_row_without_a_form_keeps_its_logits():
    vocab = 50
    rows = 3
    logits = np.random.default_rng(0).standard_normal((rows, vocab), np.float32)
    mask = token_mask(vocab)
    words = mask.off["allowed"]
    off = np.broadcast_to(words, (rows, *words.shape))
    context: RowContext = None  # type: ignore
    chex.assert_trees_all_equal(mask.apply(logits, {"allowed": off}, context), logits)
