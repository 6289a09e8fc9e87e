"""GLM-4 (dense): half of each head is rotated, in pairs of neighbours; q, k and v have biases; gates
and up are one tensor in files. The models of 2025 (`glm4`) have norms behind attention and MLP too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.llama import (
    NORMS,
    attention_table,
    blocks_table,
    dense,
    mlp_table,
    qkv_order,
    rotated_numbers,
    rotation,
)
from pagedjax.device.models.param_table import ParamSource

POST_NORMS = {"attn_post": "post_self_attn_layernorm", "mlp_post": "post_mlp_layernorm"}


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with the defaults of the architecture.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    return dense(
        config,
        kinds=(LayerKind(),) * config["num_hidden_layers"],
        ropes=(rotation(config, rotated_numbers(config)),),
        qkv_bias=bool(config["attention_bias"]),
        post_norms=config["model_type"] == "glm4",
    )


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names."""
    order = qkv_order(c, interleaved=True)
    norms = NORMS | POST_NORMS if c.post_norms else NORMS
    return blocks_table(
        c,
        norms,
        attention=partial(attention_table, order=order),
        mlp=partial(mlp_table, gate_up=("gate_up_proj",)),
    )
