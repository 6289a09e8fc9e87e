"""Whole sequences without a cache: the batch of a step that computes them, and attention that reads
no pages.

The layers are those that serve. All sequences have S tokens. A shorter sequence is filled up at its
end with any tokens; its own tokens come before and do not see them. "Page" b is all keys of
sequence b, as the product gives them, so nothing is written to a cache. What a layer without
attention keeps is held in the same way (`KeptSequences` of models/mixers/mixer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax.device.attention import IMPLS, Attend, Bound, Implementation, weights_of
from pagedjax.device.batch import Batch
from pagedjax.device.cache import BlockSizes, PageShapes, init, kv_pages
from pagedjax.device.extras import Factors, TokenAdapters, WholeSequences
from pagedjax.device.models.decoder import Decoder, LayerKind


def packed(tokens: jax.Array) -> Batch:
    """Windows [B, S] as the batch of a step: B prompts, each in one block of S slots."""
    b, s = tokens.shape
    row = jnp.arange(b)
    slots = jnp.arange(b * s)
    return Batch(
        tokens=tokens.reshape(-1),
        positions=slots % s,
        slots=slots,
        block_tables=row[:, None],
        seq_lens=jnp.full(b, s),
        cu_q_lens=jnp.arange(b + 1) * s,
        last=row * s + s - 1,
        sampled_row=row,
        targets=None,
        sampling=None,  # type: ignore[arg-type]  # nothing is sampled
        extras=(WholeSequences(b, s),),
    )


def dense(
    q,
    k_pages,
    v_pages,
    *_,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """An `Attend` for `packed` windows in plain XLA, in float32. All S x S scores exist at the same
    time.
    """
    b, k, s, d = k_pages.shape
    queries, keys, values = (
        x.astype(jnp.float32) for x in (q.reshape(b, s, k, -1, d), k_pages, v_pages)
    )
    scores = scale * jnp.einsum("bskgd,bktd->bkgst", queries, keys)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    distance = jnp.arange(s)[:, None] - jnp.arange(s)
    is_seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    scores = jnp.where(is_seen, scores, -jnp.inf)
    rows = None if sinks is None else sinks.reshape(k, -1, 1)  # [K, G, S]
    weights = weights_of(scores, rows)
    return jnp.einsum("bkgst,bktd->bskgd", weights, values).reshape(q.shape).astype(q.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exact(
    options: tuple[tuple[str, Any], ...],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    *rows: jax.Array,
):
    """`exact`, with the options in a form that can be hashed."""
    invariant = IMPLS["cpu"].invariant
    assert invariant is not None
    return invariant(q, k, v, *rows, sinks=sinks, **dict(options))


def _forward(options: Any, *arrays: jax.Array) -> tuple[jax.Array, Any]:
    return _exact(options, *arrays), arrays


def _backward(options: Any, arrays: Any, cotangent: jax.Array) -> Any:
    q, k, v, sinks, *rows = arrays

    def attend(q, k, v, sinks):
        return dense(q, k, v, sinks=sinks, **dict(options))

    pull = jax.vjp(attend, q, k, v, sinks)[1]
    return *pull(cotangent), *(None for _ in rows)


_exact.defvjp(_forward, _backward)


def exact(*arrays: jax.Array, sinks: jax.Array | None = None, **options: Any) -> jax.Array:
    """An `Attend` for `packed` windows with the bits of a batch-invariant engine, and the gradient
    of `dense`.
    """
    return _exact(tuple(options.items()), *arrays[:3], sinks, *arrays[3:])


def as_pages(k_pages, v_pages, k, v, slots, *, rows: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B S, K, D] of `packed` windows as pages [B, K, S, D]; the pages' own content
    is not read.
    """
    k_rows, v_rows = (x.reshape(rows, -1, *x.shape[1:]).swapaxes(1, 2) for x in (k, v))
    return k_rows, v_rows


DENSE = Implementation("windows", dense, write=as_pages, takes_sinks=True)
EXACT = Implementation("exact windows", exact, write=as_pages, takes_sinks=True)


def attend(scale: float, *, batch_invariant: bool = False) -> Attend:
    """The attention of `packed` windows with its scale."""
    return Bound(EXACT if batch_invariant else DENSE, scale)


def hidden(
    module: Decoder,
    tokens: jax.Array,
    taps: Sequence[int] = (),
    *,
    batch_invariant: bool = False,
    adapter: Factors | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Windows [B, S] -> ([B S, H] after the final norm, [B S, H] after each of the layers `taps`).

    Args:
        adapter: the factors of an adapter that all tokens use (`factors_of_one`).
    """
    c = module.config
    b, s = tokens.shape

    def pages_of(kind: LayerKind) -> PageShapes:
        layer = c.of_kind(kind)
        sizes = BlockSizes(s, layer.kv_heads, layer.head_dim, module.dtype, layer.head_dim)
        return {} if kind.mixer else kv_pages(sizes)

    # only their shapes are used
    pages = init(
        layers=c.layers,
        blocks=b - 1,
        block_size=s,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        dtype=module.dtype,
        layer_pages=[pages_of(kind) for kind in c.kinds],
    )
    batch = packed(tokens)
    if adapter is not None:
        adapters = TokenAdapters(jnp.ones(b * s, jnp.int32), adapter)
        batch = batch._replace(extras=(*batch.extras, adapters.routed()))
    attention = attend(c.attn_scale, batch_invariant=batch_invariant)
    return module.hidden(pages, batch, attention, taps)[1:]
