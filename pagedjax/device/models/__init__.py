"""Model families: each one is a configuration of the same decoder (decoder.py). `FAMILIES` lists them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.device.models import gemma, gpt2, llama
from pagedjax.device.models.decoder import Decoder, DecoderConfig, angle_tables

# Hugging Face model_type -> module with from_hf, param_table and IGNORED
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"), llama),
    **dict.fromkeys(("gemma2", "gemma3_text"), gemma),
    "gpt2": gpt2,
}


class Model(NamedTuple):
    """A model after `nnx.split`; the step merges it inside the jit."""

    config: DecoderConfig
    graphdef: nnx.GraphDef
    params: Any
    dtype: str  # of the activations, and of parameters that are not int8

    @property
    def weight_dtype(self) -> str:
        return "int8" if self.config.int8 else self.dtype

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The parameters for a step. To flatten nnx's containers in each call is slower than the scheduler."""
        return tuple(jax.tree.leaves(self.params))


def assemble(config: DecoderConfig, params: dict[str, Any], dtype: str) -> Model:
    """A model from parameters nested by `ParamSource.path`. Arrays that the configuration determines are added."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype)))
    nnx.replace_by_pure_dict(state, _numbered({**params, "angles": jnp.asarray(angle_tables(config))}))
    return Model(config, graphdef, state, dtype)


def _numbered(tree: Any) -> Any:
    """The tree with integer keys for numbers: nnx.List has integer keys, the paths of a table are strings."""
    if not isinstance(tree, dict):
        return tree
    return {int(key) if key.isdigit() else key: _numbered(value) for key, value in tree.items()}
