"""How llama.cpp stores each architecture in a GGUF file: the names of keys and tensors, and the
values that its converter changes.

Its facts are in llama.cpp's source: conversion/*.py (what is written), src/models/*.cpp (what is
read, and the defaults of keys that are not there), gguf-py's constants.py (names).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pagedjax.weights.checkpoint import Tensor

Change = Callable[[np.ndarray], np.ndarray]  # of a tensor's values


class GGUF(NamedTuple):
    """How llama.cpp stores an architecture.

    name: its name in GGUF, the prefix of its metadata keys.
    top, block: GGUF tensor name -> Hugging Face name, outside and inside "blk.N.".
    config: (keys, tensors) -> the config before `normalised`.
    change: (Hugging Face name, config) -> the function that undoes llama.cpp's change of the
        values; None if there was no change.
    """

    name: str
    top: Mapping[str, str]
    block: Mapping[str, str]
    config: Callable[[Keys, Mapping[str, Tensor]], dict[str, Any]]
    change: Callable[[str, Mapping[str, Any]], Change | None]


class Keys(NamedTuple):
    """The metadata of a file whose keys begin with the name of its architecture."""

    path: Any
    architecture: str
    metadata: Mapping[str, Any]

    def __call__(self, name: str, default: Any = None) -> Any:
        """The value of the key <architecture>.<name>, one for all layers.

        Raises:
            ValueError: there is no such key and no default, or the layers differ.
        """
        value = self.optional(name, default)
        if value is None:
            raise ValueError(
                f"{self.path}: the metadata lacks {self.architecture}.{name}; the file is "
                "incomplete, convert it again"
            )
        if isinstance(value, list):  # one number for each layer; supported if all are equal
            if len(set(value)) != 1:
                raise ValueError(
                    f"{self.path}: {self.architecture}.{name} differs between layers ({value}); "
                    "they must be equal"
                )
            return value[0]
        return value

    def optional(self, name: str, default: Any = None) -> Any:
        """The value as it is in the file."""
        return self.metadata.get(f"{self.architecture}.{name}", default)


def body_config(
    model_type: str, keys: Keys, tensors: Mapping[str, Tensor], *, partial_rotary: bool = False
) -> dict[str, Any]:
    """The part of config.json that all architectures have.

    Args:
        partial_rotary: whether only the first numbers of a head may be rotated.
    """
    if experts := keys.optional("expert_count", 0):
        raise ValueError(f"{keys.path} is a mixture of {experts} experts; only dense models work")
    layers = keys("block_count")
    if layers > len(tensors):
        raise ValueError(
            f"{keys.path}: {keys.architecture}.block_count is {layers}, but the file has "
            f"{len(tensors)} tensors; the file is damaged, fetch it again"
        )
    heads = keys("attention.head_count")
    head_dim = keys("attention.key_length", keys("embedding_length") // heads)
    sizes = ["attention.value_length"]
    if not partial_rotary:
        sizes.append("rope.dimension_count")
    for size in sizes:
        if keys(size, head_dim) != head_dim:
            raise ValueError(
                f"{keys.path}: {keys.architecture}.{size} is {keys(size)}; it must equal the head "
                f"size, {head_dim}"
            )
    return {
        "model_type": model_type,
        "hidden_size": keys("embedding_length"),
        "intermediate_size": keys("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": tensors["token_embd.weight"].shape[0]
        if "token_embd.weight" in tensors
        else keys("vocab_size"),
        "rms_norm_eps": keys("attention.layer_norm_rms_epsilon"),
        "rope_theta": float(keys("rope.freq_base", 10000.0)),
        "rope_scaling": rope_scaling(keys, tensors),
        "max_position_embeddings": keys("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def rope_scaling(keys: Keys, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """`rope_scaling` from the keys <architecture>.rope.scaling.*, or from the tensor
    rope_freqs.weight, in which llama.cpp stores "llama3" scaling.
    """
    label = f"{keys.architecture}.rope.scaling.type"
    kind = keys.optional("rope.scaling.type", "none")
    factor = keys.optional("rope.scaling.factor")
    if factor is None:  # the key's name in older files
        factor = keys.optional("rope.scale_linear")
        kind = kind if factor is None else "linear"
    _check_temperature(keys, "longrope" if LONG in tensors else kind)
    if "rope_freqs.weight" in tensors:
        if kind != "none":
            raise ValueError(
                f"{keys.path} has both rope_freqs.weight and {label} = {kind!r}; only one is "
                "allowed"
            )
        # each frequency is divided by its factor
        return {"rope_type": "freqs", "factors": tensors["rope_freqs.weight"].read().tolist()}
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return None
    if kind == "longrope" and LONG in tensors:  # see `phi3_config`
        return None
    if kind not in ("linear", "yarn") or factor is None:
        raise ValueError(
            f"{keys.path}: {label} is {kind!r} with factor {factor!r}; supported: none, linear, "
            "yarn"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
    renamed = {
        "original_context_length": "original_max_position_embeddings",
        "yarn_attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    for gguf_name, hf_name in renamed.items():
        value = keys.optional(f"rope.scaling.{gguf_name}")
        if value is not None:
            scaling[hf_name] = value
    if kind == "yarn":
        scaling |= _temperature(keys, scaling)
    return scaling


def _check_temperature(keys: Keys, kind: str) -> None:
    """Raises ValueError for a temperature of scores in a file whose scaling has none here."""
    value = keys.optional("rope.scaling.attn_factor", 1.0)
    if value != 1 and kind not in ("yarn", "longrope"):
        raise ValueError(
            f"{keys.path}: {keys.architecture}.rope.scaling.attn_factor is {value!r}, and the type "
            f"of scaling is {kind!r}; it is read beside 'yarn' and 'longrope' alone"
        )


def _temperature(keys: Keys, scaling: Mapping[str, Any]) -> dict[str, float]:
    """The entries of the temperature of YaRN in llama.cpp (src/llama-context.cpp): the usual one
    for the factor, divided by that of the logarithm's multiplier, times `attn_factor`. A file that
    states the whole temperature (`yarn_attn_factor`) has no use for the multiplier.
    """
    multiplier = keys.optional("rope.scaling.yarn_log_multiplier") or 0.0
    times = keys.optional("rope.scaling.attn_factor", 1.0)
    stated = scaling.get("attention_factor")
    if stated is None and times == 1:
        return {"mscale": 1.0, "mscale_all_dim": multiplier} if multiplier else {}
    if stated is None:
        logarithm = 0.1 * math.log(max(1.0, scaling["factor"]))
        stated = (logarithm + 1) / (multiplier * logarithm + 1)
    return {"attention_factor": stated * times}


def unchanged(name: str, config: Mapping[str, Any]) -> None:
    """The `change` of an architecture whose values are stored as they are."""


# divisors of the frequencies for long and for short texts, of Phi 3
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

# --- llama, qwen2, qwen3 --------------------------------------------------------------------------


def llama_config(model_type: str, keys: Keys, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config.json of a Llama or a Qwen3, which may have biases."""
    biased = {
        part for part in ("attn_q", "attn_output", "ffn_up") if f"blk.0.{part}.bias" in tensors
    }
    config = body_config(model_type, keys, tensors) | {
        "attention_bias": {"attn_q", "attn_output"} <= biased,
        "mlp_bias": "ffn_up" in biased,
    }
    if "attn_q" in biased and not config["attention_bias"]:
        # Hugging Face's attention_bias would mean a bias of the output too
        config["qkv_bias"] = True
    return config


