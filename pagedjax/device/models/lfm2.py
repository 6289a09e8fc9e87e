"""LFM2 (Liquid AI 2025, arXiv 2511.23404): layers of attention with norms of q and k, and layers
with a gated short convolution in its place.
"""

from __future__ import annotations

from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.llama import rotation, sources_of, stretched
from pagedjax.device.models.mixers.short_conv import ShortConv
from pagedjax.device.models.param_table import ParamSource

CONVOLUTION = "conv"
ATTENTION = "full_attention"


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json.

    Raises:
        ValueError: a key has a value that is not supported, or a required key is missing.
    """
    try:
        hidden = config["hidden_size"]
        heads = config["num_attention_heads"]
        mixer = ShortConv(config["conv_L_cache"], bool(config["conv_bias"]))
        kinds = {CONVOLUTION: LayerKind(mixer=mixer), ATTENTION: LayerKind()}
        types = _layer_types(config)
        unknown_types = sorted(set(types) - set(kinds))
        if unknown_types:
            raise ValueError(
                f"layer_types has {unknown_types[0]!r}; a layer of LFM2 is one of {sorted(kinds)}"
            )
        return DecoderConfig(
            vocab_size=config["vocab_size"],
            hidden=hidden,
            intermediate=_intermediate(config),
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            max_len=stretched(config),
            tied=config.get("tie_word_embeddings", True),
            eps=config["norm_eps"],
            kinds=tuple([kinds[name] for name in types]),
            ropes=(rotation(config),),
            qk_norm="head",
        )
    except KeyError as missing:
        raise ValueError(
            f"the model's configuration has no {missing}; it is needed to build an LFM2"
        ) from None


def _layer_types(config: dict[str, Any]) -> list[str]:
    """The type of each layer; older configs list the layers of attention alone."""
    if config.get("layer_types"):
        return config["layer_types"]
    layers = config["num_hidden_layers"]
    attention = config.get("full_attn_idxs")
    with_attention = range(layers) if attention is None else attention
    return [ATTENTION if i in with_attention else CONVOLUTION for i in range(layers)]


def _intermediate(config: dict[str, Any]) -> int:
    """The width of the MLP: two thirds of what the config says, rounded up, unless it says no."""
    width = config["intermediate_size"]
    if not config["block_auto_adjust_ff_dim"]:
        return width
    width = int(2 * width / 3)
    if config["block_ffn_dim_multiplier"] is not None:
        width = int(config["block_ffn_dim_multiplier"] * width)
        multiple = config["block_multiple_of"]
        width = -(-width // multiple) * multiple
    return width


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names, fused along the output axis."""
    table = [ParamSource(("embed",), ("model.embed_tokens.weight",), (c.vocab_size, c.hidden))]
    for layer, kind in enumerate(c.kinds):
        table += _convolution(c, layer, kind.mixer) if kind.mixer else _attention(c, layer)
        table += _mlp(c, layer)
    table.append(ParamSource(("norm", "weight"), ("model.embedding_norm.weight",), (c.hidden,)))
    if not c.tied:
        table.append(ParamSource(("head", "weight"), ("lm_head.weight",), (c.vocab_size, c.hidden)))
    return tuple(table)


def _convolution(c: DecoderConfig, layer: int, mixer: Any) -> list[ParamSource]:
    prefix = f"model.layers.{layer}.conv."
    path = ("blocks", str(layer), "attn")
    size = c.hidden
    names = {
        ("inner", "weight"): ("in_proj.weight", (3 * size, size)),
        ("out", "weight"): ("out_proj.weight", (size, size)),
        ("weight",): ("conv.weight", (size, 1, mixer.length)),
    }
    if mixer.bias:
        names |= {
            ("inner", "bias"): ("in_proj.bias", (3 * size,)),
            ("out", "bias"): ("out_proj.bias", (size,)),
            ("bias",): ("conv.bias", (size,)),
        }
    return sources_of(path, prefix, names)


def _attention(c: DecoderConfig, layer: int) -> list[ParamSource]:
    prefix = f"model.layers.{layer}.self_attn."
    path = ("blocks", str(layer), "attn")
    width = c.heads * c.head_dim
    parts = tuple([f"{prefix}{part}_proj.weight" for part in "qkv"])
    norms = [
        ParamSource(
            (*path, f"{part}_norm", "weight"), (f"{prefix}{part}_layernorm.weight",), (c.head_dim,)
        )
        for part in "qk"
    ]
    return [
        ParamSource((*path, "qkv", "weight"), parts, (c.qkv_rows, c.hidden)),
        ParamSource((*path, "out", "weight"), (f"{prefix}out_proj.weight",), (c.hidden, width)),
        *norms,
    ]


def _mlp(c: DecoderConfig, layer: int) -> list[ParamSource]:
    """The MLP, and both norms of a layer."""
    prefix = f"model.layers.{layer}."
    path = ("blocks", str(layer))
    up = (f"{prefix}feed_forward.w1.weight", f"{prefix}feed_forward.w3.weight")
    down = (f"{prefix}feed_forward.w2.weight",)
    norms = {"attn_norm": "operator_norm", "mlp_norm": "ffn_norm"}
    return [
        ParamSource((*path, "mlp", "up", "weight"), up, (2 * c.intermediate, c.hidden)),
        ParamSource((*path, "mlp", "down", "weight"), down, (c.hidden, c.intermediate)),
        *[
            ParamSource((*path, name, "weight"), (f"{prefix}{stored_name}.weight",), (c.hidden,))
            for name, stored_name in norms.items()
        ],
    ]
