"""Public configs of models whose layers are not all alike, by name, and the shapes of families
whose costs are counted from a few fields.

`CONFIGS` has the fields of each model's config.json (huggingface.co/<repository>) that decide its
costs. Experts beside a shared MLP, latent attention and GPT-OSS are counted here (`counted`); other
models are read by the engine's family. Biases, norms, sinks of attention and
layers that predict several tokens are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments.simulation.layer_kinds import Kind, Latent

Config = Mapping[str, Any]

GPT_OSS: Config = {  # openai/gpt-oss-20b
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,  # in every second layer, the first one included
}
DEEPSEEK_V3: Config = {  # deepseek-ai/DeepSeek-V3
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 163840,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GLM_4_5: Config = {  # zai-org/GLM-4.5
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
}
GRANITE_4_H: Config = {  # ibm-granite/granite-4.0-h-micro
    "model_type": "granitemoehybrid",
    "vocab_size": 100352,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "shared_intermediate_size": 8192,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "position_embedding_type": "nope",
    "tie_word_embeddings": True,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
CONFIGS: Mapping[str, Config] = {
    "gpt-oss-20b": GPT_OSS,
    # openai/gpt-oss-120b
    "gpt-oss-120b": {**GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    # Qwen/Qwen3-Next-80B-A3B-Instruct
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "deepseek-v3": DEEPSEEK_V3,
    # moonshotai/Kimi-K2-Instruct
    "kimi-k2": {
        **DEEPSEEK_V3,
        "model_type": "kimi_k2",
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "max_position_embeddings": 131072,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
    },
    "glm-4.5": GLM_4_5,
    # zai-org/GLM-4.5-Air
    "glm-4.5-air": {
        **GLM_4_5,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
    },
    "granite-4-h-micro": GRANITE_4_H,
    # ibm-granite/granite-4.0-h-tiny
    "granite-4-h-tiny": {
        **GRANITE_4_H,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "mamba_n_heads": 48,
    },
    # ibm-granite/granite-4.0-h-small
    "granite-4-h-small": {
        **GRANITE_4_H,
        "hidden_size": 4096,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "mamba_n_heads": 128,
    },
    # LiquidAI/LFM2-1.2B
    "lfm2-1.2b": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "block_ff_dim": 12288,  # of which two thirds are used, as `block_auto_adjust_ff_dim` says
        "num_hidden_layers": 16,
        "layer_types": [
            "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
        ],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "max_position_embeddings": 128000,
    },
    # Qwen/Qwen3.5-0.8B, the text part
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    # google/gemma-3-1b-it; every sixth layer sees all tokens
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
}


class Counted(NamedTuple):
    """What a config.json says of a model's shape.

    sizes: fields of `cost.Shape`.
    others: a config of a family of the engine, which has the other fields; None: `sizes` has all.
    """

    sizes: Mapping[str, Any]
    others: Config | None = None


def counted(config: Config) -> Counted | None:
    """The sizes in a config.json of a family that is counted here; None for another family.

    Raises:
        ValueError: a field is missing.
    """
    model_type = str(config.get("model_type"))
    reader = READERS.get(model_type)
    if reader is None:
        return None
    try:
        return reader(config)
    except KeyError as error:
        raise ValueError(
            f"the config.json of a {model_type} has no {error}, which decides its costs; add it"
        ) from error


def _usual(config: Config) -> dict[str, Any]:
    """Sizes by the usual fields."""
    heads = config["num_attention_heads"]
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "intermediate": config["intermediate_size"],
        "vocabulary": config["vocab_size"],
        "longest": config["max_position_embeddings"],
        "tied": config.get("tie_word_embeddings", False),
    }


def _gpt_oss(config: Config) -> Counted:
    """Windows in some layers, and experts in all."""
    layers = config["num_hidden_layers"]
    types = config.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(layers)
    ]
    windowed = [i for i in range(layers) if types[i] == "sliding_attention"]
    full = [i for i in range(layers) if types[i] != "sliding_attention"]
    sizes = {
        "sparse": layers,
        "experts": config["num_local_experts"],
        "chosen": config["num_experts_per_tok"],
        "expert": config["intermediate_size"],
        "kinds": (Kind(tuple(windowed), window=config["sliding_window"]), Kind(tuple(full))),
    }
    return Counted(_usual(config) | sizes)


def _mixture(config: Config) -> dict[str, Any]:
    """Experts beside a shared MLP, behind some first layers with one MLP."""
    expert = config["moe_intermediate_size"]
    return {
        "sparse": config["num_hidden_layers"] - config.get("first_k_dense_replace", 0),
        "experts": config["n_routed_experts"],
        "chosen": config["num_experts_per_tok"],
        "expert": expert,
        "shared": (config.get("n_shared_experts") or 0) * expert,
    }


def _glm4_moe(config: Config) -> Counted:
    return Counted(_usual(config) | _mixture(config))


def _deepseek(config: Config) -> Counted:
    """Latent attention, and experts beside a shared MLP."""
    latent = Latent(
        rank=config["kv_lora_rank"],
        rotated=config["qk_rope_head_dim"],
        key=config["qk_nope_head_dim"],
        value=config["v_head_dim"],
        query_rank=config.get("q_lora_rank") or 0,
    )
    layers = tuple(range(config["num_hidden_layers"]))
    sizes = {"head_dim": latent.key + latent.rotated, "kinds": (Kind(layers, latent=latent),)}
    return Counted(_usual(config) | _mixture(config) | sizes)


def _qwen3_next(config: Config) -> Counted:
    """The layers of Qwen3.5, and experts beside a shared MLP."""
    sizes = {
        "sparse": config["num_hidden_layers"],
        "experts": config["num_experts"],
        "chosen": config["num_experts_per_tok"],
        "expert": config["moe_intermediate_size"],
        "shared": config["shared_expert_intermediate_size"],
    }
    return Counted(sizes, {**config, "model_type": "qwen3_5_text"})


def _granite(config: Config) -> Counted | None:
    """The layers of a Granite 4 Hybrid without experts, and experts beside its MLP; None without
    experts, which the engine's family reads.
    """
    experts = config["num_local_experts"]
    if not experts:
        return None
    sizes = {
        "sparse": config["num_hidden_layers"],
        "experts": experts,
        "chosen": config["num_experts_per_tok"],
        "expert": config["intermediate_size"],
        "shared": config["shared_intermediate_size"],
    }
    return Counted(sizes, {**config, "num_local_experts": 0})


READERS: Mapping[str, Callable[[Config], Counted | None]] = {
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen3_next,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "glm4_moe": _glm4_moe,
    "granitemoehybrid": _granite,
}
