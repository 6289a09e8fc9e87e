"""The TPU kernel for states, interpreted on a CPU: it reads and writes the pages in place. The
oracle is the recurrence in float64, token by token. Pages begin full of old numbers, and NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from pagedjax.device import states
from pagedjax.device.cache import BlockSizes
from pagedjax.device.models.mixers import decayed_state
from pagedjax.device.models.mixers.decayed_state import RECENT, STATE, Inputs, StateSizes
from pagedjax.device.models.mixers.mixer import (
    CONV_INPUT,
    Kept,
    KeptPages,
    convolution,
    with_inputs,
)
from pallas_kernels.races import MODES, without_races
from pallas_kernels.states import IMPLS, StateShape
from pallas_kernels.states.pallas_tpu import implementation as pallas_tpu
from pallas_kernels.states.pallas_tpu import kernel
from pallas_kernels.states.pallas_tpu import tokens as tokens_of_tpu
from pallas_kernels.tiles import TPUS, TpuTiles
from tests.device.test_mixers import (
    CHUNKS,
    INPUT,
    LENGTHS,
    World,
    drawn_inputs,
    padded,
    recurrence,
    step_of,
    steps_of,
    with_arrays,
    world,
)
from tests.pallas_kernels.test_paged_attention_tpu import Device
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations

TILES = TpuTiles.read("v5e")


class Case(NamedTuple):
    """States, and the pages of attention in which they are."""

    sizes: StateSizes
    delta: bool
    pages: BlockSizes


def case(
    heads: int,
    key_heads: int,
    value_dim: int,
    *,
    delta: bool,
    block_size: int,
    head_dim: int = 128,
    kv_heads: int = 2,
    dtype: str = "float32",
) -> Case:
    sizes = StateSizes(heads, key_heads, 128, value_dim)
    row = max(128, head_dim)
    return Case(sizes, delta, BlockSizes(block_size, kv_heads, head_dim, dtype, row))


CASES = {
    "delta": case(2, 2, 128, delta=True, block_size=8),
    # two heads side by side; two rows of a page are one row of 32 bits
    "mamba in 16 bits": case(
        4, 1, 64, delta=False, block_size=32, head_dim=64, kv_heads=4, dtype="bfloat16"
    ),
    # as Qwen3.5: two groups of lanes, and the tokens of a block in two parts
    "delta in wide pages of 16 bits": case(
        2, 1, 128, delta=True, block_size=16, head_dim=256, dtype="uint16"
    ),
    "delta with two heads side by side": case(4, 2, 64, delta=True, block_size=16, kv_heads=1),
    "mamba with one head of keys for each head": case(
        2, 2, 128, delta=False, block_size=16, kv_heads=3, dtype="float32"
    ),
}
# rows of one token beside longer ones; rows that end at a border of blocks, and begin there; a row
# of several blocks; and a row that waits
CUTS = [(9, 0, 3), (1, 1, 1), (6, 0, 4)]


class Checked:
    """A layer's states, step by step, compared with the recurrence."""

    def __init__(self, tested: Case, seed: int = 0):
        self.case = tested
        self.pages: World = world(tested.sizes.kept(INPUT), tested.pages)
        rng = np.random.default_rng(seed)
        self.inputs = [
            drawn_inputs(rng, length, delta=tested.delta, sizes=tested.sizes) for length in LENGTHS
        ]
        self.expected = [recurrence(inputs) for inputs in self.inputs]
        self.arrays: Any = self.pages.kept.arrays
        self.computed = [0] * len(LENGTHS)

    def arguments(self, step: Sequence[tuple[int, int]]) -> tuple[Inputs, Any]:
        """The inputs of a step's tokens, and its batch."""
        spans = [(row, slice(self.computed[row], self.computed[row] + n)) for row, n in step]
        of_step = jax.tree.map(
            lambda *parts: padded(parts),
            *[jax.tree.map(lambda x, span=span: x[span], self.inputs[row]) for row, span in spans],
        )
        return of_step, step_of(self.pages, step, self.computed)

    def run(self, step: Sequence[tuple[int, int]], call: Any) -> np.ndarray:
        """Runs a step by call(arrays, inputs, batch) -> (arrays, y), and compares y."""
        of_step, batch = self.arguments(step)
        arrays, y = call(self.arrays, of_step, batch)
        kept = with_arrays(self.pages.kept, arrays, batch)
        check_other_pages(self.arrays, kept, (RECENT, STATE), self.pages, step, self.computed)
        self.arrays = arrays
        at = 0
        for row, count in step:
            span = slice(self.computed[row], self.computed[row] + count)
            expected = self.expected[row][span]
            chex.assert_trees_all_close(np.asarray(y)[at : at + count], expected, atol=2e-4)
            at += count
        chex.assert_trees_all_equal(np.asarray(y)[at:], np.zeros_like(y[at:]))
        return np.asarray(y)

    def advance(self, step: Sequence[tuple[int, int]]) -> None:
        for row, count in step:
            self.computed[row] += count


