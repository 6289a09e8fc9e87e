"""GPT-NeoX (Black et al. 2022) and Pythia: LayerNorm, biases everywhere, a quarter of each head is
rotated, and attention and MLP read the same input. Files have q, k and v of a head together.
"""

from __future__ import annotations

from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.gpt2 import ACTIVATIONS, weight_and_bias
from pagedjax.device.models.llama import dense, rotated_numbers, rotation
from pagedjax.device.models.param_table import ParamSource
from pagedjax.device.rope import pair_order


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with the defaults of the architecture.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    act = config["hidden_act"]
    if act not in ACTIVATIONS:
        raise ValueError(
            f"hidden_act is {act!r}; it must be one of {', '.join(map(repr, ACTIVATIONS))}"
        )
    bias = bool(config["attention_bias"])
    return dense(
        config,
        kinds=(LayerKind(),) * config["num_hidden_layers"],
        ropes=(rotation(config, rotated_numbers(config)),),
        eps=config["layer_norm_eps"],
        norm="layer",
        activation=ACTIVATIONS[act],
        gated=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        parallel=bool(config["use_parallel_residual"]),
    )


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """The sources of each parameter."""
    size = c.hidden
    order = _order(c)
    # by parameter: the name in files, its shape, whether it has a bias, and the order of its rows
    matrices = {
        "attn.qkv": ("attention.query_key_value", (c.qkv_rows, size), c.qkv_bias, order),
        "attn.out": ("attention.dense", (size, size), c.out_bias, ()),
        "mlp.up": ("mlp.dense_h_to_4h", (c.intermediate, size), c.mlp_bias, ()),
        "mlp.down": ("mlp.dense_4h_to_h", (size, c.intermediate), c.mlp_bias, ()),
    }
    table = [ParamSource(("embed",), ("gpt_neox.embed_in.weight",), (c.vocab_size, size))]
    for i in range(c.layers):
        path = "blocks", str(i)
        prefix = f"gpt_neox.layers.{i}"
        table += weight_and_bias((*path, "attn_norm"), f"{prefix}.input_layernorm", size)
        table += weight_and_bias((*path, "mlp_norm"), f"{prefix}.post_attention_layernorm", size)
        for name, (stored_name, shape, has_bias, rows) in matrices.items():
            shapes = {"weight": shape}
            if has_bias:
                shapes["bias"] = shape[:1]
            for kind, kind_shape in shapes.items():
                parameter = (*path, *name.split("."), kind)
                source = f"{prefix}.{stored_name}.{kind}"
                table.append(ParamSource(parameter, (source,), kind_shape, order=rows))
    table += weight_and_bias(("norm",), "gpt_neox.final_layer_norm", size)
    if not c.tied:
        table.append(ParamSource(("head", "weight"), ("embed_out.weight",), (c.vocab_size, size)))
    return tuple(table)


def _order(c: DecoderConfig) -> tuple[int, ...]:
    """The order of the rows of `query_key_value`, in which those of q, k and v of head 0 are first,
    then those of head 1.
    """
    pairs = pair_order(c.head_dim, c.ropes[0].rotated)
    rows_of_part = [pairs, pairs, range(c.head_dim)]
    return tuple(
        (3 * head + part) * c.head_dim + row
        for part in range(3)
        for head in range(c.heads)
        for row in rows_of_part[part]
    )
