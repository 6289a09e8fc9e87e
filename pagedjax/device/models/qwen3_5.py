"""The text model of Qwen3.5: three of four layers have the gated delta rule, and every fourth has
attention with a gate, norms of q and k, and rotary positions in a quarter of each head.
"""

from __future__ import annotations

from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.llama import (
    NORMS,
    attention_table,
    decoder_table,
    dense,
    mlp_table,
    norm_table,
    rotated_numbers,
    rotation,
)
from pagedjax.device.models.mixers.gated_delta import GatedDelta
from pagedjax.device.models.param_table import ParamSource
from pagedjax.device.rope import pair_order

ATTENTION = "full_attention"
DELTA = "linear_attention"


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with the defaults of the architecture.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    heads = config["linear_num_value_heads"]
    key_heads = config["linear_num_key_heads"]
    if heads % key_heads:
        raise ValueError(
            f"linear_num_value_heads {heads} is not a multiple of linear_num_key_heads {key_heads}"
        )
    if config.get("attention_bias"):
        raise ValueError("attention_bias is true; Qwen3.5 here has no bias in its attention")
    mixer = GatedDelta(
        length=config["linear_conv_kernel_dim"],
        heads=heads,
        key_heads=key_heads,
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
    )
    kinds = {ATTENTION: LayerKind(), DELTA: LayerKind(mixer=mixer)}
    every = config["full_attention_interval"]
    types = config.get("layer_types") or [
        DELTA if (i + 1) % every else ATTENTION for i in range(config["num_hidden_layers"])
    ]
    return dense(
        config,
        kinds=tuple([kinds[name] for name in types]),
        ropes=(rotation(config, rotated_numbers(config)),),
        norm="rms_plus_one",
        qk_norm="head",
        attn_gate=True,
    )


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names, fused along the output axis."""
    order = _order(c)
    return decoder_table(
        c,
        [
            (_delta_table(c, i, kind.mixer) if kind.mixer else attention_table(c, i, order=order))
            + norm_table(c, i, NORMS)
            + mlp_table(c, i)
            for i, kind in enumerate(c.kinds)
        ],
    )


def _order(c: DecoderConfig) -> tuple[int, ...]:
    """The order of the rows of q, k and v of a file, in which each head's gate is behind its query,
    and heads have the pairs of a `pair_order`.
    """
    pairs = pair_order(c.head_dim, c.ropes[0].rotated)
    size = c.head_dim
    queries = [2 * head * size + row for head in range(c.heads) for row in pairs]
    gates = [(2 * head + 1) * size + row for head in range(c.heads) for row in range(size)]
    first_key = 2 * c.heads * size
    keys = [first_key + head * size + row for head in range(c.kv_heads) for row in pairs]
    return (*queries, *gates, *keys, *range(first_key + len(keys), c.qkv_rows))


def _delta_table(c: DecoderConfig, layer: int, mixer: Any) -> list[ParamSource]:
    """The parameters of a layer with the gated delta rule."""
    prefix = f"model.layers.{layer}.linear_attn."
    path = ("blocks", str(layer), "attn")
    inner = tuple([f"{prefix}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")])
    singles = {
        ("out", "weight"): ("out_proj.weight", (c.hidden, mixer.values)),
        ("conv",): ("conv1d.weight", (mixer.channels, 1, mixer.length)),
        ("decay_log",): ("A_log", (mixer.heads,)),
        ("decay_bias",): ("dt_bias", (mixer.heads,)),
        ("norm",): ("norm.weight", (mixer.value_dim,)),
    }
    return [
        ParamSource(
            (*path, "inner", "weight"), inner, (sum(mixer.parts), c.hidden), rows=mixer.parts
        ),
        *[
            ParamSource((*path, *name), (prefix + stored_name,), shape)
            for name, (stored_name, shape) in singles.items()
        ],
    ]
