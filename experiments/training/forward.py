"""The model of a training run: initial weights, and the serving layers on dense windows with their loss."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.core.optional_imports import require
from pagedjax.device import cache, models
from pagedjax.device.batch import Batch
from pagedjax.device.models import llama
from pagedjax.device.models.decoder import Decoder, DecoderConfig
from pagedjax.weights.tree import nested

optax = require("optax")


def initial(config: DecoderConfig, seed: int) -> Decoder:
    """Norms are ones. Matrices are normal: deviation 0.02 for the embedding (also the head), else 1 / sqrt(columns)."""
    rng, values = np.random.default_rng(seed), {}
    for entry in llama.param_table(config):
        name, shape = ".".join(entry.path), entry.shape
        scale = 0.02 if name == "embed" else shape[-1] ** -0.5
        if name.endswith(("out.weight", "down.weight")):  # each layer adds two of them to the residual
            scale /= (2 * config.layers) ** 0.5
        drawn = np.float32(scale) * rng.standard_normal(shape, np.float32)
        values[name] = jnp.asarray(drawn) if len(shape) > 1 else jnp.ones(shape)
    model = models.assemble(config, nested(values), "float32")
    return nnx.merge(model.graphdef, model.params)


def dense(q, k_pages, v_pages, *_, scale: float, window: int | None, soft_cap: float | None) -> jax.Array:
    """An `Attend` for `packed` windows: page b has all tokens of window b, so no table lookup is needed."""
    assert (window, soft_cap) == (None, None), "a Llama has neither"
    b, k, s, d = k_pages.shape
    scores = scale * jnp.einsum("bskgd,bktd->bkgst", q.reshape(b, s, k, -1, d), k_pages)
    weights = jax.nn.softmax(jnp.where(jnp.tri(s, dtype=bool), scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgst,bktd->bskgd", weights, v_pages).reshape(q.shape)


def packed(tokens: jax.Array) -> Batch:
    """Windows [B, S] as the batch of a step: B prompts, each in one block of S slots."""
    b, s = tokens.shape
    each, slots = jnp.arange(b), jnp.arange(b * s)
    return Batch(
        tokens=tokens.reshape(-1),
        positions=slots % s,
        slots=slots,
        block_tables=each[:, None],
        seq_lens=jnp.full(b, s),
        cu_q_lens=jnp.arange(b + 1) * s,
        last=each * s + s - 1,
        sampled_row=each,
        targets=None,
        sampling=None,  # type: ignore[arg-type]  # no sampling in training
    )


def logits(module: Decoder, tokens: jax.Array) -> jax.Array:
    """Windows [B, S] -> logits [B, S, V], by the serving layers. The cache has the windows' keys only."""
    c, (b, s) = module.config, tokens.shape
    # there is no padding, so block 0 (the trash block) is used too
    pages = cache.init(
        layers=c.layers, blocks=b - 1, block_size=s, kv_heads=c.kv_heads, head_dim=c.head_dim, dtype="float32"
    )
    _, hidden, _ = module.hidden(pages, packed(tokens), partial(dense, scale=c.attn_scale))
    return module.logits(hidden).reshape(b, s, -1)


def loss(module: Decoder, tokens: jax.Array) -> jax.Array:
    """Mean over windows [B, S + 1] of -log p(next token)."""
    found = logits(module, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(found, tokens[:, 1:]).mean()