def unpermute(num_heads: int, values: np.ndarray) -> np.ndarray:
    """Undo the row order that llama.cpp gives to q and k: in each head of D rows, the order
    (0, D/2, 1, D/2 + 1, ...) becomes (0, 1, ...) again.

    llama.cpp rotates neighbouring pairs in a Llama, and Hugging Face rotates halves. In the other
    architectures here both rotate halves.

    Args:
        values: [num_heads * D, in] or [num_heads * D].
    """
    paired = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)


def llama_change(name: str, config: Mapping[str, Any]) -> Change | None:
    if ".q_proj." in name:
        return partial(unpermute, config["num_attention_heads"])
    if ".k_proj." in name:
        return partial(unpermute, config["num_key_value_heads"])
    return None


LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LLAMA = GGUF("llama", TOP, LLAMA_BLOCK, partial(llama_config, "llama"), llama_change)
# Its q, k and v always have a bias. llama.cpp stores no window for it, and reads none.
QWEN2 = GGUF("qwen2", TOP, LLAMA_BLOCK, partial(body_config, "qwen2"), unchanged)
QWEN3 = GGUF("qwen3", TOP, LLAMA_BLOCK | QK_NORMS, partial(llama_config, "qwen3"), unchanged)

# --- gemma2, gemma3 -------------------------------------------------------------------------------

