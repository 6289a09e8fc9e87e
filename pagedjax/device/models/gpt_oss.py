"""GPT-OSS (arXiv 2508.10925): a mixture of experts in each layer, with biases and clamped gates; a
sink in each head of attention; windows in every other layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.llama import NORMS, SLIDING, attention_table, blocks_table, dense
from pagedjax.device.models.mlp import ClampedGates, Experts
from pagedjax.device.models.param_table import ParamSource


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with the defaults of the architecture.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    for name in ("swiglu_alpha", "swiglu_limit"):
        if not config[name] > 0:
            raise ValueError(f"{name} is {config[name]!r}; it must be above 0")
    layers = config["num_hidden_layers"]
    types = config.get("layer_types") or [
        "full_attention" if i % 2 else SLIDING for i in range(layers)
    ]
    window = config["sliding_window"]
    bias = bool(config["attention_bias"])
    return dense(
        config,
        kinds=tuple(
            [LayerKind(window if name == SLIDING else None, sparse=True) for name in types]
        ),
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
        experts=Experts(
            count=config["num_local_experts"],
            chosen=config["num_experts_per_tok"],
            intermediate=config["intermediate_size"],
            normalised=True,
            biases=True,
            clamped=ClampedGates(float(config["swiglu_alpha"]), float(config["swiglu_limit"])),
        ),
    )


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names, fused along the output axis."""
    mlp = partial(_moe_table, order=_up_order(c))
    return blocks_table(c, NORMS, attention=_attention_table, mlp=mlp)


def _attention_table(c: DecoderConfig, layer: int) -> list[ParamSource]:
    name = f"model.layers.{layer}.self_attn.sinks"
    sinks = ParamSource(("blocks", str(layer), "attn", "sinks"), (name,), (c.heads,))
    return [*attention_table(c, layer), sinks]


def _up_order(c: DecoderConfig) -> tuple[int, ...]:
    """The order of the rows of gates and ups of a file, which are neighbours there."""
    assert c.experts is not None
    rows = 2 * c.experts.intermediate
    of_expert = [*range(0, rows, 2), *range(1, rows, 2)]
    return tuple([expert * rows + row for expert in range(c.experts.count) for row in of_expert])


def _moe_table(c: DecoderConfig, layer: int, order: tuple[int, ...]) -> list[ParamSource]:
    """The parameters of a sparse MLP. A file has all experts in one tensor, [experts, in, out]."""
    assert c.experts is not None
    e = c.experts
    prefix = f"model.layers.{layer}.mlp."
    path = ("blocks", str(layer), "mlp")
    ups = e.count * 2 * e.intermediate
    downs = e.count * c.hidden
    stacks = {
        "up": ("gate_up_proj", (ups, c.hidden), order),
        "up_bias": ("gate_up_proj_bias", (ups,), order),
        "down": ("down_proj", (downs, e.intermediate), ()),
        "down_bias": ("down_proj_bias", (downs,), ()),
    }
    routers = {"weight": (e.count, c.hidden), "bias": (e.count,)}
    return [
        *[
            ParamSource((*path, "router", name), (f"{prefix}router.{name}",), shape)
            for name, shape in routers.items()
        ],
        *[
            ParamSource(
                (*path, name),
                (f"{prefix}experts.{source}",),
                shape,
                transpose=len(shape) > 1,
                order=rows,
                stacked=e.count,
            )
            for name, (source, shape, rows) in stacks.items()
        ],
    ]
