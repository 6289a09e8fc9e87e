"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, biases everywhere, matrices
stored [in, out].
"""

from __future__ import annotations

from typing import Any

from pagedjax.device.models.decoder import Activation, DecoderConfig, LayerKind
from pagedjax.device.models.param_table import ParamSource

ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with `n_embd` and similar keys already renamed.

    Raises:
        ValueError: a key has a value that is not supported, or a required key is missing.
    """
    try:
        hidden = config["hidden_size"]
        heads = config["num_attention_heads"]
        act = config.get("activation_function", "gelu_new")
        if act not in ACTIVATIONS:
            raise ValueError(
                f"activation_function is {act!r}; it must be one of "
                f"{', '.join(map(repr, ACTIVATIONS))}"
            )
        for name, required in (
            ("scale_attn_weights", True),
            ("scale_attn_by_inverse_layer_idx", False),
        ):
            if config.get(name, required) != required:
                raise ValueError(f"{name} is {config[name]!r}; GPT-2 here has {required!r}")
        return DecoderConfig(
            vocab_size=config["vocab_size"],
            hidden=hidden,
            intermediate=config.get("intermediate_size") or 4 * hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            max_len=config["max_position_embeddings"],
            tied=config.get("tie_word_embeddings", True),
            eps=config.get("layer_norm_epsilon", 1e-5),
            kinds=(LayerKind(),) * config["num_hidden_layers"],
            ropes=(),
            norm="layer",
            activation=ACTIVATIONS[act],
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
        )
    except KeyError as missing:
        raise ValueError(
            f"the model's configuration has no {missing}; it is needed to build a GPT-2"
        ) from None


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """The sources of each parameter: tensor names, without the prefix "transformer."."""
    h = c.hidden
    f = c.intermediate
    table = [ParamSource(("embed",), ("wte.weight",), (c.vocab_size, h))]
    table.append(ParamSource(("positions",), ("wpe.weight",), (c.max_len, h)))
    matrices = {
        "attn.qkv": ("attn.c_attn", 3 * h, h),
        "attn.out": ("attn.c_proj", h, h),
        "mlp.up": ("mlp.c_fc", f, h),
        "mlp.down": ("mlp.c_proj", h, f),
    }
    for i in range(c.layers):
        for name, hf_name in (("attn_norm", "ln_1"), ("mlp_norm", "ln_2")):
            table += weight_and_bias(("blocks", str(i), name), f"h.{i}.{hf_name}", h)
        for name, (hf_name, out, size_in) in matrices.items():
            path = ("blocks", str(i), *name.split("."))
            weight = ParamSource(
                (*path, "weight"), (f"h.{i}.{hf_name}.weight",), (out, size_in), transpose=True
            )
            table += [weight, ParamSource((*path, "bias"), (f"h.{i}.{hf_name}.bias",), (out,))]
    table += weight_and_bias(("norm",), "ln_f", h)
    if not c.tied:
        table.append(ParamSource(("head", "weight"), ("lm_head.weight",), (c.vocab_size, h)))
    return tuple(table)


def weight_and_bias(path: tuple[str, ...], name: str, size: int) -> list[ParamSource]:
    """The parameters of a LayerNorm."""
    return [ParamSource((*path, kind), (f"{name}.{kind}",), (size,)) for kind in ("weight", "bias")]
