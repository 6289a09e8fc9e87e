"""The Llama family: grouped-query attention, rotary positions, RMSNorm, SwiGLU.

Llama 2 and 3, TinyLlama and SmolLM2; Mistral and Qwen2 (a window in some layers, biases of q, k and
v); Qwen3 (norms of q and k); Mixtral, Qwen3-MoE and Qwen2-MoE (experts instead of the MLP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.mlp import Experts
from pagedjax.device.models.param_table import ParamSource
from pagedjax.device.rope import ORIGINAL, Rope, pair_order

# (config, layer) -> the parameters of a part of the layer
LayerTable = Callable[[DecoderConfig, int], Sequence[ParamSource]]
Stored = tuple[str, tuple[int, ...]]  # the name of a tensor, and its shape

SLIDING = "sliding_attention"
NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
QKV = "q_proj", "k_proj", "v_proj"
GATE_UP = "gate_proj", "up_proj"
STACKS = {"up": "gate_up_proj", "down": "down_proj"}  # of all experts of a layer
QWEN_MOE = "qwen2_moe", "qwen3_moe"


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json.

    Raises:
        ValueError: a key has a value that is not supported, or a required key is missing.
    """
    model_type = config.get("model_type", "llama")
    bias = bool(config.get("attention_bias", False))
    try:
        return dense(
            config,
            qkv_bias=bool(config.get("qkv_bias", bias or model_type == "qwen2")),
            out_bias=bias,
            qk_norm="head" if model_type in ("qwen3", "qwen3_moe") else None,
            kinds=tuple(_kinds(config, model_type)),
            experts=_experts(config, model_type),
        )
    except KeyError as missing:
        raise ValueError(
            f"the model's configuration has no {missing}; it is needed to build a {model_type}"
        ) from None


def dense(config: dict[str, Any], **fields: Any) -> DecoderConfig:
    """The shape of a decoder whose config.json has the usual keys.

    Args:
        fields: of the `DecoderConfig`: what differs from a Llama, and the `kinds` of the layers.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    model_type = config.get("model_type", "llama")
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    act = config.get("hidden_act", "silu")
    if "activation" not in fields and act != "silu":
        raise ValueError(f"hidden_act is {act!r}; {model_type} uses 'silu'")
    if config.get("mlp_bias"):
        raise ValueError(f"mlp_bias is true; {model_type} here has no bias in its MLP")
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    usual = {
        "vocab_size": config["vocab_size"],
        "hidden": hidden,
        "intermediate": config["intermediate_size"],
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "eps": config.get("rms_norm_eps", 1e-6),
        "ropes": (rotation(config),),
        "max_len": stretched(config),
        "tied": config.get("tie_word_embeddings", False),
    }
    return DecoderConfig(**(usual | fields))


def rotation(config: dict[str, Any], rotated: int | None = None) -> Rope:
    """The rotation that a config.json describes; `rotated` as in `Rope`."""
    return Rope(config.get("rope_theta", 10000.0), frozen(scaling_of(config)), rotated)


def rotated_numbers(config: dict[str, Any]) -> int:
    """How many numbers of a head are rotated, by `partial_rotary_factor`."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(head_dim * config["partial_rotary_factor"])


def scaling_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """The `rope_scaling`, with what transformers takes from other keys: the context of the first
    training, and the factor by which the longest context is longer.
    """
    scaling = config.get("rope_scaling")
    if not scaling or scaling.get("rope_type") not in ("llama3", "yarn", "longrope"):
        return scaling
    longest = config.get("max_position_embeddings", 2048)
    original = config.get(ORIGINAL) or scaling.get(ORIGINAL) or longest
    completed = {**scaling, ORIGINAL: original}
    if scaling["rope_type"] != "llama3" and scaling.get("factor") is None:
        completed["factor"] = max(1.0, longest / original)
    return completed


