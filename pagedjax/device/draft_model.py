"""`DraftModel`: a drafter that runs on the device, with pages of its own in the blocks of the
model's cache.

Two kinds: a smaller model (`of_decoder`), and a head on the model's own layers (`of_eagle`,
models/eagle.py). Both do two things:

    observe      in every step of the model: keep what later drafts need of the step's tokens
    next_logits  in the drafter's own program: the logits after one more token of each row

What `observe` writes into a slot depends on the tokens up to that slot only, as keys and values do.
So a block can be shared, copied, swapped and found again with the drafter's part in it.

If the model's layers have several block tables, all layers of a drafter have the first one, which
has the blocks of all tokens. A draft model that has layers without attention has groups of its own
behind the model's (`layer_groups.beside`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.device.attention import Attend
from pagedjax.device.batch import Batch
from pagedjax.device.cache import DraftPages, KVCache
from pagedjax.device.models import Model
from pagedjax.device.models.decoder import Decoder, DecoderConfig
from pagedjax.device.models.eagle import Eagle, EagleConfig

Observe = Callable[[Any, Decoder, DraftPages, Batch, tuple[jax.Array, ...], Attend], DraftPages]
NextLogits = Callable[..., tuple[DraftPages, Any, jax.Array]]


class DraftModel(NamedTuple):
    """A drafter's parameters and functions; the first argument of each function is its nnx module.

    Attributes:
        layers: the shape of its attention layers.
        graphdef, params, dtype: its module after `nnx.split`, as in `Model`.
        taps: layers of the model whose outputs it observes.
        features: how many numbers it keeps of each slot beside keys and values (F), of `dtype`.
        observe: (module, model, pages, batch, outputs of the taps, attend) -> pages.
        next_logits: (module, model, pages, batch of one token a row, feature of the token before
            each, attend) -> (pages, feature of each token, logits [B, V] of its own vocabulary).
    """

    layers: DecoderConfig
    graphdef: nnx.GraphDef
    params: Any
    dtype: str
    taps: tuple[int, ...]
    features: int
    observe: Observe
    next_logits: NextLogits

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The parameters for a step."""
        return tuple(jax.tree.leaves(self.params))


def features_before(
    pages: DraftPages, block_tables: jax.Array, rows: jax.Array, positions: jax.Array
) -> jax.Array | None:
    """[n, F] the kept features of the tokens before some tokens, zeros at position 0; None if none
    are kept.

    Args:
        block_tables: [B, M].
        rows, positions: [n] of the tokens.
    """
    if pages.features is None:
        return None
    positions_before = jnp.maximum(positions - 1, 0)
    block_size = pages.features.shape[1]
    blocks = block_tables.at[rows, positions_before // block_size].get(mode="promise_in_bounds")
    features = pages.features.at[blocks, positions_before % block_size].get(
        mode="promise_in_bounds"
    )
    return jnp.where((positions > 0)[:, None], features, 0)


# --- a smaller model ------------------------------------------------------------------------------


def of_decoder(model: Model) -> DraftModel:
    """A model with the tokenizer of the one that it drafts for. Their vocabularies may be padded to
    different sizes.

    Raises:
        ValueError: it is on a mesh (a drafter has a copy on each device), keeps latents, or has
            layers with heads of their own.
    """
    if model.placement:
        raise ValueError(
            f"the draft model is on {model.placement}; load it without mesh and devices"
        )
    if model.config.latent:
        raise ValueError(
            f"the draft model keeps latents (rows of {model.config.latent.row} numbers), and the "
            "pages of a draft model are keys and values; use one with usual attention, or "
            "speculative.method='ngram'"
        )
    if model.config.has_layer_heads:
        raise ValueError(
            "the draft model has layers with heads of several sizes, and the pages of a draft "
            "model are keys and values of one size; use one whose layers have the same heads, or "
            "speculative.method='ngram'"
        )
    return DraftModel(
        layers=model.config,
        graphdef=model.graphdef,
        params=model.params,
        dtype=model.dtype,
        taps=(),
        features=0,
        observe=_observe,
        next_logits=_next_logits,
    )


def _run(
    draft: Decoder, pages: DraftPages, batch: Batch, attend: Attend
) -> tuple[DraftPages, jax.Array]:
    # the model may have sampled an id that pads its vocabulary, for which the drafter has no row
    batch = batch._replace(tokens=jnp.minimum(batch.tokens, draft.config.vocab_size - 1))
    cache, hidden, _ = draft.hidden(KVCache(pages.k, pages.v, jnp.zeros(())), batch, attend)
    return pages._replace(k=cache.k, v=cache.v), hidden


def _observe(
    draft: Decoder, model: Decoder, pages: DraftPages, batch: Batch, outputs: Any, attend: Attend
):
    return _run(draft, pages, batch, attend)[0]  # XLA drops what only the hidden states need


def _next_logits(
    draft: Decoder, model: Decoder, pages: DraftPages, batch: Batch, before: None, attend: Attend
):
    pages, hidden = _run(draft, pages, batch, attend)
    return pages, None, draft.logits(hidden)


def fitted(logits: jax.Array, size: int) -> jax.Array:
    """Logits [B, V] of the drafter's vocabulary as logits [B, size] of the model's vocabulary. Ids
    that only pad one of them are never drafted.
    """
    drafted = logits[:, :size]
    return jnp.pad(drafted, ((0, 0), (0, size - drafted.shape[1])), constant_values=-jnp.inf)


# --- a head ---------------------------------------------------------------------------------------


def of_eagle(config: EagleConfig, graphdef: nnx.GraphDef, params: Any, dtype: str) -> DraftModel:
    """A head on the model's own layers, after `nnx.split`. A feature has H numbers."""
    return DraftModel(
        layers=config.layer,
        graphdef=graphdef,
        params=params,
        dtype=dtype,
        taps=config.taps,
        features=config.layer.hidden,
        observe=_observe_eagle,
        next_logits=_next_logits_eagle,
    )


def _observe_eagle(
    head: Eagle,
    model: Decoder,
    pages: DraftPages,
    batch: Batch,
    outputs: tuple[jax.Array, ...],
    attend: Attend,
) -> DraftPages:
    assert pages.features is not None
    block_size = pages.features.shape[1]
    t = len(batch.tokens)
    features = head.features(outputs).astype(pages.features.dtype)
    places = batch.slots // block_size, batch.slots % block_size  # blocks, and slots in them
    kept = pages.features.at[places].set(features, mode="promise_in_bounds")
    pages = pages._replace(features=kept)
    row = jnp.minimum(
        jnp.searchsorted(batch.row_cu_q_lens, jnp.arange(t), side="right") - 1,
        len(batch.seq_lens) - 1,
    )
    previous_features = features_before(pages, batch.block_tables, row, batch.positions)
    assert previous_features is not None
    _, k, v = head.layer(
        model.embedded(batch), previous_features, pages.k[0], pages.v[0], batch, attend
    )
    return pages._replace(k=(k,), v=(v,))


def _next_logits_eagle(
    head: Eagle, model: Decoder, pages: DraftPages, batch: Batch, before: jax.Array, attend: Attend
) -> tuple[DraftPages, jax.Array, jax.Array]:
    u, k, v = head.layer(model.embedded(batch), before, pages.k[0], pages.v[0], batch, attend)
    return pages._replace(k=(k,), v=(v,)), u, head.logits(u)
