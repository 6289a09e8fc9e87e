"""Layers without attention: what their pages keep, and states against the recurrence in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedjax.device.batch import Batch
from pagedjax.device.cache import BlockSizes, Pages, kv_pages
from pagedjax.device.extras import LayerTables
from pagedjax.device.models.mixers import decayed_state
from pagedjax.device.models.mixers.decayed_state import Inputs, StateSizes
from pagedjax.device.models.mixers.mixer import (
    CONV_INPUT,
    Kept,
    KeptNumbers,
    KeptPages,
    KeptSequences,
    convolution,
    pages_needed,
)
from pagedjax.device.windows import packed
from tests import drawn
from tests.device.test_llama import lay_out
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations

SIZES = StateSizes(heads=4, key_heads=2, key_dim=3, value_dim=5)
INPUT = jax.ShapeDtypeStruct((7,), jnp.float32)
LENGTHS = (23, 1, 9)
WIDTH = 24  # blocks of a table
T = sum(LENGTHS) + 2


class World(NamedTuple):
    """The pages of one layer, and the tables of three sequences."""

    kept: KeptPages
    tables: np.ndarray  # [pages of the layer, sequences, blocks]


def small_blocks(block_size: int, dtype: str = "float32") -> BlockSizes:
    return BlockSizes(block_size, kv_heads=2, head_dim=4, dtype=dtype, row=4)


def world(kept: Kept, sizes: BlockSizes) -> World:
    """Pages that have old numbers."""
    pages = pages_needed(kept, sizes)
    rng = np.random.default_rng(0)
    count = pages * len(LENGTHS) * WIDTH
    tables = rng.permutation(count).reshape(pages, len(LENGTHS), WIDTH) + 1

    def old_numbers(shape: jax.ShapeDtypeStruct) -> jax.Array:
        """Numbers of an earlier owner, some of them not finite."""
        numbers = rng.standard_normal((count + 1, *shape.shape)).astype(np.float32)
        numbers[rng.random(numbers.shape) < 0.1] = np.nan
        if sizes.dtype == "float32":
            return jnp.asarray(numbers)
        floats = jnp.asarray(numbers, jnp.bfloat16)
        return jax.lax.bitcast_convert_type(floats, jnp.dtype(sizes.dtype))

    arrays = Pages({name: old_numbers(shape) for name, shape in kv_pages(sizes).items()})
    return World(KeptPages(kept, sizes, arrays, LayerTables((), ())), tables.astype(np.int32))


def step_of(world: World, step: Sequence[tuple[int, int]], computed: Sequence[int]) -> Batch:
    """What a layer gets of a step of chunks (sequence, tokens), with padding."""
    size = world.kept.sizes.block_size
    prompts = [np.zeros(length, int) for length in LENGTHS]
    batches = [lay_out(step, computed, prompts, table, T, size) for table in world.tables]
    tables = LayerTables(
        np.stack([batch.slots for batch in batches]),
        np.stack([batch.block_tables for batch in batches]),
    )
    return jax.tree.map(jnp.asarray, batches[0]._replace(extras=(tables,)))


def with_arrays(kept: KeptPages, arrays: Any, batch: Batch) -> KeptPages:
    """The pages with these arrays, and the tables of a step."""
    tables = batch.extra(LayerTables)
    assert tables is not None
    return kept._replace(arrays=arrays, tables=tables)


def padded(parts: Sequence[np.ndarray]) -> np.ndarray:
    """[T, ...] the tokens of a step, and zeros."""
    tokens = np.concatenate(parts)
    return np.pad(tokens, [(0, T - len(tokens))] + [(0, 0)] * (tokens.ndim - 1))


CHUNKS = st.lists(st.tuples(*[st.integers(0, 9)] * len(LENGTHS)), max_size=6)


def steps_of(chunks: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Steps (sequence, tokens) with these chunks, and one with what is left."""
    computed = [0] * len(LENGTHS)
    steps: list[list[tuple[int, int]]] = []
    for sizes in (*chunks, LENGTHS):
        step = []
        for row, size in enumerate(sizes):
            count = min(size, LENGTHS[row] - computed[row])
            if count:
                step.append((row, count))
                computed[row] += count
        if step:
            steps.append(step)
    return steps


# convolutions -------------------------------------------------------------------------------------

CONVOLUTIONS: dict[BlockSizes, Any] = {}  # one for all examples with the same blocks


