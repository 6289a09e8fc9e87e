"""A layer that keeps other arrays than keys and values of one shape is one class in one file: blocks
of its pages are shared, copied and swapped as all others are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import LLM
from pagedjax.device.attention import Attend
from pagedjax.device.batch import Batch
from pagedjax.device.cache import BlockSizes, Pages, PageShapes
from pagedjax.device.memory import nbytes
from pagedjax.device.models import Model, assemble
from pagedjax.device.models.decoder import Attention, Block, DecoderConfig, LayerKind
from pagedjax.device.rope import rotate
from pagedjax.weights.trained import named, nested, whole
from tests.engine.page_kinds import check_moves, check_same, tokens_of
from tests.engine.runs import small_llm

SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "num_blocks": 20,
    "preemption": "swap",
    "swap_space_gib": 0.01,
}

# the layer ----------------------------------------------------------------------------------------


class HalfValues(Attention):
    """Attention to values of half the size, which the other half of the output does not get; and a
    number for each token, which must be there when the token is read.
    """

    def __call__(self, x, pages: Pages, batch: Batch, angles, attend: Attend, *, norm, residual):
        pages = self.write(x, pages, batch, angles, attend, norm=norm)
        return self.read(x, pages, batch, angles, attend, norm=norm, residual=residual), pages

    def write(self, x, pages: Pages, batch: Batch, angles, attend: Attend, *, norm) -> Pages:
        _, k, v = self.heads_of(x, batch, angles, norm)
        size = pages["k"].shape[2]
        block = batch.slots // size
        offset = batch.slots % size
        return Pages(
            k=pages["k"].at[block, :, offset].set(k),
            v=pages["v"].at[block, :, offset].set(v[..., : self.config.head_dim // 2]),
            present=pages["present"].at[block, 0, offset].set(1.0),
        )

    def read(self, x, pages: Pages, batch: Batch, angles, attend: Attend, *, norm, residual=None):
        c = self.config
        q, _, _ = self.heads_of(x, batch, angles, norm)
        t = len(q)
        row = jnp.searchsorted(batch.row_cu_q_lens[1:], jnp.arange(t), side="right")
        tables = batch.block_tables[jnp.minimum(row, len(batch.seq_lens) - 1)]

        def of_row(name: str) -> jax.Array:
            """[T, heads, M S, ...]"""
            of_blocks = jnp.swapaxes(pages[name][tables], 1, 2)
            return of_blocks.reshape(t, of_blocks.shape[1], -1, *of_blocks.shape[4:])

        queries = q.reshape(t, c.kv_heads, -1, c.head_dim)
        scores = c.attn_scale * jnp.einsum("tkgd,tkcd->tkgc", queries, of_row("k"))
        context = jnp.arange(scores.shape[-1])
        is_seen = context <= batch.positions[:, None, None, None]
        weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), axis=-1)
        weights = weights * of_row("present")[:, :, None]
        y = jnp.einsum("tkgc,tkcd->tkgd", weights, of_row("v"))
        y = jnp.pad(y, [(0, 0)] * 3 + [(0, c.head_dim // 2)]).reshape(t, -1).astype(x.dtype)
        return self.out(y, residual=residual, sizes=batch.used_tokens)

    def heads_of(self, x, batch: Batch, angles, norm) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [T, N, D], keys and values [T, K, D] of a Llama."""
        c = self.config
        assert self.kind.rope is not None
        product = self.qkv(x, norm=norm, sizes=batch.used_tokens).reshape(len(x), -1, c.head_dim)
        q, k, v = jnp.split(product, (c.heads, c.heads + c.kv_heads), axis=1)
        q = rotate(q, angles[self.kind.rope])
        k = rotate(k, angles[self.kind.rope])
        return q, k, v


class HalfBlock(Block):
    @staticmethod
    def pages(c: DecoderConfig, kind: LayerKind, sizes: BlockSizes) -> PageShapes:
        def shape(*lengths: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(lengths, jnp.dtype(sizes.dtype))

        heads = sizes.kv_heads
        return {
            "k": shape(heads, sizes.block_size, sizes.head_dim),
            "v": shape(heads, sizes.block_size, sizes.head_dim // 2),
            "present": shape(1, sizes.block_size),
        }

    def attention(self, c: DecoderConfig, kind: LayerKind, dtype: str) -> HalfValues:
        return HalfValues(c, kind, dtype)


# the tests ----------------------------------------------------------------------------------------


def without_half_of_the_values(model: Model) -> Model:
    """The model whose usual layers have zeros in the second half of each value."""
    c = model.config
    first = (c.heads + c.kv_heads) * c.head_dim
    params = named(whole(model))
    for name in [name for name in params if name.endswith("attn.qkv.weight")]:
        weight = np.array(params[name])
        values = weight[first:].reshape(c.kv_heads, c.head_dim, -1)
        values[:, c.head_dim // 2 :] = 0
        params[name] = weight
    return assemble(c, nested(params), model.dtype)


def with_half_blocks(model: Model) -> Model:
    config = replace(model.config, block=HalfBlock)
    return assemble(config, nested(named(whole(model))), model.dtype)


@pytest.fixture(scope="module")
def llm(tiny) -> LLM:
    return small_llm(replace(tiny, model=with_half_blocks(tiny.model)), **SIZES)


@pytest.mark.slow
def test_pages_of_another_shape_are_shared_copied_and_swapped(llm, tiny, tmp_path):
    usual = small_llm(replace(tiny, model=without_half_of_the_values(tiny.model)), **SIZES)
    recording = tmp_path / "run.jsonl"
    llm.engine.record(recording)
    check_same(tokens_of(llm, rounds=2), tokens_of(usual, rounds=2))
    llm.engine.record(None)
    check_moves(recording)


def test_the_memory_of_a_block_is_that_of_its_pages(llm):
    cache = llm.engine.runtime.cache_shapes
    chex.assert_shape(cache.k, (SIZES["num_blocks"] + 1, 2, 4, 16))
    chex.assert_shape(cache.v, (SIZES["num_blocks"] + 1, 2, 4, 8))
    chex.assert_shape(cache.others["present"], (SIZES["num_blocks"] + 1, 1, 4))
    numbers = 2 * (2 * 4 * 16 + 2 * 4 * 8 + 4) + 4  # of two layers, and the token ids
    assert llm.engine.memory.block_bytes == 4 * numbers
    assert nbytes(cache) == llm.engine.memory.block_bytes * (SIZES["num_blocks"] + 1)
