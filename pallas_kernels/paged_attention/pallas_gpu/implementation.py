"""Paged attention on NVIDIA GPUs of the Hopper generation (sm_90a): Pallas kernels.

Mosaic GPU compiles them. A row with one query token goes to `decode.py`. So does a short row, of 2
to 4 or of 5 to 8 query tokens, with more columns. All other rows go to `chunks.py`, or to
`overlapped.py` by the implementation OVERLAPPED, which no GPU has run. Every call runs all programs
that its tokens can need, because only the device knows the rows' lengths. A call without cu_q_lens
has only decodes, and runs only the decode kernel. All kernels read pages in place, multiply numbers
of 16 bits and add in float32.

Latents have a kernel of their own, `latents.py`, for single query tokens. The tokens of longer rows
are computed by it one by one. Rows of at least `Latent.expands_from` tokens, of the model, are
computed by `expanded.py` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.implementation import Implementation, Latents
from pallas_kernels.paged_attention.rows import (
    sizes_of_short_rows,
    slot_queries,
    slots_of,
    with_results,
)
from pallas_kernels.shared.device import device_kind
from pallas_kernels.shared.hopper import JAX_NEEDED as JAX_NEEDED
from pallas_kernels.shared.hopper import old_jax, wrong_device
from pallas_kernels.tiles import Tiles

DTYPES = ("bfloat16", "float16")
HEAD_SIZES = (64, 128)
BLOCK_SIZES = (8, 16, 32, 64, 128)
MAX_GROUP = 16  # query heads of a key head
# Query heads times query tokens of a short row: with more, its sums do not fit in registers.
MAX_COLUMNS = 64
LATENT = (512, 576)  # numbers of a latent, and with the rotated key


def paged_attention(
    q,
    k_pages,
    v_pages,
    block_tables,
    seq_lens,
    cu_q_lens,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    short_rows: bool = True,
    overlapped: bool = False,
    in_place: bool = False,
    tiles: Tiles | None = None,
) -> jax.Array:
    """See `api.paged_attention`. NaN in pages and slots outside all contexts does not spread.

    Args:
        window: a query sees the last `window` tokens up to itself; None is all.
        soft_cap: scores x become soft_cap * tanh(x / soft_cap) before the softmax (Gemma 2).
        sinks: [N] float32, a score of each query head that joins its softmax; None: there are none.
        short_rows: True: rows of 2 to 8 tokens have programs of their own, which run in every mixed
            step. False: these rows are chunks. Without drafts to verify such rows are rare: they
            are the ends of prompts.
        overlapped: chunks are computed by `overlapped.py`.
        in_place: decodes of a call without cu_q_lens read their queries from q, if they can. A
            padded copy would be a launch of its own, unless XLA makes it where it computes q.
        tiles: sizes of the kernels; None takes those of the device.

    Raises:
        ValueError: `shape_obstacle` gives a reason.
    """
    t, n, d = q.shape
    _, heads, s, _ = k_pages.shape
    reason = shape_obstacle(str(k_pages.dtype), d, s, n // heads)
    if not reason and v_pages.dtype != k_pages.dtype:
        reason = (
            "needs k_pages and v_pages of one dtype, "
            f"and they are {k_pages.dtype} and {v_pages.dtype}"
        )
    if reason:
        name = OVERLAPPED.name if overlapped else IMPLEMENTATION.name
        raise ValueError(f"impl {name!r} {reason}; impl 'xla' has no such limit")

    from pallas_kernels.paged_attention.pallas_gpu import decode  # it imports Mosaic GPU

    tiles = tiles or Tiles.of(device_kind())
    pages = (k_pages, v_pages, block_tables)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    if cu_q_lens is None:  # one launch
        return decode.decode(q, *pages, seq_lens, tiles=tiles, in_place=in_place, **options)
    first = cu_q_lens[:-1]
    q_lens = jnp.diff(cu_q_lens)
    single = q_lens == 1
    rows = q[jnp.minimum(first, t - 1)]
    decoded = decode.decode(rows, *pages, jnp.where(single, seq_lens, 0), tiles=tiles, **options)
    out = jnp.zeros_like(q)
    shorts = sizes_of_short_rows(t, MAX_COLUMNS // (n // heads)) if short_rows else []
    # the most query tokens of a row that is no chunk
    longest = max((size for _, size in shorts), default=1)
    if t > longest:
        chunk_lens = jnp.where(q_lens <= longest, 0, q_lens)
        attend_chunks = _chunk_kernel(overlapped, tiles)
        out = attend_chunks(q, *pages, seq_lens, first, chunk_lens, **options)
    for fewest, size in shorts:
        chosen = (q_lens >= fewest) & (q_lens <= size)
        row, begin, number = slots_of(chosen, cu_q_lens, min(len(seq_lens), t // fewest))
        queries = slot_queries(q, begin, size)
        results = decode.decode_short(
            queries, *pages, seq_lens, row, number, tiles=tiles, **options
        )
        out = with_results(out, results, begin, number)
    return out.at[jnp.where(single, first, t)].set(decoded, mode="drop")


def _chunk_kernel(overlapped: bool, tiles: Tiles) -> Callable[..., jax.Array]:
    """Returns the function that computes chunks. Its module imports Mosaic GPU."""
    if overlapped:
        from pallas_kernels.paged_attention.pallas_gpu.overlapped import chunks

        return chunks
    from pallas_kernels.paged_attention.pallas_gpu.chunks import chunks

    return partial(chunks, tiles=tiles)


def latent_attention(
    q,
    pages,
    block_tables,
    seq_lens,
    cu_q_lens,
    *,
    rank: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    tiles: Tiles | None = None,
) -> jax.Array:
    """See `api.latent_attention`. NaN in slots outside all contexts does not spread.

    Args:
        tiles: as of `paged_attention`.

    Raises:
        ValueError: `latent_shape_obstacle` gives a reason.
    """
    t, _, row = q.shape
    if reason := latent_shape_obstacle(str(pages.dtype), rank, row, pages.shape[2]):
        raise ValueError(f"impl 'pallas_gpu' {reason}; impl 'xla' has no such limit")

    from pallas_kernels.paged_attention.pallas_gpu import latents  # it imports Mosaic GPU

    options = {"rank": rank, "scale": scale, "window": window, "soft_cap": soft_cap}
    attend = partial(latents.attend, tiles=tiles or Tiles.of(device_kind()), **options)
    rows = jnp.arange(len(seq_lens), dtype=jnp.int32)
    if cu_q_lens is None:  # one launch
        return attend(q, pages, block_tables, seq_lens, rows)
    first = cu_q_lens[:-1]
    single = jnp.diff(cu_q_lens) == 1
    queries = q[jnp.minimum(first, t - 1)]
    decoded = attend(queries, pages, block_tables, jnp.where(single, seq_lens, 0), rows)
    token = jnp.arange(t, dtype=jnp.int32)
    row_of = jnp.minimum((token[:, None] >= cu_q_lens[1:]).sum(1, dtype=jnp.int32), rows[-1])
    visible = seq_lens[row_of] - (cu_q_lens[row_of + 1] - 1 - token)
    is_other = (token < cu_q_lens[-1]) & ~single[row_of]
    lengths = jnp.where(is_other, jnp.maximum(visible, 0), 0)
    out = attend(q, pages, block_tables, lengths, row_of)
    return out.at[jnp.where(single, first, t)].set(decoded, mode="drop")


def rotate_and_write(
    *arrays: jax.Array, queries: int
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """See `kv_write.api.rotate_and_write`."""
    from pallas_kernels.kv_write import pallas_gpu  # it imports Mosaic GPU

    return pallas_gpu.rotate_and_write(*arrays, queries=queries)


def dtype_obstacle(dtype: str) -> str:
    """Returns why this JAX, or pages of a dtype, cannot be used; empty if they can."""
    if reason := old_jax():
        return reason
    if dtype in DTYPES:
        return ""
    return f"reads pages of {' or '.join(DTYPES)} and not of {dtype}"


def block_obstacle(block_size: int) -> str:
    """Returns why blocks of so many tokens cannot be read; empty if they can."""
    if block_size in BLOCK_SIZES:
        return ""
    return f"needs blocks of {', '.join(map(str, BLOCK_SIZES))} tokens, and they have {block_size}"


def shape_obstacle(dtype: str, head_size: int, block_size: int, group: int) -> str:
    """Returns why the kernels cannot take a shape, as the rest of a sentence; empty if they can."""
    if reason := dtype_obstacle(dtype):
        return reason
    if head_size not in HEAD_SIZES:
        return f"needs a head size of {' or '.join(map(str, HEAD_SIZES))}, and it is {head_size}"
    if reason := block_obstacle(block_size):
        return reason
    if group > MAX_GROUP:
        return f"takes at most {MAX_GROUP} query heads for each key head, and there are {group}"
    return ""


def latent_shape_obstacle(dtype: str, rank: int, row: int, block_size: int) -> str:
    """As `shape_obstacle`, for pages of latents of `rank` numbers in rows of `row`."""
    if reason := dtype_obstacle(dtype):
        return reason
    if (rank, row) != LATENT:
        return (
            f"reads latents of {LATENT[0]} numbers in rows of {LATENT[1]}, and they have {rank} "
            f"in rows of {row}"
        )
    return block_obstacle(block_size)


def latent_obstacle(
    device: Any,
    *,
    dtype: str,
    query_dtype: str,
    head_dim: int,
    block_size: int,
    kv_heads: int,
    heads: int,
    rank: int,
) -> str:
    """See `implementation.Latents`."""
    reason = wrong_device(device) or latent_shape_obstacle(dtype, rank, head_dim, block_size)
    if not reason and dtype != query_dtype:
        reason = f"reads latents of the queries' dtype, and they are {dtype} and {query_dtype}"
    return reason


def obstacle(
    device: Any,
    *,
    dtype: str,
    query_dtype: str,
    head_dim: int,
    block_size: int,
    kv_heads: int,
    heads: int,
) -> str:
    """See `Implementation`."""
    reason = wrong_device(device) or shape_obstacle(dtype, head_dim, block_size, heads // kv_heads)
    if not reason and dtype != query_dtype:
        reason = (
            f"reads keys and values of the queries' dtype, and they are {dtype} and {query_dtype}"
        )
    return reason


IMPLEMENTATION = Implementation(
    "pallas_gpu",
    paged_attention,
    obstacle,
    without_drafts=partial(paged_attention, short_rows=False),
    latents=Latents(latent_attention, latent_obstacle, lambda numbers: numbers),
    decodes_alone=True,
    takes_sinks=True,
)
# It is the same implementation but for prompts, whose kernel no GPU has run. Latents have no such
# kernel, and so are refused.
OVERLAPPED = IMPLEMENTATION._replace(
    name="pallas_gpu_overlapped",
    attend=partial(paged_attention, overlapped=True),
    without_drafts=partial(paged_attention, short_rows=False, overlapped=True),
    latents=None,
)
# It is the same implementation but for the kernel that rotates and writes, which no GPU has run.
# Its queries are the kernel's, so XLA does not pad them in passing.
FUSED = IMPLEMENTATION._replace(
    name="pallas_gpu_fused",
    attend=partial(paged_attention, in_place=True),
    without_drafts=partial(paged_attention, short_rows=False, in_place=True),
    rotate_and_write=rotate_and_write,
)