def stretched(config: dict[str, Any]) -> int:
    """The longest context. Scaling of the kinds "linear" and "yarn" stretches positions beyond
    `max_position_embeddings`.

    Configs with other kinds name the longer context, and so do those of Gemma. A config with
    `original_max_position_embeddings` may name either.
    """
    positions = config.get("max_position_embeddings", 2048)
    scaling = scaling_of(config)
    if not scaling or scaling.get("rope_type") not in ("linear", "yarn"):
        return positions
    original = scaling.get(ORIGINAL) or positions
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
    types = config.get("layer_types") or [
        SLIDING if _slides(config, model_type, i) else "full_attention"
        for i in range(config["num_hidden_layers"])
    ]
    for i, name in enumerate(types):
        sparse = model_type == "mixtral" or (model_type in QWEN_MOE and is_sparse(config, i))
        yield LayerKind(window=window if name == SLIDING else None, sparse=sparse)


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer of a Qwen has experts."""
    is_dense = layer in (config.get("mlp_only_layers") or ())
    return not is_dense and (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def _slides(config: dict[str, Any], model_type: str, layer: int) -> bool:
    """Whether a layer has the window, in a config without layer_types."""
    bound = config.get("max_window_layers", 0) if model_type.startswith("qwen") else 0
    if model_type == "qwen2_moe":
        return layer % 2 == 0 and layer < bound
    return layer >= bound


def _experts(config: dict[str, Any], model_type: str) -> Experts | None:
    if model_type == "mixtral":
        return Experts(
            count=config["num_local_experts"],
            chosen=config["num_experts_per_tok"],
            intermediate=config["intermediate_size"],
            normalised=True,
        )
    if model_type not in QWEN_MOE:
        return None
    return qwen_experts(config, has_shared=model_type == "qwen2_moe")


def qwen_experts(config: dict[str, Any], *, has_shared: bool) -> Experts:
    """The experts of a Qwen. has_shared: beside them is an MLP with a gate."""
    return Experts(
        count=config["num_experts"],
        chosen=config["num_experts_per_tok"],
        intermediate=config["moe_intermediate_size"],
        normalised=bool(config.get("norm_topk_prob", False)),
        shared=config["shared_expert_intermediate_size"] if has_shared else 0,
        shared_gate=has_shared,
    )


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names, fused along the output axis."""
    return blocks_table(c, NORMS, sparse=_sparse_table)


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


def attention_table(
    c: DecoderConfig,
    layer: int,
    qkv: Sequence[str] = QKV,
    order: tuple[int, ...] = (),
    rows: tuple[int, ...] = (),
) -> list[ParamSource]:
    """q, k and v as one parameter, the output, their biases, and the norms of q and k.

    Args:
        c: of the layer, if its heads are not those of the model.
        qkv: names of the tensors with the rows of q, k and v.
        order, rows: of these, as in `ParamSource`.
    """
    prefix = f"model.layers.{layer}.self_attn."
    path = ("blocks", str(layer), "attn")
    width = c.heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"weight": (c.qkv_rows, c.hidden)}
    if c.qkv_bias:
        shapes["bias"] = (c.qkv_rows,)
    table = [
        ParamSource(
            (*path, "qkv", kind),
            tuple(f"{prefix}{part}.{kind}" for part in qkv),
            shape,
            rows=rows,
            order=order,
        )
        for kind, shape in shapes.items()
    ]
    table.append(
        ParamSource((*path, "out", "weight"), (f"{prefix}o_proj.weight",), (c.hidden, width))
    )
    if c.out_bias:
        table.append(ParamSource((*path, "out", "bias"), (f"{prefix}o_proj.bias",), (c.hidden,)))
    if c.qk_norm:
        for name, heads in (("q_norm", c.heads), ("k_norm", c.kv_heads)):
            size = heads * c.head_dim if c.qk_norm == "width" else c.head_dim
            pairs = order[: c.head_dim] if c.qk_norm == "head" else ()  # of the first query head
            source = f"{prefix}{name}.weight"
            table.append(ParamSource((*path, name, "weight"), (source,), (size,), order=pairs))
    return table


def qkv_order(c: DecoderConfig, *, interleaved: bool = False) -> tuple[int, ...]:
    """The order of the rows of q, k and v of a file, in which q and k have the pairs of a
    `pair_order`.
    """
    head_rows = pair_order(c.head_dim, c.ropes[0].rotated, interleaved)
    turned_heads = range(c.heads + c.kv_heads)
    turned = [head * c.head_dim + row for head in turned_heads for row in head_rows]
    order = (*turned, *range(len(turned), c.qkv_rows))
    return () if order == tuple(range(c.qkv_rows)) else order


def sources_of(
    path: tuple[str, ...], prefix: str, tensors: Mapping[tuple[str, ...], Stored]
) -> list[ParamSource]:
    """Parameters that are tensors of a file as they are. tensors: the end of the parameter's path
    -> the end of the tensor's name, and its shape.
    """
    return [
        ParamSource((*path, *name), (prefix + stored_name,), shape)
        for name, (stored_name, shape) in tensors.items()
    ]


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


