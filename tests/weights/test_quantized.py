"""Quantized checkpoints of Hugging Face: the weights of a layout written by hand, models that say the
same as with these weights in floats, and what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedjax import LLM, LoRARequest, SamplingParams, load_model
from pagedjax.device.formats import restored
from pagedjax.device.models import Model
from pagedjax.engine import compilations
from pagedjax.weights import open_checkpoint
from pagedjax.weights.convert import convert
from pagedjax.weights.huggingface import read_safetensors
from pagedjax.weights.quantized import check
from pagedjax.weights.trained import whole
from pagedjax.weights.tree import named, nested
from tests.device.test_plain_families import GPT_OSS
from tests.engine.runs import SMALL
from tests.refusals import refused
from tests.weights.quantized_files import (
    LAYOUTS,
    gptq,
    set_quantization,
    write_mxfp4,
    write_quantized,
)
from tests.weights.tiny_adapters import tiny_adapter

PROMPTS = [list(range(3, 40)), [7, 8, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
# the format of the output of attention, with 128 inputs
FORMATS = {
    "awq": "q4_k",
    "gptq, 4 bits": "int4_64",
    "gptq, act-order": "q4_k_ordered",
    "gptq, 8 bits": "uint8_32",
    "gptq, 8 bits, symmetric": "int8_128",
    "packed": "int4_128",
    "packed, asymmetric": "uint4_64",
    "packed, act-order": "int4_32_ordered",
    "packed, 8 bits": "int8_128",
    "int8 by channel": "int8_128",
    "fp8 by channel": "fp8_128",
    "fp8 by tensor": "fp8_128",
    "fp8 by block": "fp8_128",
    "fp8 by block, powers": "fp8_32",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("quantized")
    return {
        name: write_quantized(root / str(i), layout)
        for i, (name, layout) in enumerate(LAYOUTS.items())
    }


def formats_of(model: Model) -> dict[str, str]:
    """The formats of a model's matrices, by name."""
    assert isinstance(model.config.stored, tuple)
    return dict(model.config.stored)


def values_of(llm: LLM) -> list[tuple[Any, Any]]:
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    return [(output.token_ids, output.cumulative_logprob) for output in outputs]


def logprobs_of_prompts(llm: LLM) -> np.ndarray:
    """Of all tokens of all prompts but their first."""
    values = []
    for output in llm.generate(PROMPTS, SamplingParams(max_tokens=1, prompt_logprobs=0)):
        assert output.prompt_token_ids is not None
        assert output.prompt_logprobs is not None
        places = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        values += [place[token].logprob for place, token in places if place is not None]
    return np.array(values)


# --- numbers --------------------------------------------------------------------------------------


# A model that is loaded for the CPU kernels begins to compile them, four seconds for each format.


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_those_that_the_layout_means(name, folders):
    """As floats, and as they are stored: each is a float64 number that was rounded once."""
    stored, plain = folders[name]
    tensors = open_checkpoint(stored).tensors
    expected = load_file(plain / "model.safetensors")
    assert {n for n in tensors if not n.endswith(".bias")} == set(expected)
    for tensor_name, values in expected.items():
        chex.assert_trees_all_equal(tensors[tensor_name].read(), values)
    floats = named(load_model(plain, linear_impl="xla").model.params)
    model = load_model(stored, weight_dtype="stored", linear_impl="xla").model
    formats = formats_of(model)
    assert formats["blocks.0.attn.out.weight"] == FORMATS[name]
    assert len(formats) == 4
    params = {key: np.asarray(x) for key, x in named(model.params).items()}
    for key, x in floats.items():
        values = restored(model.config.stored, params, key) if key in formats else params[key]
        chex.assert_trees_all_equal(values, np.asarray(x), custom_message=key)


def test_convert_writes_the_floats_that_a_layout_means(folders, tmp_path):
    stored, plain = folders["gptq, 4 bits"]
    target = convert(stored, tmp_path / "floats", "safetensors")
    chex.assert_trees_all_equal(arrays_of(target), arrays_of(plain))
    assert "quantization_config" not in json.loads((target / "config.json").read_text())


# --- models ---------------------------------------------------------------------------------------

# Inputs are put in an order before any kernel. test_gguf_blocks.py has the CPU kernel, which takes
# seconds to compile for each format.
QUICK = ("gptq, act-order", "xla")
# one layout of each format; XLA has each kind of numbers
SLOW = {
    "cpu": (
        "awq",
        "gptq, 4 bits",
        "gptq, act-order",
        "gptq, 8 bits",
        "packed, asymmetric",
        "packed, act-order",
        "int8 by channel",
        "fp8 by block",
        "fp8 by block, powers",
    ),
    "xla": ("awq", "packed, 8 bits", "fp8 by tensor"),
}