def check_other_pages(
    before: Any,
    kept: KeptPages,
    names: Sequence[str],
    pages: World,
    step: Sequence[tuple[int, int]],
    computed: Sequence[int],
) -> None:
    """Of all pages but the trash, those of these arrays alone are written, in blocks with new
    tokens.
    """
    size = kept.sizes.block_size
    written: dict[str, set[int]] = {name: {0} for name in kept.arrays}
    for row, count in step:
        first = computed[row] // size
        last = (computed[row] + count - 1) // size
        for part in [part for name in names for part in kept.parts(name)]:
            ids = pages.tables[part.first : part.end, row, first : last + 1]
            written[part.name] |= set(ids.ravel().tolist())
    assert any(len(ids) > 1 for ids in written.values())
    for name, after in kept.arrays.items():
        others = np.setdiff1d(np.arange(len(after)), sorted(written[name]))
        bits = [np.asarray(x)[others].view(np.uint8) for x in (before[name], after)]
        chex.assert_trees_all_equal(*bits)


def kernel_call(tested: Case, world: World, interpret: Any) -> Any:
    """(arrays, inputs, batch) -> (arrays, y), by the kernel."""
    run = partial(pallas_tpu.run, tiles=TILES, interpret=interpret)
    implementation = IMPLS["pallas_tpu"]._replace(run=run)

    @jax.jit
    def call(arrays, of_step, batch):
        kept = with_arrays(world.kept, arrays, batch)
        kept, y = decayed_state.run(kept, tested.sizes, of_step, batch, implementation)
        return kept.arrays, y

    return call


def of_steps(tested: Case, cuts: Sequence[Sequence[int]], mode: Any) -> None:
    """All steps of these cuts, under the detector of races."""
    checked = Checked(tested)
    one_program = cache(lambda interpret: kernel_call(tested, checked.pages, interpret))

    def call(*arguments):
        return without_races(lambda interpret: one_program(interpret)(*arguments), mode)

    for step in steps_of(cuts):
        checked.run(step, call)
        checked.advance(step)


def cases(often: str) -> Any:
    """The case of the default run in one mode; in slow runs all cases, each in one mode."""
    chosen = []
    for i, name in enumerate(CASES):
        for j, mode in enumerate(MODES):
            marks: Any = pytest.mark.slow if (i + j) % 2 == 0 else pytest.mark.exhaustive
            is_often = name == often and (i + j) % 2 == 0
            chosen.append(pytest.param(name, mode, marks=() if is_often else marks))
    return pytest.mark.parametrize(("name", "mode"), chosen)


@cases("delta in wide pages of 16 bits")
def test_steps_give_the_recurrence_without_races(name, mode):
    of_steps(CASES[name], CUTS, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_kernel_that_does_not_wait_is_found_out(mode, monkeypatch):
    monkeypatch.setattr(kernel, "wait", lambda copy: None)
    with pytest.raises((RuntimeError, AssertionError)):
        of_steps(CASES["delta"], CUTS, mode)


@pytest.mark.slow  # the test of steps without races is the quick one
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4, deadline=None)
@given(cuts=CHUNKS)
def test_any_cut_gives_the_recurrence_and_so_does_a_token_again(name, cuts):
    """As ordinary XLA. A step that runs again, as for a branch, gives the same bits."""
    tested = CASES[name]
    checked = Checked(tested)
    call = interpreted_call(name)
    for step in steps_of(cuts):
        y = checked.run(step, call)
        chex.assert_trees_all_equal(checked.run(step, call), y)
        checked.advance(step)


@cache
def interpreted_call(name: str) -> Any:
    """One program for all examples of a case."""
    tested = CASES[name]
    return kernel_call(tested, world(tested.sizes.kept(INPUT), tested.pages), True)


# --- convolutions ---------------------------------------------------------------------------------

