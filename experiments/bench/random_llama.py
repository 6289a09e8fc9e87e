"""A Llama of random weights, in the shapes that benchmarks and the programs of `hardware/` use.

It needs no checkpoint. Its greedy tokens mean nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.device.models import Decoder, Model, llama
from pagedjax.device.models.decoder import angle_tables

SHAPES = {
    "tinyllama-1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "vocab_size": 32000,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "vocab_size": 128256,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    },
}


def random_model(shape: dict[str, Any], dtype: str, seed: int = 0) -> Model:
    """A Llama with normal parameters (standard deviation 0.02); norms are ones."""
    config = llama.from_hf(shape)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype)))
    flat, tree = jax.tree.flatten(state)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in flat)
    state = jax.tree.unflatten(tree, _parameters(jax.random.key(seed), shapes))
    state["angles"].set_value(jnp.asarray(angle_tables(config)))
    return Model(config, graphdef, state, dtype)


@partial(jax.jit, static_argnums=1)  # one program, and not several for each shape
def _parameters(key: jax.Array, shapes: tuple[tuple[tuple[int, ...], Any], ...]) -> list[jax.Array]:
    def fill(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, dtype)
        return 0.02 * jax.random.normal(key, shape, dtype)

    keys = jax.random.split(key, len(shapes))
    return [
        fill(leaf_key, shape, dtype) for leaf_key, (shape, dtype) in zip(keys, shapes, strict=True)
    ]
