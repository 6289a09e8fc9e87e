"""Latent attention: a layer in pages, whose tokens are cut in any way, against its definition in
float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.device import attention
from pagedjax.device.batch import Batch
from pagedjax.device.cache import BlockSizes, Pages
from pagedjax.device.models.decoder import DecoderConfig, LayerKind, angle_tables
from pagedjax.device.models.latent import Latent, LatentAttention, latent_pages
from pagedjax.device.rope import Rope
from tests.device.test_llama import lay_out
from tests.device.test_mixers import steps_of
from tests.device.test_step_tpu import interpreted
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations

LATENT = Latent(rank=16, rotated=8, key=4, value=6)
LENGTHS = (23, 1, 9)
WIDTH = 24  # blocks of a table
T = sum(LENGTHS) + 2
HEADS = 3
ATOL = 1e-5


def decoder_config(latent: Latent = LATENT, **fields: Any) -> DecoderConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 320,
        "hidden": 32,
        "intermediate": 48,
        "heads": HEADS,
        "kv_heads": 1,
        "head_dim": latent.row,
        "max_len": 64,
        "tied": False,
        "eps": 1e-5,
        "kinds": (LayerKind(),),
        "ropes": (Rope(100.0),),
        "latent": latent,
    }
    return DecoderConfig(**(sizes | fields))


class Layer(NamedTuple):
    """A layer with random parameters, and by name their values in float64."""

    config: DecoderConfig
    module: LatentAttention
    values: dict[str, np.ndarray]


@cache
def layer_of(query_rank: int | None) -> Layer:
    config = decoder_config(replace(LATENT, query_rank=query_rank))
    module = LatentAttention(config, config.kinds[0], "float32")
    rng = np.random.default_rng(0)
    values = {}
    state = nnx.state(module)
    for path, leaf in nnx.to_flat_state(state):
        numbers = rng.standard_normal(leaf.shape)
        numbers = numbers / np.sqrt(leaf.shape[-1]) if len(leaf.shape) > 1 else 1 + 0.3 * numbers
        leaf.set_value(jnp.asarray(numbers, jnp.float32))
        values[".".join(map(str, path))] = np.asarray(leaf.get_value(), np.float64)
    nnx.update(module, state)
    return Layer(config, module, values)


# the definition -----------------------------------------------------------------------------------


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def turned(x: np.ndarray) -> np.ndarray:
    """x [n, ..., R] of the positions 0 to n - 1, rotated."""
    pairs = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * 100.0 ** (-np.arange(pairs) / pairs)
    angle = angle.reshape(len(x), *[1] * (x.ndim - 2), pairs)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1
    )


class Defined(NamedTuple):
    """What a layer gives for a sequence."""

    y: np.ndarray  # [n, H]
    weights: np.ndarray  # [N, n, n] of each head, query and context token


def defined(layer: Layer, x: np.ndarray) -> Defined:
    """For the inputs [n, H] of a sequence, by keys and values of each head."""
    m = layer.config.latent
    assert m is not None
    values = layer.values
    down = x @ values["down.weight"].T
    queries, latents, shared = np.split(down, np.cumsum([down.shape[1] - m.row, m.rank]), axis=1)
    if m.query_rank:
        queries = rms_norm(queries, values["q_norm.weight"]) @ values["q_up.weight"].T
    queries = queries.reshape(len(x), HEADS, m.query)
    queries = np.concatenate([queries[..., : m.key], turned(queries[..., m.key :])], axis=-1)
    up = rms_norm(latents, values["kv_norm.weight"]) @ values["kv_up"].T
    up = up.reshape(len(x), HEADS, m.up)
    keys = np.concatenate(
        [up[..., : m.key], np.repeat(turned(shared)[:, None], HEADS, axis=1)], axis=-1
    )
    scores = np.einsum("tnd,cnd->ntc", queries, keys) / np.sqrt(m.query)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    y = np.einsum("ntc,cnv->tnv", weights, up[..., m.key :])
    return Defined(y.reshape(len(x), -1) @ values["out.weight"].T, weights)


# the layer in pages -------------------------------------------------------------------------------


class World(NamedTuple):
    """Pages with numbers of an earlier owner, some of them not finite, and three block tables."""

    pages: Pages
    tables: np.ndarray
    block_size: int


def world(block_size: int, impl: str = "reference") -> World:
    count = len(LENGTHS) * WIDTH
    rng = np.random.default_rng(1)
    row = attention.latent_row(impl, LATENT.row)
    sizes = BlockSizes(block_size, 1, row, "float32", row)
    (name, shape), *further_pages = latent_pages(sizes).items()
    assert not further_pages, "a token has one row, and no values beside it"
    numbers = rng.standard_normal((count + 1, *shape.shape)).astype(np.float32)
    numbers[rng.random(numbers.shape) < 0.1] = np.nan
    tables = rng.permutation(count).reshape(len(LENGTHS), WIDTH).astype(np.int32) + 1
    return World(Pages({name: jnp.asarray(numbers)}), tables, block_size)


@partial(jax.jit, static_argnums=(0, 1))
def run(query_rank: int | None, impl: str, x, pages: Pages, batch: Batch):
    """(output, pages, what the tokens read when their rows are in the pages)."""
    layer = layer_of(query_rank)
    table = jnp.asarray(angle_tables(layer.config))
    angles = table[:, :, batch.positions]
    attend = attention.attend(impl, layer.config.attn_scale)
    y, pages = layer.module(x, pages, batch, angles, attend, norm=None)
    return y, pages, layer.module.read(x, pages, batch, angles, attend, norm=None)


def check_steps(
    query_rank: int | None, impl: str, block_size: int, chunks: Sequence[Sequence[int]]
) -> None:
    """Computes three sequences in these chunks, each step twice, and compares with `defined`."""
    layer = layer_of(query_rank)
    rng = np.random.default_rng(2)
    inputs = [rng.standard_normal((n, 32)).astype(np.float32) for n in LENGTHS]
    expected = [defined(layer, x.astype(np.float64)).y for x in inputs]
    pages, tables, _ = world(block_size, impl)
    computed = [0] * len(LENGTHS)
    for step in steps_of(chunks):
        batch = lay_out(step, computed, [np.zeros(n, int) for n in LENGTHS], tables, T, block_size)
        spans = [(row, slice(computed[row], computed[row] + count)) for row, count in step]
        x = np.concatenate([inputs[row][span] for row, span in spans])
        x = np.pad(x, ((0, T - len(x)), (0, 0)))
        _, pages, _ = run(query_rank, impl, x, pages, batch)
        y, pages, read = run(
            query_rank, impl, x, pages, batch
        )  # as a branch computes a token again
        right = np.concatenate([expected[row][span] for row, span in spans])
        chex.assert_trees_all_close(np.asarray(y)[: len(right)], right, atol=ATOL)
        chex.assert_trees_all_close(np.asarray(read)[: len(right)], right, atol=ATOL)
        for row, count in step:
            computed[row] += count


def chunks_of(size: int) -> list[tuple[int, ...]]:
    """Steps of chunks of one size, of all sequences."""
    return [(size,) * len(LENGTHS)] * (max(LENGTHS) // size)


@pytest.mark.parametrize("query_rank", [None, 12])
@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.default_cases("4-xla-12", "16-reference-None")
def test_a_layer_is_that_of_its_definition_for_chunks_of_any_size(impl, query_rank, block_size):
    """With "xla", chunks of more than `Latent.expands_from` tokens are expanded, and those of other
    rows in the same step are absorbed.
    """
    assert LATENT.expands_from == 6
    for size in (1, 2, 5, 6, 7, 9):
        check_steps(query_rank, impl, block_size, chunks_of(size))
    check_steps(query_rank, impl, block_size, [(7, 1, 2), (1, 0, 7), (15, 0, 0)])


@pytest.fixture
def on_a_tpu(monkeypatch):
    """The TPU kernels, interpreted. Their rows have 128 numbers."""
    monkeypatch.setitem(attention.IMPLS, "pallas_tpu", interpreted(attention.IMPLS["pallas_tpu"]))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_layer_in_padded_rows_is_that_of_its_definition(block_size, on_a_tpu):
    assert attention.latent_row("pallas_tpu", LATENT.row) == 128
    for size in (1, 5, 9):  # decodes, short rows and expanded chunks
        check_steps(12, "pallas_tpu", block_size, chunks_of(size))
    check_steps(12, "pallas_tpu", block_size, [(7, 1, 2), (1, 0, 7), (15, 0, 0)])


@pytest.mark.parametrize("impl", ["xla", "cpu"])
@pytest.mark.default_cases("xla")
def test_absorbed_and_expanded_chunks_have_one_result(impl):
    """In one process the same implementation runs with and without its way for long chunks."""
    layer = layer_of(None)
    rng = np.random.default_rng(3)
    pages, tables, block_size = world(4)
    batch = lay_out(
        [(0, 23), (2, 9)], [0] * 3, [np.zeros(n, int) for n in LENGTHS], tables, T, block_size
    )
    x = rng.standard_normal((T, 32)).astype(np.float32)
    angles = jnp.asarray(angle_tables(layer.config))[:, :, batch.positions]
    usual = attention.find(impl)
    results = {}
    programs = {}
    for name, form in (("expanded", usual), ("absorbed", usual._replace(expanded=None))):
        attend = attention.Bound(form, layer.config.attn_scale)
        run_layer = jax.jit(partial(layer.module, attend=attend, norm=None))
        lowered = run_layer.lower(x, pages, batch, angles)
        programs[name] = lowered.as_text()
        y, _ = lowered.compile()(x, pages, batch, angles)
        results[name] = np.asarray(y)[:32]
    assert programs["expanded"] != programs["absorbed"]
    chex.assert_trees_all_close(results["expanded"], results["absorbed"], atol=ATOL)


@pytest.mark.parametrize("impl", ["reference", "pallas_tpu"])
@pytest.mark.default_cases("reference")
@pytest.mark.slow_cases("pallas_tpu")
def test_taps_get_the_weights_of_the_definition(impl, on_a_tpu):
    layer = layer_of(12)
    length = LENGTHS[0]
    x = np.random.default_rng(4).standard_normal((length, 32)).astype(np.float32)
    pages, tables, block_size = world(4, impl)
    padded = np.pad(x, ((0, T - length), (0, 0)))
    prompts = [np.zeros(n, int) for n in LENGTHS]
    batch = lay_out([(0, length)], [0] * 3, prompts, tables, T, block_size)
    _, pages, _ = run(12, impl, padded, pages, batch)
    last = lay_out([(0, 1)], [length - 1, 0, 0], prompts, tables, 3, block_size)
    angles = jnp.asarray(angle_tables(layer.config))[:, :, last.positions]
    attend = attention.attend(impl, layer.config.attn_scale)
    queries = np.pad(x[-1:], ((0, 2), (0, 0)))

    @jax.jit
    def weights_of(queries: jax.Array, pages: jax.Array, last: Batch) -> jax.Array:
        return layer.module.weights(queries, pages, last, angles, attend, (0, 2), norm=None)

    weights = weights_of(queries, pages["k"], last)
    right = defined(layer, x.astype(np.float64)).weights[[0, 2], -1]
    chex.assert_trees_all_close(np.asarray(weights)[0, :, :length], right, atol=ATOL)


def test_chunks_are_expanded_from_the_length_at_which_it_is_cheaper():
    """For the sizes of DeepSeek V2 and V3, and where reading a row is always cheaper."""
    deepseek = Latent(rank=512, rotated=64, key=128, value=128)
    assert (deepseek.row, deepseek.expands_from) == (576, 158)
    absorbed, expanded = (
        [n * 2 * 576 for n in (157, 158)],
        [n * (192 + 128) + 512 * 256 for n in (157, 158)],
    )
    assert absorbed[0] < expanded[0]
    assert absorbed[1] > expanded[1]
    assert Latent(rank=8, rotated=2, key=32, value=32).expands_from is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "rows of 24 numbers, and the model 3 key heads of 24"),
        ({"head_dim": 8}, "latents need one key head of that size"),
        ({"qk_norm": "head"}, "qk_norm is 'head' in a model with latents"),
        ({"attn_gate": True}, "attn_gate is True in a model with latents"),
        ({"qkv_bias": True}, "qkv_bias is True in a model with latents"),
    ],
)
def test_what_latents_exclude_is_refused(change, message):
    with refused(message):
        decoder_config(**change)
