"""Formats of stored matrices: the same results as with the restored weights in floats, the rounding
of int8, and a format of one's own.
"""

from __future__ import annotations

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from pagedjax import LLM, from_params, load_model
from pagedjax.device.formats import Array, Format, int8, is_stored, restored
from pagedjax.device.linear import linear
from pagedjax.device.models import Decoder
from pagedjax.device.models.split import split
from pagedjax.engine import compilations
from pagedjax.options.config import STORED_FORMATS, MeshConfig
from pagedjax.weights.convert import convert
from pagedjax.weights.tree import named, nested
from tests import quick_compiler
from tests.device.test_llama import CHUNKED, all_logits
from tests.device.test_model_families import config_of
from tests.engine.runs import SMALL, greedy, token_ids
from tests.refusals import refused
from tests.weights.tiny import tiny_gguf, tiny_llama

pytestmark = pytest.mark.few_optimisations

SCALES = "_scales"
GREEDY = greedy(8)
PROMPTS = [list(range(3, 40)), [7, 8, 9]]


def random_params(config) -> dict:
    """Every parameter of an architecture: matrices of usual standard deviation, some rows much
    larger than others.
    """
    rng = np.random.default_rng(0)
    blank = named(nnx.state(nnx.eval_shape(lambda: Decoder(config, "float32"))))
    values = {}
    for name, x in blank.items():
        values[name] = rng.normal(
            1.0 if name.endswith("norm.weight") else 0.0, 0.1, x.shape
        ).astype(np.float32)
        if x.ndim == 2:
            values[name] *= rng.uniform(0.1, 3.0, (len(values[name]), 1)).astype(np.float32)
    return values


# --- rounding -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    arrays(
        np.float32, array_shapes(min_dims=2, max_dims=2), elements=st.floats(-1e6, 1e6, width=32)
    )
)
@example(np.float32([[1e-45]]))
@example(np.float32([[3e-43, -1e-44]]))
@example(np.float32([[1e-36, 1e-38]]))
def test_the_rounding_error_is_at_most_half_a_scale(matrix):
    numbers, scales = int8.pack(matrix)
    assert (numbers.dtype, scales.dtype) == (np.int8, np.float32)
    assert (scales > 0).all()
    assert numbers.min() >= -127
    off = np.abs(numbers * scales[:, None].astype(np.float64) - matrix)
    assert (off <= 0.501 * scales[:, None]).all()


def test_each_row_has_its_own_scale_and_zeros_stay_zeros():
    matrix = np.zeros((2500, 3), np.float32)
    matrix[0] = [127.0, -1.0, 0.4]
    matrix[2100] = [-2.54, 1.27, 0.0]
    numbers, scales = int8.pack(matrix)
    np.testing.assert_array_equal(numbers[[0, 1, 2100]], [[127, -1, 0], [0, 0, 0], [-127, 64, 0]])
    np.testing.assert_allclose(scales[[0, 1, 2100]], [1.0, 1.0, 0.02], rtol=1e-6)


# --- a model --------------------------------------------------------------------------------------


ALIKE = [pytest.param(name, marks=pytest.mark.slow) for name in ("Llama 2", "Qwen2", "Mixtral")]


@pytest.mark.default_cases("GPT-2")
@pytest.mark.parametrize("name", ["GPT-2", "Gemma 2", "Qwen3-MoE", *ALIKE])
def test_logits_are_those_of_the_rounded_weights_in_floats(name):
    """With every kind of matrix: fused, with bias, tied, of experts."""
    sizes = {"n_layer": 1} if name == "GPT-2" else {}  # it is of the default run
    config = config_of(name, **sizes)
    params = random_params(config)
    model = from_params(nested(params), config, weight_dtype="int8").model
    stored = {n: np.asarray(x) for n, x in named(model.params).items()}
    inside = {
        n: stored[n] * stored[n + SCALES][:, None] if n + SCALES in stored else x
        for n, x in params.items()
    }
    changed = [n for n, x in params.items() if not np.array_equal(inside[n], x)]
    assert set(changed) == {n for n, x in params.items() if is_stored(n.split("."), x.shape)}
    assert {str(stored[n].dtype) for n in changed} == {"int8"}
    with quick_compiler.all_quickly():
        expected = all_logits(from_params(nested(inside), config).model, CHUNKED)
        logits = all_logits(model, CHUNKED)
    for got, row in zip(logits, expected, strict=True):
        assert np.ptp(row) > 0.1
        np.testing.assert_allclose(got, row, atol=2e-4 * np.abs(row).max())


def test_every_format_gives_the_same_int8_weights(tmp_path):
    source = tiny_llama(tmp_path / "hf", tied=False)
    tiny_gguf(tmp_path / "model.gguf", source, matrices="F32")
    convert(source, tmp_path / "orbax", "orbax")
    expected = named(load_model(source, weight_dtype="int8").model.params)
    assert len(expected) > len(named(load_model(source).model.params))
    for path in (tmp_path / "model.gguf", tmp_path / "orbax"):
        params = load_model(path, weight_dtype="int8").model.params
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(params))
        loaded = named(params)
        for name, x in expected.items():
            chex.assert_trees_all_equal(loaded[name], x, custom_message=f"{path.name}: {name}")


