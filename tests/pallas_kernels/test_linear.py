"""Every implementation of `linear` against a product in float64, and the bits of the CPU kernel."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.interpreted import interpreted as interpreted_on_gpu
from pallas_kernels.linear import IMPLS, Implementation, LowRank, Matrix, Norm, linear, pallas_tpu
from pallas_kernels.shared.hopper import old_jax
from tests import drawn
from tests.pallas_kernels import older_cpus

pytestmark = pytest.mark.few_optimisations
# Those that multiply the numbers of x as they are; `test_linear_rounded` has the other one
EXACT = [name for name in IMPLS if name != "cpu_int8"]
PALLAS = "pallas_gpu", "pallas_tpu"  # which multiply bfloat16, and are interpreted here
MISSING = {"cpu": importlib.util.find_spec("llvmlite") is None, "pallas_gpu": bool(old_jax())}
HERE = [name for name in EXACT if not MISSING.get(name)]
INTERPRETED = IMPLS["pallas_tpu"]._replace(multiply=partial(pallas_tpu.multiply, interpret=True))
ERROR = {"float32": 3e-6, "bfloat16": 2**-8}  # of the largest number of a result, or its terms
ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def numbers(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def zeros(shape: int | tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.float32)


def case(
    t: int,
    k: int,
    m: int,
    *,
    dtype: str = "float32",
    int8: bool = False,
    activation: str | None = None,
    norm: bool | None = None,
    bias: bool = False,
    residual: bool = False,
    sizes: tuple[int, ...] | None = None,
    rows: tuple[int, int] | None = None,
    low: tuple[int, int, tuple[int, ...]] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `linear`, with the weight as it is stored. norm: its `plus_one`. low: as in
    `low_rank`.
    """
    rng = np.random.default_rng(seed)
    matrix = Matrix(m, k, activation is not None, len(sizes or (t,)))
    weight = numbers(rng, m, k, dtype=dtype)
    width = matrix.width if rows is None else rows[1] - rows[0]
    return {
        "x": numbers(rng, t, k, dtype=dtype),
        "weight": rng.integers(-127, 128, (m, k), np.int8) if int8 else weight,
        "matrix": matrix,
        "norm": None if norm is None else Norm(numbers(rng, k, dtype=dtype), 1e-5, norm),
        "scales": rng.random(m, np.float32) / 100 if int8 else None,
        "bias": numbers(rng, m, dtype=dtype) if bias else None,
        "activation": activation,
        "residual": numbers(rng, t, width, dtype=dtype) if residual else None,
        "rows": rows,
        "sizes": None if sizes is None else np.array(sizes, np.int32),
        "low": low and low_rank(rng, t, matrix, dtype, *low),
    }