def convolved(kept: KeptPages) -> Any:
    """(arrays, tokens, batch, weight, bias) -> (arrays, y), of a layer that keeps these."""
    sizes = kept.sizes
    if sizes not in CONVOLUTIONS:

        @jax.jit
        def run(arrays, tokens, batch, weight, bias):
            written = with_arrays(kept, arrays, batch).with_tokens(CONV_INPUT, tokens)
            return written.arrays, convolution(written, CONV_INPUT, batch, weight, bias)

        CONVOLUTIONS[sizes] = run
    return CONVOLUTIONS[sizes]


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@settings(max_examples=6, deadline=None)
@given(chunks=CHUNKS, block_size=st.sampled_from([1, 4, 16]))
def test_a_convolution_has_its_inputs_in_the_pages(dtype, chunks, block_size):
    floats = "bfloat16" if dtype == "uint16" else "float32"
    rng = np.random.default_rng(1)
    kept = Kept({CONV_INPUT: jax.ShapeDtypeStruct((21,), jnp.dtype(floats))})
    pages = world(kept, small_blocks(block_size, dtype))
    inputs = [
        np.asarray(jnp.asarray(rng.standard_normal((n, 21)), floats), np.float32) for n in LENGTHS
    ]
    weight = rng.standard_normal((21, 3)).astype(np.float32)
    bias = rng.standard_normal(21).astype(np.float32)

    run = convolved(pages.kept)
    arrays = pages.kept.arrays
    computed = [0] * len(LENGTHS)
    for step in steps_of(chunks):
        batch = step_of(pages, step, computed)
        of_step = [inputs[row][computed[row] : computed[row] + count] for row, count in step]
        arrays, y = run(arrays, padded(of_step), batch, weight, bias)
        at = 0
        for row, count in step:
            history = np.pad(inputs[row], ((2, 0), (0, 0)))
            expected = sum(history[i : i + LENGTHS[row]] * weight[:, i] for i in range(3)) + bias
            span = slice(computed[row], computed[row] + count)
            chex.assert_trees_all_close(y[at : at + count], expected[span], atol=1e-5)
            at += count
            computed[row] += count


# states -------------------------------------------------------------------------------------------


def drawn_inputs(
    rng: np.random.Generator, length: int, *, delta: bool, sizes: StateSizes = SIZES
) -> Inputs:
    def numbers(*shape: int) -> np.ndarray:
        return rng.standard_normal((length, *shape)).astype(np.float32)

    key = numbers(sizes.key_heads, sizes.key_dim)
    inputs = Inputs(
        query=numbers(sizes.key_heads, sizes.key_dim),  # type: ignore[arg-type]  # numpy arrays
        key=key / np.linalg.norm(key, axis=-1, keepdims=True),  # type: ignore[arg-type]
        value=numbers(sizes.heads, sizes.value_dim),  # type: ignore[arg-type]
        decay=-np.exp(numbers(sizes.heads)),  # type: ignore[arg-type]
        rate=1 / (1 + np.exp(-numbers(sizes.heads))) if delta else None,  # type: ignore[arg-type]
    )
    return inputs


def recurrence(inputs: Inputs) -> np.ndarray:
    """[n, N, D] the outputs by definition, token by token in float64."""
    _, heads, value_dim = inputs.value.shape
    _, key_heads, key_dim = inputs.key.shape
    state = np.zeros((heads, key_dim, value_dim))
    group = heads // key_heads
    outputs = []
    for t in range(len(inputs.key)):
        key, query = (x[t].astype(np.float64).repeat(group, 0) for x in (inputs.key, inputs.query))
        state = state * np.exp(inputs.decay[t].astype(np.float64))[:, None, None]
        update = inputs.value[t].astype(np.float64)
        if inputs.rate is not None:
            update = inputs.rate[t][:, None] * (update - np.einsum("hed,he->hd", state, key))
        state = state + key[:, :, None] * update[:, None]
        outputs.append(np.einsum("hed,he->hd", state, query))
    return np.stack(outputs)


@pytest.mark.parametrize(
    ("dtype", "delta"),
    [
        pytest.param("float32", True, id="delta"),
        pytest.param("uint16", False, id="mamba in words of 16 bits"),
        pytest.param("uint16", True, id="delta in words of 16 bits", marks=pytest.mark.slow),
        pytest.param("float32", False, id="mamba", marks=pytest.mark.slow),
    ],
)
@drawn.examples(1, 8)
def test_a_state_is_that_of_the_recurrence_for_any_cut(dtype, delta, number):
    @example(chunks=[(9, 0, 3), (1, 1, 1), (6, 0, 4)], block_size=4)
    def holds(chunks: Sequence[Sequence[int]], block_size: int) -> None:
        check_steps(dtype, delta, chunks, block_size)

    # the first one that is drawn has the block size of the example, and its program
    drawn.check(number, holds, chunks=CHUNKS, block_size=st.sampled_from([4, 1, 16]))


