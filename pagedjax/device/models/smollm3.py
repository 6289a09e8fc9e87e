"""SmolLM3: a Llama in which every fourth layer has no rotation."""

from __future__ import annotations

from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.llama import SLIDING, dense, param_table

__all__ = ["from_hf", "param_table"]


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with the defaults of the architecture.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    layers = config["num_hidden_layers"]
    every = config["no_rope_layer_interval"]
    rotates = config["no_rope_layers"] or [(i + 1) % every != 0 for i in range(layers)]
    if len(rotates) < layers:
        raise ValueError(
            f"no_rope_layers has {len(rotates)} values, and the model {layers} layers; give 1 for "
            "each layer that rotates, and 0 for each other one"
        )
    window = config["sliding_window"] if config["use_sliding_window"] else None
    types = config.get("layer_types") or [
        "full_attention" if rotates[i] else SLIDING for i in range(layers)
    ]
    kinds = [
        LayerKind(window if types[i] == SLIDING else None, 0 if rotates[i] else None)
        for i in range(layers)
    ]
    bias = bool(config["attention_bias"])
    return dense(config, kinds=tuple(kinds), qkv_bias=bias, out_bias=bias)
