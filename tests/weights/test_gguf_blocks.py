"""Matrices of GGUF files in their own bits: the numbers of the gguf package, models that say the
same as with widened weights, and what is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from pagedjax import LLM, SamplingParams, from_params, load_model
from pagedjax.device import linear
from pagedjax.device.formats import blocks, dtypes_of, restored
from pagedjax.engine import compilations
from pagedjax.engine.adapters import init
from pagedjax.engine.resolve import resolve
from pagedjax.options.config import EngineConfig
from pagedjax.weights.gguf_blocks import PARTS, rows_of
from pagedjax.weights.gguf_file import KINDS
from pagedjax.weights.trained import whole
from pagedjax.weights.tree import named, nested
from pallas_kernels.linear import BLOCKS
from pallas_kernels.linear.blocks import restored as restored_rows
from tests.engine.runs import SMALL, greedy, token_ids
from tests.refusals import refused
from tests.weights.tiny import tiny_gguf, tiny_llama

PROMPTS = [list(range(3, 40)), [7, 8, 9]]
GREEDY = greedy(8)
# queries, keys and values are one matrix, which holds two encodings
MIXED = {"": "Q4_1", "v_proj": "Q5_0", "embed": "Q8_0", "down_proj": "Q4_0", "0.mlp.up": "F16"}
MIXED |= {"o_proj": "Q5_0"}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    return tiny_gguf(folder / "m.gguf", tiny_llama(folder, tied=False), matrices=MIXED)


@pytest.fixture(scope="module")
def tied_file(tmp_path_factory) -> Path:
    """The embedding, which is the head, has another encoding than the matrices, as SmolLM2's has.
    Other tests of the default run need the kernels for both.
    """
    folder = tmp_path_factory.mktemp("tied")
    matrices = {"": "Q4_1", "embed": "Q5_0"}
    return tiny_gguf(folder / "m.gguf", tiny_llama(folder, layers=1), matrices=matrices)


@pytest.fixture(scope="module")
def untied_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("untied")
    return tiny_gguf(folder / "m.gguf", tiny_llama(folder, layers=1, tied=False), matrices="Q4_1")


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", PARTS)
def test_no_number_of_a_file_is_rounded(encoding):
    """Random bytes are blocks of any values; scales are finite."""
    kind = GGMLQuantizationType[encoding]
    inputs, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (6 * 4, block_bytes), np.uint8)
    halves = (208,) if encoding == "Q6_K" else (0, 2) if encoding.endswith(("_1", "K")) else (0,)
    for start in halves:
        scales = (rng.standard_normal(len(raw)) / 50).astype(np.float16)
        scales[:3] = np.float16(3e-7)  # subnormal
        raw[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    chosen = BLOCKS[KINDS[encoding][0]]
    rows = rows_of(raw.reshape(-1), (6, 4 * inputs), block_bytes, encoding, chosen.name, chosen)
    values = restored_rows(rows, chosen, np)
    expected = dequantize(raw.reshape(6, -1), kind)
    chex.assert_trees_all_equal(values.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_floats_are_rounded_as_the_gguf_package_rounds_them(name):
    kind = GGMLQuantizationType[name.upper()]
    matrix = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    matrix[1] = 0
    raw = quantize(matrix, kind)
    (rows,) = blocks.FORMATS[name].pack(matrix)
    restored_floats = blocks.FORMATS[name].restore([rows])
    chex.assert_trees_all_equal(restored_floats, dequantize(raw, kind))
    # and what was rounded stays as it is, up to the last bit of a scale
    (rounded_rows,) = blocks.FORMATS[name].pack(restored_floats)
    chex.assert_trees_all_close(
        blocks.FORMATS[name].restore([rounded_rows]), restored_floats, rtol=2**-9, atol=1e-7
    )


@pytest.mark.parametrize("name", ["q4_k", "q5_k"])
def test_floats_are_rounded_to_parts_of_blocks(name):
    """Scales and offsets are integers of 6 bits there, which costs a little."""
    matrix = np.random.default_rng(0).standard_normal((5, 512)).astype(np.float32)
    matrix[1] = 0
    errors = {}
    for format_name in (name, f"{name}_super"):
        (rows,) = blocks.FORMATS[format_name].pack(matrix)
        values = blocks.FORMATS[format_name].restore([rows])
        chex.assert_equal_shape((values, matrix))
        chex.assert_trees_all_equal(values[1], matrix[1])
        errors[format_name] = np.abs(values - matrix).mean()
    assert errors[name] < errors[f"{name}_super"] < 1.1 * errors[name]


# --- models ---------------------------------------------------------------------------------------


def test_each_matrix_has_the_format_of_its_encoding_and_the_numbers_of_the_file(file):
    # for the CPU it would begin to compile kernels, four seconds for each format
    model = load_model(file, weight_dtype="stored", linear_impl="xla").model
    assert isinstance(model.config.stored, tuple)
    formats = dict(model.config.stored)
    for layer in range(2):
        assert formats[f"blocks.{layer}.attn.qkv.weight"] == "uint8_32"  # holds Q4_1 and Q5_0
        assert formats[f"blocks.{layer}.attn.out.weight"] == "q5_0"
        assert formats[f"blocks.{layer}.mlp.down.weight"] == "q4_0"
    assert formats["blocks.1.mlp.up.weight"] == "q4_1"
    assert "blocks.0.mlp.up.weight" not in formats  # F16 beside Q4_1
    assert formats["embed"] == "q8_0"
    dtypes = ["float32", "q4_0", "q4_1", "q5_0", "q8_0", "uint8_32"]
    assert dtypes_of(model.config.stored, "float32") == dtypes
    assert (model.weight_dtype, model.dtype) == ("stored", "float32")
    params = {name: np.asarray(x) for name, x in named(model.params).items()}
    widened = named(load_model(file, linear_impl="xla").model.params)
    assert params.keys() == widened.keys()
    for name, x in widened.items():
        values = restored(model.config.stored, params, name) if name in formats else params[name]
        chex.assert_trees_all_equal(values, np.asarray(x), custom_message=name)


@pytest.mark.default_cases("tied_file-cpu")
@pytest.mark.parametrize(
    ("kind", "impl"), [("tied_file", "cpu"), ("file", "xla"), ("tied_file", "xla")]
)
def test_tokens_are_those_of_the_widened_weights(kind, impl, request):
    """With the CPU kernel their log-probabilities have the same bits."""
    path = request.getfixturevalue(kind)
    options: dict[str, Any] = SMALL | {"linear_impl": impl}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    stored, widened = (
        LLM(path, weight_dtype=weight_dtype, **options).generate(PROMPTS, params)
        for weight_dtype in ("stored", None)
    )
    for output, expected in zip(stored, widened, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        if impl == "cpu":
            assert output.outputs[0].cumulative_logprob == expected.outputs[0].cumulative_logprob


@pytest.mark.slow
@pytest.mark.optimised
def test_smollm2_in_its_own_4_bits_says_what_it_says_in_float32():
    """The same bits, in a fifth of the memory."""
    options: dict[str, Any] = SMALL | {"max_model_len": 256, "num_blocks": 64}
    prompts = ["Once upon a time", "The capital of France is", "def fibonacci(n):"]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
    results = []
    memory = []
    for weight_dtype in (None, "stored"):
        llm = LLM("smollm2-135m", weight_dtype=weight_dtype, **options)
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        results.append([(output.token_ids, output.cumulative_logprob) for output in outputs])
        memory.append(llm.engine.memory.weights)
    assert results[0] == results[1]
    assert memory[1] < 0.2 * memory[0]


def test_an_engine_with_adapters_prepares_products_of_low_rank(untied_file, monkeypatch):
    """By then the formats of a file's matrices are known, and no program waits for them yet."""
    model = load_model(untied_file, weight_dtype="stored", linear_impl="cpu").model
    prepared = []

    def prepare(**variant: Any) -> None:
        prepared.append((variant["weight_dtype"], variant["low_rank"]))

    monkeypatch.setitem(linear.IMPLS, "cpu", linear.IMPLS["cpu"]._replace(prepare=prepare))
    config = EngineConfig(enable_lora=True, max_loras=1, num_blocks=8, max_model_len=64)
    assert init(model, resolve(config, model)) is not None
    assert prepared == [("float32", True), ("q4_1", True)]


