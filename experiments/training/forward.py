"""The model of a training run: initial weights, and the serving layers on dense windows with their
loss.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.core.optional_imports import require
from pagedjax.device import models, windows
from pagedjax.device.models import llama
from pagedjax.device.models.decoder import Decoder, DecoderConfig
from pagedjax.weights.tree import nested

optax = require("optax")


def initial(config: DecoderConfig, seed: int) -> Decoder:
    """A model with initial weights. Norms are ones.

    Matrices are normal: deviation 0.02 for the embedding (also the head), else 1 / sqrt(columns).
    """
    rng = np.random.default_rng(seed)
    values = {}
    for entry in llama.param_table(config):
        name = ".".join(entry.path)
        shape = entry.shape
        scale = 0.02 if name == "embed" else shape[-1] ** -0.5
        # each layer adds the outputs of these two matrices to the residual
        if name.endswith(("out.weight", "down.weight")):
            scale /= (2 * config.layers) ** 0.5
        drawn = np.float32(scale) * rng.standard_normal(shape, np.float32)
        values[name] = jnp.asarray(drawn) if len(shape) > 1 else jnp.ones(shape)
    model = models.assemble(config, nested(values), "float32")
    return nnx.merge(model.graphdef, model.params)


def logits(module: Decoder, tokens: jax.Array) -> jax.Array:
    """Windows [B, S] -> logits [B, S, V], by the serving layers."""
    return module.logits(windows.hidden(module, tokens)[0]).reshape(*tokens.shape, -1)


def loss(module: Decoder, tokens: jax.Array) -> jax.Array:
    """Mean over windows [B, S + 1] of -log p(next token)."""
    predictions = logits(module, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(predictions, tokens[:, 1:]).mean()