def mlp_table(c: DecoderConfig, layer: int, gate_up: Sequence[str] = GATE_UP) -> list[ParamSource]:
    """A gated MLP. gate_up: names of the tensors with the rows of the gates and then of `up`."""
    prefix = f"model.layers.{layer}.mlp."
    path = ("blocks", str(layer), "mlp")
    up = tuple(f"{prefix}{part}.weight" for part in gate_up)
    return [
        ParamSource((*path, "up", "weight"), up, (2 * c.intermediate, c.hidden)),
        ParamSource(
            (*path, "down", "weight"), (f"{prefix}down_proj.weight",), (c.hidden, c.intermediate)
        ),
    ]


def blocks_table(
    c: DecoderConfig,
    norms: dict[str, str],
    *,
    attention: LayerTable = attention_table,
    mlp: LayerTable = mlp_table,
    sparse: LayerTable | None = None,
) -> tuple[ParamSource, ...]:
    """The parameters of a decoder by those of its layers.

    Args:
        norms: as in `norm_table`.
        sparse: of the layers with experts; None: `mlp`.
    """
    sparse = sparse or mlp
    return decoder_table(
        c,
        [
            [
                *attention(c, i),
                *norm_table(c, i, norms),
                *(sparse if kind.sparse else mlp)(c, i),
            ]
            for i, kind in enumerate(c.kinds)
        ],
    )


def _sparse_table(c: DecoderConfig, layer: int) -> list[ParamSource]:
    """The parameters of a sparse MLP of Mixtral or of a Qwen. They name its tensors differently."""
    if c.family == "mixtral":
        prefix = f"model.layers.{layer}.block_sparse_moe."
        return experts_table(c, layer, prefix, ("w1", "w3", "w2"))
    return qwen_experts_table(c, layer)


def qwen_experts_table(c: DecoderConfig, layer: int) -> list[ParamSource]:
    """The parameters of a sparse MLP of a Qwen."""
    return experts_table(c, layer, f"model.layers.{layer}.mlp.", shared="shared_expert")


def experts_table(
    c: DecoderConfig,
    layer: int,
    prefix: str,
    names: Sequence[str] = (*GATE_UP, "down_proj"),
    shared: str = "shared_experts",
) -> list[ParamSource]:
    """The router, the experts, and the shared MLP with its gate if the mixture has them. Files have
    a tensor for each matrix of an expert, or all experts in two tensors, [experts, out, in].

    Args:
        prefix: of the names of all tensors.
        names: of an expert's gate, up and down.
        shared: the name of the shared MLP.
    """
    assert c.experts is not None
    e = c.experts
    path = ("blocks", str(layer), "mlp")
    routers = (f"{prefix}gate.weight",)
    rows = ()
    if e.shared_gate:
        routers = (*routers, f"{prefix}{shared}_gate.weight")
        rows = (e.count, 1)
    router_shape = e.count + e.shared_gate, c.hidden
    gate, up, down = names
    table = [
        ParamSource((*path, "router", "weight"), routers, router_shape, rows=rows),
        _stack(c, (*path, "up"), f"{prefix}experts.", (gate, up)),
        _stack(c, (*path, "down"), f"{prefix}experts.", (down,)),
    ]
    if e.shared:
        table += _shared_table(c, e.shared, (*path, "shared"), f"{prefix}{shared}.", names)
    return table


def _stack(
    c: DecoderConfig, path: tuple[str, ...], prefix: str, names: Sequence[str]
) -> ParamSource:
    """The matrices of all experts that are gate and up, or down.

    Args:
        names: of an expert's tensors.
    """
    assert c.experts is not None
    count = c.experts.count
    size = c.experts.intermediate
    shape = (count * 2 * size, c.hidden) if path[-1] == "up" else (count * c.hidden, size)
    sources = tuple(f"{prefix}{i}.{name}.weight" for i in range(count) for name in names)
    stack = STACKS[path[-1]]
    alternative = ParamSource(path, (f"{prefix}{stack}",), shape, stacked=count)
    return ParamSource(path, sources, shape, alternative=alternative)


def _shared_table(
    c: DecoderConfig, size: int, path: tuple[str, ...], prefix: str, names: Sequence[str]
) -> list[ParamSource]:
    """The shared MLP of a mixture. The arguments are those of `experts_table`, for this MLP."""
    gate, up, down = names
    ups = tuple(f"{prefix}{name}.weight" for name in (gate, up))
    return [
        ParamSource((*path, "up", "weight"), ups, (2 * size, c.hidden)),
        ParamSource((*path, "down", "weight"), (f"{prefix}{down}.weight",), (c.hidden, size)),
    ]
