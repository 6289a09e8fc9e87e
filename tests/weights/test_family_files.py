"""Files of the families whose tensors are joined or in another order, and of models of text and
images.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedjax import load_model
from pagedjax.device.adapters import Part, adapted
from pagedjax.weights import open_checkpoint
from pagedjax.weights.adapter_files import adapter_parts, modules_of, read_adapter, write_adapter
from pagedjax.weights.architectures import FAMILIES, NEUTRAL, Architecture, normalised
from pagedjax.weights.convert import convert
from pagedjax.weights.load import assemble
from tests.refusals import refused
from tests.weights.tiny import tiny_llama, write_json
from tests.weights.tiny_families import shape_of, write_family

BODY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 6,
    "long_factor": [2.0] * 6,
}
LATENTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "phi3": BODY
    | {"partial_rotary_factor": 0.75, "rope_scaling": LONGROPE}
    | {"original_max_position_embeddings": 64},
    "glm4": BODY | {"head_dim": 16},
    "gpt_neox": BODY | {"num_key_value_heads": 4, "rotary_pct": 0.5, "rotary_emb_base": 5000},
    "olmo3": BODY | {"sliding_window": 16, "rope_theta": 1e5},
    "granite": BODY | {"residual_multiplier": 0.5, "logits_scaling": 4.0},
    "smollm3": BODY | {"no_rope_layers": [1, 0]},
    "exaone4": BODY | {"sliding_window": 16, "sliding_window_pattern": 2},
    "deepseek_v2": BODY | LATENTS | {"q_lora_rank": None},
    "deepseek_v3": BODY | LATENTS | {"q_lora_rank": 24, "n_group": 2, "topk_group": 1},
}
QWEN_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
# with layers without attention, which not all tests of `CONFIGS` have
HYBRIDS = {
    name: BODY | QWEN_HYBRID | {"model_type": name} for name in ("qwen3_next", "qwen3_5_moe_text")
}
CONFIGS = {name: config | {"model_type": name} for name, config in CONFIGS.items()}


@pytest.fixture(params=[*CONFIGS, *HYBRIDS])
def source(request, tmp_path) -> Path:
    return write_family(tmp_path / "source", (CONFIGS | HYBRIDS)[request.param])


def test_a_converted_folder_has_the_same_tensors_and_the_same_shape(source, tmp_path):
    """Through Orbax, which has our own parameters."""
    back = convert(convert(source, tmp_path / "orbax", "orbax"), tmp_path / "back", "safetensors")
    tensors = load_file(source / "model.safetensors")
    chex.assert_trees_all_equal(load_file(back / "model.safetensors"), tensors)
    assert shape_of(json.loads((back / "config.json").read_text())) == shape_of(
        json.loads((source / "config.json").read_text())
    )


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a file with 2 layers of 4 experts, with all experts of a layer in two."""
    stacked_tensors = {name: x for name, x in tensors.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gates, ups, downs = (
            np.stack([tensors[f"{prefix}{i}.{part}_proj.weight"] for i in range(4)])
            for part in ("gate", "up", "down")
        )
        stacked_tensors[f"{prefix}gate_up_proj"] = np.concatenate([gates, ups], axis=1)
        stacked_tensors[f"{prefix}down_proj"] = downs
    return stacked_tensors


def test_experts_in_two_tensors_are_those_in_many(tmp_path):
    """As published files of Qwen3.5 MoE have them, and transformers in memory."""
    separate = write_family(tmp_path / "many", HYBRIDS["qwen3_5_moe_text"])
    tensors = stacked(load_file(separate / "model.safetensors"))
    stacked_folder = shutil.copytree(separate, tmp_path / "few")
    save_file(tensors, stacked_folder / "model.safetensors")
    expected = load_model(separate, linear_impl="xla").model.params
    loaded = load_model(stacked_folder, linear_impl="xla")
    chex.assert_trees_all_equal(loaded.model.params, expected)
    back = convert(stacked_folder, tmp_path / "back", "safetensors")
    chex.assert_trees_all_equal(load_file(back / "model.safetensors"), tensors)
    # of text and images, with the names of such files
    composite = shutil.copytree(stacked_folder, tmp_path / "both")
    text = json.loads((stacked_folder / "config.json").read_text())
    write_json(composite / "config.json", {"model_type": "qwen3_5_moe", "text_config": text})
    named = {
        name.replace("model.", "model.language_model.") if name.startswith("model.") else name: x
        for name, x in tensors.items()
    }
    for name in ("model.visual.patch_embed.proj.weight", "mtp.fc.weight"):  # not read
        named[name] = np.ones((2, 2), np.float32)
    save_file(named, composite / "model.safetensors")
    chex.assert_trees_all_equal(load_model(composite, linear_impl="xla").model.params, expected)
    del tensors["model.layers.1.mlp.experts.down_proj"]
    save_file(tensors, stacked_folder / "model.safetensors")
    with refused(r"missing: model.layers.1.mlp.experts.0.down_proj.weight"):
        load_model(stacked_folder)


def test_the_rows_of_a_gpt_neox_are_those_of_q_k_and_v_head_after_head(tmp_path):
    folder = write_family(tmp_path / "neox", CONFIGS["gpt_neox"])
    checkpoint = open_checkpoint(folder)
    name = "gpt_neox.layers.1.attention.query_key_value.weight"
    per_head = checkpoint.tensors[name].read().reshape(4, 3, 16, 64)  # head, part, row, input
    c = shape_of(CONFIGS["gpt_neox"])
    (entry,) = [x for x in FAMILIES["gpt_neox"].param_table(c) if x.sources == (name,)]
    rows = assemble(checkpoint.tensors, entry, "float32").reshape(3, 4, 16, 64)
    # of the 8 rows that are rotated, 4 are the first of pairs; then 4 of those that are not
    order = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    for part in (0, 1):
        chex.assert_trees_all_equal(rows[part], per_head[:, part, order])
    chex.assert_trees_all_equal(rows[2], per_head[:, 2])


def test_a_head_that_files_call_lm_head_is_embed_out(tmp_path):
    """transformers 5 has both names."""
    folder = write_family(tmp_path / "neox", CONFIGS["gpt_neox"])
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    save_file(tensors, folder / "model.safetensors")
    assert "embed_out.weight" in open_checkpoint(folder).tensors


def test_adapters_are_in_the_order_of_the_files(source, tmp_path):
    """A matrix of ours from the file's W + s B A is ours from W, plus the parts of the adapter."""
    checkpoint = open_checkpoint(source)
    family = FAMILIES[checkpoint.config["model_type"]]
    c = family.from_hf(checkpoint.config)
    rng = np.random.default_rng(1)
    factors = {}
    merged = dict(checkpoint.tensors)
    for module in modules_of(c):
        tensor = checkpoint.tensors[f"{module}.weight"]
        out, inputs = tensor.shape
        a = rng.standard_normal((3, inputs)).astype(np.float32)
        b = rng.standard_normal((out, 3)).astype(np.float32)
        factors[module] = a, b
        values = tensor.read() + 2 * b @ a  # alpha / r is 2
        merged[tensor.name] = tensor.__class__(
            tensor.name, tensor.shape, tensor.dtype, tensor.file, "F32", lambda x=values: x
        )
    options = {"lora_alpha": 6}
    adapter = read_adapter(write_adapter(tmp_path / "a", factors, options), c, "a")
    parts = adapter_parts(factors, c, options)
    chex.assert_trees_all_equal(dict(adapter.parts), parts)
    assert len(parts) == sum(len(c.parts[name]) for layer in adapted(c) for name in layer)
    for entry in family.param_table(c):
        matrix = ".".join(entry.path[2:-1])
        layer = int(entry.path[1]) if entry.path[0] == "blocks" else None
        if layer is not None and matrix in adapted(c)[layer] and entry.path[-1] == "weight":
            before, after = (assemble(t, entry, "float32") for t in (checkpoint.tensors, merged))
            added = [
                parts[Part(layer, matrix, i)][1] @ parts[Part(layer, matrix, i)][0]
                for i in range(len(c.parts[matrix]))
            ]
            chex.assert_trees_all_close(after - before, np.concatenate(added), atol=1e-4)


# --- text and images ------------------------------------------------------------------------------

OLD_NAMES = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
NEW_NAMES = {"model.": "model.language_model.", "lm_head.": "lm_head."}


def composite_of(folder: Path, text: Path, starts: dict[str, str], **changes: Any) -> Path:
    """A model of text and images around a text model, with names of either transformers."""
    folder.mkdir()
    config = json.loads((text / "config.json").read_text())
    outer = {"model_type": "mistral3", "vision_config": {"hidden_size": 8}, "eos_token_id": [2, 7]}
    config = config | {"model_type": "mistral", "sliding_window": None}
    write_json(folder / "config.json", outer | {"text_config": config} | changes)
    tensors = {}
    for name, x in load_file(text / "model.safetensors").items():
        start = next(start for start in starts if name.startswith(start))
        tensors[starts[start] + name.removeprefix(start)] = x
    image = "model." if starts is NEW_NAMES else ""
    for name in ("vision_tower.patch_conv.weight", "multi_modal_projector.linear_1.weight"):
        tensors[image + name] = np.ones((2, 2), np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("starts", [OLD_NAMES, NEW_NAMES], ids=["old names", "new names"])
def test_the_text_of_a_composite_is_read_and_the_log_names_what_is_left_out(
    tmp_path, caplog, starts
):
    text = tiny_llama(tmp_path / "text", tied=False)
    folder = composite_of(tmp_path / "both", text, starts)
    with caplog.at_level(logging.WARNING, "pagedjax.weights"):
        checkpoint = open_checkpoint(folder)
    message = (
        "text and images (mistral3); its 2 tensors of images are left out: it reads and writes"
    )
    assert message in caplog.text
    assert checkpoint.config["model_type"] == "mistral"
    assert checkpoint.eos_token_ids == (2, 7)
    plain = open_checkpoint(text).tensors
    assert checkpoint.tensors.keys() == plain.keys()
    for name, tensor in checkpoint.tensors.items():
        chex.assert_trees_all_equal(tensor.read(), plain[name].read())
    converted = convert(folder, tmp_path / "converted", "safetensors")
    assert open_checkpoint(converted).tensors.keys() == plain.keys()
    # PEFT names the matrices of a composite as its files do
    config = FAMILIES["mistral"].from_hf(checkpoint.config)
    name = "model.layers.0.self_attn.o_proj"
    factors = np.ones((2, 64), np.float32), np.ones((64, 2), np.float32)
    renamed = starts["model."] + name.removeprefix("model.")
    chex.assert_trees_all_equal(
        adapter_parts({renamed: factors}, config), adapter_parts({name: factors}, config)
    )


def test_what_a_composite_says_beside_its_text_holds(tmp_path):
    text = tiny_llama(tmp_path / "text", tied=True)
    tied = composite_of(tmp_path / "tied", text, NEW_NAMES, tie_word_embeddings=True)
    assert open_checkpoint(tied).config["tie_word_embeddings"] is True
    quantised = {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}
    with refused("fp8: fmt is 'e5m2'; supported: 'e4m3', None"):
        open_checkpoint(composite_of(tmp_path / "fp8", text, NEW_NAMES, **quantised))


def test_a_composite_of_another_text_is_refused():
    with refused("here: model_type is 'gemma3' and text_config is None; it must be an object"):
        normalised({"model_type": "gemma3"}, "here")
    composite = {"model_type": "mistral3", "text_config": BODY | {"model_type": "ministral3"}}
    with refused("here: model_type is 'ministral3'; .*the nearest name: mistral3"):
        normalised(composite, "here")


# --- keys that a family does not read -------------------------------------------------------------

VALUES = {
    "no_rope_layers": [1, 0],
    "rope_interleave": True,
    "rope_interleaved": True,
    "alibi": True,
    "use_alibi": True,
    "use_parallel_residual": True,
    "parallel_attn": True,
    "use_bidirectional_attention": True,
    "is_causal": False,
}
READERS = {
    "partial_rotary_factor": "gemma4_text, gemma4_unified_text, qwen3_5_text, qwen3_5_moe_text, "
    "qwen3_next, phi3, glm, glm4, glm4_moe, gpt_neox",
    "residual_multiplier": "granitemoehybrid, granite, granitemoe",
    "no_rope_layers": "smollm3",
    "attn_logit_softcapping": "gemma2, gemma3_text",
    "use_parallel_residual": "gpt_neox",
    "routed_scaling_factor": "deepseek_v2, deepseek_v3, kimi_k2, glm4_moe",
}


@pytest.mark.parametrize("key", NEUTRAL)
def test_a_key_that_changes_the_result_and_is_not_read_is_refused_with_its_family(key):
    config = BODY | {"model_type": "qwen3"}
    value = VALUES.get(key, 0.3)
    having = f"families that do: {READERS[key]};" if key in READERS else ""
    with refused(f"here: {key} is .*, which qwen3 does not read; {having}"):
        normalised(config | {key: value}, "here")
    for neutral in (None, *NEUTRAL[key]):
        normalised(config | {key: neutral}, "here")


def test_deepseeks_files_may_say_that_they_rotate_neighbours():
    for model_type in ("deepseek_v2", "deepseek_v3", "kimi_k2"):
        config = BODY | {"model_type": model_type, "rope_interleave": True}
        config["num_experts_per_tok"] = 2
        assert FAMILIES[model_type].from_hf(normalised(config, "here")).latent is not None


def test_a_family_of_ones_own_says_that_it_rotates_a_part_of_a_head():
    config = BODY | {"model_type": "own", "partial_rotary_factor": 0.5, "residual_multiplier": 0.3}
    reads_nothing = FAMILIES["llama"]._replace(model_type="own")
    with refused(
        "partial_rotary_factor is 0.5, which own does not read; .*Architecture's defaults"
    ):
        normalised(config, "here", reads_nothing)
    reads_it = reads_nothing._replace(architecture=Architecture({"partial_rotary_factor": 1.0}))
    assert normalised(config, "here", reads_it)["partial_rotary_factor"] == 0.5


def test_layers_of_another_kind_are_refused():
    config = BODY | {"model_type": "qwen3"}
    with refused(
        "layer_types has 'linear_attention'; layers of qwen3 are of full_attention or sliding"
    ):
        normalised(config | {"layer_types": ["full_attention", "linear_attention"]}, "here")
    with refused("layer_types has 1 entries, and num_hidden_layers is 2; give one for each layer"):
        normalised(config | {"layer_types": ["full_attention"]}, "here")


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 values, and the model 2 layers"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0; it must be above 0"),
        (
            "exaone4",
            {"sliding_window_pattern": "LLLG"},
            "sliding_window_pattern is 'LLLG' and layer_types is missing; give layer_types",
        ),
        ("gpt_neox", {"hidden_act": "relu"}, "hidden_act is 'relu'; it must be one of 'gelu_new'"),
        ("glm4", {"partial_rotary_factor": 0.2}, "3 of the 16 numbers of a head are rotated"),
        ("phi3", {"partial_rotary_factor": 0.5}, "has 6 values in .*; a head has 4 pairs that are"),
        ("olmo3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; olmo3 uses 'silu'"),
    ],
)
def test_a_value_that_a_family_cannot_honour_is_refused_before_weights_are_read(
    model_type, change, message
):
    config = normalised(CONFIGS[model_type] | change, "here")
    with refused(message):
        FAMILIES[model_type].from_hf(config)