def test_on_a_mesh_devices_have_whole_blocks(tmp_path):
    folder = tiny_llama(tmp_path, layers=1, head_dim=32, intermediate=128)
    path = tiny_gguf(tmp_path / "m.gguf", folder, matrices={"": "Q4_1", "embed": "Q8_0"})
    options: dict[str, Any] = SMALL | {"weight_dtype": "stored"}
    single = LLM(path, linear_impl="xla", **options)
    meshed = LLM(path, mesh={"tensor": 2}, **options)
    assert token_ids(single, PROMPTS, GREEDY) == token_ids(meshed, PROMPTS, GREEDY)
    weights = [named(whole(llm.engine.model)) for llm in (single, meshed)]
    chex.assert_trees_all_equal(*weights)
    message = (
        r"blocks.0.attn.out.weight is stored in blocks of 32 inputs \(q4_1\), and on 4 devices "
    )
    narrow_folder = tiny_llama(tmp_path / "narrow", intermediate=128)
    narrow = tiny_gguf(tmp_path / "narrow.gguf", narrow_folder, matrices="Q4_1")
    with refused(message + "each has 16 of its inputs"):
        load_model(narrow, weight_dtype="stored", mesh={"tensor": 4})
    # numbers of 5 bits are in 6 there, of which there are blocks of 16 inputs
    five = tiny_gguf(tmp_path / "five.gguf", narrow_folder, matrices="Q5_0")
    values = []
    for mesh, format_name in (({"tensor": 4}, "q6_k"), (None, "q5_0")):
        model = load_model(five, weight_dtype="stored", mesh=mesh).model
        assert isinstance(model.config.stored, tuple)
        formats = dict(model.config.stored)
        assert formats["blocks.0.attn.out.weight"] == format_name
        assert formats["blocks.0.mlp.up.weight"] == "q5_0"
        params = {name: np.asarray(x) for name, x in named(whole(model)).items()}
        values.append(restored(model.config.stored, params, "blocks.0.attn.out.weight"))
    chex.assert_trees_all_equal(*values)


