"""Products of floats on Hopper GPUs with what follows them: sizes, numbers, bits and races.

The kernel is interpreted on a CPU. A product is computed as late as a GPU may compute it, and a store
to another block arrives when that one waits for it (`pallas_kernels.interpreted`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.interpreted import interpreted_without_races
from pallas_kernels.linear import Matrix, Norm, linear
from pallas_kernels.linear.pallas_gpu import dense_sizes
from pallas_kernels.linear.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.linear.pallas_gpu.dense_sizes import Product, Sizes, parts_of, sizes_of
from pallas_kernels.shared.hopper import old_jax
from pallas_kernels.tiles import Tiles

pytestmark = pytest.mark.few_optimisations
on_newer_jax = pytest.mark.skipif(bool(old_jax()), reason="GPU interpret mode needs JAX 0.11")
H200 = Tiles.read("h200")
SHARED = 227 * 1024  # bytes of shared memory of a block of threads on Hopper, at most
HALF_A_STEP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}  # of a number
SINGLE = 2.0**-24
# outputs and inputs of the matrices of TinyLlama-1.1B and of Llama 3 8B: width, K, gated, residual
TINY_LLAMA = {
    "qkv": (2560, 2048, False, False),
    "out": (2048, 2048, False, True),
    "up": (5632, 2048, True, False),
    "down": (2048, 5632, False, True),
    "head": (32000, 2048, False, False),
}
LLAMA_8B = {
    "qkv": (6144, 4096, False, False),
    "out": (4096, 4096, False, True),
    "up": (14336, 4096, True, False),
    "down": (4096, 14336, False, True),
    "head": (128256, 4096, False, False),
}
BUCKETS = 1, 8, 64, 65, 128, 256, 384, 512, 2048, 8192


def product_of(tokens: int, shape: tuple[int, int, bool, bool]) -> Product:
    width, inputs, gated, residual = shape
    parts = 1 if gated else parts_of(width, inputs, H200)
    itemsize = 4 if width > 30000 else 2  # logits are float32
    return Product(tokens, inputs, width, gated, parts, residual, itemsize)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [TINY_LLAMA, LLAMA_8B], ids=["TinyLlama", "Llama 3 8B"])
def test_sizes_fit_in_shared_memory_and_cover_the_result(shapes):
    for shape in shapes.values():
        for tokens in BUCKETS:
            product = product_of(tokens, shape)
            all_sizes = dense_sizes.ranked(product, 132)
            assert sizes_of(product, 132) == all_sizes[0]
            for sizes in all_sizes:
                assert dense_sizes.shared_bytes(sizes, product) < SHARED
                assert 3 <= sizes.stages <= 8
                assert sizes.block_columns * sizes.shares == sizes.columns
                assert sizes.block_columns % sizes.piece == 0
                of_tokens, of_outputs = dense_sizes.tile_counts(sizes, product)
                assert 0 <= of_tokens * sizes.rows - tokens < sizes.rows
                assert 0 <= of_outputs * sizes.columns - product.width < sizes.columns


def test_few_outputs_fill_the_device_at_256_tokens_in_one_turn():
    for name in ("qkv", "out", "up", "down"):
        product = product_of(256, TINY_LLAMA[name])
        sizes = sizes_of(product, 132)
        of_tokens, of_outputs = dense_sizes.tile_counts(sizes, product)
        assert 108 <= of_tokens * of_outputs * sizes.shares <= 132


def test_parts_are_the_weights_alone_and_none_is_short():
    assert [parts_of(outputs, 4096, H200) for outputs in (576, 2048, 2112, 6144, 6208)] == [
        *(4, 4, 2, 2, 1)
    ]
    assert [parts_of(512, inputs, H200) for inputs in (64, 448, 512, 1024, 8192)] == [1, 1, 2, 4, 4]
    product = product_of(256, TINY_LLAMA["out"])
    assert {sizes.parts for sizes in dense_sizes.ranked(product, 132)} == {4}


def test_a_second_turn_and_more_inputs_take_longer():
    product = product_of(256, TINY_LLAMA["out"])
    sizes = sizes_of(product, 132)
    time = dense_sizes.cycles(sizes, product, 132)
    assert dense_sizes.cycles(sizes, product, 66) > time
    assert dense_sizes.cycles(sizes, product._replace(inputs=4096), 132) > time
    assert time >= 2 * 256 * 2048 * 2048 / 132 / dense_sizes.OPERATIONS


@on_newer_jax
@pytest.mark.parametrize(("rows", "columns"), [(2, 5), (16, 3), (17, 3), (40, 2), (1, 7)])
def test_each_tile_is_computed_once_and_a_band_before_the_next_one(rows, columns):
    from pallas_kernels.linear.pallas_gpu.dense import BAND, tile_at

    indices = jnp.arange(rows * columns, dtype=jnp.int32)
    of_tiles = jax.jit(jax.vmap(lambda index: tile_at(index, rows, columns)))(indices)
    places = list(zip(*(array.tolist() for array in of_tiles), strict=True))
    bands = [range(first, min(first + BAND, rows)) for first in range(0, rows, BAND)]
    assert places == [(row, column) for band in bands for column in range(columns) for row in band]


@on_newer_jax
def test_parts_have_all_slabs():
    from pallas_kernels.linear.pallas_gpu.dense import begin_of

    begins = [int(begin_of(jnp.int32(part), 18, 4)) for part in range(5)]
    assert begins == [0, 4, 9, 13, 18]


# --- the kernel -----------------------------------------------------------------------------------


class Case(NamedTuple):
    """A product, its tiles, and how many blocks of threads the device has at once."""

    sizes: Sizes
    tokens: int
    inputs: int
    width: int
    activation: str | None = None
    residual: bool = False
    dtype: str = "bfloat16"
    result: str | None = None
    first: int = 0

    @property
    def matrix(self) -> Matrix:
        if self.activation:
            return Matrix(2 * self.width, self.inputs, gated=True)
        return Matrix(self.first + self.width, self.inputs)

    def arrays(self, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        rng = np.random.default_rng(seed)
        shapes = (self.tokens, self.inputs), (self.matrix.outputs, self.inputs)
        x, weight = (jnp.asarray(rng.standard_normal(shape), self.dtype) for shape in shapes)
        residual = rng.standard_normal((self.tokens, self.width))
        return x, weight, jnp.asarray(residual, self.dtype) if self.residual else None


def run(case: Case, x: Any, weight: Any, residual: Any = None) -> np.ndarray:
    """Under race detection."""
    rows = None if case.activation else (case.first, case.first + case.width)
    return without_races(
        lambda: pallas_gpu.dense(
            x,
            weight,
            case.matrix,
            rows=rows,
            activation=case.activation,
            residual=residual,
            dtype=case.result or case.dtype,
            sizes=case.sizes,
        )
    )


def without_races(call: Callable[[], jax.Array]) -> np.ndarray:
    with interpreted_without_races():
        return np.asarray(call())


def assert_near(case: Case, y: np.ndarray, x: Any, weight: Any, residual: Any) -> None:
    """In float64: each number is the exact one, rounded once, but for the error of its sum."""
    wide_x, wide_weight = (np.asarray(array, np.float64) for array in (x, weight))
    exact = wide_x @ wide_weight.T
    error = case.inputs * SINGLE * (np.abs(wide_x) @ np.abs(wide_weight).T)
    if case.activation:
        gates, ups = np.split(exact, 2, axis=1)
        of_gates, of_ups = np.split(error, 2, axis=1)
        activated = GATES[case.activation](gates)
        exact = activated * ups
        error = 1.2 * of_gates * np.abs(ups) + np.abs(activated) * of_ups + 1e-6 * np.abs(exact)
    else:
        kept = slice(case.first, case.first + case.width)
        exact = exact[:, kept]
        error = error[:, kept]
    if residual is not None:
        exact = exact + np.asarray(residual, np.float64)
    result = case.result or case.dtype
    chex.assert_shape(y, exact.shape)
    assert y.dtype == result
    limit = error + HALF_A_STEP[result] * 1.01 * (np.abs(exact) + error)
    assert (np.abs(y.astype(np.float64) - exact) <= limit).all(), "farther than one rounding"


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


GATES = {
    "silu": lambda x: x * sigmoid(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def tile(
    rows: int,
    outputs: int,
    *,
    gated: bool = False,
    parts: int = 1,
    shared: bool = False,
    stages: int = 3,
    blocks: int = 2,
) -> Sizes:
    return Sizes(rows, outputs, gated, parts, shared, stages, blocks)


# Slots of the ring are used again in all of them.
CASES = {
    "one consumer": Case(tile(64, 64), tokens=8, inputs=320, width=64),
    "gates": Case(tile(64, 64, gated=True), 24, 256, 64, activation="silu"),
    "shared parts": Case(tile(64, 64, parts=2, shared=True), 8, 512, 64, residual=True),
    "tiles one after the other": Case(tile(128, 64), 136, 256, 192, residual=True),
    "tokens that are no eights": Case(tile(64, 128), 13, 256, 192),
    "parts of one block": Case(tile(128, 64, parts=4), 136, 1088, 192, residual=True),
    "shared parts of several tiles": Case(
        tile(128, 64, parts=4, shared=True, stages=4), 136, 1088, 192, residual=True
    ),
    "gates of several tiles": Case(
        tile(128, 192, gated=True, blocks=3), 200, 192, 448, activation="gelu_tanh"
    ),
    "float16": Case(tile(128, 128), 72, 256, 128, residual=True, dtype="float16"),
    "float32 of some outputs": Case(tile(64, 96), 16, 256, 192, result="float32", first=72),
    "shared parts in float32": Case(
        tile(64, 192, parts=4, shared=True), 40, 1024, 256, result="float32"
    ),
}
QUICK = "one consumer", "gates", "shared parts"


def marked(names: Any) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


@on_newer_jax
@pytest.mark.parametrize("name", marked(CASES))
def test_the_kernel_has_no_races_and_rounds_once(name):
    case = CASES[name]
    arrays = case.arrays()
    assert_near(case, run(case, *arrays), *arrays)


@on_newer_jax
@pytest.mark.parametrize(
    ("name", "place", "function"),
    [
        ("shared parts", "barrier_wait", "exchanged"),
        pytest.param("shared parts", "barrier_wait", "add_slab", marks=pytest.mark.slow),
        pytest.param("shared parts", "barrier_wait", "consume_tile", marks=pytest.mark.slow),
        pytest.param("one consumer", "barrier_wait", "<lambda>", marks=pytest.mark.slow),
        pytest.param("one consumer", "commit_smem", "consume_tile", marks=pytest.mark.slow),
        pytest.param("one consumer", "wgmma_wait", "add_slab", marks=pytest.mark.slow),
    ],
)
def test_the_checks_detect_what_is_missing(name, place, function, monkeypatch):
    import sys

    from jax.experimental.pallas import mosaic_gpu as plgpu

    call = getattr(plgpu, place)

    def careless(*args, **options):
        left_out = sys._getframe(1).f_code.co_name == function
        return None if left_out else call(*args, **options)

    monkeypatch.setattr(plgpu, place, careless)
    case = CASES[name]
    arrays = case.arrays()
    with pytest.raises(Exception, match=r"without an order|[Bb]arrier|farther"):
        assert_near(case, run(case, *arrays), *arrays)


# --- bits -----------------------------------------------------------------------------------------


def order_of_slabs(tokens: int, inputs: int, outputs: int) -> tuple[jax.Array, jax.Array]:
    """x and a weight whose sums over a slab are exact, and whose sums over slabs depend on the
    order, because each slab has a size of its own.
    """
    rng = np.random.default_rng(0)
    slabs = inputs // dense_sizes.SLAB
    sizes = np.repeat(2.0 ** rng.integers(0, 24, slabs), dense_sizes.SLAB)
    x = rng.integers(-3, 4, (tokens, inputs))
    weight = rng.integers(-3, 4, (outputs, inputs)) * sizes
    return jnp.asarray(x, "bfloat16"), jnp.asarray(weight, "bfloat16")


@on_newer_jax
@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        (tile(64, 64, parts=2, shared=True), slice(3, 11)),
        pytest.param(tile(64, 128, parts=2), slice(0, 72), marks=pytest.mark.slow),
        pytest.param(tile(128, 64, parts=2, shared=True), slice(0, 72), marks=pytest.mark.slow),
        pytest.param(tile(128, 128, parts=2), slice(1, 66), marks=pytest.mark.slow),
    ],
)
def test_bits_of_a_token_do_not_depend_on_its_place_the_tile_or_the_cluster(sizes, kept):
    x, weight = order_of_slabs(72, 512, 128)
    of_slabs = [
        np.asarray(x[:, i : i + 64], np.float32) @ np.asarray(weight[:, i : i + 64], np.float32).T
        for i in range(0, 512, 64)
    ]
    of_parts = [sum(of_slabs[i : i + 4], np.float32(0)) for i in (0, 4)]
    expected = of_parts[0] + of_parts[1]
    assert (expected != sum(of_slabs, np.float32(0))).any(), "the order makes no difference"
    case = Case(sizes, kept.stop - kept.start, 512, 128, result="float32")
    chex.assert_trees_all_equal(run(case, x[kept], weight), expected[kept])


# --- the contract ---------------------------------------------------------------------------------


@on_newer_jax
@pytest.mark.parametrize(
    ("matrix", "options"),
    [
        (Matrix(128, 128), {"residual": True, "norm": True}),
        pytest.param(
            Matrix(256, 128, gated=True),
            {"activation": "silu", "norm": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(  # its gates are XLA's
            Matrix(128, 128, gated=True), {"activation": "gelu"}, marks=pytest.mark.slow
        ),
        pytest.param(
            Matrix(192, 64),
            {"bias": True, "rows": (64, 192), "residual": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(Matrix(200, 64), {"rows": (8, 72)}, marks=pytest.mark.slow),
        pytest.param(Matrix(70, 100), {"bias": True}, marks=pytest.mark.slow),  # by XLA alone
    ],
    ids=str,
)
def test_results_are_those_of_plain_xla(matrix, options):
    """But for the last bit, which the order of a sum may change."""
    rng = np.random.default_rng(1)
    options = dict(options)
    x, weight = (
        jnp.asarray(rng.standard_normal(shape), "bfloat16")
        for shape in ((9, matrix.inputs), (matrix.outputs, matrix.inputs))
    )
    first, last = options.get("rows", (0, matrix.width))
    if options.pop("norm", False):
        options["norm"] = Norm(x[0], 1e-5)
    if options.pop("bias", False):
        options["bias"] = weight[:, 0]
    if options.pop("residual", False):
        options["residual"] = jnp.asarray(rng.standard_normal((9, last - first)), "bfloat16")
    expected = linear(x, weight, matrix, impl="xla", **options).astype(jnp.float32)
    y = without_races(lambda: linear(x, weight, matrix, impl="pallas_gpu", **options))
    assert y.dtype == jnp.bfloat16
    chex.assert_trees_all_close(
        y.astype(np.float32), np.asarray(expected), rtol=2.0**-7, atol=2.0**-7
    )


def test_which_matrices_it_multiplies():
    x = jnp.zeros((3, 128), jnp.bfloat16)
    weight = jnp.zeros((256, 128), jnp.bfloat16)
    matrix = Matrix(256, 128)
    assert pallas_gpu.is_dense(x, weight, matrix, (0, 256))
    assert pallas_gpu.is_dense(x, weight, matrix, (72, 200))
    for others in (
        (x, weight, matrix, (70, 198)),  # not from a multiple of 8 on
        (x, weight, matrix, (0, 100)),
        (x, weight[:250], Matrix(250, 128), (0, 128)),
        (x, weight, matrix._replace(count=2), (0, 128)),
        (x, weight.astype(jnp.int8), matrix, (0, 256)),
        (x.astype(jnp.float32), weight.astype(jnp.float32), matrix, (0, 256)),
        (x[:, :100], weight[:, :100], Matrix(256, 100), (0, 256)),
    ):
        assert not pallas_gpu.is_dense(*others)


def test_a_model_of_floats_of_16_bits_is_served_and_others_are_as_before():
    assert pallas_gpu.model_obstacle(["bfloat16"]) == ""
    assert pallas_gpu.model_obstacle(["float16", "float16"]) == ""
    assert "multiplies matrices in words" in pallas_gpu.model_obstacle(["float32"])
    assert "multiplies matrices in words" in pallas_gpu.model_obstacle(["bfloat16", "q6_k"])


def test_activations_of_32_bits_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    assert pallas_gpu.product_obstacle("float16", "float16") == ""
    reason = "multiplies bfloat16 and float16 and not float32"
    assert pallas_gpu.product_obstacle("float32", "bfloat16") == reason
