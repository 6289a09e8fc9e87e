"""`convert` with matrices in fewer bits: what it rounds and how far, and who reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedjax import LLM, SamplingParams, load_model
from pagedjax.commands import calibration
from pagedjax.commands.cli import main
from pagedjax.device.formats import restored
from pagedjax.device.formats.blocks import FORMATS, ROUNDED
from pagedjax.device.linear import BLOCKS
from pagedjax.weights import open_checkpoint
from pagedjax.weights.convert import convert
from pagedjax.weights.huggingface import read_safetensors
from pagedjax.weights.quantized.schemes import SCHEMES
from pagedjax.weights.tree import named
from tests.device.test_llama import CHUNKED, PROMPTS, all_logits
from tests.device.test_plain_families import (
    GLM_MOE,
    GPT_OSS,
    GRANITE,
    glm_moe_logits,
    gpt_oss_logits,
)
from tests.engine.runs import SMALL
from tests.refusals import refused
from tests.weights.quantized_files import SIZES
from tests.weights.test_family_files import HYBRIDS, stacked
from tests.weights.test_quantized import formats_of
from tests.weights.tiny import tiny_llama
from tests.weights.tiny_families import write_family

pytestmark = pytest.mark.few_optimisations

STEPS = {"int4-g128": 7, "int4-g64": 7, "int4-g32": 7, "int8": 127}  # of the largest magnitude
FORMATS_OF = {
    "int4-g128": "int4_128",
    "int4-g64": "int4_64",
    "int4-g32": "int4_32",
    "int8": "int8_128",
    "fp8": "fp8_128",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("source") / "llama", **SIZES | {"layers": 2})


def nearest(weights: np.ndarray, group: int, steps: int) -> np.ndarray:
    """Round to nearest with the largest magnitude of a group as `steps`, in float64."""
    cells = weights.astype(np.float64).reshape(len(weights), -1, group)
    scales = np.abs(cells).max(-1, keepdims=True) / steps
    return (np.rint(cells / scales) * scales).reshape(weights.shape)


def check_differences(name: str, weights: np.ndarray, differences: np.ndarray) -> None:
    """What rounding changed in a matrix [out, in] is at most that of the nearest numbers."""
    if name == "fp8":  # 3 bits of mantissa; subnormal numbers have a step of 2 ** -9 scales
        smallest = np.abs(weights).max(1, keepdims=True) / 448 / 2**10
        assert (np.abs(differences) <= 1.001 * np.maximum(np.abs(weights) / 16, smallest)).all()
        return
    group = SCHEMES[name].group or weights.shape[1]
    plain = nearest(weights, group, STEPS[name]) - weights
    of_groups = [(x**2).reshape(len(x), -1, group).sum(-1) for x in (differences, plain)]
    assert (of_groups[0] <= of_groups[1] * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_matrices_of_layers_are_rounded_and_all_else_stays(name, source, tmp_path, capsys):
    target = tmp_path / name
    command = ["convert", str(source), str(target), "--to", "safetensors", "--weights", name]
    assert main(command) == 0
    output = capsys.readouterr()
    assert output.out == f"{target}\n"
    original = load_file(source / "model.safetensors")
    tensors = open_checkpoint(target).tensors
    assert tensors.keys() == original.keys()
    error = 0.0
    size = 0.0
    for tensor_name, weights in original.items():
        values = tensors[tensor_name].read()
        if not tensor_name.endswith("_proj.weight"):
            chex.assert_trees_all_equal(values, weights)
            continue
        group = SCHEMES[name].group or weights.shape[1]
        differences = values.astype(np.float64) - weights
        error += (differences**2).sum()
        size += (weights.astype(np.float64) ** 2).sum()
        check_differences(name, weights, differences)
        if name.startswith("int4"):  # the search is worth something
            plain = nearest(weights, group, STEPS[name]) - weights
            assert (differences**2).sum() < 0.97 * (plain**2).sum()
    share = 100 * np.sqrt(error / size)
    assert f"14 matrices were rounded; the root mean square of what changed is {share:.2f} %" in (
        output.err
    )
    model = load_model(target, weight_dtype="stored", linear_impl="xla").model
    assert {*formats_of(model).values()} == {FORMATS_OF[name]}
    assert json.loads((target / "config.json").read_text())["quantization_config"]["ignore"] == [
        "model.embed_tokens",
        "lm_head",
    ]


def test_a_text_is_for_4_bits(source, tmp_path, capsys):
    text = tmp_path / "no.txt"
    command = ["convert", str(source), str(tmp_path / "new"), "--to", "safetensors"]
    assert main([*command, "--weights", "fp8", "--calibration", str(text)]) != 0
    message = (
        "--calibration is given, and --weights is fp8; a text chooses the scales of 4 bits: use"
    )
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"\xff", "it is not UTF-8 text")]
)
def test_a_text_that_cannot_be_read_is_named(source, tmp_path, content, reason):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with refused(rf"the text '.*text.txt' cannot be read: {reason}.*; name a text file"):
        calibration.mean_squares(str(source), file)


def test_experts_are_rounded_one_by_one(tmp_path):
    """Routers stay floats, and are named as such."""
    config = GLM_MOE | {"moe_intermediate_size": 32}
    source = write_family(tmp_path / "source", config)
    target = convert(source, tmp_path / "target", "safetensors", weights="int4-g32")
    quantization = json.loads((target / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.gate" in quantization["ignore"]
    model = load_model(target, weight_dtype="stored", linear_impl="xla").model
    formats = formats_of(model)
    assert {name for name, x in formats.items() if x == "int4_32"} >= {
        "blocks.1.mlp.up",
        "blocks.1.mlp.down",
        "blocks.1.mlp.shared.up.weight",
    }


# Experts of a layer in one tensor: [experts, in, out], and [experts, out, in]
SPARSE = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
STACKS: dict[str, tuple[dict[str, Any], str]] = {
    "gpt_oss": (GPT_OSS | {"intermediate_size": 32}, "mlp.experts.gate_up_proj"),
    "granitemoe": (
        GRANITE | SPARSE | {"model_type": "granitemoe"},
        "block_sparse_moe.input_linear.weight",
    ),
}


@pytest.mark.parametrize("name", ["int4-g32", "int8", "fp8"])
@pytest.mark.parametrize("family", STACKS)
def test_stacks_of_experts_are_rounded_and_stay_stacks(family, name, tmp_path):
    """Each expert is rounded as a matrix is, and what is read are the numbers of the file."""
    config, up = STACKS[family]
    source = write_family(tmp_path / "source", config)
    target = convert(source, tmp_path / "target", "safetensors", weights=name)
    original = load_file(source / "model.safetensors")
    values = {key: tensor.read() for key, tensor in open_checkpoint(target).tensors.items()}
    assert values.keys() == original.keys()
    up = f"model.layers.1.{up}"
    floats = original[up]
    is_turned = family == "gpt_oss"
    for of_file, of_target in zip(floats, values[up], strict=True):
        weights, rounded = (x.T if is_turned else x for x in (of_file, of_target))
        check_differences(name, weights, rounded.astype(np.float64) - weights)
        assert not np.array_equal(weights, rounded)
    written = read_safetensors(target / "model.safetensors")
    groups = 1 if SCHEMES[name].group is None else 2
    upright = len(floats), 64, groups  # outputs of an expert, and scales of each
    scale_shape = (upright[0], groups, 64) if is_turned else upright
    assert written[f"{up}_scale"].shape == scale_shape
    if name == "int4-g32":
        chex.assert_trees_all_equal(written[f"{up}_shape"].read(), np.array(floats.shape))
        assert up not in written
        assert written[f"{up}_packed"].read().nbytes * 8 == floats.nbytes
    stored = load_model(target, weight_dtype="stored", linear_impl="xla").model
    formats = formats_of(stored)
    expected_format = {"int4-g32": "int4_32", "int8": "int8_32", "fp8": "fp8_32"}[name]
    assert formats["blocks.1.mlp.up"] == formats["blocks.1.mlp.down"] == expected_format
    params = {key: np.asarray(x) for key, x in named(stored.params).items()}
    widened = named(load_model(target, linear_impl="xla").model.params)
    for key in ("blocks.1.mlp.up", "blocks.1.mlp.down"):
        restored_values = restored(stored.config.stored, params, key)
        chex.assert_trees_all_equal(restored_values, np.asarray(widened[key]))


def test_experts_in_two_tensors_are_written_as_those_in_many(tmp_path):
    """Other engines read a tensor for each matrix of an expert."""
    separate = write_family(tmp_path / "many", HYBRIDS["qwen3_5_moe_text"])
    together = shutil.copytree(separate, tmp_path / "few")
    save_file(stacked(load_file(separate / "model.safetensors")), together / "model.safetensors")
    targets = [
        convert(source, tmp_path / f"{source.name} 8", "safetensors", weights="int8")
        for source in (separate, together)
    ]
    tensors, expected = (load_file(target / "model.safetensors") for target in targets[::-1])
    assert "model.layers.1.mlp.experts.3.up_proj.weight_scale" in tensors
    chex.assert_trees_all_equal(tensors, expected)


def test_a_stack_that_is_damaged_or_has_orders_of_its_own_is_refused(tmp_path):
    config, up = STACKS["granitemoe"]
    source = write_family(tmp_path / "source", config)
    target = convert(source, tmp_path / "target", "safetensors", weights="int4-g32")
    file = target / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.0.{up}"
    changes = {
        f"{name}_shape": (
            np.zeros(2, np.int64),
            r"_shape is int64 \(2,\), and the quantization ne",
        ),
        f"{name}_scale": (
            np.ones((4, 1), np.float32),
            r"_scale has the shape \(4, 1\); what belon",
        ),
        f"{name}_g_idx": (
            np.zeros((4, 64), np.int32),
            "is a stack of matrices with inputs in orders",
        ),
    }
    for changed_name, (values, message) in changes.items():
        save_file(tensors | {changed_name: values}, file)
        with refused(message):
            open_checkpoint(target)


@pytest.mark.default_cases("gpt_oss-int4-g32-xla")  # a CPU kernel takes seconds to compile
@pytest.mark.slow_cases("gpt_oss-int4-g32-cpu", "gpt_oss-fp8-cpu", "glm4_moe-int8-xla")
@pytest.mark.parametrize("impl", ["cpu", "xla"])
@pytest.mark.parametrize("name", ["int4-g32", "int8", "fp8"])
@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe"])
def test_logits_of_rounded_experts_are_those_of_their_weights_in_float64(
    family, name, impl, tmp_path
):
    configs = {"gpt_oss": STACKS["gpt_oss"][0], "glm4_moe": GLM_MOE | {"moe_intermediate_size": 32}}
    forwards = {"gpt_oss": gpt_oss_logits, "glm4_moe": glm_moe_logits}
    source = write_family(tmp_path / "source", configs[family])
    target = convert(source, tmp_path / "target", "safetensors", weights=name)
    weights = {
        key: tensor.read().astype(np.float64)
        for key, tensor in open_checkpoint(target).tensors.items()
    }
    model = load_model(target, weight_dtype="stored", linear_impl=impl).model
    assert formats_of(model)["blocks.1.mlp.down"].endswith("_32")
    for got, prompt in zip(all_logits(model, CHUNKED), PROMPTS, strict=True):
        expected = forwards[family](weights, prompt)
        chex.assert_trees_all_close(got, expected.astype(np.float32), atol=2e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("config", [GLM_MOE | {"moe_intermediate_size": 32}, STACKS["gpt_oss"][0]])
def test_rounded_experts_say_what_they_say_in_floats(config, tmp_path):
    source = write_family(tmp_path / "source", config)
    target = convert(source, tmp_path / "target", "safetensors", weights="int4-g32")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    tokens = []
    for weight_dtype in ("stored", None):
        llm = LLM(target, weight_dtype=weight_dtype, **SMALL)
        tokens.append(llm.generate([[3, 4, 5]], params)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]


def test_what_does_not_fit_is_refused_before_anything_is_written(source, tmp_path):
    target = tmp_path / "target"
    narrow = tiny_llama(tmp_path / "narrow")
    message = (
        r"q_proj\.weight has 64 inputs, which are not whole groups of 128; use one of int4-g64"
    )
    with refused(message):
        convert(narrow, target, "safetensors", weights="int4-g128")
    with refused("weights is 'int8' and to is 'orbax'; matrices in fewer bits are written as safe"):
        convert(source, target, "orbax", weights="int8")
    weights: Any = "int3"
    with refused("weights is 'int3'; it must be one of None, 'int4-g128'"):
        convert(source, target, "safetensors", weights=weights)
    assert not target.exists()


NEW = [name for name in ROUNDED if not name.startswith("q")]


@pytest.mark.parametrize("name", NEW)
def test_new_values_are_rounded_to_the_nearest_numbers(name):
    """Within half a step of the numbers that a block has, by its own scale."""
    blocks = BLOCKS[name]
    matrix = np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32)
    matrix[1] = 0
    (rows,) = FORMATS[name].pack(matrix)
    values = FORMATS[name].restore([rows]).astype(np.float64)
    assert not values[1].any()
    cells = matrix.reshape(6, -1, blocks.inputs).astype(np.float64)
    largest = np.abs(cells).max(-1, keepdims=True)
    widths = cells.max(-1, keepdims=True) - cells.min(-1, keepdims=True)
    steps = {
        "int4": largest / 7 * (1 + 1e-6),
        "uint4": widths / 15,
        "int8": largest / 127,
        "uint8": widths / 255,
        "fp8": np.maximum(np.abs(cells) / 8, largest / 448 / 2**9),
        "mxfp4": np.maximum(np.abs(cells) / 2, largest / 4),
    }[name.rsplit("_", 1)[0]]
    differences = np.abs(values.reshape(cells.shape) - cells)
    is_inside = np.ones(cells.shape, bool)
    if blocks.numbers == "e2m1":  # a power of two, so the largest ones may be above 6 of it
        is_inside = np.abs(cells) <= 2.0 ** np.floor(np.log2(np.maximum(largest, 1e-9))) * 1.5
    if name.startswith("int4"):  # by least squares, so the largest ones may be cut
        is_inside = np.abs(cells) <= 0.6 * largest
    assert (differences <= 0.5 * steps * (1 + 1e-4) + 1e-7)[is_inside].all()


@pytest.mark.oracle
@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_reads_the_same_weights(name, source, tmp_path):
    """Its package, through transformers. It is no dependency: the test needs it installed."""
    pytest.importorskip("compressed_tensors")
    import torch
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    target = convert(source, tmp_path / name, "safetensors", weights=name)
    theirs = AutoModelForCausalLM.from_pretrained(
        target,
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(run_compressed=False),
    )
    weights = {key: x.detach().numpy() for key, x in theirs.state_dict().items()}
    for key, tensor in open_checkpoint(target).tensors.items():
        chex.assert_trees_all_equal(weights[key], tensor.read())


# --- scales by the activations of a text ----------------------------------------------------------


def test_mean_squares_are_those_of_the_inputs_of_matrices(source, tmp_path):
    """Those of the first layer are the norm of the embeddings, over each token of the text once."""
    file = tmp_path / "text.txt"
    file.write_text("the cat hears the rain in the house; " * 40)
    squares = calibration.mean_squares(str(source), file)
    loaded = load_model(source)
    tokens = np.array(loaded.tokenizer.encode(file.read_text()))
    tensors = {n: x.astype(np.float64) for n, x in load_file(source / "model.safetensors").items()}
    x = tensors["model.embed_tokens.weight"][tokens]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    x = x * tensors["model.layers.0.input_layernorm.weight"]
    expected = (x**2).mean(0)
    chex.assert_trees_all_close(
        squares["blocks.0.attn.qkv.weight"].astype(np.float64), expected, rtol=1e-5
    )
    layers = {f"blocks.{i}.{part}.weight" for i in (0, 1) for part in PARTS}
    assert squares.keys() >= layers
    assert squares["blocks.1.mlp.down.weight"].shape == (256,)


PARTS = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")


def test_errors_of_important_inputs_are_smaller(source, tmp_path):
    """The error that counts is that of the importance, in each group."""
    sizes = np.random.default_rng(0).exponential(size=256)
    importance = {"blocks.0.mlp.down.weight": (sizes**4).astype(np.float32)}
    name = "model.layers.0.mlp.down_proj.weight"
    weights = load_file(source / "model.safetensors")[name]
    errors = []
    for kind, means in (("plain", None), ("weighed", importance)):
        target = convert(
            source, tmp_path / kind, "safetensors", weights="int4-g32", importance=means
        )
        values = open_checkpoint(target).tensors[name].read().astype(np.float64)
        counted = (values - weights) ** 2 * importance["blocks.0.mlp.down.weight"]
        errors.append(counted.reshape(len(weights), -1, 32).sum(-1))
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all()
    assert errors[1].sum() < 0.97 * errors[0].sum()
    with refused(
        "importance is given, and weights is 'int8'; it chooses the scales of 4 bits: use"
    ):
        convert(source, tmp_path / "8", "safetensors", weights="int8", importance=importance)