STATE_PROGRAMS: dict[tuple[BlockSizes, bool], Any] = {}


def computed_states(kept: KeptPages, delta: bool) -> Any:
    """(arrays, inputs, batch) -> (arrays, y, what is read then), of a layer that keeps these."""
    key = (kept.sizes, delta)
    if key not in STATE_PROGRAMS:

        @jax.jit
        def run(arrays, of_step, batch):
            written = with_arrays(kept, arrays, batch)
            written, y = decayed_state.run(written, SIZES, of_step, batch)
            return written.arrays, y, decayed_state.read(written, SIZES, of_step.query, batch)

        STATE_PROGRAMS[key] = run
    return STATE_PROGRAMS[key]


def check_steps(dtype: str, delta: bool, chunks: Sequence[Sequence[int]], block_size: int) -> None:
    """The outputs of all steps with these chunks are those of the recurrence."""
    rng = np.random.default_rng(2)
    pages = world(SIZES.kept(INPUT), small_blocks(block_size, dtype))
    inputs = [drawn_inputs(rng, length, delta=delta) for length in LENGTHS]
    expected = [recurrence(of_sequence) for of_sequence in inputs]

    run = computed_states(pages.kept, delta)
    arrays = pages.kept.arrays
    computed = [0] * len(LENGTHS)
    for step in steps_of(chunks):
        batch = step_of(pages, step, computed)
        spans = [(row, slice(computed[row], computed[row] + count)) for row, count in step]
        of_step = jax.tree.map(
            lambda *parts: padded(parts),
            *[jax.tree.map(lambda x, span=span: x[span], inputs[row]) for row, span in spans],
        )
        arrays, y, _ = run(arrays, of_step, batch)
        arrays, y_again, read = run(arrays, of_step, batch)  # as a branch computes a token again
        chex.assert_trees_all_close(y, y_again, atol=1e-5)
        at = 0
        for row, span in spans:
            count = span.stop - span.start
            chex.assert_trees_all_close(y[at : at + count], expected[row][span], atol=1e-4)
            chex.assert_trees_all_close(read[at : at + count], expected[row][span], atol=1e-4)
            at += count
            computed[row] += count


# whole sequences ----------------------------------------------------------------------------------

WHOLE = 2 * decayed_state.SEQUENCE_BLOCK + 9  # tokens of a sequence: three blocks
WEAK = 0.02  # of decays, so that a block depends on the one before


def of_sequences(kept: Kept, count: int, length: int) -> KeptSequences:
    """What a layer keeps of `count` sequences of `length` tokens, before it has written anything."""
    sizes = BlockSizes(length, kv_heads=2, head_dim=4, dtype="float32", row=4)
    return KeptSequences(kept, sizes, count, Pages())


def outputs_of(inputs: Inputs, length: int) -> jax.Array:
    """[B, L, N, D] of B sequences of L tokens, one behind the other."""
    count = len(inputs.decay) // length
    kept = of_sequences(SIZES.kept(INPUT), count, length)
    batch = packed(jnp.zeros((count, length), jnp.int32))
    _, outputs = decayed_state.run(kept, SIZES, inputs, batch)
    return outputs.reshape(count, length, *outputs.shape[1:])


def by_definition(inputs: Inputs, length: int) -> jax.Array:
    """The same, token by token."""
    group = SIZES.heads // SIZES.key_heads

    def next_token(state: jax.Array, token: Inputs) -> tuple[jax.Array, jax.Array]:
        key, query = (x.repeat(group, 0) for x in (token.key, token.query))
        state = state * jnp.exp(token.decay)[:, None, None]
        update = token.value
        if token.rate is not None:
            update = token.rate[:, None] * (update - jnp.einsum("hed,he->hd", state, key))
        state = state + key[:, :, None] * update[:, None]
        return state, jnp.einsum("hed,he->hd", state, query)

    start = jnp.zeros((SIZES.heads, SIZES.key_dim, SIZES.value_dim))
    split = jax.tree.map(lambda x: jnp.reshape(x, (-1, length, *x.shape[1:])), inputs)
    return jax.vmap(lambda sequence: jax.lax.scan(next_token, start, sequence)[1])(split)