def test_int8_weights_of_a_16_bit_model_are_rounded_from_the_stored_values(tiny_folder):
    exact, half = (
        load_model(tiny_folder, dtype=d, weight_dtype="int8").model for d in ("float32", "bfloat16")
    )
    of_half = named(half.params)
    of_exact = named(exact.params)
    for name, x in of_exact.items():
        if x.dtype == np.int8 or name.endswith(SCALES):
            chex.assert_trees_all_equal(of_half[name], x)
        else:
            assert str(of_half[name].dtype) == "bfloat16"
    assert (half.dtype, half.weight_dtype, exact.weight_dtype) == ("bfloat16", "int8", "int8")


def test_new_values_are_rounded_and_nothing_is_compiled(tiny, tiny_folder):
    llm = LLM(tiny_folder, weight_dtype="int8", **SMALL)
    before = token_ids(llm, PROMPTS, GREEDY)
    params = {name: np.asarray(x) for name, x in named(tiny.model.params).items()}
    changed = {
        name: x[::-1].copy() if "mlp" in name and x.ndim == 2 else x for name, x in params.items()
    }
    counted = compilations.counts()
    llm.update_params(nested(changed))
    after = token_ids(llm, PROMPTS, GREEDY)
    assert (compilations.counts() - counted).compilations == 0
    assert after != before
    fresh = from_params(
        nested(changed), tiny.model.config, weight_dtype="int8", tokenizer=tiny.tokenizer
    )
    assert token_ids(LLM(fresh, **SMALL), PROMPTS, GREEDY) == after
    # int8 already, with its scales
    llm.update_params(load_model(tiny_folder, weight_dtype="int8").model.params)
    assert token_ids(llm, PROMPTS, GREEDY) == before


def test_conflicting_options_are_refused(tiny, tiny_folder):
    with refused("weight_dtype is 'int8', but the model was loaded with 'float32'; load it"):
        LLM(tiny, weight_dtype="int8", **SMALL)
    with refused("weight_dtype is 'bfloat16'; it must be one of None, 'int8', 'stored', 'float32'"):
        load_model(tiny_folder, dtype="float32", weight_dtype="bfloat16")
    deleted = jax.tree.map(lambda x: x.copy(), tiny.model.params)
    jax.tree.map(lambda x: x.delete(), deleted)
    with refused(r"values of blocks.0.attn.qkv.weight: deleted \(donated"):
        LLM(tiny_folder, weight_dtype="int8", **SMALL).update_params(deleted)


# --- a format of one's own ------------------------------------------------------------------------

# By a byte, the sign and the power of two: the highest bit, and minus the exponent.
POWERS = np.float32([sign * 0.5**exponent for sign in (1, -1) for exponent in range(128)])
SMALLEST = POWERS[100]  # of a matrix whose largest weight is 1; smaller ones become it


def powers_of_two(matrix) -> tuple[np.ndarray, np.ndarray]:
    matrix = np.asarray(matrix, np.float32)
    scale = np.abs(matrix).max()
    exponents = -np.log2(np.maximum(np.abs(matrix) / scale, SMALLEST))
    return (np.rint(exponents) + 128 * (matrix < 0)).astype(np.uint8), scale


def restored_powers(arrays) -> np.ndarray:
    numbers, scale = arrays
    return POWERS[numbers] * scale


def times_powers(x, arrays, matrix, **options) -> jax.Array:
    numbers, scale = arrays
    return linear(x, (jnp.asarray(POWERS)[numbers] * scale).astype(x.dtype), matrix, **options)


def rows_of_powers(numbers, arrays, ids, dtype) -> jax.Array:
    _, scale = arrays
    return (jnp.asarray(POWERS)[numbers] * scale).astype(dtype)


POWERS_OF_TWO = Format(
    arrays=(
        Array("", lambda matrix: (matrix.outputs, matrix.inputs), "uint8", dims=2),
        Array("_scale", lambda matrix: (), "float32", dims=0),
    ),
    pack=powers_of_two,
    restore=restored_powers,
    multiply=times_powers,
    rows=rows_of_powers,
)


@pytest.mark.slow
def test_an_engine_runs_a_format_that_this_file_defines(one_layer_folder, monkeypatch):
    """With the tokens of the restored weights in floats."""
    monkeypatch.setitem(STORED_FORMATS, "powers", f"{__name__}:POWERS_OF_TWO")
    llm = LLM(one_layer_folder, weight_dtype="powers", **SMALL)
    assert (llm.engine.config.weight_dtype, llm.engine.config.linear_impl) == ("powers", "xla")
    params = named(load_model(one_layer_folder, weight_dtype="powers").model.params)
    floats = {
        name: restored("powers", params, name) if is_stored(name.split("."), x.shape) else x
        for name, x in params.items()
        if not name.endswith("_scale")
    }
    assert {str(params[name].dtype) for name, x in floats.items() if x.ndim == 2} == {"uint8"}
    original = load_model(one_layer_folder, linear_impl="xla")
    before = token_ids(LLM(original, **SMALL), PROMPTS, GREEDY)
    widened = from_params(nested(floats), original.model.config, linear_impl="xla")
    expected = token_ids(LLM(widened, **SMALL), PROMPTS, GREEDY)
    assert token_ids(llm, PROMPTS, GREEDY) == expected != before
    # other parameters are packed as those of the checkpoint were
    llm.update_params(original.model.params)
    assert token_ids(llm, PROMPTS, GREEDY) == expected
    config = replace(original.model.config, stored="powers")
    mesh = MeshConfig(tensor=2)
    assert split(config, mesh, ("head", "weight_scale")) == ()
