"""Granite 4 Hybrid: layers of Mamba 2, some layers of attention without rotary positions, and the
factors of Granite 3. Tiny and small have experts beside the MLP of each layer.
"""

from __future__ import annotations

from typing import Any

from pagedjax.device.models import granite
from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.llama import (
    NORMS,
    attention_table,
    decoder_table,
    norm_table,
    sources_of,
)
from pagedjax.device.models.mixers.mamba2 import Mamba2
from pagedjax.device.models.param_table import ParamSource

ATTENTION = "full_attention", "attention"  # its names in newer and older configs


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with the defaults of the architecture.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    position_type = config["position_embedding_type"]
    if position_type not in (None, "nope", "rope"):
        raise ValueError(
            f"position_embedding_type is {position_type!r}; it must be 'rope', 'nope' or null"
        )
    rotates = position_type == "rope"
    width = config["shared_intermediate_size"]
    experts = granite.experts_of(config, shared=width) if config["num_local_experts"] else None
    sparse = experts is not None
    attention = LayerKind(rope=0 if rotates else None, sparse=sparse)
    mamba = LayerKind(mixer=_mixer(config), sparse=sparse)
    layers = config["num_hidden_layers"]
    types = config.get("layer_types") or ["linear_attention"] * layers
    usual = {**config, "intermediate_size": width}
    kinds = tuple([attention if name in ATTENTION else mamba for name in types])
    return granite.from_hf(usual, kinds, experts)


def _mixer(config: dict[str, Any]) -> Mamba2:
    width = config["mamba_expand"] * config["hidden_size"]
    heads = config["mamba_n_heads"]
    value_dim = config["mamba_d_head"]
    if value_dim == "auto":
        value_dim = width // heads
    if heads * value_dim != width:
        raise ValueError(
            f"mamba_n_heads {heads} times mamba_d_head {value_dim} is not mamba_expand times "
            f"hidden_size, {width}"
        )
    groups = config["mamba_n_groups"]
    if heads % groups:
        raise ValueError(f"mamba_n_heads {heads} is not a multiple of mamba_n_groups {groups}")
    # JSON has no infinity: transformers writes {"__float__": "Infinity"}
    limits = [
        value["__float__"] if isinstance(value, dict) else value
        for value in config["time_step_limit"]
    ]
    return Mamba2(
        length=config["mamba_d_conv"],
        heads=heads,
        key_heads=config["mamba_n_groups"],
        key_dim=config["mamba_d_state"],
        value_dim=value_dim,
        step_limits=(float(limits[0]), float(limits[1])),
        bias=bool(config["mamba_proj_bias"]),
        conv_bias=bool(config["mamba_conv_bias"]),
        norm_parts=config["mamba_n_groups"],
    )


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names, fused along the output axis."""
    return decoder_table(
        c,
        [
            (_mamba_table(c, i, kind.mixer) if kind.mixer else attention_table(c, i))
            + norm_table(c, i, NORMS)
            + (granite.moe_table(c, i) if kind.sparse else [])
            + _mlp_table(c, i)
            for i, kind in enumerate(c.kinds)
        ],
    )


def _mlp_table(c: DecoderConfig, layer: int) -> list[ParamSource]:
    """The MLP that all tokens use, whose gates and ups are one tensor."""
    prefix = f"model.layers.{layer}.shared_mlp."
    path = ("blocks", str(layer), "mlp", *(("shared",) if c.kinds[layer].sparse else ()))
    width = c.experts.shared if c.experts else c.intermediate
    up = (f"{prefix}input_linear.weight",)
    down = (f"{prefix}output_linear.weight",)
    return [
        ParamSource((*path, "up", "weight"), up, (2 * width, c.hidden)),
        ParamSource((*path, "down", "weight"), down, (c.hidden, width)),
    ]


def _mamba_table(c: DecoderConfig, layer: int, mixer: Any) -> list[ParamSource]:
    """The parameters of a layer of Mamba 2."""
    prefix = f"model.layers.{layer}.mamba."
    path = ("blocks", str(layer), "attn")
    inner = sum(mixer.parts)
    names = {
        ("inner", "weight"): ("in_proj.weight", (inner, c.hidden)),
        ("out", "weight"): ("out_proj.weight", (c.hidden, mixer.values)),
        ("conv",): ("conv1d.weight", (mixer.channels, 1, mixer.length)),
        ("decay_log",): ("A_log", (mixer.heads,)),
        ("step_bias",): ("dt_bias", (mixer.heads,)),
        ("skip",): ("D", (mixer.heads,)),
        ("norm",): ("norm.weight", (mixer.values,)),
    }
    if mixer.conv_bias:
        names[("conv_bias",)] = ("conv1d.bias", (mixer.channels,))
    if mixer.bias:
        names[("inner", "bias")] = ("in_proj.bias", (inner,))
        names[("out", "bias")] = ("out_proj.bias", (c.hidden,))
    return sources_of(path, prefix, names)