@pytest.mark.parametrize(
    "delta", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["delta", "mamba"]
)
def test_whole_sequences_have_the_recurrence_and_its_gradients(delta):
    rng = np.random.default_rng(3)
    drawn = [drawn_inputs(rng, WHOLE, delta=delta) for _ in range(2)]
    drawn = [inputs._replace(decay=WEAK * inputs.decay) for inputs in drawn]
    inputs = jax.tree.map(lambda *parts: jnp.asarray(np.concatenate(parts)), *drawn)
    weights = rng.standard_normal((2, WHOLE, SIZES.heads, SIZES.value_dim)).astype(np.float32)

    def total(inputs: Inputs, outputs: Any) -> tuple[jax.Array, jax.Array]:
        y = outputs(inputs, WHOLE)
        return (y * weights).sum(), y

    results = [
        jax.jit(jax.value_and_grad(lambda x, run=run: total(x, run), has_aux=True))(inputs)
        for run in (outputs_of, by_definition)
    ]
    ((_, y), gradient), (_, expected_gradient) = results
    chex.assert_trees_all_close(y, np.stack([recurrence(x) for x in drawn]), atol=3e-4)
    for x, expected in zip(
        jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True
    ):
        scale = np.abs(expected).max()
        assert scale > 0.1, "the sum hardly depends on it: the comparison is blind"
        chex.assert_trees_all_close(x / scale, expected / scale, atol=1e-4)


@pytest.mark.parametrize("length", [1, 3, decayed_state.SEQUENCE_BLOCK])
def test_sequences_of_a_block_or_less_are_whole_too(length):
    drawn = [drawn_inputs(np.random.default_rng(i), length, delta=True) for i in range(2)]
    inputs = jax.tree.map(lambda *parts: jnp.asarray(np.concatenate(parts)), *drawn)
    y = jax.jit(outputs_of, static_argnums=1)(inputs, length)
    chex.assert_trees_all_close(y, np.stack([recurrence(x) for x in drawn]), atol=1e-4)


def test_whole_sequences_are_read_and_written_as_pages_of_one_block_each():
    """So a mixer of one's own needs no other code for them."""
    count, length = 3, 8
    kept = Kept(
        tokens={
            "a": jax.ShapeDtypeStruct((7,), jnp.dtype("float32")),
            "b": jax.ShapeDtypeStruct((3, 2), jnp.dtype("bfloat16")),
        },
        blocks={"state": jax.ShapeDtypeStruct((5,), jnp.dtype("float32"))},
    )
    whole = of_sequences(kept, count, length)
    num_pages = pages_needed(kept, whole.sizes)
    tables = 1 + np.arange(num_pages * count, dtype=np.int32).reshape(num_pages, count, 1)
    slots = tables * length + np.arange(length, dtype=np.int32)
    arrays = Pages(
        {
            name: jnp.zeros((num_pages * count + 1, *shape.shape))
            for name, shape in kv_pages(whole.sizes).items()
        }
    )
    layer_tables = LayerTables(jnp.asarray(slots.reshape(num_pages, -1)), jnp.asarray(tables))
    pages = KeptPages(kept, whole.sizes, arrays, layer_tables)
    rng = np.random.default_rng(0)
    of_a, of_b, of_blocks = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((count * length, 7), (count * length, 3, 2), (2, 5))
    )
    rows = jnp.array([2, 0, 2, 1])
    zeros = jnp.zeros(2, jnp.int32)

    def results(kept: KeptNumbers) -> list[jax.Array]:
        blank = kept.blocks("state", jnp.arange(count), jnp.zeros(count, jnp.int32))
        kept = kept.with_tokens("a", of_a).with_tokens("b", of_b)
        kept = kept.with_blocks("state", jnp.array([2, 0]), zeros, of_blocks)
        return [
            blank,
            kept.tokens("a", rows, jnp.array([7, 0, 3, -2])),
            kept.block_tokens("b", rows[:2], zeros),
            kept.blocks("state", jnp.arange(count), jnp.zeros(count, jnp.int32)),
        ]

    chex.assert_trees_all_equal(
        jax.jit(lambda: results(whole))(), jax.jit(lambda: results(pages))()
    )


def test_numbers_of_8_bits_are_refused():
    kept = Kept({CONV_INPUT: jax.ShapeDtypeStruct((7,), jnp.float8_e4m3fn)})
    with refused("a mixer keeps float8_e4m3fn; its numbers must have 16 or 32 bits"):
        pages_needed(kept, BlockSizes(4, kv_heads=2, head_dim=4, dtype="float32", row=4))
