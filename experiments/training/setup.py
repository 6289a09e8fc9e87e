"""The options of a training run that decide its result, and the config.json of its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setup:
    """The options that determine the result, bit for bit.

    steps: updates; the learning rate falls over them, so another number is another run.
    context: tokens of a window, and of a request to the trained model.
    batch: windows in a step.
    rate: the highest learning rate.
    """

    steps: int = 800
    seed: int = 0
    vocab: int = 1024
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    context: int = 256
    batch: int = 4
    rate: float = 3e-3


def hf_config(setup: Setup) -> dict[str, Any]:
    """The model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": setup.vocab,
        "hidden_size": setup.hidden,
        "intermediate_size": 3 * setup.hidden,
        "num_hidden_layers": setup.layers,
        "num_attention_heads": setup.heads,
        "num_key_value_heads": setup.kv_heads,
        "head_dim": setup.hidden // setup.heads,
        "max_position_embeddings": setup.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
