"""Products of integers, in blocks or by row, with tokens rounded to 8 bits, against float64."""

from __future__ import annotations

from typing import Any

import chex
import jax
import numpy as np
import pytest

from pallas_kernels.linear import BLOCKS, IMPLS, Blocks
from pallas_kernels.linear.cpu import implementation as cpu
from tests.pallas_kernels import older_cpus
from tests.pallas_kernels.test_linear import case, expected, normalised, run, size_of_terms
from tests.pallas_kernels.test_linear_blocks import CASES, ERROR, ON_CPU, case_of, in_blocks

pytestmark = pytest.mark.few_optimisations
INTEGERS = [name for name, blocks in BLOCKS.items() if blocks.integers]
SMALLEST = 1e-30
NEAR_A_TIE = 1e-5


def in_groups(x: np.ndarray, blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Returns (x in units of its factors, factors) of groups of inputs: [T, groups, ...]."""
    groups = x.astype(np.float32).reshape(len(x), -1, min(32, blocks.part.inputs))
    largest = np.abs(groups).max(-1, keepdims=True)
    largest = np.where(largest < SMALLEST, np.float32(np.inf), largest)
    with np.errstate(invalid="ignore"):
        factors = np.where(np.isinf(largest), 0, largest / np.float32(127))
    return groups * (np.float32(127) / largest), factors


def rounded(x: np.ndarray, blocks: Blocks) -> np.ndarray:
    """x [T, K] in float64, each number a multiple of its group's factor."""
    units, factors = in_groups(x, blocks)
    return (np.round(units).astype(np.float64) * factors).reshape(x.shape)


def tokens_near_ties(x: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Which tokens have a number that another order of the norm's sum may round to the other side.

    x: [T, K] float32. Numbers of bfloat16 are often exactly between two multiples (half of the
    largest is 63.5), and one step more or less is within what bfloat16 is allowed.
    """
    units, _ = in_groups(x, blocks)
    distances = np.abs(np.abs(units) % 1 - 0.5)
    return np.asarray((distances < NEAR_A_TIE).any((1, 2)))


def assert_product_of_rounded_tokens(name: str, case_name: str, dtype: str) -> None:
    blocks = BLOCKS[name]
    assert_rounded(*in_blocks(case_of(blocks, case_name, dtype=dtype), blocks), blocks)


def assert_rounded(stored: dict[str, Any], floats: dict[str, Any], blocks: Blocks) -> None:
    """The product of rounded tokens. floats: the arguments with the weight's floats, or its
    integers and their scales.
    """
    dtype = stored["x"].dtype.name
    x = normalised(floats)
    exact = expected(floats | {"x": rounded(x, blocks), "norm": None, "low": None})
    if floats["low"] is not None:  # its products are those of the numbers as they are
        exact = exact + expected(floats) - expected(floats | {"low": None})
    limit = ERROR[dtype] * max(np.abs(exact).max(), size_of_terms(floats))
    output = run(stored, "cpu_int8").astype(np.float64)
    chex.assert_equal_shape((output, exact))
    if floats["norm"] is not None and dtype == "float32":
        is_sure = ~tokens_near_ties(x, blocks)
        assert is_sure.mean() > 0.8
        output = output[is_sure]
        exact = exact[is_sure]
    chex.assert_trees_all_close(output, exact, rtol=0, atol=limit)


# as in test_linear_blocks.py
SLOW = {(name, case_name, "float32") for name in INTEGERS for case_name in ("a token", "deep")} | {
    (name, case_name, dtype)
    for name in ("q5_1", "q6_k", "int8_128")
    for case_name in CASES
    for dtype in ERROR
}
QUICK = {("q4_1", name, "float32") for name in CASES} | {
    *(("q8_0", name, "float32") for name in ("a token", "deep")),
    ("q5_0", "a token", "float32"),
    ("q4_0", "a chunk", "bfloat16"),
    ("any", "rows", "float32"),
    *(("q4_k_super", name, "float32") for name in ("a token", "deep", "gates")),
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
        for key in [(n, c, d) for n in INTEGERS for c in CASES for d in ERROR]
    ],
)
def test_products_are_those_of_rounded_tokens(name, case_name, dtype):
    assert_product_of_rounded_tokens(name, case_name, dtype)


WIDE = {"t": 7, "k": 256, "m": 70, "norm": True, "bias": True}  # blocks of 128 inputs
BY_ROW = CASES | {"wide": WIDE}


@ON_CPU
@pytest.mark.default_cases("wide-float32")
@pytest.mark.slow_cases("a chunk-float32", "experts-float32", "rows-float32", "rows-bfloat16")
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("name", BY_ROW)
def test_products_with_int8_by_row_are_those_of_rounded_tokens(name, dtype):
    arguments = case(**BY_ROW[name], dtype=dtype, int8=True)
    assert_rounded(arguments, arguments, BLOCKS["int8_32"])


@ON_CPU
@pytest.mark.parametrize("inputs", [256, 96, 40])
def test_int8_by_row_is_packed_and_read_again_without_loss(inputs):
    """Inputs that are not whole blocks leave the numbers and the product as they are."""
    arguments = case(5, inputs, 70, int8=True)
    weight = arguments["weight"]
    matrix = arguments["matrix"]
    impl = IMPLS["cpu_int8"]
    packed = impl.pack(weight, matrix)
    assert packed.dtype == (np.int8 if inputs == 40 else np.uint8)
    chex.assert_trees_all_equal(impl.unpack(packed, matrix), weight)
    ids = np.array([3, 69, 0], np.int32)
    rows = jax.jit(impl.gather, static_argnums=1)(packed, matrix, ids)
    chex.assert_trees_all_equal(np.asarray(rows, np.float32), weight[ids].astype(np.float32))
    if inputs == 40:
        chex.assert_trees_all_equal(run(arguments, "cpu_int8"), run(arguments, "cpu"))


@ON_CPU
def test_bits_of_a_rounded_token_do_not_depend_on_the_tokens_beside_it():
    options: dict[str, Any] = {"activation": "silu", "norm": False}
    arguments, _ = in_blocks(case(512, 576, 960, **options), BLOCKS["q4_1"])
    output = run(arguments, "cpu_int8")
    for first, last in ((0, 1), (100, 107), (3, 67), (511, 512)):
        alone = run({**arguments, "x": arguments["x"][first:last]}, "cpu_int8")
        chex.assert_trees_all_equal(alone, output[first:last])


@ON_CPU
def test_zeros_tiny_numbers_and_numbers_that_are_not_finite():
    blocks = BLOCKS["q4_1"]
    stored, _ = in_blocks(case(6, 128, 64), blocks)
    x = stored["x"].copy()
    x[0] = 0
    x[1] = 1e-38
    x[2, 32:] = 0
    x[3, 40] = np.nan
    x[4, 7] = -np.inf
    output = run(stored | {"x": x}, "cpu_int8")
    chex.assert_trees_all_equal(output[:2], np.zeros_like(output[:2]))
    assert np.isfinite(output[2]).all()
    assert not np.isfinite(output[3:5]).any()
    chex.assert_trees_all_equal(output[5], run(stored, "cpu_int8")[5])


@ON_CPU
def test_other_weights_are_multiplied_as_by_the_exact_kernel():
    arguments = case(5, 64, 40)
    chex.assert_trees_all_equal(run(arguments, "cpu_int8"), run(arguments, "cpu"))
    small_floats, _ = in_blocks(case(5, 128, 40), BLOCKS["fp8_128"])
    chex.assert_trees_all_equal(run(small_floats, "cpu_int8"), run(small_floats, "cpu"))


@pytest.mark.parametrize(
    ("impl", "useful", "useless"),
    [
        ("cpu_int8", "q4_1", "fp8_128"),
        ("cpu_int8", "int8", "mxfp4"),
        ("pallas_gpu", "int4_128", "q6_k"),
        ("pallas_gpu", "mxfp4", "any"),
        ("pallas_tpu", "q6_k", "float32"),
    ],
)
def test_a_model_without_matrices_that_an_implementation_is_made_for_is_refused(
    impl, useful, useless
):
    reason = IMPLS[impl].model_obstacle
    assert reason(("float32", useful)) == ""
    assert f"the model's are {', '.join(sorted(('bfloat16', useless)))}" in reason(
        (useless, "bfloat16")
    )
    assert all(cpu.IMPLEMENTATION.model_obstacle([name]) == "" for name in ("int8", "float32"))


PROGRAM = """
from tests.pallas_kernels.test_linear_rounded import CASES, assert_product_of_rounded_tokens
from pallas_kernels.linear.cpu import vectors
print(vectors.COLUMNS)
for name in ("q5_1", "q8_0", "q6_k"):
    for case_name in CASES if name == "q5_1" else ("a token", "deep"):
        assert_product_of_rounded_tokens(name, case_name, "float32")
"""


@pytest.mark.slow
@older_cpus.by_name
@ON_CPU
def test_products_of_rounded_tokens_without_the_newest_instructions(name, tmp_path):
    columns = older_cpus.printed(PROGRAM, name, tmp_path)[0]
    assert columns == {"AVX2": "6", "AVX-512 without pairs": "12"}[name]
