"""GLM-4.5 and 4.6 (arXiv 2508.06471): the experts of DeepSeek V3; a part of each head is rotated; q
and k have norms in the large models.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.deepseek_experts import corrected_experts, is_sparse, moe_table
from pagedjax.device.models.llama import (
    NORMS,
    attention_table,
    blocks_table,
    dense,
    qkv_order,
    rotated_numbers,
    rotation,
)
from pagedjax.device.models.param_table import ParamSource


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with the defaults of the architecture.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    layers = range(config["num_hidden_layers"])
    return dense(
        config,
        kinds=tuple([LayerKind(sparse=is_sparse(config, layer)) for layer in layers]),
        ropes=(rotation(config, rotated_numbers(config)),),
        qkv_bias=bool(config["attention_bias"]),
        qk_norm="head" if config["use_qk_norm"] else None,
        experts=corrected_experts(config),
    )


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names, fused along the output axis."""
    order = qkv_order(c)
    return blocks_table(c, NORMS, attention=partial(attention_table, order=order), mlp=moe_table)
