"""Granite 3: a Llama with factors on embeddings, scores, what layers add, and logits
(https://arxiv.org/abs/2405.04324; the factors are those of muP, Yang et al. 2022).
"""

from __future__ import annotations

from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.llama import dense, param_table

__all__ = ["from_hf", "param_table"]
FACTORS = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"


def from_hf(config: dict[str, Any], kinds: tuple[LayerKind, ...] | None = None) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with the defaults of the architecture.

    Args:
        kinds: of a hybrid; None: all layers have attention.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    for name in FACTORS:
        if not config[name] > 0:
            raise ValueError(f"{name} is {config[name]!r}; it must be above 0")
    bias = bool(config["attention_bias"])
    return dense(
        config,
        kinds=kinds or (LayerKind(),) * config["num_hidden_layers"],
        qkv_bias=bias,
        out_bias=bias,
        embed_scale=float(config["embedding_multiplier"]),
        attn_scale=float(config["attention_multiplier"]),
        residual_scale=float(config["residual_multiplier"]),
        logit_scale=1 / config["logits_scaling"],
    )
