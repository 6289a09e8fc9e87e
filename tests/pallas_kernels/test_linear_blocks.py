"""Products of matrices in blocks: those of the restored weights, and on a CPU with the same bits."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.linear import BLOCKS, IMPLS, Blocks, Matrix, linear
from pallas_kernels.linear.blocks import DOUBLED, Parts, parts_of, recoded, restored, rows_of_parts
from tests.pallas_kernels import older_cpus
from tests.pallas_kernels.test_linear import (
    EXACT,
    HERE,
    PALLAS,
    case,
    expected,
    run,
    size_of_terms,
)

pytestmark = pytest.mark.few_optimisations
ON_CPU = pytest.mark.skipif("cpu" not in HERE, reason="the cpu extra is not installed")
ERROR = {"float32": 3e-6, "bfloat16": 2**-7}  # bfloat16: of x and of XLA's weights
# formats of the default run, one of each kind
MOST = {
    "reference": ["q6_k", "fp8_32"],
    "xla": ["q5_1", "mxfp4", "q4_k_super"],
    "cpu": ["q4_1", "q5_0", "q4_k_super", "fp8_128"],
    "pallas_tpu": ["q5_1", "fp8_32"],
    "pallas_gpu": ["int4_128", "q4_1", "mxfp4"],
}


# formats of the slow runs: numbers of each number of bits, kind of scales and size of blocks
MANY = (
    *("q4_0", "q4_1", "q5_0", "q6_k", "q4_k_super", "q6_k_super", "any"),
    *("int8_128", "uint4_64", "fp8_32", "fp8_128", "mxfp4"),
)


def formats(impls: list[str]) -> Any:
    """The cases of implementations and formats: the default run has MOST, slow runs have MANY."""
    cases = []
    for impl in impls:
        for name in BLOCKS:
            marks: Any = pytest.mark.slow if name in MANY else pytest.mark.exhaustive
            marks = () if name in MOST[impl] else marks
            cases.append(pytest.param(impl, name, marks=marks))
    return pytest.mark.parametrize(("impl", "name"), cases)


def random_parts(blocks: Blocks, outputs: int, inputs: int, seed: int = 0) -> Parts:
    """Scales are float16 numbers, of which some are subnormal, times the integers of "K" encodings
    in float32; or powers of two. Small floats are of any size, subnormal ones too. Factors of parts
    may be 0 and negative.
    """
    rng = np.random.default_rng(seed)
    cells = outputs, inputs // blocks.part.inputs
    first, last = (-127, 128)
    if blocks.bits < 8:
        first, last = -blocks.zero, 2**blocks.bits - blocks.zero
    numbers: Any = rng.integers(first, last, (*cells, blocks.part.inputs)).astype(np.int8)
    if blocks.numbers == "e4m3":
        numbers = np.where(numbers & 127 == 127, 3, numbers).astype(np.int8)  # those are NaN
        numbers = numbers.view(ml_dtypes.float8_e4m3fn)
    if blocks.scale == "e8m0":
        numbers = np.array(DOUBLED, np.int8)[numbers & 7] * np.where(numbers < 8, 1, -1)
        powers = rng.integers(-9, -2, cells)
        return Parts(numbers.astype(np.int8), np.ldexp(np.float32(0.5), powers), None)
    divisor = 100 if blocks.parts == 1 else 6400  # factors are up to 128
    scales = (rng.standard_normal(cells) / divisor).astype(np.float16)
    scales[0] = np.float16(3e-7)
    scales = scales.astype(np.float32)
    if blocks.scale == "float32":
        scales = scales * rng.integers(1, 64, cells).astype(np.float32)
    offsets = None
    if blocks.offset:
        offsets = rng.standard_normal(cells).astype(np.float16).astype(np.float32)
    if blocks.parts > 1:
        first_of_block = np.arange(cells[1]) // blocks.parts * blocks.parts
        scales = scales[:, first_of_block] * rng.integers(-128, 128, cells).astype(np.float32)
        if offsets is not None:
            offsets = (offsets / 64).astype(np.float16).astype(np.float32)[:, first_of_block]
            offsets = offsets * rng.integers(0, 64, cells).astype(np.float32)
    return Parts(numbers, scales, offsets)


def weights_of(parts: Parts) -> np.ndarray:
    weights = parts.scales[..., None] * parts.numbers.astype(np.float32)
    if parts.offsets is not None:
        weights = weights + parts.offsets[..., None]
    return weights.reshape(len(weights), -1)


def in_blocks(arguments: dict[str, Any], blocks: Blocks) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `linear` with a weight in blocks, and with the same weight in floats."""
    matrix = arguments["matrix"]
    parts = random_parts(blocks, matrix.outputs, matrix.inputs)
    rows = rows_of_parts(parts, blocks, np)
    stored = arguments | {"weight": rows, "matrix": matrix._replace(blocks=blocks)}
    return stored, arguments | {"weight": weights_of(parts)}


