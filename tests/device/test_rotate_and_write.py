"""Layers whose attention rotates and writes at once get its function, and give the same logits."""

from __future__ import annotations

from dataclasses import replace

import chex
import jax.numpy as jnp
import pytest
from flax import nnx

from pagedjax.device.models.decoder import Attention, LayerKind
from pagedjax.device.rope import rotate
from pallas_kernels import kv_write
from pallas_kernels.paged_attention import IMPLS
from tests.device.test_llama import CHUNKED, all_logits

pytestmark = pytest.mark.few_optimisations


@pytest.fixture
def queries_of_calls(monkeypatch) -> list[int]:
    """The query heads of each call of the function of the attention "at_once"."""
    calls = []

    def in_steps(k_pages, v_pages, heads, angles, slots, *, queries):
        calls.append(queries)
        ends = queries, queries + k_pages.shape[1]
        q, k, v = jnp.split(heads, ends, axis=1)
        new = rotate(k, angles), v, slots
        pages = kv_write.write(k_pages, v_pages, *new, rows=len(slots), impl="xla")
        return rotate(q, angles), *pages

    impl = IMPLS["reference"]._replace(name="at_once", rotate_and_write=in_steps)
    monkeypatch.setitem(IMPLS, "at_once", impl)
    return calls


def test_logits_are_those_of_rotation_and_write(tiny, queries_of_calls):
    expected = all_logits(tiny.model, CHUNKED)
    chex.assert_trees_all_equal(all_logits(tiny.model, CHUNKED, "at_once"), expected)
    # of the last layer keys and values are written alone
    assert queries_of_calls == [tiny.model.config.heads, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"qk_norm": "head"},
        {"v_norm": True},
        {"shared_values": True},
        {"attn_gate": True},
        {"kinds": (LayerKind(rope=None),)},
        {"ropes": ()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_layers_with_more_than_a_rotation_do_not_get_it(tiny, change):
    def attention_of(config) -> Attention:
        return nnx.eval_shape(lambda: Attention(config, config.kinds[0], "float32"))

    assert attention_of(tiny.model.config).only_rotates
    assert not attention_of(replace(tiny.model.config, **change)).only_rotates
