"""Granite 3: a Llama with factors on embeddings, scores, what layers add, and logits
(https://arxiv.org/abs/2405.04324; the factors are those of muP, Yang et al. 2022). Some have experts.
"""

from __future__ import annotations

from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.llama import NORMS, blocks_table, dense
from pagedjax.device.models.mlp import Experts
from pagedjax.device.models.param_table import ParamSource

FACTORS = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"


def from_hf(
    config: dict[str, Any],
    kinds: tuple[LayerKind, ...] | None = None,
    experts: Experts | None = None,
) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with the defaults of the architecture.

    Args:
        kinds: of a hybrid; None: all layers have attention.
        experts: of a hybrid.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    for name in FACTORS:
        if not config[name] > 0:
            raise ValueError(f"{name} is {config[name]!r}; it must be above 0")
    bias = bool(config["attention_bias"])
    if config["model_type"] == "granitemoe":
        experts = experts_of(config, shared=0)
    return dense(
        config,
        kinds=kinds or (LayerKind(sparse=experts is not None),) * config["num_hidden_layers"],
        experts=experts,
        qkv_bias=bias,
        out_bias=bias,
        embed_scale=float(config["embedding_multiplier"]),
        attn_scale=float(config["attention_multiplier"]),
        residual_scale=float(config["residual_multiplier"]),
        logit_scale=1 / config["logits_scaling"],
    )


def experts_of(config: dict[str, Any], shared: int) -> Experts:
    """The experts of all layers. shared: the size of the MLP beside them, or 0."""
    return Experts(
        count=config["num_local_experts"],
        chosen=config["num_experts_per_tok"],
        intermediate=config["intermediate_size"],
        normalised=True,
        shared=shared,
    )


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names, fused along the output axis."""
    return blocks_table(c, NORMS, sparse=moe_table)


def moe_table(c: DecoderConfig, layer: int) -> list[ParamSource]:
    """The router and the experts, whose gates and ups are one tensor, [experts, out, in]."""
    assert c.experts is not None
    e = c.experts
    prefix = f"model.layers.{layer}.block_sparse_moe."
    path = ("blocks", str(layer), "mlp")
    router = (f"{prefix}router.layer.weight",)
    up = (f"{prefix}input_linear.weight",)
    down = (f"{prefix}output_linear.weight",)
    up_shape = e.count * 2 * e.intermediate, c.hidden
    down_shape = e.count * c.hidden, e.intermediate
    return [
        ParamSource((*path, "router", "weight"), router, (e.count, c.hidden)),
        ParamSource((*path, "up"), up, up_shape, stacked=e.count),
        ParamSource((*path, "down"), down, down_shape, stacked=e.count),
    ]