CHANNELS = 700
LENGTH = 4
# pages of attention: two rows a token, of 16 and of 32 bits; two tokens a row; wide rows
CONVOLVED = {
    "16 bits": BlockSizes(16, 2, 128, "bfloat16", 128),
    "32 bits": BlockSizes(8, 2, 128, "float32", 128),
    "two tokens a row": BlockSizes(32, 2, 64, "bfloat16", 128),
    "wide": BlockSizes(16, 1, 256, "float32", 256),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(
            name, MODES[i % 2], marks=() if name == "two tokens a row" else pytest.mark.slow
        )
        for i, name in enumerate(CONVOLVED)
    ],
)
def test_a_convolution_has_its_inputs_in_pages_without_races(name, mode):
    sizes = CONVOLVED[name]
    rng = np.random.default_rng(3)
    dtype = jnp.dtype("bfloat16")  # of activations; in pages of 32 bits they are wider
    pages = world(Kept({CONV_INPUT: jax.ShapeDtypeStruct((CHANNELS,), dtype)}), sizes)
    inputs = [
        np.asarray(jnp.asarray(rng.standard_normal((n, CHANNELS)), dtype), np.float32)
        for n in LENGTHS
    ]
    weight = rng.standard_normal((CHANNELS, LENGTH)).astype(np.float32)
    bias = rng.standard_normal(CHANNELS).astype(np.float32)

    @cache
    def program(interpret):
        exchange = partial(tokens_of_tpu.exchange, tiles=TILES, interpret=interpret)
        implementation = IMPLS["pallas_tpu"]._replace(exchange=exchange)

        @jax.jit
        def run(arrays, tokens, batch):
            kept = with_arrays(pages.kept, arrays, batch)
            weights = jnp.asarray(weight), jnp.asarray(bias)
            kept, of_step = with_inputs(kept, CONV_INPUT, tokens, batch, LENGTH, implementation)
            return kept.arrays, convolution(kept, CONV_INPUT, batch, *weights, of_step)

        return run

    arrays: Any = pages.kept.arrays
    computed = [0] * len(LENGTHS)
    for step in steps_of([(2, 1, 3), (1, 0, 1), (5, 0, 1), (1, 0, 3)]):
        batch = step_of(pages, step, computed)
        of_step = padded([inputs[row][computed[row] : computed[row] + n] for row, n in step])
        before = arrays
        arrays, y = without_races(
            lambda interpret, arguments=(before, of_step, batch): program(interpret)(*arguments),
            mode,
        )
        kept = with_arrays(pages.kept, arrays, batch)
        check_other_pages(before, kept, (CONV_INPUT,), pages, step, computed)
        at = 0
        for row, count in step:
            history = np.pad(inputs[row], ((LENGTH - 1, 0), (0, 0)))
            expected = bias + sum(
                history[i : i + LENGTHS[row]] * weight[:, i] for i in range(LENGTH)
            )
            span = slice(computed[row], computed[row] + count)
            chex.assert_trees_all_close(y[at : at + count], expected[span], atol=1e-4)
            at += count
            computed[row] += count


# --- sizes and limits -----------------------------------------------------------------------------

# [heads of keys, rows, lanes] of a page in 16 bits with blocks of 16 and of 64 tokens, and states
MODELS: dict[str, tuple[dict[int, tuple[int, int, int]], StateShape]] = {
    "Qwen3.5-0.8B": (
        {16: (2, 16, 256), 64: (2, 64, 256)},
        StateShape(16, 16, 128, 128, delta=True),
    ),
    "Qwen3-Next-80B-A3B": (
        {16: (2, 16, 256), 64: (2, 64, 256)},
        StateShape(32, 16, 128, 128, delta=True),
    ),
    "Granite-4-H-Micro": ({32: (8, 16, 128), 64: (8, 32, 128)}, StateShape(64, 1, 128, 64, False)),
    "Granite-4-H-Tiny": ({16: (4, 16, 128), 64: (4, 64, 128)}, StateShape(48, 1, 128, 64, False)),
    "Granite-4-H-Small": ({16: (8, 16, 128), 32: (8, 32, 128)}, StateShape(128, 1, 128, 64, False)),
}
V5E = Device("tpu", "TPU v5 lite")
STEP = {"rows": 64, "tokens": 2048}