def case_of(blocks: Blocks, name: str, **options: Any) -> dict[str, Any]:
    """A case, with inputs that are whole blocks."""
    fields = CASES[name]
    inputs = -(-fields["k"] // blocks.inputs) * blocks.inputs
    return case(**fields | {"k": inputs}, **options)


CASES = {
    "a token": {"t": 1, "k": 64, "m": 96},
    "a chunk": {"t": 40, "k": 96, "m": 70, "norm": False, "bias": True, "residual": True},
    "deep": {"t": 14, "k": 4192, "m": 37},
    "gates": {"t": 13, "k": 64, "m": 2 * 37, "activation": "silu", "norm": True},
    "rows": {"t": 9, "k": 64, "m": 100, "rows": (7, 99), "residual": True, "bias": True},
    "low rank": {"t": 13, "k": 64, "m": 128, "low": (3, 4, (32, 48, 64)), "norm": False},
    "experts": {"t": 40, "k": 32, "m": 4 * 64, "sizes": (3, 0, 30, 7), "activation": "silu"},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_have_the_parts_that_they_were_made_of(name):
    blocks = BLOCKS[name]
    parts = random_parts(blocks, 5, 768)
    rows = rows_of_parts(parts, blocks, np)
    assert (rows.dtype, rows.shape) == (np.uint8, (5, blocks.row_bytes(768)))
    chex.assert_trees_all_equal(parts_of(rows, blocks, np), parts)
    chex.assert_trees_all_equal(restored(rows, blocks, np), weights_of(parts))
    in_jax = jax.jit(lambda x: restored(x, blocks, jnp))(rows)
    chex.assert_trees_all_equal(np.asarray(in_jax), weights_of(parts))
    for to in BLOCKS.values():
        if to.holds(blocks):
            weights = restored(recoded(rows, blocks, to, np), to, np)
            chex.assert_trees_all_equal(weights.view(np.int32), weights_of(parts).view(np.int32))
    assert BLOCKS["any"].holds(blocks) == (blocks.numbers != "e4m3")


@pytest.mark.parametrize(
    ("names", "smallest"),
    [
        (("q4_k_super", "q6_k_super"), "k_super"),
        (("q5_k_super", "q4_k_super"), "q5_k_super"),
        (("q4_k_super", "q8_0"), "uint8_32"),
        (("q4_k_super", "q4_k"), "q4_k"),
        (("q5_0", "q8_0"), "q8_0"),
    ],
)
def test_joined_matrices_have_the_smallest_format_that_holds_both(names, smallest):
    holding = [x for x in BLOCKS.values() if all(x.holds(BLOCKS[name]) for name in names)]
    assert min(holding, key=lambda x: x.row_bytes(256)).name == smallest


def test_scales_that_are_no_products_are_refused():
    blocks = BLOCKS["q4_k_super"]
    parts = random_parts(blocks, 2, 256)
    parts.scales[1, 3] = 0.3
    with pytest.raises(ValueError, match=r"0\.3.* are not a float16 number times integers"):
        rows_of_parts(parts, blocks, np)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("q5_0", {0: 0, 7: 28, 8: 1, 30: 27, 31: 31}),  # of an input, in the word
        ("q6_k", {0: 0, 7: 28, 8: 2, 14: 26, 15: 30}),
    ],
)
def test_bits_that_are_apart_are_a_shift_away_from_their_digits(name, places):
    blocks = BLOCKS[name]
    scales = np.ones((1, 1), np.float32)
    for number, place in places.items():
        numbers = np.full((1, 1, blocks.inputs), -blocks.zero, np.int8)
        numbers[0, 0, number] = blocks.zero - 1  # all of its bits are 1
        row = rows_of_parts(Parts(numbers, scales, None), blocks, np)
        digits = row[0, blocks.scale_bytes : -4]
        assert row[0, -4:].view("<u4") == (2 ** (blocks.bits - 4) - 1) << place
        assert digits.tolist() == [
            15 << number % 2 * 4 if byte == number // 2 else 0 for byte in range(len(digits))
        ]


def test_a_variant_of_the_kernel_is_of_one_format():
    same = [x._replace(name="") for x in BLOCKS.values()]
    assert len({x.code for x in BLOCKS.values()}) == len(set(same)) == len(BLOCKS)