def models() -> list[Any]:
    """Each layout with each implementation."""
    cases = []
    for name in LAYOUTS:
        for impl in ("cpu", "xla"):
            run = pytest.mark.slow if name in SLOW[impl] else pytest.mark.exhaustive
            cases.append(pytest.param(name, impl, marks=() if (name, impl) == QUICK else run))
    return cases


@pytest.mark.parametrize(("name", "impl"), models())
def test_tokens_are_those_of_the_weights_in_floats(name, impl, folders):
    """With the CPU kernel their log-probabilities have the same bits, if inputs stay in their
    order.
    """
    stored, plain = folders[name]
    options: dict[str, Any] = SMALL | {"linear_impl": impl}
    stored_values = values_of(LLM(stored, weight_dtype="stored", **options))
    expected = values_of(LLM(plain, **options))
    if impl == "cpu" and "act-order" not in name:
        assert stored_values == expected
    assert [tokens for tokens, _ in stored_values] == [tokens for tokens, _ in expected]
    logprobs = [np.array([value for _, value in values]) for values in (stored_values, expected)]
    chex.assert_trees_all_close(*logprobs, rtol=1e-4)


def test_tokens_are_rounded_to_8_bits_beside_stored_weights_alone(folders):
    with refused("and the model's are float32 .weight_dtype='stored' keeps"):
        LLM(folders["awq"][1], linear_impl="cpu_int8", **SMALL)


@pytest.mark.slow  # test_linear_impl.py has a quick one, of int8 weights
def test_tokens_rounded_to_8_bits_are_an_implementation_that_is_named(folders):
    """Log-probabilities change, by less than 5 %."""
    stored, _ = folders["awq"]
    options: dict[str, Any] = SMALL | {"weight_dtype": "stored"}
    llm = LLM(stored, linear_impl="cpu_int8", **options)
    assert llm.engine.model.config.linear == "cpu_int8"
    rounded = logprobs_of_prompts(llm)
    expected = logprobs_of_prompts(LLM(stored, linear_impl="cpu", **options))
    assert not np.array_equal(rounded, expected)
    chex.assert_trees_all_close(rounded, expected, rtol=5e-2)


@pytest.fixture
def mxfp4_folders(tmp_path):
    """Of a GPT-OSS: rows of gates and ups are in another order in a file, and floats are
    transposed.
    """
    return write_mxfp4(tmp_path, GPT_OSS | {"hidden_size": 64, "intermediate_size": 32})


def test_experts_in_mxfp4_are_read_and_stay_as_they_are(mxfp4_folders):
    stored, plain = mxfp4_folders
    expected = load_file(plain / "model.safetensors")
    tensors = open_checkpoint(stored).tensors
    chex.assert_trees_all_equal({name: tensor.read() for name, tensor in tensors.items()}, expected)
    formats = formats_of(load_model(stored, weight_dtype="stored", linear_impl="xla").model)
    assert formats == {f"blocks.{i}.mlp.{part}": "mxfp4" for i in (0, 1) for part in ("up", "down")}


@pytest.mark.slow
def test_experts_in_mxfp4_say_what_they_say_in_floats(mxfp4_folders):
    stored, plain = mxfp4_folders
    llm = LLM(stored, weight_dtype="stored", **SMALL)
    assert values_of(llm) == values_of(LLM(plain, **SMALL))


@pytest.mark.slow
def test_experts_in_mxfp4_on_a_mesh_say_the_same(tmp_path):
    config = GPT_OSS | {"hidden_size": 64, "intermediate_size": 64}
    stored, plain = write_mxfp4(tmp_path, config)
    mesh = {"expert": 2, "tensor": 2}
    stored_values = values_of(LLM(stored, weight_dtype="stored", mesh=mesh, **SMALL))
    expected = values_of(LLM(plain, linear_impl="xla", **SMALL))
    assert [tokens for tokens, _ in stored_values] == [tokens for tokens, _ in expected]


