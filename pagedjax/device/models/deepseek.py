"""DeepSeek V2 and V3 (DeepSeek-AI 2024, arXiv 2405.04434 and 2412.19437), Moonlight and Kimi K2:
latent attention, and experts in all layers but the first ones.

Rotated numbers of a file are pairs (2 i, 2 i + 1).
"""

from __future__ import annotations

from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.deepseek_experts import (
    corrected_experts,
    greedy_experts,
    is_sparse,
    moe_table,
)
from pagedjax.device.models.latent import Latent
from pagedjax.device.models.llama import NORMS, blocks_table, dense, rotation
from pagedjax.device.models.mlp import Experts
from pagedjax.device.models.param_table import ParamSource
from pagedjax.device.rope import pair_order, temperature

SIZES = "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
QUERY_RANK = "q_lora_rank"  # may be null


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json.

    Raises:
        ValueError: a key has a value that is not supported, or a required key is missing.
    """
    try:
        return _decoder(config)
    except KeyError as missing:
        raise ValueError(
            f"the model's configuration has no {missing}; it is needed to build a "
            f"{config['model_type']}"
        ) from None


def _decoder(config: dict[str, Any]) -> DecoderConfig:
    if config.get("attention_bias"):
        raise ValueError(
            f"attention_bias is true; {config['model_type']} here has no bias in its attention"
        )
    if not config["rope_interleave"]:
        raise ValueError(
            f"rope_interleave is false; {config['model_type']} here rotates neighbours, as all "
            "published files do"
        )
    kinds = [LayerKind(sparse=is_sparse(config, i)) for i in range(config["num_hidden_layers"])]
    latent = _latent(config)
    rope = rotation(config)
    mscale = temperature(rope.entries.get("factor", 1.0), rope.entries.get("mscale_all_dim") or 0)
    return dense(
        config,
        kv_heads=1,
        head_dim=latent.row,
        latent=latent,
        ropes=(rope,),
        attn_scale=latent.query**-0.5 * mscale**2,
        kinds=tuple(kinds),
        experts=_experts(config) if any(kind.sparse for kind in kinds) else None,
    )


def _experts(config: dict[str, Any]) -> Experts:
    model_type = config["model_type"]
    is_greedy = model_type == "deepseek_v2"
    scores = "softmax" if is_greedy else "sigmoid"
    if config.get("scoring_func", scores) != scores:
        raise ValueError(
            f"scoring_func is {config['scoring_func']!r}; the router of {model_type} has {scores!r}"
        )
    if not is_greedy:
        return corrected_experts(config)
    if config["norm_topk_prob"]:
        raise ValueError(
            "norm_topk_prob is true, which the authors' code and transformers read in two ways in "
            f"a {model_type}; it must be false, as in published files"
        )
    return greedy_experts(config)


def _latent(config: dict[str, Any]) -> Latent:
    for name in (*SIZES, QUERY_RANK):
        value = config[name]
        is_left_out = name == QUERY_RANK and value is None
        is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not (is_size or is_left_out):
            or_null = ", or null" if name == QUERY_RANK else ""
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1{or_null}")
    return Latent(
        rank=config["kv_lora_rank"],
        rotated=config["qk_rope_head_dim"],
        key=config["qk_nope_head_dim"],
        value=config["v_head_dim"],
        query_rank=config[QUERY_RANK],
    )


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names, fused along the output axis."""
    return blocks_table(c, NORMS, attention=attention_table, mlp=moe_table)


def attention_table(c: DecoderConfig, layer: int) -> list[ParamSource]:
    """The matrices and norms of latent attention."""
    assert c.latent is not None
    m = c.latent
    prefix = f"model.layers.{layer}.self_attn."
    path = ("blocks", str(layer), "attn")
    query_rows, down_rows = c.parts["attn.down"]
    pairs = pair_order(m.rotated, interleaved=True)
    of_head = [*range(m.key), *[m.key + row for row in pairs]]
    of_queries = [head * m.query + row for head in range(c.heads) for row in of_head]
    of_latents = [*range(m.rank), *[m.rank + row for row in pairs]]
    of_down = of_queries if m.query_rank is None else range(query_rows)
    first = "q_proj" if m.query_rank is None else "q_a_proj"
    table = [
        ParamSource(
            (*path, "down", "weight"),
            (f"{prefix}{first}.weight", f"{prefix}kv_a_proj_with_mqa.weight"),
            (down_rows, c.hidden),
            rows=(query_rows, m.row),
            order=(*of_down, *[query_rows + row for row in of_latents]),
        ),
        ParamSource((*path, "kv_norm", "weight"), (f"{prefix}kv_a_layernorm.weight",), (m.rank,)),
        ParamSource((*path, "kv_up"), (f"{prefix}kv_b_proj.weight",), (c.heads * m.up, m.rank)),
        ParamSource((*path, "out", "weight"), (f"{prefix}o_proj.weight",), (c.hidden, c.attended)),
    ]
    if m.query_rank is not None:
        table += [
            ParamSource(
                (*path, "q_norm", "weight"), (f"{prefix}q_a_layernorm.weight",), (m.query_rank,)
            ),
            ParamSource(
                (*path, "q_up", "weight"),
                (f"{prefix}q_b_proj.weight",),
                (c.heads * m.query, m.query_rank),
                order=tuple(of_queries),
            ),
        ]
    return table