@formats(EXACT)
def test_packed_rows_are_unpacked_and_found(impl, name):
    blocks = BLOCKS[name]
    kernel = IMPLS[impl]
    for matrix in (Matrix(70, 96), Matrix(74, 64, True), Matrix(4 * 34, 32, True, 4)):
        matrix = matrix._replace(inputs=matrix.inputs // 32 * max(32, blocks.inputs))
        rows = rows_of_parts(random_parts(blocks, *matrix[:2]), blocks, np)
        matrix = matrix._replace(blocks=blocks)
        packed = kernel.pack(rows, matrix)
        chex.assert_trees_all_equal(kernel.unpack(packed, matrix), rows)
        if not matrix.gated:
            ids = np.array([0, 69, 31, 32, 31])
            gathered = jax.jit(kernel.gather, static_argnums=1)(packed, matrix, ids)
            chex.assert_trees_all_equal(np.asarray(gathered), restored(rows, blocks, np)[ids])


@formats([impl for impl in EXACT if impl != "cpu"])
def test_products_are_those_of_the_restored_weights_in_float64(impl, name, monkeypatch):
    monkeypatch.setattr("pallas_kernels.linear.xla.PANEL_ROWS", 32)  # and the rest of a matrix
    if impl not in HERE:
        pytest.skip("it needs a newer JAX")
    dtype = "bfloat16" if impl in PALLAS else "float32"
    for case_name in ("a chunk", "gates", "experts"):
        stored, floats = in_blocks(case_of(BLOCKS[name], case_name, dtype=dtype), BLOCKS[name])
        exact = expected(floats)
        limit = ERROR[dtype] * max(np.abs(exact).max(), size_of_terms(floats))
        output = run(stored, impl)
        chex.assert_trees_all_close(output.astype(np.float64), exact, rtol=0, atol=limit)


def assert_bits_of_floats(name: str, case_name: str, dtype: str) -> None:
    """bfloat16: x and results are rounded, and the weights never are."""
    stored, floats = in_blocks(case_of(BLOCKS[name], case_name, dtype=dtype), BLOCKS[name])
    output = run(stored, "cpu")
    exact = expected(floats)
    limit = ERROR[dtype] * max(np.abs(exact).max(), size_of_terms(floats))
    chex.assert_trees_all_close(output.astype(np.float64), exact, rtol=0, atol=limit)
    if dtype == "float32":
        chex.assert_trees_all_equal(output, run(floats, "cpu"))


# A second of compilation, and three on a slow machine, for each format and dtype, and one more for
# low rank, whose quick cases are in test_linear.py and test_linear_rounded.py. So all formats have
# float32 and one token and several; three have all cases and dtypes.
SLOW = {(name, case_name, "float32") for name in BLOCKS for case_name in ("a token", "deep")} | {
    (name, case_name, dtype)
    for name in ("q5_1", "int4_128", "fp8_32")
    for case_name in CASES
    for dtype in ERROR
}
QUICK = {("q4_1", name, "float32") for name in CASES if name != "low rank"} | {
    *(("q4_0", name, "bfloat16") for name in ("a chunk", "gates")),
    *(("q5_0", name, "float32") for name in ("a token", "a chunk", "gates")),
    *(("q4_k_super", name, "float32") for name in ("a token", "a chunk", "deep", "gates")),
    *(("fp8_128", name, "float32") for name in ("a chunk", "rows")),
    *(("mxfp4", name, "float32") for name in ("a token", "experts")),
}


def marks_of(key: tuple[str, str, str]) -> Any:
    if key in QUICK:
        return ()
    return pytest.mark.slow if key in SLOW else pytest.mark.exhaustive


@ON_CPU
@pytest.mark.parametrize(
    ("name", "case_name", "dtype"),
    [
        pytest.param(*key, marks=marks_of(key))
        for key in [(n, c, d) for n in BLOCKS for c in CASES for d in ERROR]
    ],
)
def test_the_cpu_kernel_has_the_bits_of_the_restored_weights(name, case_name, dtype):
    assert_bits_of_floats(name, case_name, dtype)


@ON_CPU
@pytest.mark.parametrize("name", ["q4_1", "q5_0", "q4_k_super"])
def test_bits_of_a_token_do_not_depend_on_the_tokens_beside_it(name):
    options: dict[str, Any] = {"activation": "silu", "norm": False}
    inputs = 768 if name == "q4_k_super" else 576
    arguments, _ = in_blocks(case(512, inputs, 960, **options), BLOCKS[name])
    output = run(arguments, "cpu")
    for first, last in ((0, 1), (100, 107), (3, 67), (511, 512)):
        alone = run({**arguments, "x": arguments["x"][first:last]}, "cpu")
        chex.assert_trees_all_equal(alone, output[first:last])


def test_rows_that_are_no_blocks_are_refused():
    with pytest.raises(ValueError, match="a row has 40 inputs; q4_1 needs a multiple of 32"):
        BLOCKS["q4_1"].row_bytes(40)


def test_an_implementation_without_gates_of_this_kind_is_named():
    matrix = Matrix(64, 32, True, blocks=BLOCKS["q4_0"])
    x = jnp.zeros((3, 32))
    rows = jnp.zeros((64, 18), jnp.uint8)
    with pytest.raises(ValueError, match="has the gates silu, gelu_tanh and not 'gelu'"):
        linear(x, rows, matrix, impl="cpu", activation="gelu")


PROGRAM = """
from tests.pallas_kernels.test_linear_blocks import CASES, assert_bits_of_floats
from pallas_kernels.linear.cpu import small_floats, vectors
print(vectors.COLUMNS, small_floats.HAS_HALVES)
for name in ("q5_1", "q6_k", "fp8_32", "mxfp4"):
    for case_name in CASES if name == "q5_1" else ("a token", "deep"):
        assert_bits_of_floats(name, case_name, "float32")
"""


@pytest.mark.slow
@older_cpus.by_name
@ON_CPU
def test_the_cpu_kernel_without_the_newest_instructions(name, tmp_path):
    columns = older_cpus.printed(PROGRAM, name, tmp_path)[0]
    assert columns == {"AVX2": "6 True", "AVX-512 without pairs": "12 False"}[name]
