"""Defines paged attention, for tests. It is short and slow.

Every query gathers its row's whole block table.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.implementation import Implementation
from pallas_kernels.paged_attention.probabilities import weights_of
from pallas_kernels.shared.page_bits import read


def paged_attention(
    q,
    k_pages,
    v_pages,
    block_tables,
    seq_lens,
    cu_q_lens,
    *,
    scale: float,
    window=None,
    soft_cap=None,
    sinks=None,
) -> jax.Array:
    """See `api.paged_attention`. It costs T * M * S of time and memory."""
    t, n, d = q.shape
    _, k, s, _ = k_pages.shape
    token = jnp.arange(t)
    row = jnp.clip(jnp.searchsorted(cu_q_lens, token, side="right") - 1, 0, seq_lens.shape[0] - 1)
    # how many context tokens a query sees, itself included
    visible = seq_lens[row] - (cu_q_lens[row + 1] - 1 - token)
    visible = jnp.where(token < cu_q_lens[-1], visible, 0)

    table = block_tables[row]  # [T, M]
    keys, values = (
        read(pages[table]).transpose(0, 2, 1, 3, 4).reshape(t, k, -1, d)
        for pages in (k_pages, v_pages)
    )
    keys = keys.astype(jnp.float32)
    values = values.astype(jnp.float32)
    grouped = q.astype(jnp.float32).reshape(t, k, n // k, d) * scale
    scores = jnp.einsum("tkgd,tkcd->tkgc", grouped, keys, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    place = jnp.arange(table.shape[1] * s)
    mask = place < visible[:, None]
    if window is not None:
        mask &= place >= visible[:, None] - window
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    sinks = None if sinks is None else sinks.reshape(k, n // k)
    weights = jnp.where(mask[:, None, None], weights_of(scores, sinks), 0.0)
    # unused slots may have a NaN of the block's earlier owner, and 0 * NaN is not 0
    values = jnp.where(mask[:, None, :, None], values, 0.0)
    out = jnp.einsum("tkgc,tkcd->tkgd", weights, values, precision="highest")
    return out.reshape(t, n, d).astype(q.dtype)


IMPLEMENTATION = Implementation("reference", paged_attention, takes_sinks=True)
