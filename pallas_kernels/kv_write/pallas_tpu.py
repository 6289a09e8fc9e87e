"""Writing keys and values in place on a TPU: a Pallas kernel for Mosaic TPU.

XLA's scatter into pages is not in place on a TPU: inside a step it needs another layout of the
whole array, and copies the array in and out in every layer. A token's numbers are also fewer than
the 8 rows that a TPU moves at least. So the kernel moves whole *pieces*, 8 rows of a page of every
head: it reads each piece that gets new tokens, fills it and writes it back.

    k [T, K, D]   -> new [I, K, 8, L]     by XLA: for piece i the tokens of its slots; other slots get any token
    grid          a block of pieces at a time: all are read, then filled, then written, then awaited
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.shared.device import device_kind
from pallas_kernels.shared.tpu import pinned
from pallas_kernels.tiles import TpuTiles

ROWS = 8  # rows of a piece; a page with fewer rows is moved whole
MAX_UNITS = 16  # most pieces in a block of the grid


class Pieces(NamedTuple):
    """The pieces that get tokens, for scalar memory: I of them, and the first `total` are real."""

    total: jax.Array  # [1]
    piece: jax.Array  # [I] the piece's number, counted through all pages
    begin: jax.Array  # [I] slots begin : end of the piece get tokens
    end: jax.Array  # [I]


def write(
    k_pages,
    v_pages,
    k,
    v,
    slots,
    *,
    rows: int,
    tiles: TpuTiles | None = None,
    interpret: Any = False,
):
    """See `api.write`. The pages are donated.

    Args:
        k_pages, v_pages: [P, K, S D / L, L], the rows of `shared.tpu.row_size`.
        slots: as in the contract, and all padding tokens have one slot.
        rows: the number of sequences, which bounds the number of pieces that are begun.
        tiles: the device's file, for the bytes of VMEM that the compiler may use; None takes that
            of the device.
        interpret: False compiles; True or pltpu.InterpretParams runs it on a CPU.
    """
    vmem_limit = (tiles or TpuTiles.of(device_kind())).vmem_limit
    pages = [k_pages] if v_pages is None else [k_pages, v_pages]
    new_tokens = [k] if v is None else [k, v]
    t, _, d = k.shape
    _, heads, height, lanes = k_pages.shape
    size = min(ROWS, height)
    piece_slots = size * (lanes // d)
    work, source = pieces(slots, piece_slots, min(t, t // piece_slots + 2 * rows + 1))

    # VMEM of a piece: its keys and values, as they were and twice as they become, because Pallas
    # copies the next block in while this one is computed
    piece_bytes = len(pages) * 3 * heads * size * lanes * k_pages.dtype.itemsize
    units = max(1, min(MAX_UNITS, len(work.piece), vmem_limit // 2 // piece_bytes))
    padding = ((0, -len(work.piece) % units), (0, 0), (0, 0), (0, 0))

    def new_pieces(x):
        """Returns [T, K, D] as [I, K, size, L]."""
        tokens = x.astype(k_pages.dtype).at[source].get(mode="promise_in_bounds")
        tokens = tokens.reshape(-1, size, lanes // d, heads, d).transpose(0, 3, 1, 2, 4)
        return jnp.pad(tokens.reshape(-1, heads, size, lanes), padding)

    new = [new_pieces(x) for x in new_tokens]
    block = pl.BlockSpec((units, heads, size, lanes), lambda i, *_: (i, 0, 0, 0))
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    scalars = len(work)
    out = jax.ShapeDtypeStruct if interpret else pltpu.HBM
    call = pl.pallas_call(
        partial(_kernel, d),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars,
            grid=(len(new[0]) // units,),
            in_specs=[*[block] * len(pages), *[in_hbm] * len(pages)],
            out_specs=[in_hbm] * len(pages),
            scratch_shapes=[
                *[pltpu.VMEM((units, heads, size, lanes), k_pages.dtype)] * len(pages),
                pltpu.SemaphoreType.DMA((units,)),
            ],
        ),
        out_shape=[out(array.shape, array.dtype) for array in pages],
        input_output_aliases={scalars + len(pages) + i: i for i in range(len(pages))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit
        ),
        interpret=interpret,
        name="paged_attention_write",
    )
    k_pages, *others = call(*work, *new, *pinned(*pages, interpret=interpret))
    return k_pages, others[0] if others else None


def pieces(slots: jax.Array, piece_slots: int, size: int) -> tuple[Pieces, jax.Array]:
    """Returns the pieces of `piece_slots` slots that get tokens, at most `size`.

    Also returns [size * piece_slots]: the index of the token of each slot. For a slot that gets no
    token it is an arbitrary index.
    """
    t = len(slots)
    piece = slots // piece_slots
    # whether a token is the first of its piece
    first = jnp.concatenate([jnp.ones(1, bool), piece[1:] != piece[:-1]])
    number = jnp.cumsum(first, dtype=jnp.int32) - 1
    token = jnp.arange(t, dtype=jnp.int32)
    begins = jnp.full(size, t, jnp.int32).at[jnp.where(first, number, size)].set(token, mode="drop")
    ends = jnp.concatenate([begins[1:], jnp.full(1, t, jnp.int32)])
    first_token = jnp.minimum(begins, t - 1)
    begin = slots[first_token] % piece_slots
    # padding tokens share a slot, so there may be more of them than slots
    end = jnp.minimum(begin + ends - begins, piece_slots)
    source = (begins - begin)[:, None] + jnp.arange(piece_slots)
    work = Pieces(number[-1:] + 1, piece[first_token], begin, end)
    return work, jnp.clip(source, 0, t - 1).reshape(-1)


def wait(copies: list[Any], phase: str) -> None:
    """Waits until the copies are done. phase: "read" or "finish", for tests that leave one out."""
    for copy in copies:
        copy.wait()


def _kernel(d: int, total, piece, begin, end, *refs) -> None:
    """Computes one block of pieces. The pages of the input and of the output are one array in HBM.

    refs: for keys, and for values if there are some, the new pieces, the pages as input and as
        output, and the old pieces; then the semaphores. In VMEM pieces are [units, K, size, L].
    """
    *of_arrays, semaphores = refs
    n = len(of_arrays) // 4
    new, _, pages, old = (of_arrays[i * n : (i + 1) * n] for i in range(4))
    arrays = list(zip(pages, old, new, strict=True))
    units, _, size, lanes = old[0].shape
    start = pl.program_id(0) * units
    count = lax.clamp(0, total[0] - start, units)

    def place(pages, i):
        page_pieces = pages.shape[2] // size
        row = pl.multiple_of(lax.rem(piece[start + i], jnp.int32(page_pieces)) * size, size)
        return pages.at[piece[start + i] // page_pieces, :, pl.ds(row, size)]

    def reads(i):
        return [
            pltpu.make_async_copy(place(pages, i), old.at[i], semaphores.at[i])
            for pages, old, _ in arrays
        ]

    def writes(i):
        return [
            pltpu.make_async_copy(old.at[i], place(pages, i), semaphores.at[i])
            for pages, old, _ in arrays
        ]

    def read(i, _):
        for copy in reads(i):
            copy.start()

    def fill(i, _):
        wait(reads(i), "read")
        row, lane = (lax.broadcasted_iota(jnp.int32, (size, lanes), axis) for axis in (0, 1))
        slot = row * (lanes // d) + lane // d
        is_new = (slot >= begin[start + i]) & (slot < end[start + i])
        for _, old, new in arrays:
            numbers = jnp.where(is_new, new[i].astype(jnp.float32), old[i].astype(jnp.float32))
            old[i] = numbers.astype(old.dtype)
        for copy in writes(i):
            copy.start()

    def finish(i, _):
        wait(writes(i), "finish")

    for act in (read, fill, finish):
        lax.fori_loop(0, count, act, None)
