"""The arrays of a span: what each of its steps sees, and what the program gives back."""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.device import cache as caches
from pagedjax.device.batch import Batch, blank_sampling
from pagedjax.device.extras import Span
from pagedjax.device.span import _step_of, decode_span
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations

SIZE = 4
TABLES = np.array([[3, 5], [7, 0], [0, 0]], np.int32)  # two rows, and padding


def batch(steps: list[int], count: int = 2) -> Batch:
    """The first step: a row at its third token, whose next block comes later, and one at its first."""
    return Batch(
        tokens=jnp.array([11, 12, 0], jnp.int32),
        positions=jnp.array([3, 0, 0], jnp.int32),
        slots=jnp.array([15, 28, 0], jnp.int32),
        block_tables=jnp.asarray(TABLES),
        seq_lens=jnp.array([4, 1, 0], jnp.int32),
        cu_q_lens=None,
        last=jnp.array([0, 1, 0], jnp.int32),
        sampled_row=jnp.array([0, 1, 0], jnp.int32),
        targets=None,
        sampling=blank_sampling(3),
        extras=(Span(jnp.array(steps, jnp.int32), count),),
    )


def test_a_step_is_one_token_further_and_a_row_behind_its_end_is_padding():
    whole = batch([2, 1, 0])
    span = whole.extra(Span)
    assert span is not None
    first, second = (
        _step_of(whole.without(Span), span, jnp.int32(i), whole.tokens, SIZE) for i in range(2)
    )
    fields = ("positions", "slots", "seq_lens", "block_tables")
    chex.assert_trees_all_equal(
        *({name: getattr(x, name) for name in fields} for x in (first, whole))
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(first, second)
    chex.assert_trees_all_equal(second.positions[0], 4)
    chex.assert_trees_all_equal(second.slots, np.array([5 * SIZE, 0, 0], np.int32))
    # the row that ended keeps a length, so that the rows behind it keep their numbers
    chex.assert_trees_all_equal(second.seq_lens, np.array([5, 1, 0], np.int32))
    chex.assert_trees_all_equal(second.block_tables, np.array([[3, 5], [0, 0], [0, 0]], np.int32))
    chex.assert_trees_all_equal(second.sampling.position, whole.sampling.position + 1)


def test_the_tokens_of_a_step_are_the_input_of_the_next_one():
    empty = caches.KVCache((), (), jnp.zeros((9, SIZE), jnp.int32))

    def one_step(cache: caches.KVCache, step: Batch):
        assert step.extra(Span) is None
        written = cache.tokens.reshape(-1).at[step.slots].set(step.tokens)
        return cache._replace(tokens=written.reshape(cache.tokens.shape)), step.tokens + 100

    cache, tokens = decode_span(one_step, empty, batch([3, 3, 0], count=3))
    chex.assert_shape(tokens, (3, 3))
    chex.assert_trees_all_equal(tokens[:, 0], np.array([111, 211, 311], np.int32))
    chex.assert_trees_all_equal(cache.tokens[5, :2], np.array([111, 211], np.int32))
    chex.assert_trees_all_equal(cache.tokens[7, :3], np.array([12, 112, 212], np.int32))


def test_a_span_of_other_rows_is_refused():
    span = Span(np.zeros(2, np.int32), 2)
    with refused("span.steps"):
        span.check(batch([1, 1, 0]))
