"""Model families, each a configuration of one decoder (decoder.py). `FAMILIES` lists them."""

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
    """A model split once (`nnx.split`): the step merges it again inside the jit."""

    config: DecoderConfig
    graphdef: nnx.GraphDef
    params: Any
    dtype: str  # of the activations and, if those are not int8, of the parameters

    @property
    def weight_dtype(self) -> str:
        return "int8" if self.config.int8 else self.dtype

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The parameters as a step takes them: in every call, nnx's own containers take longer to flatten than all
        that a scheduler does."""
        return tuple(jax.tree.leaves(self.params))


def assemble(config: DecoderConfig, params: dict[str, Any], dtype: str) -> Model:
    """A model of its parameters: nested by `ParamSource.path`, without what the configuration determines."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype)))
    nnx.replace_by_pure_dict(state, _numbered({**params, "angles": jnp.asarray(angle_tables(config))}))
    return Model(config, graphdef, state, dtype)


def _numbered(tree: Any) -> Any:
    """nnx.List keeps integers as keys; a table's paths are strings."""
    if not isinstance(tree, dict):
        return tree
    return {int(key) if key.isdigit() else key: _numbered(value) for key, value in tree.items()}
