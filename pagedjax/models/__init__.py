"""Architectures, each a configuration over shared layers. `load` makes one of a checkpoint."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from pagedjax.layers import rope_table
from pagedjax.models import llama
from pagedjax.weights.checkpoint import Checkpoint
from pagedjax.weights.load import load_params

ARCHITECTURES = {"llama": llama}  # Hugging Face model_type -> module with from_hf, param_table and Llama


class Model(NamedTuple):
    """A model split once (`nnx.split`): the step merges it again inside the jit."""

    config: llama.LlamaConfig
    graphdef: nnx.GraphDef
    params: Any
    dtype: str  # of the parameters


def load(checkpoint: Checkpoint, dtype: str, *, progress: bool = False) -> Model:
    """Read a checkpoint's parameters in `dtype`.

    Raises:
        ValueError: an architecture that is not in ARCHITECTURES, or tensors that do not fit (all are named).
    """
    kind = checkpoint.config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type is {kind!r}; supported are {', '.join(sorted(ARCHITECTURES))}")
    config = ARCHITECTURES[kind].from_hf(checkpoint.config)
    params = load_params(checkpoint, llama.param_table(config), dtype, progress=progress)
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: llama.Llama(config, dtype)))
    params["angles"] = jnp.asarray(rope_table(config.frequencies, config.max_len))
    nnx.replace_by_pure_dict(shapes, _numbered(params))
    return Model(config, graphdef, shapes, dtype)


def _numbered(tree: Any) -> Any:
    """nnx.List keeps integers as keys; a table's paths are strings."""
    if not isinstance(tree, dict):
        return tree
    return {int(key) if key.isdigit() else key: _numbered(value) for key, value in tree.items()}
