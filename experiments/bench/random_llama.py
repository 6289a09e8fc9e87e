"""A Llama of random weights, in the shapes that benchmarks and the programs of `hardware/` use.

It needs no checkpoint. Its greedy tokens mean nothing. Its matrices may be in a stored format, in
the layout of an implementation of products.
"""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.device.linear import BLOCKS, Matrix, find
from pagedjax.device.models import Decoder, Model, llama, matrices
from pagedjax.device.models.decoder import DecoderConfig, angle_tables
from pagedjax.options.config import STORED_FORMATS
from pagedjax.weights.tree import name_of
from pallas_kernels.linear.blocks import Parts, rows_of_parts

# of `with_weights`, beside the dtype of the model
WEIGHTS = (*STORED_FORMATS, *[name for name, blocks in BLOCKS.items() if blocks.integers])

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


def with_weights(config: DecoderConfig, weights: str, linear: str = "xla") -> DecoderConfig:
    """The configuration with its matrices in a stored format.

    Args:
        weights: one of WEIGHTS, or the dtype of the model. Blocks are those of all layers; the
            embedding and the head are floats beside them, as `pagedjax convert` leaves them.
        linear: the implementation of products.
    """
    if weights in BLOCKS:
        names = [name for name in matrices(config) if name.startswith("blocks.")]
        stored: Any = tuple([(name, weights) for name in names])
    else:
        stored = weights if weights in STORED_FORMATS else None
    return dataclasses.replace(config, stored=stored, linear=linear)


def model_of_shapes(config: DecoderConfig, dtype: str) -> Model:
    """The model without values: shapes, of matrices in the layout of their implementation."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype)))
    if config.linear == "xla":  # whose layout is that of files
        return Model(config, graphdef, state, dtype)
    of_name = matrices(config)

    def packed(keys: Any, leaf: Any) -> Any:
        matrix = of_name.get(name_of(keys))
        if matrix is None:
            return leaf
        array = _packed(config.linear, matrix, leaf.shape, leaf.dtype.name)
        return jax.ShapeDtypeStruct(array.shape, array.dtype)

    return Model(config, graphdef, jax.tree_util.tree_map_with_path(packed, state), dtype)


def random_stored_model(shape: dict[str, Any], dtype: str, weights: str, linear: str) -> Model:
    """A Llama with matrices in blocks of integers. All layers have the same numbers, each in memory
    of its own; the other parameters are those of `random_model`.

    Args:
        weights, linear: as in `with_weights`.
    """
    config = with_weights(llama.from_hf(shape), weights, linear)
    floats, _ = jax.tree_util.tree_flatten_with_path(random_model(shape, dtype).params)
    floats_by_name = {name_of(keys): x for keys, x in floats}
    shapes = model_of_shapes(config, dtype)
    of_name = matrices(config)
    random_matrix = cache(lambda matrix: find(linear).pack(random_rows(matrix), matrix))

    def value(keys: Any, leaf: Any) -> Any:
        name = name_of(keys)
        matrix = of_name.get(name)
        is_in_blocks = matrix is not None and matrix.blocks is not None
        return jax.device_put(random_matrix(matrix)) if is_in_blocks else floats_by_name[name]

    return shapes._replace(params=jax.tree_util.tree_map_with_path(value, shapes.params))


@cache
def _packed(linear: str, matrix: Matrix, shape: tuple[int, ...], dtype: str) -> Any:
    """The shape of a matrix in the layout of an implementation."""
    array = find(linear).pack(np.zeros(shape, dtype), matrix)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def random_rows(matrix: Matrix) -> np.ndarray:
    """Rows [M, bytes] of a matrix in blocks of integers. Weights are between -0.04 and 0.04."""
    blocks = matrix.blocks
    assert blocks is not None
    rng = np.random.default_rng(0)
    cells = matrix.outputs, matrix.inputs // blocks.inputs
    half = 2 ** (blocks.bits - 1)
    least = -half if blocks.bits == 8 else -blocks.zero
    numbers = rng.integers(least, least + 2 * half, (*cells, blocks.inputs), np.int8)
    scales = np.full(cells, 0.04 / half, np.float32)
    offsets = -(least + half) * scales if blocks.offset else None
    return rows_of_parts(Parts(numbers, scales, offsets), blocks, np)


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
