"""The cache on the device: tokens land in their slots, and a step updates it in place."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import SamplingParams
from pagedjax.device import attention, cache
from pagedjax.device.batch import Shapes, blank_feed, blank_sampling
from pagedjax.device.step import make_step, make_steps
from pagedjax.engine.pack import pack
from pagedjax.host.types import EMPTY_PLAN

SIZES = {"layers": 2, "kv_heads": 2, "head_dim": 4}


@pytest.mark.parametrize("s", [1, 2, 8, 16, 64])
def test_a_token_lands_in_its_slot_and_nowhere_else(s):
    rng = np.random.default_rng(s)
    pages = 128 // s + 1
    old = cache.init(layers=1, blocks=pages - 1, block_size=s, kv_heads=2, head_dim=4, dtype="float32")
    k, v = rng.standard_normal((2, 12, 2, 4), np.float32)
    slots = np.concatenate([s + rng.permutation(128)[:10], [0, 0]]).astype(np.int32)  # two padding tokens
    k_pages, v_pages = map(np.asarray, jax.jit(cache.write)(old.k[0], old.v[0], k, v, slots))
    k_slots = k_pages.transpose(0, 2, 1, 3).reshape(-1, 2, 4)
    v_slots = v_pages.transpose(0, 2, 1, 3).reshape(-1, 2, 4)
    np.testing.assert_array_equal(k_slots[slots[:10]], k[:10])
    np.testing.assert_array_equal(v_slots[slots[:10]], v[:10])
    untouched = np.setdiff1d(np.arange(s, pages * s), slots)
    assert len(untouched) == 118
    assert not k_slots[untouched].any()
    assert not v_slots[untouched].any()


def test_a_cache_is_pairs_of_pages_a_layer_with_the_trash_block_first():
    kv = cache.init(**SIZES, blocks=5, block_size=8, dtype="bfloat16")
    assert [a.shape for a in (*kv.k, *kv.v)] == [(6, 2, 8, 4)] * 4
    assert all(a.dtype == jnp.bfloat16 for a in (*kv.k, *kv.v))
    assert (kv.tokens.shape, kv.tokens.dtype) == ((6, 8), jnp.int32)
    assert not any(a.any() for a in jax.tree.leaves(kv))


def test_writing_rounds_to_the_type_of_the_cache():
    kv = cache.init(layers=1, blocks=1, block_size=2, kv_heads=1, head_dim=1, dtype="bfloat16")
    one = np.full((1, 1, 1), 1.001, np.float32)
    k_pages, v_pages = cache.write(kv.k[0], kv.v[0], one, one, np.array([2]))
    assert k_pages.dtype == v_pages.dtype == jnp.bfloat16
    assert k_pages[1, 0, 0, 0] == v_pages[1, 0, 0, 0] == 1.0


def compiled_step(model, *, t: int, blocks: int, steps: int, dtype: str = "float32"):
    """The engine's step for the one bucket t, over a cache of `blocks` blocks -> (compiled, the cache's shapes)."""
    m, s = model.config, 16
    kv = jax.eval_shape(
        lambda: cache.init(
            layers=m.layers, blocks=blocks, block_size=s, kv_heads=m.kv_heads, head_dim=m.head_dim, dtype=dtype
        )
    )
    shapes = Shapes((t,), 8, s, m.max_len // s, m.max_len, m.vocab_size)
    batch = pack(EMPTY_PLAN, {}, shapes, {t: blank_sampling(shapes, t)})._replace(feed=blank_feed(shapes, t))
    step = make_step(model, attention.attend("xla", m.head_dim**-0.5), seed=0)
    if steps == 1:
        return step.lower(model.leaves, kv, batch).compile(), kv
    return make_steps(step).lower(model.leaves, kv, (batch,) * steps, np.int32(0)).compile(), kv


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize(("t", "steps"), [(8, 1), (96, 1), (8, 3)])  # without the loop over prompt chunks, and with it
def test_a_step_updates_the_cache_in_place(tiny, t, steps, dtype):
    """Read off the compiled program, for a cache of 160 MB: all of it is aliased, and none of it copied."""
    size = np.dtype(dtype).itemsize
    compiled, kv = compiled_step(tiny.model, t=t, blocks=80_000 // size, steps=steps, dtype=dtype)
    leaves = jax.tree.leaves(kv)
    total = sum(a.size * a.dtype.itemsize for a in leaves)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes >= total > 160e6
    assert memory.temp_size_in_bytes < total / len(leaves) / 10, "a temporary is as large as a part of the cache"

    whole = re.compile(rf"= \w+\[{80_000 // size + 1},[\d,]+\]\S* (\S+)\(")  # instructions whose result has all pages
    kinds = {match[1] for match in whole.finditer(text)}
    assert {"parameter", "scatter"} & kinds, "the pattern finds nothing: the test is blind"
    assert not kinds & {"copy", "copy-start", "transpose", "concatenate", "select", "convert", "add"}, kinds


def test_the_donated_cache_is_gone_after_a_step(tiny_llm):
    engine = tiny_llm.engine
    old = jax.tree.leaves(engine._cache)
    where = [a.unsafe_buffer_pointer() for a in old]
    engine.add("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=1))
    engine.step()
    assert not engine.has_work
    assert all(a.is_deleted() for a in old)
    new = jax.tree.leaves(engine._cache)
    assert [a.unsafe_buffer_pointer() for a in new] == where
    assert any(np.asarray(a).any() for a in new)