def low_rank(
    rng: np.random.Generator,
    t: int,
    matrix: Matrix,
    dtype: str,
    slots: int,
    rank: int,
    parts: tuple[int, ...],
) -> LowRank:
    """Products of low rank of tokens in any order. parts: the last output + 1 of each, in 64ths of
    all.
    """
    m = matrix.outputs
    k = matrix.inputs
    ends = [m * end // 64 for end in parts]
    a = np.zeros(
        (slots, rank * len(ends), -(-k // 16) * 16),
        ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype,
    )
    a[1:, :, :k] = numbers(rng, slots - 1, rank * len(ends), k) / np.sqrt(k)
    b = np.zeros((slots, rank * len(ends), m), a.dtype)
    for i, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        b[1:, i * rank : (i + 1) * rank, first:last] = numbers(rng, slots - 1, rank, last - first)
    slot_of = rng.integers(0, slots, t).astype(np.int32)
    sizes = np.bincount(slot_of, minlength=slots).astype(np.int32)
    return LowRank(
        a, b, slot_of, np.argsort(slot_of, kind="stable").astype(np.int32), sizes, tuple(ends)
    )


def kernel_of(impl: str) -> Implementation:
    """An implementation that runs on a CPU."""
    return INTERPRETED if impl == "pallas_tpu" else IMPLS[impl]


def interpreted(impl: str) -> Any:
    """The context in which it runs on a CPU."""
    if impl != "pallas_gpu":
        return contextlib.nullcontext()
    return interpreted_on_gpu()


def run(arguments: dict[str, Any], impl: str) -> np.ndarray:
    options = dict(arguments)
    x = options.pop("x")
    weight = options.pop("weight")
    matrix = options.pop("matrix")
    packed = IMPLS[impl].pack(weight, matrix)
    if options["low"] is not None:
        low = options["low"]._replace(b=IMPLS[impl].pack_low(options["low"].b, matrix))
        options["low"] = low
    with interpreted(impl):
        return np.asarray(linear(x, packed, matrix, impl=kernel_of(impl), **options))


def normalised(arguments: dict[str, Any]) -> np.ndarray:
    """x after its norm, rounded to its dtype."""
    x = arguments["x"]
    norm = arguments["norm"]
    if norm is None:
        return x
    wide = x.astype(np.float32)
    root = np.sqrt((wide**2).mean(-1, keepdims=True) + np.float32(norm.eps))
    return (wide / root * (np.asarray(norm.weight, np.float32) + norm.plus_one)).astype(x.dtype)


def size_of_terms(arguments: dict[str, Any]) -> float:
    """The size that a product of x and the weight has unless its terms cancel: a sum of few outputs
    may be near zero, and the error of a sum is that of its terms.
    """
    x = normalised(arguments).astype(np.float64)
    squares = x**2 @ arguments["weight"].astype(np.float64).T ** 2
    sizes = np.sqrt(squares)
    if arguments["scales"] is not None:
        sizes = sizes * arguments["scales"]
    if arguments["activation"]:
        experts = 1 if arguments["sizes"] is None else len(arguments["sizes"])
        gates, ups = np.split(sizes.reshape(len(x), experts, -1), 2, axis=2)
        sizes = gates * ups
    return sizes.max()


def expected(arguments: dict[str, Any]) -> np.ndarray:
    """The result in float64, with x rounded after its norm."""
    scales = arguments["scales"]
    bias = arguments["bias"]
    activation = arguments["activation"]
    residual = arguments["residual"]
    rows = arguments["rows"]
    sizes = arguments["sizes"]
    low = arguments["low"]
    x = normalised(arguments)
    y = x.astype(np.float64) @ arguments["weight"].astype(np.float64).T
    y = y * (1 if scales is None else scales) + (0 if bias is None else bias.astype(np.float64))
    if sizes is not None:
        group_of = np.repeat(np.arange(len(sizes)), sizes)
        y = y.reshape(len(x), len(sizes), -1)[np.arange(len(x)), group_of]
    if low is not None:
        a, b = (np.asarray(factor, np.float64) for factor in low[:2])
        a = a[low.slots]
        b = b[low.slots]
        k = x.shape[1]
        h = np.einsum("tk,trk->tr", x.astype(np.float64), a[..., :k])
        y = y + np.einsum("tr,trm->tm", h, b[..., : y.shape[1]])
    if activation:
        gate, up = np.split(y, 2, axis=1)
        y = ACTIVATIONS[activation](gate) * up
    y = y if rows is None else y[:, slice(*rows)]
    return y if residual is None else y + residual.astype(np.float64)


def assert_contract(arguments: dict[str, Any], impl: str) -> None:
    output = run(arguments, impl)
    exact = expected(arguments)
    chex.assert_shape(output, exact.shape)
    chex.assert_type(output, arguments["x"].dtype)
    limit = ERROR[arguments["x"].dtype.name] * max(np.abs(exact).max(), size_of_terms(arguments))
    if (
        impl in ("xla", *PALLAS) and arguments["low"] is not None
    ):  # it rounds the inner products to x's dtype
        limit = 4 * limit
    chex.assert_trees_all_close(output.astype(np.float64), exact, rtol=0, atol=limit)


CASES = {
    "one token": {"t": 1, "k": 64, "m": 96},
    "a decode": {"t": 13, "k": 80, "m": 70},
    "a chunk": {"t": 64, "k": 96, "m": 160},
    "many tokens": {"t": 200, "k": 48, "m": 170, "bias": True, "residual": True, "norm": False},
    "odd sizes": {"t": 7, "k": 33, "m": 37},
    "deep": {"t": 29, "k": 4200, "m": 64},
    "norm": {"t": 25, "k": 72, "m": 64, "norm": False},
    "norm plus one": {"t": 1, "k": 50, "m": 64, "norm": True},
    "bias and residual": {"t": 14, "k": 48, "m": 45, "bias": True, "residual": True},
    "gates": {"t": 12, "k": 48, "m": 128, "activation": "silu"},
    "gates of odd width": {"t": 5, "k": 40, "m": 2 * 37, "activation": "gelu_tanh", "norm": True},
    "rows within a panel": {
        "t": 9,
        "k": 64,
        "m": 100,
        "rows": (7, 99),
        "residual": True,
        "bias": True,
    },
    "low rank": {"t": 40, "k": 64, "m": 96, "low": (5, 8, (64,)), "residual": True, "bias": True},
    "low rank of three parts": {
        "t": 13,
        "k": 48,
        "m": 128,
        "low": (3, 4, (32, 48, 64)),
        "norm": False,
    },
    "low rank of odd sizes": {
        "t": 29,
        "k": 33,
        "m": 37,
        "low": (4, 12, (20, 31, 64)),
        "norm": True,
    },
    "low rank of gates": {
        "t": 14,
        "k": 48,
        "m": 128,
        "low": (4, 8, (32, 64)),
        "activation": "silu",
        "norm": False,
    },
    "low rank of odd gates": {
        "t": 5,
        "k": 40,
        "m": 2 * 37,
        "low": (9, 16, (32, 64)),
        "activation": "gelu_tanh",
    },
    "low rank by rows within a panel": {
        "t": 9,
        "k": 64,
        "m": 100,
        "rows": (7, 99),
        "low": (3, 8, (32, 64)),
    },
    "low rank, many tokens": {"t": 200, "k": 48, "m": 170, "residual": True, "low": (9, 8, (64,))},
    "experts": {"t": 40, "k": 32, "m": 4 * 64, "sizes": (3, 0, 30, 7), "activation": "silu"},
    "experts without gates": {
        "t": 5,
        "k": 64,
        "m": 8 * 40,
        "sizes": (0, 0, 1, 0, 2, 1, 1, 0),
        "residual": True,
    },
}


# Of the implementations that XLA compiles, a third of a second for each case. Each part of `linear`
# is in one of them.
COMPILED = {
    "reference": [
        "many tokens",
        "gates of odd width",
        "low rank by rows within a panel",
        "low rank of gates",
        "experts",
        "experts without gates",
    ],
    "xla": [
        "odd sizes",
        "many tokens",
        "norm plus one",
        "gates",
        "gates of odd width",
        "low rank by rows within a panel",
        "low rank of odd sizes",
        "low rank of gates",
        "experts",
        "experts without gates",
    ],
    "pallas_tpu": [
        "odd sizes",
        "deep",
        "gates of odd width",
        "low rank by rows within a panel",
        "experts",
    ],
    "pallas_gpu": ["odd sizes", "rows within a panel"],
}


DEAR = ("low rank", "one token")  # seconds each


def cases_of_kinds(
    names: Iterable[str], compiled: Mapping[str, Collection[str]]
) -> pytest.MarkDecorator:
    """Of (impl, name, int8, dtype). The CPU kernel has code for each kind of numbers; that for int8
    has half of the cases with each kind of activations, and all of low rank with bfloat16. The dear
    ones have float32 by default. Of the others the default run has the cases in `compiled`, in turn
    with float32 and with bfloat16 and int8; those of Pallas have the latter. Slow runs have these
    cases with all numbers."""
    names = list(names)
    kinds = [
        (impl, int8, dtype)
        for impl in HERE
        for int8 in (False, True)
        for dtype in ("float32", "bfloat16")
        if impl not in PALLAS or dtype == "bfloat16"
    ]
    cases = []
    for impl, int8, dtype in kinds:
        for name in names:
            default_names = list(compiled.get(impl, ()))
            is_odd = name in default_names and default_names.index(name) % 2 == 1
            is_16_bit = is_odd or impl in PALLAS
            default_kind = (True, "bfloat16") if is_16_bit else (False, "float32")
            int8_dtype = "bfloat16" if "low" in name or names.index(name) % 2 else "float32"
            default = (name in default_names and (int8, dtype) == default_kind) or (
                impl == "cpu"
                and (not int8 or dtype == int8_dtype)
                and (name not in DEAR or (int8, dtype) == (False, "float32"))
            )
            case_id = "-".join((impl, name, *(["int8"] if int8 else []), dtype))
            slow = impl == "cpu" or name in default_names
            marks: Any = pytest.mark.slow if slow else pytest.mark.exhaustive
            marks = () if default else marks
            cases.append(pytest.param(impl, name, int8, dtype, marks=marks, id=case_id))
    return pytest.mark.parametrize(("impl", "name", "int8", "dtype"), cases)


@cases_of_kinds(CASES, COMPILED)
def test_every_implementation_fulfils_the_contract(impl, name, int8, dtype):
    assert_contract(case(**CASES[name], dtype=dtype, int8=int8), impl)


@pytest.mark.skipif("cpu" not in HERE, reason="the cpu extra is not installed")
@drawn.given(
    20,
    200,
    *(st.integers(1, 70) for _ in range(3)),
    st.sampled_from(["float32", "bfloat16"]),
    st.booleans(),
    st.sampled_from([None, "silu", "gelu_tanh"]),
    st.sampled_from([None, False, True]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_the_cpu_kernel_on_any_shape(t, k, m, dtype, int8, activation, norm, with_bias, seed):
    options: dict[str, Any] = {
        "activation": activation,
        "norm": norm,
        "bias": with_bias,
        "residual": with_bias,
        "seed": seed,
    }
    m = 2 * m if activation else m
    assert_contract(case(t, k, m, dtype=dtype, int8=int8, **options), "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "matrix",
    [
        Matrix(96, 40),
        Matrix(37, 33),
        Matrix(74, 21, True),
        Matrix(3 * 50, 7, False, 3),
        Matrix(4 * 34, 64, True, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("impl", EXACT)
def test_a_packed_weight_is_unpacked_exactly_and_its_rows_are_found(impl, matrix, dtype):
    rng = np.random.default_rng(1)
    kernel = IMPLS[impl]
    shape = matrix.outputs, matrix.inputs
    weight = (
        rng.integers(-127, 128, shape, np.int8)
        if dtype == "int8"
        else numbers(rng, *shape, dtype=dtype)
    )
    packed = kernel.pack(weight, matrix)
    chex.assert_trees_all_equal(kernel.unpack(packed, matrix), weight)
    if not matrix.gated and matrix.count == 1:
        ids = rng.integers(0, matrix.outputs, 11)
        chex.assert_trees_all_equal(kernel.gather(jax.device_put(packed), matrix, ids), weight[ids])


@pytest.mark.default_cases(
    *(f"{sizes}-{dtype}-" for sizes in ("576-960", "5000-64") for dtype in ("float32", "bfloat16")),
    "576-960-float32-int8",
    "1536-576-bfloat16-int8",
)
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("k", "m"), [(576, 960), (1536, 576), (5000, 64)])
@pytest.mark.skipif("cpu" not in HERE, reason="the cpu extra is not installed")
def test_bits_of_a_token_do_not_depend_on_the_tokens_beside_it(k, m, dtype, int8):
    """Of sums, norm and gates, whichever tile and thread computes a token."""
    arguments = case(512, k, m, dtype=dtype, int8=int8, activation="silu", norm=False)
    output = run(arguments, "cpu")
    for first, last in ((0, 1), (100, 107), (3, 67), (511, 512), (200, 256)):
        alone = run({**arguments, "x": arguments["x"][first:last]}, "cpu")
        chex.assert_trees_all_equal(alone, output[first:last])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.skipif("cpu" not in HERE, reason="the cpu extra is not installed")
def test_bits_of_a_token_with_a_slot_depend_on_its_slot_alone(dtype):
    """And a token without one has those of a product without low rank."""
    arguments = case(
        200, 576, 2 * 320, dtype=dtype, activation="silu", norm=False, low=(6, 8, (32, 64))
    )
    output = run(arguments, "cpu")
    low = arguments["low"]
    for first, last in ((0, 1), (100, 107), (3, 67), (199, 200)):
        part = {
            "x": arguments["x"][first:last],
            "low": low._replace(slots=low.slots[first:last], order=low.order[first:last]),
        }
        chex.assert_trees_all_equal(run(arguments | part, "cpu"), output[first:last])
    none = low.slots == 0
    assert 0 < none.sum() < len(none)
    chex.assert_trees_all_equal(run(arguments | {"low": None}, "cpu")[none], output[none])


PADDED = {
    "one matrix": {"k": 48, "m": 70, "sizes": (29,), "bias": True, "residual": True},
    "gates": {"k": 33, "m": 2 * 40, "sizes": (5,), "norm": False, "activation": "silu"},
    "rows": {"k": 64, "m": 100, "sizes": (1,), "rows": (7, 99)},
    "no token": {"k": 64, "m": 64, "sizes": (0,)},
    "many tokens": {"t": 400, "k": 48, "m": 170, "sizes": (300,), "bias": True, "residual": True},
    "many tokens by rows": {"t": 400, "k": 48, "m": 300, "sizes": (211,), "rows": (7, 290)},
    "experts": {"k": 32, "m": 4 * 64, "sizes": (3, 0, 20, 7), "activation": "silu"},
    "experts without a token": {"k": 32, "m": 2 * 64, "sizes": (0, 0)},
}


@cases_of_kinds(
    PADDED,
    {
        "reference": ["rows", "experts"],
        "xla": ["many tokens by rows", "experts", "experts without a token", "no token"],
    },
)
def test_tokens_before_padding_are_as_without_it_and_padding_is_finite(impl, name, int8, dtype):
    """As in a step, whose bucket has more tokens than the step."""
    options = {"t": 40, **PADDED[name]}
    used = sum(options["sizes"])
    arguments = case(**options, dtype=dtype, int8=int8)
    output = run(arguments, impl)
    first, last = arguments["rows"] or (0, arguments["matrix"].width)
    chex.assert_shape(output, (options["t"], last - first))
    chex.assert_tree_all_finite(output.astype(np.float32))
    alone = {
        name: arguments[name] if arguments[name] is None else arguments[name][:used]
        for name in ("x", "residual")
    }
    if used:
        exact = expected(arguments | alone)
        limit = ERROR[dtype] * np.abs(exact).max()
        chex.assert_trees_all_close(output[:used].astype(np.float64), exact, rtol=0, atol=limit)
        if impl == "cpu":
            chex.assert_trees_all_equal(output[:used], run(arguments | alone, impl))
    if impl == "cpu":  # it computes nothing for padding
        chex.assert_trees_all_equal(output[used:], np.zeros_like(output[used:]))


@settings(max_examples=200)
@given(
    st.integers(1, 400),
    st.integers(1, 200),
    st.integers(1, 6000),
    st.sampled_from([1, 4]),
    st.sampled_from([1, 2, 8, 64]),
)
@pytest.mark.skipif("cpu" not in HERE, reason="the cpu extra is not installed")
def test_a_call_has_items_for_all_threads_and_they_are_about_equal(
    tiles, panels, steps, number_bytes, workers
):
    """The split of one matrix of panels by tiles of tokens."""
    from pallas_kernels.linear.cpu import kernel

    split = kernel._split.function
    num_chunks, group = split(tiles, panels, 32 * number_bytes * steps, steps, 1, workers)
    assert 1 <= num_chunks <= tiles
    assert 1 <= group <= min(kernel.GROUP_PANELS, panels)
    chunk = -(-tiles // num_chunks)
    groups = -(-panels // group)
    items = -(-tiles // chunk) * groups
    if steps > kernel.MAX_DEPTH:
        assert chunk <= kernel.CHUNK_TILES
    if tiles * panels >= 8 * workers:  # there is enough to do
        assert items >= 2 * workers or workers == 1
        busiest = -(-items // workers) * chunk * group  # tiles by panels
        assert busiest <= 2 * tiles * panels / workers


@pytest.mark.skipif("cpu" not in HERE, reason="the cpu extra is not installed")
def test_numbers_that_are_not_finite_stay_in_their_rows():
    arguments = case(9, 64, 64, norm=False, activation="silu")
    output = run(arguments, "cpu")
    arguments["x"][4, 5] = np.nan
    wrong = run(arguments, "cpu")
    assert np.isnan(wrong[4]).all()
    chex.assert_trees_all_equal(np.delete(wrong, 4, 0), np.delete(output, 4, 0))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"impl": "gpu"},
            "impl is 'gpu'; it must be one of 'reference', 'xla', 'cpu', 'cpu_int8', 'pallas_gpu'",
        ),
        ({"x": zeros((3, 9))}, r"x is \(3, 9\); the weight \[64, 8\] needs \[T, 8\]"),
        ({"bias": zeros(63)}, r"bias is \(63,\); x \(3, 8\) and the weight \[64, 8\] need \(64,\)"),
        ({"rows": (60, 65)}, r"rows is \(60, 65\); it must be within \[0, 64\]"),
        ({"activation": "silu"}, "the weight is not gated and the activation 'silu'; need both"),
        (
            {"activation": "relu"},
            "activation is 'relu'; it must be one of 'silu', 'gelu', 'gelu_tanh'",
        ),
        ({"sizes": zeros(1)}, "sizes is float32; it must be int32"),
        (
            {"sizes": np.zeros(2, np.int32)},
            r"sizes is \(2,\); x \(3, 8\) and the weight \[64, 8\] need \(1,\)",
        ),
        ({"matrix": Matrix(64, 8, False, 2)}, "sizes is missing; the weight has 2 matrices"),
        (
            {"low": {}, "matrix": Matrix(64, 8, False, 2), "sizes": np.zeros(2, np.int32)},
            "weight has 2 matrices; it",
        ),
        (
            {"low": {"a": zeros((2, 4, 8))}},
            r"low.a is \(2, 4, 8\); x \(3, 8\) and 2 slots of rank 4 need \(2, 4, 16\)",
        ),
        (
            {"low": {"b": zeros((2, 4, 63))}},
            r"low.b is float32 \(2, 4, 63\); impl 'xla' needs float32 \(2, 4, 64\)",
        ),
        (
            {"low": {"parts": (32, 64)}},
            r"low.parts is \(32, 64\); they must ascend to 64, and the rank 4 be a multiple",
        ),
        ({"matrix": Matrix(64, 8, False, 3)}, "64 outputs cannot be 3 matrices"),
    ],
)
def test_wrong_arguments_are_named(changed, message):
    arguments = {
        "x": zeros((3, 8)),
        "weight": zeros((64, 8)),
        "matrix": Matrix(64, 8),
        "impl": "xla",
    } | changed
    if "low" in changed:
        tokens = dict.fromkeys(("slots", "order"), np.zeros(3, np.int32))
        right = LowRank(
            zeros((2, 4, 16)), zeros((2, 4, 64)), **tokens, sizes=np.zeros(2, np.int32), parts=(64,)
        )
        arguments["low"] = right._replace(**changed["low"])
    with pytest.raises(ValueError, match=message):
        linear(arguments.pop("x"), arguments.pop("weight"), arguments.pop("matrix"), **arguments)


@pytest.mark.parametrize(
    ("dtype", "weight", "activation", "message"),
    [
        (
            "float16",
            "float16",
            None,
            "impl 'cpu' multiplies float32 and bfloat16 and not float16; impl 'xla' has no",
        ),
        (
            "float32",
            "bfloat16",
            None,
            "needs weights of int8 or of the activations' dtype float32, and they are bfloat",
        ),
        ("float32", "float32", "gelu", "has the gates silu, gelu_tanh and not 'gelu'"),
    ],
)
def test_what_the_cpu_kernel_cannot_do_is_named(dtype, weight, activation, message):
    matrix = Matrix(64, 8, activation is not None)
    kind = jnp.dtype(weight)
    with pytest.raises(ValueError, match=message):
        linear(
            np.zeros((3, 8), dtype),
            np.zeros((2, 8, 32), kind),
            matrix,
            impl="cpu",
            activation=activation,
        )


PROGRAM = """
import itertools
from tests.pallas_kernels.test_linear import CASES, assert_contract, case
from pallas_kernels.linear.cpu import vectors
print(vectors.COLUMNS, vectors.PAIRS)
numbers = [(dtype, int8) for int8 in (False, True) for dtype in ("float32", "bfloat16")]
for options, (dtype, int8) in zip(CASES.values(), itertools.cycle(numbers)):
    assert_contract(case(**options, dtype=dtype, int8=int8), "cpu")
"""


@pytest.mark.slow
@older_cpus.by_name
@pytest.mark.skipif("cpu" not in HERE, reason="the cpu extra is not installed")
def test_the_cpu_kernel_without_the_newest_instructions(name, tmp_path):
    lines = older_cpus.printed(PROGRAM, name, tmp_path)
    assert lines[0] == {"AVX2": "6 False", "AVX-512 without pairs": "12 False"}[name]


@pytest.mark.skipif("cpu" not in HERE, reason="the cpu extra is not installed")
def test_concurrent_calls_do_not_take_each_others_helpers():
    """Calls that wake threads, and small ones, which use helpers that are awake."""
    sizes = [(1, 576, 960), (30, 96, 64), (1, 1536, 576), (2, 64, 96)]
    cases = [case(t, k, m, residual=True, seed=seed) for seed, (t, k, m) in enumerate(sizes)]
    alone = [run(arguments, "cpu") for arguments in cases]

    def repeatedly(arguments):
        return [run(arguments, "cpu") for _ in range(60)]

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(repeatedly, cases, timeout=120))
    for outputs, expected_output in zip(results, alone, strict=True):
        for output in outputs:
            chex.assert_trees_all_equal(output, expected_output)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_product_itself_rounds_its_sums_on_a_gpu_if_nothing_follows(platform, with_residual):
    """Elsewhere sums of bfloat16 might be in bfloat16."""
    x = jax.ShapeDtypeStruct((3, 16), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)

    def product(x, weight):
        residual = x if with_residual else None
        return linear(x, weight, Matrix(16, 16), impl="xla", residual=residual)

    lowered = jax.jit(product).trace(x, weight).lower(lowering_platforms=(platform,))
    (dot,) = [line for line in lowered.as_text().splitlines() if "stablehlo.dot_general" in line]
    rounds = platform == "cuda" and not with_residual
    assert dot.endswith(f"x{'bf16' if rounds else 'f32'}>")
