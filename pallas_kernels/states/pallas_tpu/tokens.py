"""Numbers of tokens in pages, written and read in place: the inputs of a convolution.

A page has K D words of a token, and they lie as a key of K heads does. So the kernel that writes
keys (`kv_write/pallas_tpu.py`) writes them, and the kernel here reads the last tokens before each
row:

    piece     8 rows of a page, for every head. The tokens before a row are in two of them at most
    copies    from page to result, both in HBM: all are started, then all are awaited
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write import pallas_tpu as kv_write_tpu
from pallas_kernels.kv_write.pallas_tpu import ROWS as PIECE
from pallas_kernels.shared.tpu import pinned
from pallas_kernels.states.records import Memory, Part, Spans
from pallas_kernels.tiles import TpuTiles


def exchange(
    memory: Memory,
    words: jax.Array,
    slots: jax.Array,
    spans: Spans,
    *,
    count: int,
    tiles: TpuTiles | None = None,
    interpret: Any = False,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """See `api.Implementation`.

    Args:
        tiles, interpret: as of `implementation.run`.
    """
    arrays = list(memory.arrays)
    rows = len(spans.counts)
    first = 0
    for part in memory.tokens:
        pages = part.end - part.first
        new, places = _packed(
            words[first : first + pages], slots[first : first + pages], spans, arrays[part.array]
        )
        arrays[part.array], _ = kv_write_tpu.write(
            arrays[part.array],
            None,
            new,
            None,
            places,
            rows=rows * pages,
            tiles=tiles,
            interpret=interpret,
        )
        first += pages
    return _read(memory._replace(arrays=tuple(arrays)), spans, count, interpret)


def _head_dim(pages: jax.Array, block_size: int) -> int:
    """Words of a token in each head of a page."""
    return pages.shape[2] * pages.shape[3] // block_size


def _packed(
    words: jax.Array, slots: jax.Array, spans: Spans, pages: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of all pages as the tokens of one call, those of a page side by side and
    all padding at the end: ([pages T, K, D], slots).

    Args:
        words: [pages, T, K D].
        slots: [pages, T].
    """
    count, tokens, _ = words.shape
    used = spans.counts.sum(dtype=jnp.int32)
    place = jnp.arange(count * tokens, dtype=jnp.int32)
    page = place // jnp.maximum(used, 1)
    is_token = page < count
    token = place - page * used
    source = jnp.where(is_token & (used > 0), page * tokens + token, 0)
    places = jnp.where(is_token & (used > 0), slots.reshape(-1)[source], 0)
    new = words.reshape(count * tokens, pages.shape[1], -1)[source]
    return new, places


class Pieces(NamedTuple):
    """What is read, for scalar memory. A row of the batch has two pieces: that of the last token
    before it, and behind that the one before, if it has some of the tokens.
    """

    ids: jax.Array  # [2 * B * pages] of the pages
    row: jax.Array  # [2 * B] the first row of the piece in its page; -1: it is not read


def _read(
    memory: Memory, spans: Spans, count: int, interpret: Any
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns the page arrays as they are, so that what writes them follows, and the words
    [pages, B, count, K D] of the tokens before each row, the last one first.
    """
    array = memory.arrays[0]
    _, heads, _, lanes = array.shape
    size = memory.block_size
    tokens_of_row = lanes // _head_dim(array, size)
    piece_tokens = PIECE * tokens_of_row
    num_rows = len(spans.counts)
    distances = jnp.array([1, count], jnp.int32)
    positions = jnp.maximum(spans.positions[:, None] - distances, 0)  # [B, 2]
    numbers = positions // piece_tokens
    is_read = (spans.counts > 0) & (spans.positions > 0)
    is_other = numbers[:, 1] != numbers[:, 0]
    needed = jnp.stack([is_read, is_read & is_other], axis=1)
    row_in_page = numbers % (size // piece_tokens) * PIECE
    pages = jnp.concatenate([jnp.arange(part.first, part.end) for part in memory.tokens])
    rows = jnp.arange(num_rows)[:, None, None]
    work = Pieces(
        ids=memory.tables[pages, rows, (positions // size)[..., None]].reshape(-1),
        row=jnp.where(needed, row_in_page, -1).reshape(-1).astype(jnp.int32),
    )
    shape = len(pages), 2 * num_rows, heads, PIECE, lanes
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    shape_in_hbm = jax.ShapeDtypeStruct if interpret else pltpu.HBM
    arrays = memory.arrays
    first = len(work)
    call = pl.pallas_call(
        partial(_kernel, memory.tokens, len(arrays), num_rows),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work),
            grid=(1,),
            in_specs=[in_hbm] * len(arrays),
            out_specs=[in_hbm] * (len(arrays) + 1),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=[shape_in_hbm(a.shape, a.dtype) for a in arrays]
        + [shape_in_hbm(shape, array.dtype)],
        input_output_aliases={first + i: i for i in range(len(arrays))},
        interpret=interpret,
        name="states_tokens",
    )
    *arrays, pieces = call(*work, *pinned(*arrays, interpret=interpret))
    # [pages, B, tokens of both pieces, K D]
    by_token = pieces.reshape(len(pages), num_rows, 2, heads, PIECE, tokens_of_row, -1)
    by_token = jnp.moveaxis(by_token, 3, 5).reshape(len(pages), num_rows, 2 * piece_tokens, -1)
    positions = jnp.maximum(spans.positions[:, None] - 1 - jnp.arange(count), 0)  # [B, count]
    in_other = positions // piece_tokens != numbers[:, :1]
    place = in_other * piece_tokens + positions % piece_tokens
    return tuple(arrays), by_token[:, jnp.arange(num_rows)[:, None], place]


def _kernel(parts: tuple[Part, ...], num_arrays: int, num_rows: int, ids, row, *refs) -> None:
    arrays = refs[num_arrays : 2 * num_arrays]  # inputs and outputs are one memory
    pieces, arrived = refs[2 * num_arrays :]
    num_pages = sum(part.end - part.first for part in parts)

    def copy_pieces(act) -> None:
        def copy_piece(piece, _):
            first_row = pl.multiple_of(row[piece], PIECE)

            def copy_pages(array, before, count):
                def copy(page, _):
                    source = arrays[array].at[
                        ids[piece * num_pages + page], :, pl.ds(first_row, PIECE)
                    ]
                    act(pltpu.make_async_copy(source, pieces.at[page, piece], arrived))

                lax.fori_loop(before, before + count, copy, None)

            @pl.when(row[piece] >= 0)
            def copy():
                before = 0
                for part in parts:
                    copy_pages(part.array, before, part.end - part.first)
                    before += part.end - part.first

        lax.fori_loop(0, 2 * num_rows, copy_piece, None)

    copy_pieces(lambda copy: copy.start())
    copy_pieces(lambda copy: copy.wait())