def test_new_values_are_rounded_or_taken_as_they_are(untied_file):
    llm = LLM(untied_file, weight_dtype="stored", **SMALL)
    before = token_ids(llm, PROMPTS, GREEDY)
    old = load_model(untied_file, linear_impl="xla").model
    params = {name: np.asarray(x) for name, x in named(old.params).items()}
    changed = {
        name: x[::-1].copy() if "mlp" in name and x.ndim == 2 else x for name, x in params.items()
    }
    counted = compilations.counts()
    llm.update_params(nested(changed))
    assert token_ids(llm, PROMPTS, GREEDY) != before
    assert (compilations.counts() - counted).compilations == 0
    llm.update_params(load_model(untied_file, weight_dtype="stored").model.params)
    assert token_ids(llm, PROMPTS, GREEDY) == before
    # a new model of the same formats, from floats
    stored = replace(old.config, stored=llm.engine.model.config.stored, linear="xla")
    fresh = from_params(nested(changed), stored, tokenizer=None).model
    assert fresh.weight_dtype == "stored"
    llm.update_params(nested(changed))
    chex.assert_trees_all_equal(named(whole(fresh)), named(whole(llm.engine.model)))


def test_what_cannot_be_stored_is_refused(file, tmp_path, tiny, tiny_folder):
    with refused(
        "llama has no matrix whose numbers can be kept, only F32; leave weight_dtype out, or take int8"
    ):
        load_model(tiny_folder, weight_dtype="stored")
    params = {name: np.asarray(x) for name, x in named(tiny.model.params).items()}
    with refused("weight_dtype is 'stored', and parameters in memory are of no file; give"):
        from_params(nested(params), tiny.model.config, weight_dtype="stored")
    stored = load_model(file, weight_dtype="stored", linear_impl="xla")
    floats = load_model(file, linear_impl="xla").model
    with refused(
        "floats are not rounded to uint8_32 here, only to q4_0, q4_1, q5_0, .*; give the matrix"
    ):
        LLM(stored, **SMALL).update_params(floats.params)
    with refused("weight_dtype is 'int8', but the model was loaded with 'stored'; load it again"):
        LLM(stored, weight_dtype="int8", **SMALL)
