"""Tiny random models of any built-in family as Hugging Face directories, and as the GGUF files that
llama.cpp's converter makes of them. Names of keys and tensors are those of the gguf package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.weights.tiny import CHAT_TEMPLATE, llama_cpp_permute, tiny_vocab, write_gguf
from tests.weights.tiny_families import write_family

BODY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# model_type -> llama.cpp's name
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}


def tiny_family(folder: Path, model_type: str, *, seed: int = 0, **settings: Any) -> Path:
    """Write config.json, weights and the tokenizer of a model of `BODY` and these settings; returns
    the folder.
    """
    return write_family(folder, {**BODY, **settings, "model_type": model_type}, seed)


def family_gguf(
    path: Path,
    folder: Path,
    *,
    matrices: str = "F32",
    extra: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """Write the model of a `tiny_family` folder like llama.cpp's converter; returns the path.

    matrices: how the matrices are stored ("F32", "Q8_0", ...).
    extra: metadata to add, without the prefix of the architecture; drop: keys to leave out.
    """
    from gguf import MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(path, architecture)
    write_keys(writer, config)
    write_vocabulary(writer, config)
    for key, value in (extra or {}).items():
        write_key(writer, f"{architecture}.{key}", value)
    for key in drop:
        del writer.kv_data[0][f"{architecture}.{key}"]
    number = {name: number for number, name in MODEL_ARCH_NAMES.items()}[architecture]
    names = get_tensor_name_map(number, config["num_hidden_layers"])
    kind = GGMLQuantizationType[matrices]
    for name, stored in load_file(folder / "model.safetensors").items():
        values = stored
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if architecture == "llama" and f".{part}." in name:
                values = llama_cpp_permute(values, config[heads])
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        if values.ndim == 2 and matrices != "F32":
            writer.add_tensor(gguf_name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, values)
    write_gguf(writer)
    return path


def write_keys(writer: Any, config: dict[str, Any]) -> None:
    """The keys of a model's shape."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "rope_theta" in config:
        writer.add_rope_freq_base(config["rope_theta"])
    if config["model_type"].startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] == "phi3":
        write_phi3_keys(writer, config)
    elif scaling := config.get("rope_scaling"):
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        if scaling["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def write_phi3_keys(writer: Any, config: dict[str, Any]) -> None:
    """The keys of a Phi's rotation and window, and the tensors of its "longrope" scaling."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(head_dim * config["partial_rotary_factor"]))
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    writer.add_sliding_window(config["sliding_window"] or 0)
    if scaling := config.get("rope_scaling"):
        writer.add_rope_scaling_attn_factors(scaling["attention_factor"])
        for length in ("long", "short"):
            divisors = np.asarray(scaling[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", divisors)


def write_vocabulary(writer: Any, config: dict[str, Any]) -> None:
    """The keys of the tokenizer that `write_tokenizer` writes."""
    tokens, merges = tiny_vocab(config["vocab_size"])
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_key(writer: Any, key: str, value: Any) -> None:
    """One key; ints are uint32."""
    from gguf import GGUFValueType

    if isinstance(value, list):
        writer.add_array(key, value)
        return
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    if key in writer.kv_data[0]:
        del writer.kv_data[0][key]
    writer.add_key_value(key, value, GGUFValueType[kinds[type(value)]])
