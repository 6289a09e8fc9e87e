"""The record of an implementation of paged attention: all that an engine needs to know about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels.kv_write import xla as kv_write_xla
from pallas_kernels.kv_write.api import RotateAndWrite, Write
from pallas_kernels.shared.page_bits import BITS


def _no_obstacle(device: Any, **sizes: Any) -> str:
    return ""


def _one_token(head_dim: int) -> int:
    return head_dim


def _page_dtype(dtype: str) -> str:
    return BITS[dtype] if dtype == "float8_e4m3fn" else dtype


def _nothing(**facts: Any) -> None:
    pass


class Latents(NamedTuple):
    """How an implementation reads pages of latents by a kernel of its own: a row of each token is
    its key for all heads, and the row's first numbers are its value (expanded.py).

    attend: (q, pages, block_tables, seq_lens, cu_q_lens, *, rank, scale, window, soft_cap) ->
        [T, N, rank], the contract of `api.latent_attention`.
    obstacle: as that of `Implementation`, with the keyword `rank`. `head_dim` is the numbers that
        are kept of a token.
    page_row: numbers that are kept of a token -> those of its row in a page, which ends with zeros.
    """

    attend: Callable[..., jax.Array]
    obstacle: Callable[..., str]
    page_row: Callable[[int], int]


class Implementation(NamedTuple):
    """An implementation of paged attention.

    name: its name in error messages and in `api.IMPLS`.
    attend: (q, k_pages, v_pages, block_tables, seq_lens, cu_q_lens, *, scale, window, soft_cap) ->
        [T, N, D], the contract of `api.paged_attention`. Pages come in rows of `page_row(D)`
        numbers. It gets `sinks` too where there are some, if it takes them.
    obstacle: (device, *, dtype, query_dtype, head_dim, block_size, kv_heads, heads) -> the reason
        why it cannot serve such a cache on the device, as the rest of a sentence; empty if it can.
        `dtype` is that of the keys and values.
    page_row: head_dim -> the numbers in a row of a page, a multiple of head_dim.
    write: writes new keys and values into the pages, the contract of `kv_write.api.write`.
    rotate_and_write: rotates queries and keys and writes keys and values, the contract of
        `kv_write.api.rotate_and_write`, for layers whose heads need nothing else; None: it is done
        in steps, and ends with `write`.
    prepare: (*, dtype, query_dtype, invariant) -> None. Starts work that is needed once in a
        process, before any tracing. `dtype` is that of the keys and values. invariant: whether the
        engine is batch-invariant.
    page_dtype: dtype of the keys and values -> dtype of the pages: the same, or integers of their
        bits, for an implementation that reads both.
    invariant: as `attend`, for batch-invariant engines: the result of a query token has the same
        bits beside any other rows, in any chunk, with any block size and number of threads. None:
        it has no such form.
    without_drafts: as `attend`, for engines that verify no drafts. Few of their rows have 2 to 8
        query tokens. None: `attend` serves them too.
    decodes_alone: whether `attend` takes None for cu_q_lens, and is faster for it. Engines then
        have programs for steps of decodes alone, beside those of mixed steps. For others,
        `api.paged_attention` makes `cu_q_lens`.
    pages: (shape, dtype) -> zeros for the pages of a cache, on the default device; None: jax.numpy
        makes them.
    probabilities: returns the weights of the values for some heads of single queries, the contract
        of `probabilities.probabilities`; None: it has no such function. All implementations in
        `api.IMPLS` have the same function.
    expanded: computes long chunks over pages of latents, the contract of `expanded.expanded`; None:
        `attend` computes them too.
    latents: its kernel for pages of latents; None: `attend` gets them as keys and as values.
    takes_sinks: whether `attend` and its other forms take the keyword `sinks`, [N] float32.
    """

    name: str
    attend: Callable[..., jax.Array]
    obstacle: Callable[..., str] = _no_obstacle
    page_row: Callable[[int], int] = _one_token
    write: Write = kv_write_xla.write
    rotate_and_write: RotateAndWrite | None = None
    prepare: Callable[..., None] = _nothing
    page_dtype: Callable[[str], str] = _page_dtype
    invariant: Callable[..., jax.Array] | None = None
    without_drafts: Callable[..., jax.Array] | None = None
    decodes_alone: bool = False
    pages: Callable[..., jax.Array] | None = None
    probabilities: Callable[..., jax.Array] | None = None
    expanded: Callable[..., jax.Array] | None = None
    latents: Latents | None = None
    takes_sinks: bool = False
