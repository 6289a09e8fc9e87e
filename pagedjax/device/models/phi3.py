"""Phi-3, Phi-3.5 and Phi-4 (mini too): a Llama whose files have q, k and v in one tensor, and gates
and up in another. Some rotate only a part of each head, and have "longrope" scaling.
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


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with the defaults of the architecture.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    window = config["sliding_window"]
    if window is not None and window >= config["max_position_embeddings"]:
        window = None  # Phi-4-mini: a window that no text fills
    return dense(
        config,
        kinds=(LayerKind(window),) * config["num_hidden_layers"],
        ropes=(rotation(config, rotated_numbers(config)),),
    )


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names."""
    order = qkv_order(c)
    return blocks_table(
        c,
        NORMS,
        attention=partial(attention_table, qkv=("qkv_proj",), order=order),
        mlp=partial(mlp_table, gate_up=("gate_up_proj",)),
    )
