"""The Llama family: grouped-query attention, rotary positions, RMSNorm, SwiGLU.

Llama 2 and 3, TinyLlama and SmolLM2; Mistral and Qwen2 (a window in some layers, biases of q, k and
v); Qwen3 (norms of q and k); Mixtral and Qwen3-MoE (experts instead of the MLP).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, Experts, LayerKind, Rope
from pagedjax.device.models.param_table import ParamSource

SLIDING = "sliding_attention"


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json.

    Raises:
        ValueError: a key has a value that is not supported, or a required key is missing.
    """
    try:
        model_type = config.get("model_type", "llama")
        hidden = config["hidden_size"]
        heads = config["num_attention_heads"]
        act = config.get("hidden_act", "silu")
        if act != "silu":
            raise ValueError(f"hidden_act is {act!r}; the Llama family uses 'silu'")
        if config.get("mlp_bias"):
            raise ValueError("mlp_bias is true; the Llama family here has no bias in its MLP")
        bias = bool(config.get("attention_bias", False))
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        return DecoderConfig(
            vocab_size=config["vocab_size"],
            hidden=hidden,
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=config.get("head_dim") or hidden // heads,
            eps=config.get("rms_norm_eps", 1e-6),
            ropes=(Rope(config.get("rope_theta", 10000.0), frozen(config.get("rope_scaling"))),),
            max_len=stretched(
                config.get("max_position_embeddings", 2048), config.get("rope_scaling")
            ),
            tied=config.get("tie_word_embeddings", False),
            qkv_bias=bool(config.get("qkv_bias", bias or model_type == "qwen2")),
            out_bias=bias,
            qk_norm=model_type in ("qwen3", "qwen3_moe"),
            kinds=tuple(_kinds(config, model_type)),
            experts=_experts(config, model_type),
        )
    except KeyError as missing:
        raise ValueError(
            f"the model's configuration has no {missing}; it is needed to build a {model_type}"
        ) from None


def stretched(positions: int, scaling: dict[str, Any] | None) -> int:
    """The longest context. Scaling of kind "linear" stretches positions beyond
    `max_position_embeddings`.

    Configs with "llama3" scaling name the longer context, and so do those of Gemma. A config with
    `original_max_position_embeddings` may name either.
    """
    if not scaling or scaling.get("rope_type") != "linear":
        return positions
    original = scaling.get("original_max_position_embeddings", positions)
    return max(positions, int(original * scaling["factor"]))


def frozen(scaling: dict[str, Any] | None) -> tuple[tuple[str, Any], ...] | None:
    """A hashable rope_scaling."""
    if not scaling:
        return None
    return tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in scaling.items()))


def _kinds(config: dict[str, Any], model_type: str) -> Iterator[LayerKind]:
    """The kind of each layer: its window, and whether it has experts."""
    window = config.get("sliding_window")
    if model_type not in ("mistral", "mixtral") and not config.get("use_sliding_window", False):
        window = None
    first = config.get("max_window_layers", 0) if model_type.startswith("qwen") else 0
    types = config.get("layer_types") or [
        SLIDING if i >= first else "full_attention" for i in range(config["num_hidden_layers"])
    ]
    dense = config.get("mlp_only_layers") or ()
    every = config.get("decoder_sparse_step", 1)
    for i, name in enumerate(types):
        sparse = model_type == "mixtral" or (
            model_type == "qwen3_moe" and i not in dense and (i + 1) % every == 0
        )
        yield LayerKind(window=window if name == SLIDING else None, sparse=sparse)