# The models whose scores are scaled by hidden size / heads, and not by the size of a head. The file
# does not say it; llama.cpp knows them by their number of layers too.
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def gemma_config(model_type: str, keys: Keys, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config.json of a Gemma 2 or 3."""
    config = body_config(model_type, keys, tensors)
    layers = config["num_hidden_layers"]
    if layers == LAYERS_OF_27B[keys.architecture]:
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    else:
        config["query_pre_attn_scalar"] = config["head_dim"]
    config |= {cap: keys(cap) for cap in CAPS if keys.optional(cap)}
    window = keys.optional("attention.sliding_window")
    if window is not None:
        config["sliding_window"] = window
    if model_type == "gemma2":
        config["layer_types"] = layer_types(keys, layers, every=2)
    elif window:
        config["layer_types"] = layer_types(keys, layers, every=6)
        config["rope_local_base_freq"] = float(keys("rope.freq_base_swa", 10000.0))
    else:
        config["layer_types"] = ["full_attention"] * layers
    return config


def layer_types(keys: Keys, layers: int, every: int) -> list[str]:
    """Which layers have a window. The file may say it for each layer, or as a period: the last
    layer of each period sees all tokens.

    Args:
        every: the period if the file has none.

    Raises:
        ValueError: the list has another length than the model has layers.
    """
    pattern = keys.optional("attention.sliding_window_pattern", every)
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise ValueError(
                f"{keys.path}: {keys.architecture}.attention.sliding_window_pattern has "
                f"{len(pattern)} entries for {layers} layers; convert the model again"
            )
        windowed = pattern
    else:
        windowed = [pattern == 0 or i % pattern < pattern - 1 for i in range(layers)]
    return ["sliding_attention" if window else "full_attention" for window in windowed]


def minus_one(values: np.ndarray) -> np.ndarray:
    return values - np.float32(1)


def gemma_change(name: str, config: Mapping[str, Any]) -> Change | None:
    """A Gemma multiplies by 1 + weight, and llama.cpp stores the sum."""
    return minus_one if name.endswith("norm.weight") else None


GEMMA_BLOCK = LLAMA_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA2 = GGUF("gemma2", TOP, GEMMA_BLOCK, partial(gemma_config, "gemma2"), gemma_change)
GEMMA3 = GGUF(
    "gemma3", TOP, GEMMA_BLOCK | QK_NORMS, partial(gemma_config, "gemma3_text"), gemma_change
)

# --- phi3 -----------------------------------------------------------------------------------------


def phi3_config(keys: Keys, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config.json of a Phi 3 or 4."""
    config = body_config("phi3", keys, tensors, partial_rotary=True)
    rotated = keys("rope.dimension_count", config["head_dim"])
    config["partial_rotary_factor"] = rotated / config["head_dim"]
    original = keys.optional("rope.scaling.original_context_length")
    if original is not None:
        config["original_max_position_embeddings"] = original
    if LONG in tensors and SHORT in tensors:
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": tensors[LONG].read().tolist(),
            "short_factor": tensors[SHORT].read().tolist(),
            "attention_factor": keys.optional("rope.scaling.attn_factor"),
        }
    # older files have no such key; of their models those of 4,096 positions have a window
    default_window = 2047 if config["max_position_embeddings"] == 4096 else 0
    config["sliding_window"] = keys.optional("attention.sliding_window", default_window) or None
    return config


PHI3_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
PHI3 = GGUF("phi3", TOP, PHI3_BLOCK, phi3_config, unchanged)
