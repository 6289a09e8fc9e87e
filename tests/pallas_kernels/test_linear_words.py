"""Weights in words, and the Pallas kernels that read them: layouts, races, memory and limits.

What they compute is compared in test_linear.py and test_linear_blocks.py, as for every
implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pagedjax.device import linear as products
from pallas_kernels import aot_linear
from pallas_kernels.interpreted import interpreted_without_races
from pallas_kernels.linear import BLOCKS, IMPLS, Matrix, linear, pallas_tpu, words
from pallas_kernels.linear.blocks import restored, rows_of_parts
from pallas_kernels.linear.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.linear.pallas_gpu import layout as gpu_layout
from pallas_kernels.races import MODES, without_races
from pallas_kernels.shared.hopper import old_jax
from pallas_kernels.tiles import TPUS, Tiles, TpuTiles
from tests.pallas_kernels.test_linear_blocks import random_parts
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations
on_newer_jax = pytest.mark.skipif(bool(old_jax()), reason="GPU interpret mode needs JAX 0.11")
ONE = Tiles.read("h200")._replace(multiprocessors=1)  # the inputs are not split
SHARED = 227 * 1024  # bytes of shared memory of a block of threads on Hopper, at most
ROUNDED = 2.0**-8  # the error of a weight in bfloat16, of the largest sum
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Stored(NamedTuple):
    """A random product: x [T, K] bfloat16, a weight as it is stored, and the sums in float64."""

    x: np.ndarray
    weight: np.ndarray
    matrix: Matrix
    sums: np.ndarray


def stored(name: str, *, tokens: int, inputs: int, outputs: int) -> Stored:
    blocks = BLOCKS.get(name)
    rng = np.random.default_rng(0)
    if blocks is None:
        weight = rng.integers(-127, 128, (outputs, inputs), np.int8)
        floats = weight.astype(np.float64)
    else:
        weight = rows_of_parts(random_parts(blocks, outputs, inputs), blocks, np)
        floats = restored(weight, blocks, np).astype(np.float64)
    x = rng.standard_normal((tokens, inputs)).astype(ml_dtypes.bfloat16)
    sums = x.astype(np.float64) @ floats.T
    return Stored(x, weight, Matrix(outputs, inputs, blocks=blocks), sums)


def assert_sums(y: Any, exact: np.ndarray) -> None:
    limit = ROUNDED * np.abs(exact).max()
    chex.assert_trees_all_close(np.asarray(y, np.float64), exact, rtol=0, atol=limit)


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("run", [16, 64])
def test_a_digit_of_a_run_is_neighbouring_inputs(bits, run):
    per_word = 32 // bits
    digits = np.random.default_rng(0).integers(0, 2**bits, (3, 2 * run * per_word), np.uint8)
    packed = words.words_of(digits, bits, run)
    chex.assert_shape(packed, (3, 2 * run))
    for row, second, digit, word in ((0, 0, 0, 0), (1, 1, per_word - 1, run - 1), (2, 1, 1, 5)):
        number = int(packed[row, second * run + word]) >> bits * digit & 2**bits - 1
        assert number == digits[row, (second * per_word + digit) * run + word]
    for xp in (np, jnp):
        unpacked = words.digits_in(xp.asarray(packed), bits, run, xp)
        chex.assert_trees_all_equal(np.asarray(unpacked), digits)


def test_every_number_of_a_digit_is_widened_exactly():
    bytes_ = np.arange(256, dtype=np.uint8)
    finite = bytes_[bytes_ & 127 != 127]  # the others are NaN
    for name, values, expected in (
        ("fp8_128", finite, finite.view(ml_dtypes.float8_e4m3fn).astype(np.float32)),
        ("int8_128", bytes_, bytes_.view(np.int8).astype(np.float32)),
        ("int4_128", bytes_ & 15, (bytes_ & 15).astype(np.float32) - 8),
        ("uint4_128", bytes_ & 15, (bytes_ & 15).astype(np.float32)),
        ("q5_0", bytes_, bytes_.view(np.int8).astype(np.float32)),
        ("mxfp4", bytes_ & 15, E2M1[bytes_ & 15]),
    ):
        bits = words.bits_of(BLOCKS[name])
        for digit in range(32 // bits):
            shifted = values.astype(np.uint32) << bits * digit | np.uint32(0x5A5A5A5A) & ~np.uint32(
                (2**bits - 1) << bits * digit
            )
            numbers = words.numbers_of(jnp.asarray(shifted.view(np.int32)), digit, BLOCKS[name])
            chex.assert_trees_all_equal(np.asarray(numbers), expected)


def test_every_scale_of_a_word_is_widened_exactly():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = halves[np.isfinite(halves)]
    floats = finite.astype(np.float32)
    pairs = np.stack([floats, floats[::-1]], axis=1)
    for name, places in (("q4_1", 2), ("q4_k", 1)):
        packed = words.words_of_scales(pairs, BLOCKS[name])
        chex.assert_shape(packed, (len(pairs), 2 // places))
        chex.assert_trees_all_equal(words.scales_in(packed, BLOCKS[name]), pairs)
        for place in range(places):
            scales = words.scale_of(jnp.asarray(packed[:, 0]), place, BLOCKS[name])
            chex.assert_trees_all_equal(
                np.asarray(scales).view(np.int32), pairs[:, place].view(np.int32)
            )


def test_every_power_of_two_of_a_word_is_widened_exactly():
    exponents = np.arange(1, 253, dtype=np.int32).reshape(-1, 4)
    halved = np.ldexp(np.float32(0.5), exponents - 127).astype(np.float32)
    packed = words.words_of_scales(halved, BLOCKS["mxfp4"])
    chex.assert_shape(packed, (len(exponents), 1))
    chex.assert_trees_all_equal(words.scales_in(packed, BLOCKS["mxfp4"]), halved)
    for place in (0, 3, jnp.int32(2)):
        scales = words.scale_of(jnp.asarray(packed[:, 0]), place, BLOCKS["mxfp4"])
        chex.assert_trees_all_equal(np.asarray(scales), 2 * halved[:, place])


def test_int8_and_all_blocks_have_words():
    tpu = set(aot_linear.formats(pallas_tpu.PIECE))
    assert tpu == {"int8", *BLOCKS}
    gpu = set(aot_linear.formats(gpu_layout.SMALLEST))
    assert tpu - gpu == {"q6_k", "q6_k_super", "k_super", "any", "int8_16"}  # blocks of 16 inputs


@pytest.mark.parametrize("tile", [8, 16])
@pytest.mark.parametrize("sizes", [(3, 0, 30, 7), (0, 0, 1, 0), (0, 0, 0, 0), (16, 8, 0, 16)])
def test_the_tokens_of_a_matrix_begin_a_tile(sizes, tile):
    x = np.arange(1, 41, dtype=np.float32)[:, None]
    rows = jax.jit(words.dealt, static_argnums=2)(x, np.array(sizes, np.int32), tile)
    expected = []
    owners = []
    first = 0
    for matrix, size in enumerate(sizes):
        tiles = -(-size // tile)
        padding = np.zeros((tiles * tile - size, 1), np.float32)
        expected += [x[first : first + size], padding]
        owners += [matrix] * tiles
        first += size
    assert rows.used.tolist() == [len(owners)]
    assert rows.matrices[: len(owners)].tolist() == owners
    chex.assert_shape(rows.x, (tile * len(rows.matrices), 1))
    others = np.zeros((tile * (len(rows.matrices) - len(owners)), 1), np.float32)
    chex.assert_trees_all_equal(np.asarray(rows.x), np.concatenate([*expected, others]))
    results = x.copy()
    results[first:] = 0
    chex.assert_trees_all_equal(np.asarray(words.collected(rows.x, rows.places)), results)


@pytest.mark.parametrize("inputs", [128, 576, 2048, 2049, 4096, 11008, 13824, 14336, 28672])
def test_padding_is_little(inputs):
    """And slabs are large, so that their words cover the time of a copy."""
    layout = pallas_tpu.layout_of(Matrix(4096, inputs))
    assert 0 <= layout.inputs - inputs < 128 * max(1, layout.slabs)
    assert layout.inputs <= 1.07 * inputs + 127
    assert layout.slabs == 1 or 9 <= layout.tiles <= 16
    on_gpu = gpu_layout.layout_of(Matrix(4096, inputs, blocks=BLOCKS["int4_128"]))
    assert 0 <= on_gpu.inputs - inputs < 512


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TPUS)
def test_a_step_fits_in_the_memory_of_every_tpu(name):
    limit = TpuTiles.read(name).vmem_limit
    for weights in aot_linear.formats(pallas_tpu.PIECE):
        for inputs in (2048, 28672):
            layout = pallas_tpu.layout_of(Matrix(4096, inputs, blocks=BLOCKS.get(weights)))
            for tokens in (1, 256, 257, 8192):
                assert pallas_tpu.vmem_bytes(layout, pallas_tpu.token_tile(tokens)) < limit


@pytest.mark.parametrize(
    ("tokens", "tile"), [(1, 16), (16, 16), (17, 32), (256, 256), (257, 144), (700, 240)]
)
def test_tiles_of_tokens_are_about_equal(tokens, tile):
    assert pallas_tpu.token_tile(tokens) == tile


@on_newer_jax
def test_a_ring_fits_in_shared_memory():
    from pallas_kernels.linear.pallas_gpu import kernel

    for weights in aot_linear.formats(gpu_layout.SMALLEST):
        layout = gpu_layout.layout_of(Matrix(4096, 4096, blocks=BLOCKS.get(weights)))
        sizes = [kernel.shared_bytes(layout, kernel.columns_of(tokens)) for tokens in (1, 32, 300)]
        assert sizes == sorted(sizes)
        assert sizes[-1] <= SHARED


@on_newer_jax
def test_the_inputs_of_few_outputs_are_split_and_no_part_is_empty():
    from pallas_kernels.linear.pallas_gpu import kernel

    layout = gpu_layout.layout_of(Matrix(4096, 8192, blocks=BLOCKS["int4_128"]))
    assert layout.slabs == 16
    assert [kernel.blocks_at_once(layout, columns, 132) for columns in (8, 16)] == [264, 132]
    assert kernel.part_slabs(layout, 64, 264) == 4
    assert kernel.part_slabs(layout, 1, 264) == 1
    assert kernel.part_slabs(layout, 264, 264) == 16
    assert kernel.part_slabs(layout, 1000, 264) == 16
    assert kernel.part_slabs(layout, 44, 264) == 3  # 6 parts, of which the last has one slab


# --- the kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.slow)])
def test_the_tpu_kernel_has_no_races(mode):
    """Two slabs, two tiles of outputs, and outputs that begin inside a tile."""
    product = stored("uint4_64", tokens=3, inputs=2304, outputs=1000)
    packed = pallas_tpu.pack(product.weight, product.matrix)
    assert pallas_tpu.layout_of(product.matrix).slabs == 2

    def call(interpret: Any) -> jax.Array:
        rows = (510, 999)
        return pallas_tpu.sums(
            jnp.asarray(product.x), jnp.asarray(packed), product.matrix, rows, interpret=interpret
        )

    assert_sums(without_races(call, mode), product.sums[:, 510:999])


@pytest.mark.parametrize("tokens", [300, pytest.param(1, marks=pytest.mark.slow)])
def test_several_tiles_of_tokens_on_a_tpu(tokens):
    product = stored("fp8_128", tokens=tokens, inputs=256, outputs=130)
    packed = pallas_tpu.pack(product.weight, product.matrix)
    arrays = jnp.asarray(product.x), jnp.asarray(packed)
    y = pallas_tpu.sums(*arrays, product.matrix, (0, 130), interpret=True)
    assert_sums(y, product.sums)


def run_on_gpu(product: Stored, rows: tuple[int, int], tiles: Tiles = ONE) -> jax.Array:
    """Under race detection."""
    arrays = jnp.asarray(product.x), jnp.asarray(gpu_layout.pack(product.weight, product.matrix))
    return without_races_on_gpu(lambda: pallas_gpu.sums(*arrays, product.matrix, rows, tiles=tiles))


def without_races_on_gpu(call: Callable[[], jax.Array]) -> jax.Array:
    with interpreted_without_races():
        return jax.block_until_ready(call())


SIZES = (20, 0, 1, 12)  # of four experts, and 3 tokens are padding
OF_EXPERTS: dict[str, Any] = {"tokens": 36, "inputs": 1152, "outputs": 4 * 70}


def sums_of_experts(product: Stored) -> np.ndarray:
    """In float64, of the tokens that are no padding."""
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    by_matrix = product.sums.reshape(len(product.sums), len(SIZES), -1)
    return by_matrix[np.arange(len(owners)), owners]


@pytest.mark.parametrize("name", ["mxfp4", pytest.param("int8", marks=pytest.mark.slow)])
def test_the_tpu_kernel_of_experts_has_no_races(name):
    product = stored(name, **OF_EXPERTS)
    matrix = product.matrix._replace(count=len(SIZES))
    packed = pallas_tpu.pack(product.weight, matrix)

    def call(interpret: Any) -> jax.Array:
        arrays = jnp.asarray(product.x), jnp.asarray(packed)
        sizes = jnp.asarray(SIZES, jnp.int32)
        return pallas_tpu.sums_of_matrices(*arrays, matrix, sizes, interpret=interpret)

    y = without_races(call, MODES[0])
    assert_sums(y[: sum(SIZES)], sums_of_experts(product))
    assert not np.asarray(y)[sum(SIZES) :].any()


# more slabs than the ring has stages, so that slots are used again
RING = {"tokens": 5, "inputs": 2560, "outputs": 70}


@on_newer_jax
@pytest.mark.parametrize(
    "name",
    [
        "uint4_64",
        "q4_1",
        pytest.param("q4_k", marks=pytest.mark.slow),
        pytest.param("int8", marks=pytest.mark.slow),
    ],
)
def test_the_gpu_kernel_has_no_races(name):
    product = stored(name, **RING)
    assert_sums(run_on_gpu(product, (3, 69)), product.sums[:, 3:69])


@on_newer_jax
@pytest.mark.parametrize(
    ("tokens", "multiprocessors"), [(9, 132), pytest.param(100, 1, marks=pytest.mark.slow)]
)
def test_parts_of_inputs_and_tiles_of_tokens_on_a_gpu(tokens, multiprocessors):
    product = stored("int4_128", tokens=tokens, inputs=1152, outputs=70)
    tiles = ONE._replace(multiprocessors=multiprocessors)
    assert_sums(run_on_gpu(product, (0, 70), tiles), product.sums)


@on_newer_jax
@pytest.mark.parametrize("name", ["mxfp4", pytest.param("int8", marks=pytest.mark.slow)])
def test_the_gpu_kernel_of_experts_has_no_races(name):
    product = stored(name, **OF_EXPERTS)
    matrix = product.matrix._replace(count=len(SIZES))
    packed = jnp.asarray(gpu_layout.pack(product.weight, matrix))
    arrays = jnp.asarray(product.x), packed, matrix, jnp.asarray(SIZES, jnp.int32)
    y = without_races_on_gpu(lambda: pallas_gpu.sums_of_matrices(*arrays, tiles=ONE))
    assert_sums(y[: sum(SIZES)], sums_of_experts(product))
    assert not np.asarray(y)[sum(SIZES) :].any()


@on_newer_jax
def test_the_checks_detect_a_missing_commit(monkeypatch):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    with pytest.raises(RuntimeError, match="without an order"):
        run_on_gpu(stored("int4_128", **RING), (0, 70))


@on_newer_jax
@pytest.mark.parametrize("place", ["add_slab", "<lambda>"], ids=["for words", "for room"])
def test_the_checks_detect_a_missing_wait(place, monkeypatch):
    import sys

    from jax.experimental.pallas import mosaic_gpu as plgpu

    wait = plgpu.barrier_wait

    def careless(barrier):
        return None if sys._getframe(1).f_code.co_name == place else wait(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", careless)
    with pytest.raises(Exception, match=r"without an order|[Bb]arrier"):
        run_on_gpu(stored("int4_128", **RING), (0, 70))


# --- limits ---------------------------------------------------------------------------------------


class Device(NamedTuple):
    platform: str
    device_kind: str
    compute_capability: str = ""


TPU = Device("tpu", "TPU v5 lite")
HOPPER = Device("gpu", "NVIDIA H200", "9.0")
FACTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "weight_dtypes": ["bfloat16", "int4_128", "mxfp4"],  # the first one is multiplied by xla
    "mesh": False,
    "activation": "gelu",
}


@pytest.mark.parametrize(
    ("impl", "device", "facts", "message"),
    [
        ("pallas_tpu", HOPPER, {}, "runs on platform 'tpu' and not on 'gpu'"),
        ("pallas_tpu", Device("tpu", "TPU v99"), {}, "has no tile sizes for 'TPU v99'"),
        ("pallas_tpu", TPU, {"mesh": True}, "is for a device without a mesh"),
        ("pallas_tpu", TPU, {"dtype": "float32"}, "multiplies bfloat16 and not float32"),
        ("pallas_gpu", TPU, {}, "runs on platform 'gpu' and not on 'tpu'"),
        ("pallas_gpu", Device("gpu", "A100", "8.0"), {}, "is compiled for Hopper GPUs"),
        ("pallas_gpu", HOPPER, {"mesh": True}, "is for a device without a mesh"),
        ("pallas_gpu", HOPPER, {"dtype": "float16"}, "multiplies bfloat16 and not float16"),
    ],
)
def test_what_they_cannot_serve_is_refused_with_the_reason(
    impl, device, facts, message, monkeypatch
):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    with refused(f"linear_impl '{impl}' {message}"):
        products.choose(impl, device, **FACTS | facts)


def test_they_are_chosen_by_name_alone_until_they_have_run(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    for impl, device in (("pallas_tpu", TPU), ("pallas_gpu", HOPPER)):
        assert products.choose(impl, device, **FACTS) == impl
        assert products.choose(None, device, **FACTS) == "xla"
        assert products.find(impl) is IMPLS[impl]


def test_an_old_jax_is_an_obstacle(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with refused("linear_impl 'pallas_gpu' needs JAX 0.11 or newer"):
        products.choose("pallas_gpu", HOPPER, **FACTS)


@pytest.mark.parametrize("impl", ["pallas_tpu", pytest.param("pallas_gpu", marks=on_newer_jax)])
def test_other_activations_are_an_error(impl):
    product = stored("int4_128", tokens=1, inputs=128, outputs=64)
    packed = IMPLS[impl].pack(product.weight, product.matrix)
    with refused(f"impl '{impl}' multiplies bfloat16 and not float32; impl 'xla' has no such"):
        linear(jnp.zeros((1, 128)), packed, product.matrix, impl=impl)
