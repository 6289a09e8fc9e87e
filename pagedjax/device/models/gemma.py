"""Gemma 2 and 3. They have norms before and after attention and MLP, which multiply by 1 + weight;
scaled embeddings; GELU; and windows in most layers.

Gemma 2 caps scores and logits. Gemma 3 instead has norms of q and k, and other rotary positions in
layers with windows. Only text is supported, not images.
"""

from __future__ import annotations

from typing import Any

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.llama import SLIDING, blocks_table, rotation
from pagedjax.device.models.param_table import ParamSource
from pagedjax.device.rope import Rope

TANH_GELU = "gelu_pytorch_tanh"
NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post": "post_feedforward_layernorm",
}


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json.

    Raises:
        ValueError: a key has a value that is not supported, or a required key is missing.
    """
    try:
        is_gemma3 = config["model_type"] == "gemma3_text"
        act = config.get("hidden_activation") or TANH_GELU
        if act != TANH_GELU:
            raise ValueError(f"hidden_activation is {act!r}; Gemma uses {TANH_GELU!r}")
        if config.get("attention_bias") or config.get("use_bidirectional_attention"):
            raise ValueError(
                "attention_bias or use_bidirectional_attention is true; Gemma here has neither"
            )
        types = config.get("layer_types")
        if not types:
            every = config.get("sliding_window_pattern", 6) if is_gemma3 else 2
            types = types_of(config["num_hidden_layers"], every)
        ropes = _ropes(config)
        last_rope = len(ropes) - 1  # that of layers with windows
        kinds = [
            LayerKind(window=config["sliding_window"], rope=last_rope)
            if name == SLIDING
            else LayerKind(window=None, rope=0)
            for name in types
        ]
        return DecoderConfig(
            vocab_size=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or 256,
            max_len=config["max_position_embeddings"],
            tied=config.get("tie_word_embeddings", True),
            eps=config.get("rms_norm_eps", 1e-6),
            kinds=tuple(kinds),
            ropes=ropes,
            norm="rms_plus_one",
            activation="gelu_tanh",
            qk_norm="head" if is_gemma3 else None,
            post_norms=True,
            embed_scale=config["hidden_size"] ** 0.5,
            attn_scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
            attn_cap=config.get("attn_logit_softcapping"),
            logit_cap=config.get("final_logit_softcapping"),
        )
    except KeyError as missing:
        raise ValueError(
            f"the model's configuration has no {missing}; it is needed to build a Gemma"
        ) from None


def types_of(layers: int, every: int) -> list[str]:
    """The type of each layer: each `every`-th layer sees all tokens, the others have a window."""
    return [SLIDING if (i + 1) % every else "full_attention" for i in range(layers)]


def _ropes(config: dict[str, Any]) -> tuple[Rope, ...]:
    """The rotation of layers that see all tokens, then that of layers with windows if it is
    different.
    """
    full = rotation(config)
    window_theta = config.get("rope_local_base_freq")
    return (full,) if window_theta is None else (full, Rope(window_theta))


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names, fused along the output axis."""
    return blocks_table(c, NORMS)
