"""The loss of a draft head: drafts of several tokens ahead, as an engine will make them (EAGLE-3's
training-time test).

In pass 0 each position has the true feature of the token before. In pass s it has the feature that
the head itself made of that token in pass s - 1. Position i of pass s is the draft that an engine
makes s tokens after the last known token. It sees the true keys of the tokens up to i - s, and
after them the keys of earlier passes, as an engine's cache has them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from experiments.training.draft_data import Windows
from pagedjax.device import cache
from pagedjax.device.models.decoder import Decoder
from pagedjax.device.models.eagle import Eagle
from pagedjax.device.windows import packed

PASS_DECAY = 0.8  # the weight of a pass, over the weight of the pass before

Pages = tuple[jax.Array, jax.Array]  # keys and values of one pass, [B, K, S, D]


def shifted(x: jax.Array, by: int) -> jax.Array:
    """x [B, K, S, D] moved `by` tokens towards the end, with zeros in front."""
    return jnp.pad(x, ((0, 0), (0, 0), (by, 0), (0, 0)))[:, :, : x.shape[2]]


def queries_by_head(q: jax.Array, keys: jax.Array) -> jax.Array:
    """The queries [B * S, N, D] by the heads of keys [B, K, S, D]: [B, S, K, G, D]."""
    b, k, s, d = keys.shape
    return q.reshape(b, s, k, -1, d)


def true_scores(
    queries: jax.Array, keys: jax.Array, position: jax.Array, pass_number: int, window: int
) -> jax.Array:
    """The scores [B, K, G, S, S] of the queries of a pass with the keys of pass 0; -inf where a
    query does not see a key.

    In pass s, query i sees the true keys of the tokens up to i - s.

    Args:
        position: 0 to S - 1, [S].
    """
    scores = jnp.einsum("bskgd,bktd->bkgst", queries, keys)
    distance = position[:, None] - position  # from each query to each key
    return jnp.where((distance >= pass_number) & (distance < window), scores, -jnp.inf)


def attend_over(earlier: list[Pages], scale: float):
    """An `Attend` for pass s = len(earlier), over the true keys (pass 0) and the keys of the later
    passes.
    """

    def attend(q, k_pages, v_pages, *_, window: int | None, soft_cap: float | None) -> jax.Array:
        assert window, "a head has a window"
        assert soft_cap is None, "a head that is trained here has no cap"
        passes = [*earlier, (k_pages, v_pages)]
        queries = queries_by_head(q, k_pages)
        keys, values = passes[0]
        s = keys.shape[2]
        position = jnp.arange(s)
        scores = [true_scores(queries, keys, position, len(passes) - 1, window)]
        # later[m]: the pages of pass s - m, moved so that query i meets the token i - m
        later = [
            (shifted(key, m), shifted(value, m))
            for m, (key, value) in enumerate(reversed(passes[1:]))
        ]
        for m, (key, _) in enumerate(later):
            score = jnp.einsum("bskgd,bksd->bkgs", queries, key)
            scores.append(jnp.where(position >= m, score, -jnp.inf)[..., None])
        # the first tokens have no true key in later passes; without a finite score a softmax is NaN
        scores = jnp.maximum(scale * jnp.concatenate(scores, axis=-1), -1e9)
        weights = jax.nn.softmax(scores, axis=-1)
        output = jnp.einsum("bkgst,bktd->bskgd", weights[..., :s], values)
        for m, (_, value) in enumerate(later):
            output += jnp.einsum("bkgs,bksd->bskgd", weights[..., s + m], value)
        return output.reshape(q.shape)

    return attend


def drafts(head: Eagle, embedded: jax.Array, windows: Windows, passes: int) -> list[jax.Array]:
    """The logits of each pass, [B, S, V'].

    Args:
        embedded: the model's embeddings of the tokens, [B * S, H].
    """
    config = head.config.layer
    b, s = windows.tokens.shape
    batch = packed(windows.tokens)
    outputs = windows.features.reshape(b * s, -1).astype(embedded.dtype)
    feature = head.fuse(outputs)
    all_logits = []
    earlier: list[Pages] = []
    for _ in range(passes):
        # the feature of the token before each token; zeros before the first one
        previous = jnp.pad(feature.reshape(b, s, -1), ((0, 0), (1, 0), (0, 0)))[:, :s]
        previous = previous.reshape(b * s, -1)
        pages = cache.init(
            layers=1,
            blocks=b - 1,
            block_size=s,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=str(embedded.dtype),
        )
        attend = attend_over(earlier, config.attn_scale)
        feature, k, v = head.layer(embedded, previous, pages.k[0], pages.v[0], batch, attend)
        earlier.append((k, v))
        all_logits.append(head.drafted_logits(feature).reshape(b, s, -1))
    return all_logits


def loss(
    head: Eagle, model: Decoder, place: jax.Array, windows: Windows, passes: int
) -> tuple[jax.Array, jax.Array]:
    """The mean cross entropy with the model's next tokens, and for each pass the share of positions
    where the best token is the same, [passes].

    Tokens that the head does not draft are no target: a position counts as much as the targets'
    shares that are left.

    Args:
        model: its embedding is used, and not trained.
        place: the place of each token in the head's vocabulary, [V]; -1: the head does not draft
            the token.
    """
    embedded = model.embedded(packed(windows.tokens))
    places = place[windows.ids]
    shares = jnp.where(places >= 0, windows.shares, 0.0)
    positions = jnp.arange(windows.tokens.shape[1])
    total = jnp.zeros(())
    weight = 0.0
    agreement = []  # of each pass
    for i, logits in enumerate(drafts(head, embedded, windows, passes)):
        logp = jax.nn.log_softmax(logits, axis=-1)
        entropy = -(shares * jnp.take_along_axis(logp, jnp.maximum(places, 0), axis=-1)).sum(-1)
        # in a later pass, the first tokens have no draft before them
        has_draft = positions >= i
        entropy_sum = jnp.where(has_draft, entropy, 0.0).sum()
        shares_sum = jnp.where(has_draft, shares.sum(-1), 0.0).sum()
        total += PASS_DECAY**i * entropy_sum / shares_sum
        weight += PASS_DECAY**i
        agrees = (logits.argmax(-1) == places[..., 0]) & has_draft
        agreement.append(agrees.sum() / (has_draft.sum() * len(windows.tokens)))
    return total / weight, jnp.stack(agreement)
