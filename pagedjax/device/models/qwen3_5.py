"""The text model of Qwen3.5: three of four layers have the gated delta rule, and every fourth has
attention with a gate, norms of q and k, and rotary positions in a quarter of each head. Some models
have experts and a shared MLP with a gate in each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.llama import (
    NORMS,
    attention_table,
    decoder_table,
    dense,
    mlp_table,
    norm_table,
    qwen_experts,
    qwen_experts_table,
    rotated_numbers,
    rotation,
    sources_of,
)
from pagedjax.device.models.mixers.gated_delta import GatedDelta
from pagedjax.device.models.mlp import Experts
from pagedjax.device.models.param_table import ParamSource
from pagedjax.device.rope import pair_order

ATTENTION = "full_attention"
DELTA = "linear_attention"
MOE = "qwen3_5_moe_text"


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with the defaults of the architecture.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    if config["model_type"] != MOE:
        return hybrid(config)
    experts = qwen_experts({**config, "norm_topk_prob": True}, has_shared=True)
    usual = {**config, "intermediate_size": experts.shared}  # no layer has an MLP of another size
    return hybrid(usual, experts, range(config["num_hidden_layers"]))


def hybrid(
    config: dict[str, Any], experts: Experts | None = None, sparse: Container[int] = ()
) -> DecoderConfig:
    """A decoder of layers with the gated delta rule and layers of attention with a gate.

    Args:
        sparse: the layers with experts.

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
        raise ValueError(
            f"attention_bias is true; {config['model_type']} here has no bias in its attention"
        )
    mixer = GatedDelta(
        length=config["linear_conv_kernel_dim"],
        heads=heads,
        key_heads=key_heads,
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
    )
    every = config["full_attention_interval"]
    types = config.get("layer_types") or [
        DELTA if (i + 1) % every else ATTENTION for i in range(config["num_hidden_layers"])
    ]
    mixers = {ATTENTION: None, DELTA: mixer}
    return dense(
        config,
        kinds=tuple(
            [LayerKind(mixer=mixers[name], sparse=i in sparse) for i, name in enumerate(types)]
        ),
        ropes=(rotation(config, rotated_numbers(config)),),
        norm="rms_plus_one",
        qk_norm="head",
        attn_gate=True,
        experts=experts,
    )


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names, fused along the output axis."""
    return hybrid_table(c, _inner)


def hybrid_table(
    c: DecoderConfig, inner: Callable[[DecoderConfig, int, GatedDelta], ParamSource]
) -> tuple[ParamSource, ...]:
    """The parameters of a `hybrid`. inner: the source of the joined product of a mixer."""
    order = _order(c)
    return decoder_table(
        c,
        [
            (
                [inner(c, i, kind.mixer), *_delta_table(c, i, kind.mixer)]
                if isinstance(kind.mixer, GatedDelta)
                else attention_table(c, i, order=order)
            )
            + norm_table(c, i, NORMS)
            + (qwen_experts_table(c, i) if kind.sparse else mlp_table(c, i))
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


def inner_source(
    c: DecoderConfig, layer: int, mixer: GatedDelta, names: Sequence[str], **options: Any
) -> ParamSource:
    """The joined product of a mixer. names: of its tensors; options: of the `ParamSource`."""
    prefix = f"model.layers.{layer}.linear_attn."
    return ParamSource(
        ("blocks", str(layer), "attn", "inner", "weight"),
        tuple([f"{prefix}{name}.weight" for name in names]),
        (sum(mixer.parts), c.hidden),
        **options,
    )


def _inner(c: DecoderConfig, layer: int, mixer: GatedDelta) -> ParamSource:
    names = [f"in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    return inner_source(c, layer, mixer, names, rows=mixer.parts)


def _delta_table(c: DecoderConfig, layer: int, mixer: GatedDelta) -> list[ParamSource]:
    """The other parameters of a layer with the gated delta rule."""
    prefix = f"model.layers.{layer}.linear_attn."
    path = ("blocks", str(layer), "attn")
    singles = {
        ("out", "weight"): ("out_proj.weight", (c.hidden, mixer.values)),
        ("conv",): ("conv1d.weight", (mixer.channels, 1, mixer.length)),
        ("decay_log",): ("A_log", (mixer.heads,)),
        ("decay_bias",): ("dt_bias", (mixer.heads,)),
        ("norm",): ("norm.weight", (mixer.value_dim,)),
    }
    return sources_of(path, prefix, singles)
