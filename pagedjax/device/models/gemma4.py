"""The dense text models of Gemma 4. Layers that see all tokens have heads of another size than
those with windows, fewer key heads, and may make values of the product of keys. Values have a norm,
and each layer has a factor.

Of a head that sees all tokens only the fastest pairs turn ("proportional" rotation): with D numbers
of which R turn, pair i has the frequency theta^(-2 i / D). That is a rotation of R numbers with the
base theta^(R / D).

Models with embeddings of each layer or with layers that share keys (E2B, E4B) and mixtures of
experts (26B-A4B) are refused. Only text is supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerHeads, LayerKind
from pagedjax.device.models.gemma import NORMS, TANH_GELU, types_of
from pagedjax.device.models.llama import (
    QKV,
    SLIDING,
    attention_table,
    decoder_table,
    frozen,
    mlp_table,
    norm_table,
)
from pagedjax.device.models.param_table import ParamSource
from pagedjax.device.rope import Rope

FULL = "full_attention"
# keys of what is not here: what it is, and the value without it
ABSENT = {
    "hidden_size_per_layer_input": ("embeddings of each layer (Gemma 4 E2B and E4B)", 0),
    "num_kv_shared_layers": ("layers that read the keys of earlier ones (E2B and E4B)", 0),
    "enable_moe_block": ("experts beside an MLP (Gemma 4 26B-A4B)", False),
}
OVERRIDES = "head_dim", "num_key_value_heads"  # what a `per_layer_config` may give a layer
ROPE_ENTRIES = "rope_type", "factor", "partial_rotary_factor"


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with the defaults of the architecture.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    _check(config)
    types = list(config.get("layer_types") or types_of(config["num_hidden_layers"], every=6))
    types[-1] = FULL  # whatever a config says, as in transformers
    heads = _heads(config, types)
    bias = bool(config["attention_bias"])
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        max_len=config["max_position_embeddings"],
        tied=config["tie_word_embeddings"],
        eps=config["rms_norm_eps"],
        kinds=tuple([_kind(config, name, heads[name]) for name in types]),
        ropes=(
            _full_rope(config, heads[FULL].head_dim),
            Rope(config["rope_local_base_freq"], rotated=heads[SLIDING].head_dim),
        ),
        activation="gelu_tanh",
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        v_norm=True,
        post_norms=True,
        layer_scales=True,
        embed_scale=config["hidden_size"] ** 0.5,
        attn_scale=1.0,
        logit_cap=config["final_logit_softcapping"],
    )


def _check(config: dict[str, Any]) -> None:
    """Raises ValueError for what is not here."""
    for key, (part, neutral) in ABSENT.items():
        value = config.get(key)
        if value:
            raise ValueError(
                f"{key} is {value!r}; {part} are not supported yet. Dense models of Gemma 4 with "
                f"{key} = {neutral!r} are, such as the 31B"
            )
    activation = config["hidden_activation"]
    if activation != TANH_GELU:
        raise ValueError(f"hidden_activation is {activation!r}; Gemma uses {TANH_GELU!r}")
    if config["use_bidirectional_attention"] not in (None, False, "vision"):
        raise ValueError(
            f"use_bidirectional_attention is {config['use_bidirectional_attention']!r}; text is "
            "causal here, as with 'vision' or null"
        )


def _kind(config: dict[str, Any], name: str, heads: LayerHeads) -> LayerKind:
    """The kind of a layer of the type `name`."""
    base = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    own_heads = None if heads == LayerHeads(*base) else heads
    if name == SLIDING:
        return LayerKind(window=config["sliding_window"], rope=1, heads=own_heads)
    return LayerKind(rope=0, heads=own_heads)


def _heads(config: dict[str, Any], types: list[str]) -> dict[str, LayerHeads]:
    """The heads of the layers of each type. transformers writes them as `per_layer_config`, by the
    layer; published files have keys for all layers that see all tokens.
    """
    sizes = {name: {key: config[key] for key in OVERRIDES} for name in (FULL, SLIDING)}
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        sizes[FULL]["head_dim"] = config["global_head_dim"]
        kv_heads = config.get("num_global_key_value_heads")
        if kv_heads is not None and config["attention_k_eq_v"]:
            sizes[FULL]["num_key_value_heads"] = kv_heads
    else:
        sizes |= _overridden(config, types, by_layer)
    return {
        name: LayerHeads(
            config["num_attention_heads"],
            of_type["num_key_value_heads"],
            of_type["head_dim"],
            shared_values=name == FULL and bool(config["attention_k_eq_v"]),
        )
        for name, of_type in sizes.items()
    }


def _overridden(
    config: dict[str, Any], types: list[str], by_layer: Any
) -> dict[str, dict[str, Any]]:
    """The sizes of each type of layers, by the `per_layer_config`.

    Raises:
        ValueError: it is no object of objects by a layer's number, or gives a layer something else,
            or other sizes than one of the same type.
    """
    numbers = [str(layer) for layer in range(len(types))]
    if not isinstance(by_layer, Mapping) or not all(
        str(key).lstrip("0") in (*numbers, "") and isinstance(value, Mapping)
        for key, value in by_layer.items()
    ):
        raise ValueError(
            f"per_layer_config is {by_layer!r:.80}; it must have an object for each of some "
            f"layers, whose numbers are 0 to {len(types) - 1}"
        )
    of_layers = {int(key): value for key, value in by_layer.items()}
    sizes: dict[str, dict[str, Any]] = {}
    for layer, name in enumerate(types):
        given = of_layers.get(layer, {})
        if unknown := [key for key in given if key not in OVERRIDES]:
            raise ValueError(
                f"per_layer_config gives layer {layer} {unknown[0]} = {given[unknown[0]]!r:.40}; "
                f"here it may have {' and '.join(OVERRIDES)}"
            )
        of_layer = {key: given.get(key, config[key]) for key in OVERRIDES}
        if sizes.setdefault(name, of_layer) != of_layer:
            raise ValueError(
                f"per_layer_config gives layer {layer} {of_layer}, and another layer of the type "
                f"{name} has {sizes[name]}; layers of one type have the same heads here"
            )
    return sizes


def _full_rope(config: dict[str, Any], head_dim: int) -> Rope:
    """The rotation of layers that see all tokens."""
    scaling = config["rope_scaling"] or {}
    kind = scaling.get("rope_type", "default")
    unknown = [key for key in scaling if key not in ROPE_ENTRIES]
    if kind not in ("default", "proportional") or unknown:
        problem = (
            f"{unknown[0]} = {scaling[unknown[0]]!r:.40}" if unknown else f"rope_type {kind!r}"
        )
        raise ValueError(
            f"the rotation of full_attention has {problem}; Gemma 4 here has 'default', or "
            "'proportional' with a factor and a partial_rotary_factor"
        )
    if kind == "default":
        return Rope(config["rope_theta"], rotated=head_dim)
    part = scaling.get("partial_rotary_factor", config["partial_rotary_factor"])
    rotated = 2 * int(part * head_dim // 2)
    factor = scaling.get("factor", 1.0)
    return Rope(
        config["rope_theta"] ** (rotated / head_dim),
        None if factor == 1 else frozen({"rope_type": "linear", "factor": factor}),
        rotated,
    )


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names, fused along the output axis."""
    return decoder_table(c, [_block_table(c, i) for i in range(c.layers)])


def _block_table(c: DecoderConfig, layer: int) -> list[ParamSource]:
    of_layer = c.of_kind(c.kinds[layer])
    rows = [of_layer.heads * of_layer.head_dim, of_layer.token_numbers, of_layer.token_numbers]
    count = 2 if of_layer.shared_values else 3
    scale = (f"model.layers.{layer}.layer_scalar",)
    return [
        *attention_table(of_layer, layer, QKV[:count], rows=tuple(rows[:count])),
        *norm_table(c, layer, NORMS),
        *mlp_table(c, layer),
        ParamSource(("blocks", str(layer), "scale"), scale, (1,)),
    ]