@pytest.mark.oracle
@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_tokens_are_those_of_transformers(name, folders):
    """transformers reads the plain checkpoint of the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    stored, plain = folders[name]
    theirs: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    # its end of text is a token as any other here, neither an end nor forbidden
    theirs.generation_config.eos_token_id = None
    stored_values = values_of(LLM(stored, weight_dtype="stored", **SMALL))
    for prompt, (tokens, _) in zip(PROMPTS, stored_values, strict=True):
        output = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        assert tuple(output[0, len(prompt) :].tolist()) == tokens


@pytest.mark.slow  # test_gguf_blocks.py has a quick one
def test_on_a_mesh_devices_have_whole_groups_or_smaller_blocks(folders):
    """256 inputs of a scale are no whole blocks of 128 on four devices: they have blocks of 32."""
    options: dict[str, Any] = SMALL | {"weight_dtype": "stored", "mesh": {"tensor": 4}}
    stored, plain = folders["fp8 by channel"]
    four = LLM(stored, **options)
    formats = formats_of(four.engine.model)
    assert formats["blocks.0.attn.out.weight"] == "fp8_32"
    assert formats["blocks.0.attn.qkv.weight"] == "fp8_128"
    tokens = [tokens for tokens, _ in values_of(LLM(plain, linear_impl="xla", **SMALL))]
    assert [tokens for tokens, _ in values_of(four)] == tokens


def test_inputs_in_an_order_of_their_own_are_not_divided_over_a_mesh(folders):
    with refused(
        "blocks.0.attn.out.weight has its inputs in an order of its own \\(act-order\\), and a mesh "
        "would divide them among 4 devices; load the model without weight_dtype, or on one device"
    ):
        load_model(folders["gptq, act-order"][0], weight_dtype="stored", mesh={"tensor": 4})


@pytest.mark.slow
def test_adapters_are_beside_inputs_in_another_order(folders, tmp_path):
    stored, plain = folders["gptq, act-order"]
    adapter = tiny_adapter(tmp_path / "adapter", plain)
    outputs = []
    for folder, weight_dtype in ((stored, "stored"), (plain, None)):
        options: dict[str, Any] = SMALL | {"enable_lora": True, "weight_dtype": weight_dtype}
        llm = LLM(folder, max_lora_rank=4, **options)
        llm.load_adapter("one", adapter)
        alone = llm.generate(PROMPTS, GREEDY)
        with_adapter = llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest("one"))
        tokens = [output.outputs[0].token_ids for output in with_adapter]
        assert tokens != [output.outputs[0].token_ids for output in alone]
        outputs.append(tokens)
    assert outputs[0] == outputs[1]


# --- new values -----------------------------------------------------------------------------------


def test_new_values_are_taken_as_they_are_stored(folders):
    """And floats are refused where inputs have an order of their own."""
    stored, plain = folders["gptq, act-order"]
    llm = LLM(stored, weight_dtype="stored", linear_impl="xla", **SMALL)
    before = values_of(llm)
    counted = compilations.counts()
    params = dict(named(whole(llm.engine.model)))
    name = "blocks.0.mlp.down.weight"
    llm.update_params(nested(params | {name: params[name][::-1].copy()}))
    assert values_of(llm) != before
    llm.update_params(nested(params))
    assert values_of(llm) == before
    assert (compilations.counts() - counted).compilations == 0
    floats = load_model(plain, linear_impl="xla").model.params
    with refused(
        r"floats are not rounded to q4_k with an order of inputs \(act-order\) here; give"
    ):
        llm.update_params(floats)


# --- what is refused ------------------------------------------------------------------------------

GROUP = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another layout of AWQ": (
        {"quant_method": "awq", "version": "gemv"},
        "awq: version is 'gemv'; supported: 'gemm', 'GEMM'; use the unquantised model",
    ),
    "AWQ without zero points": (
        {"quant_method": "awq", "zero_point": False},
        "zero_point is False; supported: True",
    ),
    "another size": ({"quant_method": "gptq", "bits": 2}, "bits is 2; supported: 4, 8"),
    "a group of nothing": (
        {"quant_method": "gptq", "group_size": 0},
        "group_size is 0; it must be an integer of at least 1, or -1",
    ),
    "other bits for some": (
        {"quant_method": "gptq", "dynamic": {"lm_head": {}}},
        "dynamic is {'lm_head': {}}; it must be empty",
    ),
    "a kernel's own layout": (
        {"quant_method": "gptq", "checkpoint_format": "marlin"},
        "checkpoint_format is 'marlin'; supported: 'gptq', 'gptq_v2'",
    ),
    "another format": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        "format is 'nvfp4-pack-quantized'; supported: 'pack-quantized'",
    ),
    "a group's own format": (
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {"group_0": GROUP},
        },
        "format is 'mixed-precision'; supported",
    ),
    "rotations": (
        {"quant_method": "compressed-tensors", "transform_config": {"R1": {}}},
        "transform_config is {'R1': {}}; it must be empty",
    ),
    "sparse": (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
        "format is 'sparse-24-bitmask'; supported: 'dense'",
    ),
    "floats of 4 bits": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float"}}},
        },
        "the weights of g are of type 'float' with num_bits 4; supported: float 8, int 4, int 8",
    ),
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": 128},
        "weight_block_size is 128; it must be two integers of at least 1, or null",
    ),
    "no method": ({}, "quant_method is None; supported: awq, gptq"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_is_not_read_is_named(name):
    config, message = REFUSED[name]
    with refused("^here: .*" + message.replace("{", r"\{").replace("(", r"\(")):
        check(config, "here")


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a file, of any dtype."""
    tensors = read_safetensors(folder / "model.safetensors")
    return {name: tensor.read() for name, tensor in tensors.items()}