def _experts(config: dict[str, Any], model_type: str) -> Experts | None:
    if model_type == "mixtral":
        return Experts(
            count=config["num_local_experts"],
            chosen=config["num_experts_per_tok"],
            intermediate=config["intermediate_size"],
            normalised=True,
        )
    if model_type == "qwen3_moe":
        return Experts(
            count=config["num_experts"],
            chosen=config["num_experts_per_tok"],
            intermediate=config["moe_intermediate_size"],
            normalised=bool(config.get("norm_topk_prob", False)),
        )
    return None


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names, fused along the output axis."""
    norms = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return decoder_table(
        c,
        [
            attention_table(c, i)
            + norm_table(c, i, norms)
            + (_experts_table(c, i) if kind.sparse else mlp_table(c, i))
            for i, kind in enumerate(c.kinds)
        ],
    )


def decoder_table(
    c: DecoderConfig, blocks: Iterable[Sequence[ParamSource]]
) -> tuple[ParamSource, ...]:
    """The embedding, the parameters of the blocks, the last norm, and the head if it is not
    tied.
    """
    table = [
        ParamSource(("embed",), ("model.embed_tokens.weight",), (c.vocab_size, c.hidden)),
        *chain.from_iterable(blocks),
        ParamSource(("norm", "weight"), ("model.norm.weight",), (c.hidden,)),
    ]
    if not c.tied:
        table.append(ParamSource(("head", "weight"), ("lm_head.weight",), (c.vocab_size, c.hidden)))
    return tuple(table)


def attention_table(c: DecoderConfig, layer: int) -> list[ParamSource]:
    """q, k and v as one parameter, the output, their biases, and the norms of q and k."""
    prefix = f"model.layers.{layer}.self_attn."
    path = ("blocks", str(layer), "attn")
    width = c.heads * c.head_dim
    parts = tuple(f"{prefix}{p}_proj" for p in "qkv")
    table = [
        ParamSource(
            (*path, "qkv", "weight"), tuple(p + ".weight" for p in parts), (c.qkv_rows, c.hidden)
        ),
        ParamSource((*path, "out", "weight"), (f"{prefix}o_proj.weight",), (c.hidden, width)),
    ]
    if c.qkv_bias:
        table.append(
            ParamSource((*path, "qkv", "bias"), tuple(p + ".bias" for p in parts), (c.qkv_rows,))
        )
    if c.out_bias:
        table.append(ParamSource((*path, "out", "bias"), (f"{prefix}o_proj.bias",), (c.hidden,)))
    if c.qk_norm:
        for name in ("q_norm", "k_norm"):
            table.append(
                ParamSource((*path, name, "weight"), (f"{prefix}{name}.weight",), (c.head_dim,))
            )
    return table


def norm_table(c: DecoderConfig, layer: int, names: dict[str, str]) -> list[ParamSource]:
    """The norms of a layer. names: name in this project -> name in the checkpoint."""
    return [
        ParamSource(
            ("blocks", str(layer), name, "weight"),
            (f"model.layers.{layer}.{stored_name}.weight",),
            (c.hidden,),
        )
        for name, stored_name in names.items()
    ]


def mlp_table(c: DecoderConfig, layer: int) -> list[ParamSource]:
    prefix = f"model.layers.{layer}.mlp."
    path = ("blocks", str(layer), "mlp")
    up = tuple(f"{prefix}{p}_proj.weight" for p in ("gate", "up"))
    return [
        ParamSource((*path, "up", "weight"), up, (2 * c.intermediate, c.hidden)),
        ParamSource(
            (*path, "down", "weight"), (f"{prefix}down_proj.weight",), (c.hidden, c.intermediate)
        ),
    ]


def _experts_table(c: DecoderConfig, layer: int) -> list[ParamSource]:
    """The parameters of a sparse MLP. Mixtral and Qwen3-MoE name its tensors differently."""
    assert c.experts is not None
    e = c.experts
    path = ("blocks", str(layer), "mlp")
    mixtral = not c.qk_norm  # of the two, only Qwen3-MoE has norms of q and k
    prefix = f"model.layers.{layer}.{'block_sparse_moe' if mixtral else 'mlp'}."
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    experts = [f"{prefix}experts.{i}." for i in range(e.count)]
    ups = tuple(f"{expert}{name}.weight" for expert in experts for name in (gate, up))
    downs = tuple(f"{expert}{down}.weight" for expert in experts)
    return [
        ParamSource((*path, "router", "weight"), (f"{prefix}gate.weight",), (e.count, c.hidden)),
        ParamSource((*path, "up"), ups, (e.count * 2 * e.intermediate, c.hidden)),
        ParamSource((*path, "down"), downs, (e.count * c.hidden, e.intermediate)),
    ]
