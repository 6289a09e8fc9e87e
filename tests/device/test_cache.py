"""The cache on the device: tokens are written to their slots, blocks move whole, and a step updates
it in place.
"""

from __future__ import annotations

import re
from functools import partial

import chex
import jax
import numpy as np
import pytest

from pagedjax.device import attention, cache
from pagedjax.device.batch import Shapes, blank_sampling, joined
from pagedjax.device.step import make_step
from pagedjax.engine.pack import Sources, pack
from pagedjax.host.types import EMPTY_PLAN
from tests import quick_compiler
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations

SIZES = {"layers": 2, "kv_heads": 2, "head_dim": 4}
DIMS = chex.Dimensions(P=6, K=2, S=8, D=4)


def filled(dtype: str = "float32") -> cache.KVCache:
    """A cache whose blocks all differ."""
    blank = jax.eval_shape(partial(cache.init, **SIZES, blocks=5, block_size=8, dtype=dtype))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: rng.integers(0, 99, a.shape).astype(a.dtype), blank)


@pytest.mark.parametrize("s", [1, 8, 64])
def test_a_token_id_is_written_to_its_slot_and_to_no_other(s):
    """Those of keys and values: tests/pallas_kernels/test_kv_write.py."""
    rng = np.random.default_rng(s)
    ids = rng.integers(1, 99, 12).astype(np.int32)
    # two padding tokens
    slots = np.concatenate([s + rng.permutation(128)[:10], [0, 0]]).astype(np.int32)
    old = np.zeros((128 // s + 1, s), np.int32)
    tokens = np.asarray(jax.jit(cache.write_tokens)(old, ids, slots))
    expected = old.reshape(-1).copy()
    expected[slots[:10]] = ids[:10]
    chex.assert_trees_all_equal(tokens[1:], expected.reshape(old.shape)[1:], strict=True)


def test_rows_of_several_tokens_hold_whole_tokens_of_one_block():
    wide = cache.init(
        layers=1, blocks=5, block_size=8, kv_heads=2, head_dim=64, dtype="bfloat16", row=128
    )
    chex.assert_shape([*wide.k, *wide.v], (6, 2, 4, 128))
    chex.assert_shape(wide.tokens, DIMS["PS"])
    for row in (96, 1024):
        with refused(f"a row of {row} numbers does not divide a block of 8 tokens of 64"):
            cache.init(
                layers=1, blocks=5, block_size=8, kv_heads=2, head_dim=64, dtype="bfloat16", row=row
            )


def test_a_copy_reads_every_source_before_it_writes_a_target():
    old = filled()
    new = jax.jit(cache.copy)(old, np.array([1, 2, 0, 3]), np.array([2, 3, 0, 5]))
    expected = jax.tree.map(lambda a: a[np.array([0, 1, 1, 2, 4, 3])], old)
    chex.assert_trees_all_equal(new, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, old)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "uint8"])
def test_blocks_that_are_read_and_written_elsewhere_are_the_same(dtype):
    old = filled(dtype)
    pages = jax.jit(cache.read_blocks)(old, np.array([4, 1]))
    chex.assert_shape([*pages.k, *pages.v], (2, *DIMS["KSD"]))
    chex.assert_shape(pages.tokens, (2, DIMS["S"][0]))
    new = jax.jit(cache.write_blocks)(old, np.array([2, 5]), pages)
    chex.assert_trees_all_equal(new, jax.tree.map(lambda a: a[np.array([0, 1, 4, 3, 4, 1])], old))
    chex.assert_trees_all_equal_shapes_and_dtypes(new, old)


def test_shapes_that_do_not_fit_are_refused_when_traced():
    old = filled()
    with refused(r"target has shape \[1\]; it must be \[2\]"):
        jax.jit(cache.copy)(old, np.array([1, 2]), np.array([3]))
    with refused(r"pages has shape \[2, 2, 8, 4\]; it must be \[1, 2, 8, 4\]"):
        jax.jit(cache.write_blocks)(old, np.array([1]), jax.tree.map(lambda a: a[2:4], old))
    with refused(r"ids has shape \[3\]; it must be \[2\]"):
        jax.jit(cache.write_tokens)(old.tokens, np.zeros(3, np.int32), np.zeros(2, np.int32))


def compiled_step(model, *, t: int, blocks: int, dtype: str = "float32"):
    """The engine's step for the one bucket t, over a cache of `blocks` blocks. Returns it and the
    cache's shapes.
    """
    m = model.config
    s = 16
    kv = jax.eval_shape(
        lambda: cache.init(
            layers=m.layers,
            blocks=blocks,
            block_size=s,
            kv_heads=m.kv_heads,
            head_dim=m.head_dim,
            dtype=dtype,
        )
    )
    shapes = Shapes((t,), 8, s, m.max_len // s, m.max_len, m.vocab_size)
    rows = shapes.rows(t)
    sources = Sources(looks_ahead=True)
    batch = pack(EMPTY_PLAN, {}, shapes, {rows: blank_sampling(rows)}, sources=sources)
    step = make_step(model, attention.attend("xla", m.head_dim**-0.5), seed=0)
    lowered = step.lower(model.leaves, kv, joined(batch))
    with quick_compiler.all_quickly():  # buffers are assigned as in a fast program
        return lowered.compile(), kv


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "uint16", "uint8"])
@pytest.mark.parametrize("t", [8, 96])  # without the loop over prompt chunks, and with it
def test_a_step_updates_the_cache_in_place(tiny, t, dtype):
    """The compiled program updates all of a cache of 160 MB in place and copies none of it."""
    size = np.dtype(dtype).itemsize
    compiled, kv = compiled_step(tiny.model, t=t, blocks=80_000 // size, dtype=dtype)
    leaves = jax.tree.leaves(kv)
    total = sum(a.size * a.dtype.itemsize for a in leaves)
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    assert memory.alias_size_in_bytes >= total > 160e6
    assert memory.temp_size_in_bytes < total / len(leaves) / 10, (
        "a temporary is as large as a part of the cache"
    )

    # instructions whose result has all pages
    all_pages = re.compile(rf"= \w+\[{80_000 // size + 1},[\d,]+\]\S* (\S+)\(")
    kinds = {match[1] for match in all_pages.finditer(text)}
    assert {"parameter", "scatter"} & kinds, "the pattern finds nothing: the test is blind"
    assert not kinds & {
        "copy",
        "copy-start",
        "transpose",
        "concatenate",
        "select",
        "convert",
        "add",
    }, kinds
