"""Selections of blocks (selection.py) against a brute-force model in numpy's float64."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.device import attention
from pagedjax.device.attention import numbers_in, stored_in
from pagedjax.device.batch import Batch
from pagedjax.device.cache import BoundedKeys, Pages
from pagedjax.device.extras import Selecting, Selection
from pagedjax.device.selection import attend_selected, write
from tests.device.test_llama import lay_out
from tests.engine.brute_quest import chosen_blocks
from tests.pallas_kernels.test_paged_attention import dense

pytestmark = pytest.mark.few_optimisations
K = 2
G = 2
D = 8
S = 4
M = 6
SCALE = 0.5
# (queries that read all, queries that select, tokens of the context)
ROWS = [(0, 1, 21), (5, 0, 13), (3, 2, 24), (0, 3, 16), (0, 1, 1), (1, 0, 9)]
T = 20  # 4 of them are padding
DTYPES = "float32", "uint16", "uint8"  # of pages: float32, and the bits of bfloat16 and float8


def batch_of(blocks: int, rng: np.random.Generator) -> Batch:
    """ROWS over pages in any order; token t of a row is in the page of its position."""
    b = len(ROWS)
    tables = 1 + rng.permutation(b * M).reshape(b, M).astype(np.int32)
    counts = [dense + selecting for dense, selecting, _ in ROWS]
    computed = [row[2] - count for count, row in zip(counts, ROWS, strict=True)]
    step = [*enumerate(counts)]
    batch = lay_out(step, computed, np.zeros((b, M * S), np.int32), tables, T, s=S)
    selects = np.ones(T, bool)
    selects[: sum(counts)] = np.concatenate(
        [np.arange(count) >= row[0] for count, row in zip(counts, ROWS, strict=True)]
    )
    selecting = Selecting(Selection(blocks, 0, True), jnp.asarray(selects))
    return jax.tree.map(jnp.asarray, batch)._replace(extras=(selecting,))


def expected(q, k_pages, v_pages, batch: Batch, blocks: int) -> np.ndarray:
    out = np.zeros((T, K * G, D))
    tables, _, offsets = map(np.asarray, batch.attention)
    for i, (num_dense, num_selecting, total) in enumerate(ROWS):
        keys, values = (
            pages[tables[i]].swapaxes(1, 2).reshape(M * S, K, D) for pages in (k_pages, v_pages)
        )
        for j in range(num_dense + num_selecting):
            t = offsets[i] + j
            num_seen = total - num_dense - num_selecting + j + 1
            for head in range(K):
                heads = slice(head * G, (head + 1) * G)
                head_keys, head_values = (x[:num_seen, head : head + 1] for x in (keys, values))
                block_ids = range(M)
                if j >= num_dense:
                    block_ids = chosen_blocks(SCALE * q[t, heads], head_keys[:, 0], S, blocks)
                mask = np.isin(np.arange(num_seen) // S, list(block_ids))
                queries = q[t : t + 1, heads]
                out[t, heads] = dense(queries, head_keys, head_values, mask[None], SCALE, None)
    return out


QUICK = [("cpu", "float32", 2), ("cpu", "uint16", 3), ("xla", "float32", 3)]
BLOCKS = 2, 3, 6


def cases() -> list[Any]:
    """All pairs of an implementation, a dtype and a number of blocks are slow."""
    result = []
    for i, impl in enumerate(("cpu", "xla", "reference")):
        for j, dtype in enumerate(DTYPES):
            for n, blocks in enumerate(BLOCKS):
                is_slow = (i + j - n) % len(BLOCKS) == 0
                marks: Any = pytest.mark.slow if is_slow else pytest.mark.exhaustive
                case = impl, dtype, blocks
                result.append(pytest.param(*case, marks=() if case in QUICK else marks))
    return result


@pytest.mark.parametrize(("impl", "dtype", "blocks"), cases())
def test_selected_attention_is_that_of_a_brute_force_model(impl, dtype, blocks):
    if impl == "cpu" and attention.find(impl).obstacle(
        jax.devices()[0],
        dtype="float32",
        query_dtype="float32",
        head_dim=D,
        block_size=S,
        kv_heads=1,
        heads=G,
    ):
        pytest.skip("the compiled kernel is not here")
    rng = np.random.default_rng(blocks)
    batch = batch_of(blocks, rng)
    q = rng.normal(0, 2, (T, K * G, D)).astype(np.float32)
    kinds = jnp.dtype(dtype)
    k_pages, v_pages = (
        stored_in(jnp.asarray(rng.normal(size=(M * len(ROWS) + 1, K, S, D))), kinds) for _ in "kv"
    )
    numbers = [
        np.asarray(numbers_in(pages).astype(jnp.float32), np.float64)
        for pages in (k_pages, v_pages)
    ]
    ends = jnp.stack(
        [
            numbers_in(k_pages).astype(jnp.float32).min(2),
            numbers_in(k_pages).astype(jnp.float32).max(2),
        ],
        2,
    )
    keys = BoundedKeys(k_pages, stored_in(ends, kinds))
    attend = attention.attend(impl, SCALE)
    result = np.array(
        jax.jit(attend_selected, static_argnums=0, static_argnames="scale")(
            attend, jnp.asarray(q), keys, v_pages, batch, scale=SCALE
        )
    )
    reference = expected(q.astype(np.float64), *numbers, batch, blocks)
    used = int(batch.cu_q_lens[-1])
    chex.assert_shape(result, (T, K * G, D))
    chex.assert_trees_all_close(
        result[:used], reference[:used].astype(np.float32), atol=1e-5, rtol=1e-5
    )
    if blocks < M:
        every = expected(q.astype(np.float64), *numbers, batch, M)
        assert np.abs(result[:used] - every[:used]).max() > 1e-2, (
            "nothing is left out: the comparison is blind"
        )


WRITE = jax.jit(write, static_argnums=0)


@settings(max_examples=20)
@given(data=st.data())
def test_bounds_of_full_blocks_are_those_of_their_keys_after_any_writes(data):
    """Slots are written again, as after a rejected draft, and the blocks of one step fill in any
    order.
    """
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    blocks = 5
    t = 8
    pages = np.zeros((blocks + 1, K, S, D), np.float32)
    bounds = np.full((blocks + 1, K, 2, D), 7.0, np.float32)
    layer = Pages(k=pages, bounds=bounds, v=pages)
    attend = attention.attend("xla", 1.0)
    expected = {}
    absent: Any = None
    for _ in range(data.draw(st.integers(1, 6))):
        slots = np.zeros(t, np.int32)
        first = data.draw(st.integers(0, blocks * S - t))
        count = data.draw(st.integers(1, t))
        slots[:count] = S + first + np.arange(count)
        batch = Batch(*[absent] * 10)._replace(slots=slots, seq_lens=np.zeros(2, np.int32))
        k = rng.normal(size=(t, K, D)).astype(np.float32)
        layer = WRITE(attend, layer, k, k, batch)
        numbers = np.asarray(layer["k"])
        bounds = np.asarray(layer["bounds"])
        for block in {int(slot) // S for slot in slots[:count] if slot % S == S - 1}:
            expected[block] = np.stack([numbers[block].min(1), numbers[block].max(1)], 1)
        for block in range(1, blocks + 1):
            block_bounds = expected.get(block, np.full((K, 2, D), 7.0, np.float32))
            chex.assert_trees_all_equal(bounds[block], block_bounds)
