"""A draft head: one decoder layer on the model's own features (EAGLE-3, Li et al. 2025, arXiv
2503.01840).

    g_i = fuse(outputs of a low, a middle and a high layer at token i)        the feature of a token
    x_i = join(norm(embedding of token i), norm(g_(i-1)))                     what the layer gets
    u_i = layer(the last x up to x_i),  logits of token i + 1 = head(norm(u_i))

The feature g of a draft token is not known yet, so u takes its place. The model's embedding is
used. The head knows only the most frequent tokens, `ids`. Other tokens are never drafted, so the
model has to sample them without a draft (FR-Spec, Zhao et al. 2025, arXiv 2502.14856).
`experiments/training/train_draft.py` trains a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.device.attention import Attend
from pagedjax.device.batch import Batch
from pagedjax.device.cache import Pages
from pagedjax.device.layers import Buffer, Linear, RMSNorm
from pagedjax.device.models.decoder import Block, DecoderConfig, LayerKind, angle_tables, angles_at

# tokens that a head sees: it is trained on short texts, and has not learned what is farther away
WINDOW = 128


@dataclass(frozen=True)
class EagleConfig:
    """Shape of a head. Its layer is as wide as the model's, whose embedding it uses.

    layer: the configuration of its one layer, with the vocab_size of the model.
    taps: layers of the model whose outputs make a feature.
    vocabulary: tokens that can be drafted (V').
    """

    layer: DecoderConfig
    taps: tuple[int, ...]
    vocabulary: int


class Eagle(nnx.Module):
    def __init__(self, c: EagleConfig, dtype: str):
        layer = c.layer
        hidden = layer.hidden
        norm = {"eps": layer.eps, "dtype": dtype}
        self.fuse = Linear(len(c.taps) * hidden, hidden, dtype=dtype)
        self.embed_norm = RMSNorm(hidden, **norm)
        self.feature_norm = RMSNorm(hidden, **norm)
        self.join = Linear(2 * hidden, hidden, dtype=dtype)
        self.block = Block(layer, layer.kinds[0], dtype)
        self.norm = RMSNorm(hidden, **norm)
        self.head = Linear(hidden, c.vocabulary, dtype=dtype)
        self.ids = Buffer(jnp.zeros(c.vocabulary, jnp.int32))  # the tokens that can be drafted
        # `angle_tables`
        self.angles = Buffer(jnp.zeros((len(layer.ropes), 2, layer.max_len, layer.head_dim // 2)))
        self.config = c

    def features(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        """[T, H] from the outputs [T, H] of the layers `taps`."""
        return self.fuse(jnp.concatenate(outputs, axis=-1))

    def layer(
        self, embedded: jax.Array, before: jax.Array, k_pages, v_pages, batch: Batch, attend: Attend
    ) -> tuple[jax.Array, Any, Any]:
        """(u [T, H], k_pages, v_pages) from the embeddings [T, H], and from the features [T, H] of
        the token before each.
        """
        x = self.join(
            jnp.concatenate([self.embed_norm(embedded), self.feature_norm(before)], axis=-1)
        )
        pages = Pages(k=k_pages, v=v_pages)
        angles = angles_at(self.angles, batch.positions)
        x, pages = self.block(x, pages, batch, angles, attend)
        return x, pages["k"], pages["v"]

    def drafted_logits(self, u: jax.Array) -> jax.Array:
        """[B, H] -> [B, V'] float32."""
        return self.head(u, norm=self.norm, dtype=jnp.float32)

    def logits(self, u: jax.Array) -> jax.Array:
        """[B, H] -> [B, V] float32, -inf for tokens that the head does not know."""
        drafted = self.drafted_logits(u)
        everywhere = jnp.full((len(drafted), self.config.layer.vocab_size), -jnp.inf)
        return everywhere.at[:, self.ids[...]].set(drafted, mode="promise_in_bounds")


def eagle_config(target: DecoderConfig, vocabulary: int, window: int = WINDOW) -> EagleConfig:
    """The shape of a head for a model: its layer is like the model's layers, with a window,
    and without experts and sinks.

    Raises:
        ValueError: a vocabulary that is larger than the model's, or a model with latents or with
            layers that have heads of their own.
    """
    if target.latent:
        raise ValueError(
            f"the model keeps latents (rows of {target.latent.row} numbers), and a draft head is "
            "for models with usual attention; use speculative.method='ngram', or a draft model "
            "that has usual attention"
        )
    if target.has_layer_heads:
        raise ValueError(
            "the model has layers with heads of several sizes, and a draft head is for models "
            "whose layers have the same heads; use speculative.method='ngram', or a draft model"
        )
    if not 1 <= vocabulary <= target.vocab_size:
        raise ValueError(
            f"a draft head has a vocabulary of {vocabulary} tokens; the model has "
            f"{target.vocab_size}; choose 1 to that"
        )
    layer = replace(
        target,
        kinds=(LayerKind(window=window),),
        ropes=target.ropes[:1],
        experts=None,
        sinks=False,
        stored=None,
        linear="xla",
    )
    layers = target.layers
    low, middle, high = min(2, layers // 4), layers // 2, layers - 1
    return EagleConfig(layer, (low, middle, high), vocabulary)


def blank_eagle(c: EagleConfig, dtype: str) -> tuple[nnx.GraphDef, nnx.State]:
    """A head's structure, and the shapes of its arrays."""
    return nnx.split(nnx.eval_shape(lambda: Eagle(c, dtype)))


def assemble_eagle(
    c: EagleConfig, ids: np.ndarray, params: dict[str, Any], dtype: str
) -> tuple[nnx.GraphDef, Any]:
    """A head from its parameters, nested by path, and the token ids [V'] that it drafts,
    ascending.
    """
    graphdef, state = blank_eagle(c, dtype)
    computed = {"ids": jnp.asarray(ids, jnp.int32), "angles": jnp.asarray(angle_tables(c.layer))}
    nnx.replace_by_pure_dict(state, {**params, **computed})
    return graphdef, state