def changed(folder: Path, source: Path, change: dict[str, np.ndarray | None]) -> Path:
    """A copy of a checkpoint with other tensors of the first layer's output of attention."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = arrays_of(source)
    for suffix, values in change.items():
        name = f"model.layers.0.self_attn.o_proj.{suffix}"
        tensors.pop(name, None)
        if values is not None:
            tensors[name] = values
    save_file(tensors, folder / "model.safetensors")
    return folder


O_PROJ = r"model\.safetensors: model\.layers\.0\.self_attn\.o_proj\."
DAMAGED: dict[str, tuple[str, dict[str, np.ndarray | None], str]] = {
    "no scales": ("awq", {"scales": None}, "qweight is quantized, and .*scales is missing; fetch"),
    "other scales": (
        "gptq, 4 bits",
        {"scales": np.ones((3, 128), np.float16)},
        r"scales is float16 \(3, 128\), and the quantization needs .* \(2, 128\)",
    ),
    "unequal groups": (
        "packed",
        {"weight_scale": np.ones((128, 3), np.float32)},
        r"weight_scale has the shape \(128, 3\); a matrix \(128, 128\) has one scale, or 128 rows",
    ),
    "no scale": (
        "fp8 by tensor",
        {"weight_scale": None},
        "weight is float8_e4m3fn, and there is no .*weight_scale_inv or .*weight_scale; fetch",
    ),
    "a group that is not there": (
        "gptq, act-order",
        {"g_idx": np.arange(128, dtype=np.int32)},
        "g_idx has the group 127, and there are 4; fetch it again",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_tensors_that_do_not_fit_are_named(name, folders, tmp_path):
    kind, change, message = DAMAGED[name]
    folder = changed(tmp_path / "damaged", folders[kind][0], change)
    with refused(O_PROJ + message):
        load_model(folder, weight_dtype="stored", linear_impl="xla")


def test_values_that_mean_nothing_are_named(folders, tmp_path):
    nan = np.full((128, 1), np.nan, np.float32)
    folder = changed(tmp_path / "scale", folders["fp8 by channel"][0], {"weight_scale": nan})
    with refused("o_proj.weight has a scale that is not a finite number; fetch it again"):
        load_model(folder)
    bits = np.full((128, 128), 127, np.uint8).view("V1")
    folder = folders["fp8 by tensor"][0]
    numbers = arrays_of(folder)["model.layers.0.self_attn.o_proj.weight"]
    nan = bits.view(numbers.dtype)
    with refused("o_proj.weight has NaN; fetch it again"):
        load_model(changed(tmp_path / "nan", folder, {"weight": nan}), weight_dtype="stored")


def test_zero_points_that_are_not_symmetric_are_named(tmp_path):
    stored, _ = write_quantized(tmp_path, gptq(4, 64, sym=False))
    set_quantization(stored, gptq(4, 64, sym=True).config)
    with refused("sym is true and .*qzeros has other zero points than 8; set sym to false in"):
        load_model(stored, weight_dtype="stored", linear_impl="xla")


def test_tensors_with_different_orders_are_kept_as_floats(folders, tmp_path, caplog):
    """Queries, keys and values are one matrix here."""
    stored = folders["gptq, act-order"][0]
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.g_idx"
    in_turn = (np.arange(128) // 32).astype(np.int32)
    folder = changed(tmp_path / "orders", stored, {})
    save_file(tensors | {name: in_turn}, folder / "model.safetensors")
    model = load_model(folder, weight_dtype="stored", linear_impl="xla").model
    assert "blocks.0.attn.qkv.weight" not in formats_of(model)
    assert (
        "blocks.0.attn.qkv.weight is kept as floats: the tensors that it is made of" in caplog.text
    )
