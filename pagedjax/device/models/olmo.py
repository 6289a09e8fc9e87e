"""OLMo 2 (https://arxiv.org/abs/2501.00656), OLMo 3 and EXAONE 4: norms behind attention and MLP,
and none before them; norms of q and k, in OLMo over all heads together. OLMo 3 and EXAONE 4 have
windows in most layers.

OLMo 3 scales the rotation only of layers without a window. EXAONE 4 with windows rotates only the
layers that have one.
"""

from __future__ import annotations

from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.llama import SLIDING, blocks_table, dense, rotation
from pagedjax.device.models.param_table import ParamSource
from pagedjax.device.rope import Rope

NORMS = {"attn_post": "post_attention_layernorm", "mlp_post": "post_feedforward_layernorm"}
WINDOWS_OF_FOUR = 4  # OLMo 3: three layers with a window, then one without


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with the defaults of the architecture.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    model_type = config["model_type"]
    layers = config["num_hidden_layers"]
    bias = bool(config.get("attention_bias"))
    ropes = (rotation(config),)
    kinds = [LayerKind()] * layers
    if model_type == "olmo3":
        local = Rope(config["rope_local_base_freq"] or config["rope_theta"])
        ropes = (*ropes, local)
        types = config.get("layer_types") or _types(layers, WINDOWS_OF_FOUR)
        windowed = LayerKind(config["sliding_window"], rope=1)
        kinds = [windowed if name == SLIDING else LayerKind() for name in types]
    elif model_type == "exaone4" and config["sliding_window"] is not None:
        windowed = LayerKind(config["sliding_window"])
        types = config.get("layer_types") or _types(layers, _pattern(config))
        kinds = [windowed if name == SLIDING else LayerKind(rope=None) for name in types]
    return dense(
        config,
        kinds=tuple(kinds),
        ropes=ropes,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head" if model_type == "exaone4" else "width",
        pre_norms=False,
        post_norms=True,
    )


def _types(layers: int, every: int) -> list[str]:
    """Each `every`-th layer sees all tokens, the others have a window."""
    return [SLIDING if (i + 1) % every else "full_attention" for i in range(layers)]


def _pattern(config: dict[str, Any]) -> int:
    pattern = config["sliding_window_pattern"]
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise ValueError(
            f"sliding_window_pattern is {pattern!r} and layer_types is missing; give layer_types, "
            "or a number n: each n-th layer has no window"
        )
    return pattern


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names."""
    return blocks_table(c, NORMS)