def chosen(shape: StateShape, page: tuple[int, int, int], block_size: int, **change: Any) -> str:
    defaults = {"device": V5E, "dtype": "bfloat16", "inputs": "bfloat16", "length": 4}
    options: dict[str, Any] = defaults | STEP | change
    dtype = jnp.dtype(options.pop("dtype"))
    array = jax.ShapeDtypeStruct((1, *page), dtype)
    name = options.pop("name", "pallas_tpu")
    shapes = options.pop("shapes", [shape])
    device = options.pop("device")
    return states.choose(name, device, shapes=shapes, page=array, block_size=block_size, **options)


@pytest.mark.parametrize("name", MODELS)
def test_states_of_models_fit_the_memory_of_a_v5e(name):
    pages, shape = MODELS[name]
    for block_size, page in pages.items():
        assert chosen(shape, page, block_size) == "pallas_tpu"


def test_plain_jax_serves_everywhere():
    pages, shape = MODELS["Qwen3.5-0.8B"]
    assert chosen(shape, pages[16], 16, name="xla", device=Device("cpu", "cpu")) == "xla"
    assert states.find("xla") is None


def test_slots_of_the_ring_follow_the_memory():
    pages, shape = MODELS["Qwen3-Next-80B-A3B"]
    sizes = pallas_tpu.sizes_of(shape, pages[16], 2, 16)
    for name in TPUS:
        tiles = TpuTiles.read(name)
        fitting = pallas_tpu.with_stages(sizes, tiles)
        assert fitting.stages in (2, 3)
        assert fitting.vmem <= pallas_tpu.vmem_limit(tiles)


QWEN = MODELS["Qwen3.5-0.8B"][1]
WIDE = (2, 16, 256)


@pytest.mark.parametrize(
    ("shape", "page", "block_size", "change", "message"),
    [
        (QWEN, WIDE, 16, {"device": Device("cpu", "cpu")}, "runs on platform 'tpu' and not on"),
        (QWEN, WIDE, 16, {"dtype": "float8_e4m3fn"}, "reads pages of bfloat16, uint16, float32"),
        (QWEN._replace(key_dim=64), WIDE, 16, {}, "needs keys of 128 numbers, and they have 64"),
        (QWEN._replace(value_dim=32), WIDE, 16, {}, "needs values of 64 or 128 .* they have 32"),
        (QWEN._replace(heads=256), WIDE, 16, {}, "takes at most 128 heads, .* there are 256"),
        (
            QWEN._replace(value_dim=64),
            WIDE,
            16,
            {},
            "for each head of keys 2 or a multiple; there are 16, and 16 of keys",
        ),
        (QWEN, (2, 16, 64), 16, {}, "rows of 128 numbers, and they have 64; attention_impl='pall"),
        (QWEN, (2, 8, 256), 8, {}, "needs pages of 8, .* and they have 4; block_size=16 has 8"),
        (QWEN, (2, 256, 256), 256, {}, "at most 64, and they have 128"),
        (QWEN, (1, 16, 128), 16, {}, "needs 128 numbers of 32 bits, .* and there are 64"),
        (QWEN, WIDE, 16, {"tokens": 65536}, "scalar memory, .* lower max_num_batched_tokens"),
        (
            MODELS["Granite-4-H-Small"][1],
            (8, 32, 128),
            32,
            {"device": Device("tpu", "TPU v4")},
            "bytes of VMEM with blocks of 32 tokens, and .* lower block_size",
        ),
        (QWEN, WIDE, 16, {"length": 10}, "convolutions of 2 to 9 tokens, and they have 10"),
        (QWEN, WIDE, 16, {"inputs": "float32"}, "are float32 in pages of bfloat16; leave kv_cache"),
        (QWEN, WIDE, 16, {"shapes": []}, "and no layer of the model has a state; leave it out"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(shape, page, block_size, change, message):
    with refused(f"state_impl 'pallas_tpu'.*{message}|state_impl is 'pallas_tpu', {message}"):
        chosen(shape, page, block_size, **change)


def test_a_call_that_does_not_fit_raises_too():
    tested = case(2, 2, 128, delta=True, block_size=8, dtype="bfloat16")  # 4 rows of 32 bits
    checked = Checked(tested)
    of_step, batch = checked.arguments([(0, 3)])
    with refused("state_impl 'pallas_tpu' needs pages of 8, .* they have 4; block_size=16 has 8"):
        kernel_call(tested, checked.pages, True)(checked.arrays, of_step, batch)
