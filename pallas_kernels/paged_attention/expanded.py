"""Prompt chunks over pages of latents (Multi-head Latent Attention, DeepSeek-AI 2024, arXiv
2405.04434), in plain XLA.

A page has one row of Z + J numbers a token: a latent of Z, from which each head makes a key of E
numbers and a value of U, and a rotated key of J that all heads share. A decode takes the matrix of
the keys into its query, and that of the values into its result, so it reads the rows as they are
(`api.paged_attention` with one key head, and the rows as keys and as values). A long chunk makes
keys and values of each span of its context instead, once for `TILE` queries. Multiplications of a
head, for n queries and a context token:

    absorbed    n (2 Z + 2 J)
    expanded    n (E + J + U) + Z (E + U)
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.xla import Spans, chunks, product, tile_of

TILE = 512  # query tokens for which a span of the context is expanded once


class Expansion(NamedTuple):
    """The matrices that make keys and values of latents.

    keys: [N, E, Z].
    values: [N, U, Z].
    """

    keys: jax.Array
    values: jax.Array


def expanded(
    q,
    pages,
    expansion: Expansion,
    block_tables,
    seq_lens,
    cu_q_lens,
    chunk_lens,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Computes the attention of the chunks of some rows.

    Args:
        q: [T, N, E + J] packed query tokens.
        pages: [P, 1, S, R] latents and rotated keys, with those of the query tokens. R is Z + J, or
            more: the rest of a row is not used.
        chunk_lens: [B] int32: the query tokens of a row, or 0 to leave the row out.
        block_tables, seq_lens, cu_q_lens, scale, window, soft_cap: as of `api.paged_attention`.

    Returns:
        [T, N, U] in q's dtype; zeros for tokens of other rows.
    """
    latent_size = expansion.keys.shape[2]
    rotated = q.shape[2] - expansion.keys.shape[1]

    def keys_and_values(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = tile_of(pages, ids, q.dtype)[0, 0]  # [span, Z + J]
        latents = tokens[:, :latent_size]
        keys = product("cz,nez->nce", latents, expansion.keys).astype(q.dtype)
        shared = jnp.broadcast_to(
            tokens[:, latent_size : latent_size + rotated], (*keys.shape[:2], rotated)
        )
        values = product("cz,nuz->ncu", latents, expansion.values).astype(q.dtype)
        return jnp.concatenate([keys, shared], axis=-1), values

    spans = Spans(keys_and_values, pages.shape[2], expansion.values.shape[1])
    queries = (q.astype(jnp.float32) * scale).astype(q.dtype)[:, :, None]
    out = chunks(
        queries,
        spans,
        block_tables,
        seq_lens,
        cu_q_lens,
        chunk_lens,
        window=window,
        soft_cap=soft_cap,
        tile=TILE,
    )
    return out[:, :, 0].astype(q.dtype)
