"""Paged attention on TPUs: one Pallas kernel (`kernel.py`), compiled in up to four sizes a call.

    decode    a row with one query token is one tile
    short4    a row of 2 to 4 query tokens is one tile: a decode with drafts to verify
    short8    a row of 5 to 8 query tokens is one tile
    chunks    all other rows are cut at multiples of the tile's size, counted from the call's first token. So queries
              need not be gathered, and a tile may have the end of one row and the beginning of the next

Each pair of a tile and a row is an *item* of the kernel's work. A call runs all sizes that its
tokens can need, because only the device knows the rows' lengths.

Where D is below 128, pages are read as rows of 128 numbers, [P, K, S * D / 128, 128]: the same
bytes in the same order, which a TPU stores without padding. A cache in this layout is used in
place. A cache in another layout is copied, which on a TPU is a pass over all of it.

Latents have one key head and a row of `whole_rows(Z + J)` numbers a token, which is read once as
key and as value. A row of at least `Latent.expands_from` query tokens, of the model, is computed by
`expanded.py` instead.

No TPU has run this yet. The compiler (`pallas_kernels.aot`) and interpretation on a CPU show what
the kernel computes, that it reads nothing before it has arrived, and that it compiles for TPUs from
v4 to 7x.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import pallas_tpu as kv_write_tpu
from pallas_kernels.paged_attention.implementation import Implementation, Latents
from pallas_kernels.paged_attention.pallas_tpu.kernel import Scores, Sizes, Work, attend, vmem_bytes
from pallas_kernels.paged_attention.rows import (
    SHORT,
    sizes_of_short_rows,
    slot_queries,
    slots_of,
    with_results,
)
from pallas_kernels.shared.device import device_kind
from pallas_kernels.shared.tpu import LANES, row_size, whole_rows, wrong_device
from pallas_kernels.tiles import TpuTiles

DTYPES = ("bfloat16", "float32")
HEAD_SIZES = (64, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
MAX_GROUP = 32  # query heads of a key head
LATENT = (512, 576)  # numbers of a latent, and with the rotated key
MAX_LATENT_HEADS = 128
# Query heads of a key head times query tokens of a short row, times bytes of a number. With more
# the tile does not fit in VMEM.
MAX_SHORT_BYTES = 1024
MIN_TOKENS = 16  # query tokens of a chunk's tile: a register of 16-bit numbers has 16 rows
# Bytes of scalar memory for block tables and items; the compiler needs the rest
SMEM = 2**20 - 2**17


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
    tiles: TpuTiles | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `api.paged_attention`. NaN in pages and slots outside all contexts does not spread.

    Args:
        k_pages, v_pages: [P, K, S, D], or the same numbers in rows of several tokens (`row_size`).
        tiles: sizes of the kernels; None takes those of the device.
        interpret: False compiles; True or pltpu.InterpretParams runs it on a CPU.

    Raises:
        ValueError: `shape_obstacle` or `scalar_memory_obstacle` gives a reason.
    """
    _, n, d = q.shape
    heads = k_pages.shape[1]
    s = k_pages.shape[2] * k_pages.shape[3] // d
    b, width = block_tables.shape
    reason = shape_obstacle(
        str(k_pages.dtype), d, s, n // heads, interpret=bool(interpret)
    ) or scalar_memory_obstacle(b, width)
    if not reason and v_pages.dtype != k_pages.dtype:
        reason = (
            "needs k_pages and v_pages of one dtype, "
            f"and they are {k_pages.dtype} and {v_pages.dtype}"
        )
    if reason:
        raise ValueError(f"impl 'pallas_tpu' {reason}; impl 'xla' has no such limit")
    lanes = row_size(d)
    k_pages, v_pages = (
        pages.reshape(pages.shape[0], heads, -1, lanes) for pages in (k_pages, v_pages)
    )
    shape = Shape(
        heads=heads,
        group=n // heads,
        d=d,
        s=s,
        itemsize=k_pages.dtype.itemsize,
        query_itemsize=q.dtype.itemsize,
        has_sinks=sinks is not None,
    )
    scores = Scores(scale, window, soft_cap, has_sinks=sinks is not None)
    tiles = tiles or TpuTiles.of(device_kind())
    call = Call(k_pages, v_pages, block_tables, shape, scores, tiles, interpret, sinks)
    return _of_all_rows(call, q, seq_lens, cu_q_lens)


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
    tiles: TpuTiles | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `api.latent_attention`. NaN in slots outside all contexts does not spread.

    Args:
        q: [T, N, L].
        pages: [P, 1, S, L], L a multiple of 128 (`whole_rows`).
        tiles, interpret: as of `paged_attention`.

    Raises:
        ValueError: `latent_shape_obstacle` or `scalar_memory_obstacle` gives a reason.
    """
    _, n, row = q.shape
    s = pages.shape[2]
    reason = latent_shape_obstacle(
        str(pages.dtype), rank, row, s, n, interpret=bool(interpret)
    ) or scalar_memory_obstacle(*block_tables.shape)
    if reason:
        raise ValueError(f"impl 'pallas_tpu' {reason}; impl 'xla' has no such limit")
    shape = Shape(
        heads=1,
        group=n,
        d=row,
        s=s,
        itemsize=pages.dtype.itemsize,
        query_itemsize=q.dtype.itemsize,
        values=whole_rows(rank),
    )
    scores = Scores(scale, window, soft_cap)
    tiles = tiles or TpuTiles.of(device_kind())
    call = Call(pages, None, block_tables, shape, scores, tiles, interpret)
    return _of_all_rows(call, q, seq_lens, cu_q_lens)[..., :rank]


def _of_all_rows(call: Call, q: jax.Array, seq_lens: jax.Array, cu_q_lens: jax.Array) -> jax.Array:
    """Computes the attention of q [T, N, D] by the kernels of all lengths of rows: [T, N, V]."""
    t, n, _ = q.shape
    b = len(seq_lens)
    longest = call.shape.longest_short
    q_lens = jnp.diff(cu_q_lens)
    first = cu_q_lens[:-1]
    single = (q_lens == 1) & (seq_lens > 0)
    decoded = decode(call, q[jnp.minimum(first, t - 1)], jnp.where(single, seq_lens, 0))
    # also the result of padding; `chunks` gives zeros there too
    out = jnp.zeros((t, n, call.shape.result), q.dtype)
    has_several = (q_lens > 1) & (seq_lens >= q_lens)
    if t > longest:
        out = chunks(call, q, seq_lens, cu_q_lens, has_several & (q_lens > longest))
    for fewest, size in sizes_of_short_rows(t, max_size=longest):
        row, begin, number = slots_of(
            has_several & (q_lens >= fewest) & (q_lens <= size), cu_q_lens, min(b, t // fewest)
        )
        results = short(call, slot_queries(q, begin, size), seq_lens, row, number)
        out = with_results(out, results, begin, number)
    # the index t, of rows that are no decodes, is dropped
    return out.at[jnp.where(single, first, t)].set(decoded, mode="drop")


class Call(NamedTuple):
    """The arguments that all kernels of a call share."""

    k_pages: jax.Array  # [P, K, S * D / lanes, lanes]; lanes: `row_size`
    v_pages: jax.Array | None  # None: latents
    block_tables: jax.Array  # [B, M]
    shape: Shape
    scores: Scores
    tiles: TpuTiles
    interpret: Any
    sinks: jax.Array | None = None  # [N]

    def __call__(self, q: jax.Array, work: Work, sizes: Sizes) -> jax.Array:
        sinks = None
        if self.sinks is not None:
            sinks = sink_rows(self.sinks, self.shape, sizes.tokens, q.shape[3] // sizes.streams)
        return attend(
            q,
            self.k_pages,
            self.v_pages,
            self.block_tables.reshape(-1),
            work,
            sizes,
            self.scores,
            sinks,
            width=self.block_tables.shape[1],
            vmem_limit=self.tiles.vmem_limit,
            interpret=self.interpret,
        )


def decode(call: Call, q: jax.Array, seq_lens: jax.Array) -> jax.Array:
    """Computes the attention of q [B, N, D]: the last token of each row's context.

    Returns [B, N, V]; undefined where seq_lens [B] is 0.
    """
    b, n, d = q.shape
    shape = call.shape
    result = shape.result
    sizes = decode_sizes(shape, call.tiles)
    tiles = decode_tiles(q.reshape(b, shape.heads, shape.group, d), sizes)
    out = call(tiles, decode_work(seq_lens, sizes, call.scores.window), sizes)
    return out.reshape(-1, *out.shape[2:])[:b, :, : shape.group, :result].reshape(b, n, result)


def short(
    call: Call, q: jax.Array, seq_lens: jax.Array, row: jax.Array, number: jax.Array
) -> jax.Array:
    """Computes the attention of short rows, q [slots, Q, N, D]: Q is the size of a tile.

    The first number[i] tokens of q[i] are the last tokens of the context of row[i]. A slot whose
    number is 0 is unused. Returns [slots, Q, N, V]; undefined for all other tokens.
    """
    slots, queries, n, d = q.shape
    shape = call.shape
    result = shape.result
    sizes = decode_sizes(shape, call.tiles, queries)
    rows = shape.group * queries
    grouped = q.reshape(slots, queries, shape.heads, shape.group, d).transpose(0, 2, 3, 1, 4)
    tiles = decode_tiles(grouped.reshape(slots, shape.heads, rows, d), sizes)
    out = call(tiles, short_work(seq_lens, row, number, sizes, call.scores.window), sizes)
    out = out.reshape(-1, *out.shape[2:])[:slots, :, :rows, :result].reshape(
        slots, shape.heads, shape.group, queries, result
    )
    return out.transpose(0, 3, 1, 2, 4).reshape(slots, queries, n, result)


def chunks(
    call: Call, q: jax.Array, seq_lens: jax.Array, cu_q_lens: jax.Array, chosen: jax.Array
) -> jax.Array:
    """Computes the attention of q [T, N, D] for the rows that are `chosen` [B].

    Returns [T, N, V]; zeros for all other tokens.
    """
    t, n, d = q.shape
    shape = call.shape
    sizes = chunk_sizes(shape, call.tiles)
    work = chunk_work(chosen, seq_lens, cu_q_lens, t, sizes, call.scores.window)
    out = call(chunk_tiles(q.reshape(t, shape.heads, shape.group, d), sizes), work, sizes)
    return chunk_results(out, t, n, shape.result, sizes.tokens)


class Shape(NamedTuple):
    """The numbers that decide the sizes of a kernel."""

    heads: int  # key heads
    group: int  # query heads of each key head
    d: int  # head size, or numbers of a row of latents
    s: int  # token slots of a page
    itemsize: int  # bytes of a number of pages
    query_itemsize: int
    has_sinks: bool = False
    values: int | None = None  # of latents, see `Sizes`

    @property
    def streams(self) -> int:
        """Tokens side by side in one row of a page; each is a stream (see `kernel.py`)."""
        return row_size(self.d) // self.d

    @property
    def result(self) -> int:
        """V, the numbers of a query head's result."""
        return self.values or self.d

    @property
    def token_bytes(self) -> int:
        """Bytes of a context token."""
        arrays = 2 if self.values is None else 1
        return arrays * self.heads * self.d * self.itemsize

    @property
    def longest_short(self) -> int:
        """The most query tokens of a row that has a tile of its own."""
        head_bytes = self.group * max(self.itemsize, self.query_itemsize)
        return max([size for size in SHORT if head_bytes * size <= MAX_SHORT_BYTES], default=1)

    @property
    def min_tokens(self) -> int:
        """The fewest query tokens of a chunk's tile. Latents have so many query heads of a key
        head that fewer tokens fill whole registers.
        """
        if self.values is None:
            return MIN_TOKENS
        return MIN_TOKENS // math.gcd(MIN_TOKENS, self.group)


# --- queries as tiles -----------------------------------------------------------------------------
# In shapes, L is the lanes of a row of a page, and U the tiles of a bundle (see `kernel.py`).


def streams_of(q: jax.Array, streams: int) -> jax.Array:
    """Returns queries [..., R, D] as [..., streams * R, streams * D]: a copy for each stream.

    The copy of a stream has the queries in the lanes of that stream's token, and zeros in the other
    lanes.
    """
    *front, rows, d = q.shape
    eye = jnp.eye(streams, dtype=q.dtype)
    # by default a TPU rounds q to bfloat16
    wide = jnp.einsum("...rd,xy->...xryd", q, eye, precision="highest")
    return wide.reshape(*front, streams * rows, streams * d)


def decode_tiles(q: jax.Array, sizes: Sizes) -> jax.Array:
    """Returns queries [B, K, G * Q, D] as tiles [bundles, U, K, R, L], R as in `chunk_tiles`.

    R is padded to a multiple of 8, the rows of a register.
    """
    b, _, rows, _ = q.shape
    padded = jnp.pad(q, ((0, -b % sizes.units), (0, 0), (0, -rows % 8), (0, 0)))
    wide = streams_of(padded, sizes.streams)
    return wide.reshape(-1, sizes.units, *wide.shape[1:])


def chunk_tiles(q: jax.Array, sizes: Sizes) -> jax.Array:
    """Returns queries [T, K, G, D] as tiles [tiles, 1, K, R, L].

    R is in the order (stream, query head, token).
    """
    t, heads, group, d = q.shape
    padded = jnp.pad(q, ((0, -t % sizes.tokens), (0, 0), (0, 0), (0, 0)))
    tiled = padded.reshape(-1, sizes.tokens, heads, group, d).transpose(0, 2, 3, 1, 4)
    return streams_of(tiled.reshape(-1, heads, group * sizes.tokens, d), sizes.streams)[:, None]


def sink_rows(sinks: jax.Array, shape: Shape, tokens: int, rows: int) -> jax.Array:
    """Returns sinks [N] for the rows of a tile's results, [K, `rows`]: (query head, token) pairs,
    and padding.
    """
    of_rows = jnp.repeat(sinks.reshape(shape.heads, shape.group), tokens, axis=1)
    return jnp.pad(of_rows, ((0, 0), (0, rows - of_rows.shape[1])))


def chunk_results(out: jax.Array, t: int, n: int, d: int, tokens: int) -> jax.Array:
    """Returns the results of tiles [tiles, 1, K, G * tokens, L] as [T, N, D]."""
    tiles, _, heads, _, lanes = out.shape
    tiled = out.reshape(tiles, heads, n // heads, tokens, lanes)[..., :d].transpose(0, 3, 1, 2, 4)
    return tiled.reshape(-1, n, d)[:t]


# --- sizes and items ------------------------------------------------------------------------------


def _power_of_two(limit: int) -> int:
    """Returns the largest power of two that is at most `limit`; 1 if that is 0."""
    return 1 << max(0, limit.bit_length() - 1)


def decode_sizes(shape: Shape, tiles: TpuTiles, queries: int = 1) -> Sizes:
    """Returns the sizes for tiles of `queries` tokens: decodes (1) or short rows.

    The context tokens of a step are the power of two that fits in `decode_step` bytes, between the
    bounds of `tiles`.
    """
    tokens = tiles.decode_step // shape.token_bytes
    span = max(tiles.shortest_span, min(tiles.longest_span, _power_of_two(tokens)))
    sizes = Sizes(
        units=tiles.decode_units,
        tokens=queries,
        streams=shape.streams,
        block_size=shape.s,
        span=max(span, shape.s),
        stages=tiles.decode_stages,
        kernel="decode" if queries == 1 else f"short{queries}",
        values=shape.values,
    )
    return sizes_that_fit(shape, sizes, tiles.vmem_limit)


def chunk_sizes(shape: Shape, tiles: TpuTiles) -> Sizes:
    """Returns sizes whose tiles have `chunk_rows` rows for each key head."""
    sizes = Sizes(
        units=1,
        tokens=max(shape.min_tokens, _power_of_two(tiles.chunk_rows // shape.group)),
        streams=shape.streams,
        block_size=shape.s,
        span=max(tiles.chunk_span, shape.s),
        stages=tiles.chunk_stages,
        kernel="chunks",
        values=shape.values,
    )
    return sizes_that_fit(shape, sizes, tiles.vmem_limit)


def sizes_that_fit(shape: Shape, sizes: Sizes, limit: int) -> Sizes:
    """Returns sizes that fit in VMEM. They are halved one after the other, down to their minima.

    Shapes with many key heads need this. If even the minima do not fit, the compiler refuses the
    kernel.
    """
    span = max(LANES, shape.s)
    tokens = min(sizes.tokens, shape.min_tokens)
    for field, minimum in (
        ("span", 2 * span),
        ("units", 1),
        ("tokens", 2 * tokens),
        ("span", span),
        ("tokens", tokens),
    ):
        while vmem(shape, sizes) > limit and getattr(sizes, field) > minimum:
            halved = {field: getattr(sizes, field) // 2}
            sizes = sizes._replace(**halved)
    return sizes


def vmem(shape: Shape, sizes: Sizes) -> int:
    """Returns the bytes of VMEM that a kernel needs.

    They hold its ring, its running sums, queries and results.
    """
    rows = -(-shape.group * sizes.tokens // 8) * 8
    q_shape = (1, sizes.units, shape.heads, sizes.streams * rows, row_size(shape.d))
    sizes_of_numbers = shape.query_itemsize, shape.itemsize
    return vmem_bytes(q_shape, *sizes_of_numbers, sizes, has_sinks=shape.has_sinks)


def _items(counts: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lists items, of which row b has counts[b].

    Returns (row, index within the row, valid), each [size].
    """
    end = jnp.cumsum(counts)
    item = jnp.arange(size, dtype=jnp.int32)
    row = jnp.minimum((item[:, None] >= end).sum(1, dtype=jnp.int32), counts.shape[0] - 1)
    return row, item - (end - counts)[row], item < end[-1]


def _work(
    bundles: int, bundle, valid, unit, row, begin, end, base, span: int, window: int | None
) -> Work:
    """Returns the work of items in ascending order of their bundle.

    Args:
        bundles: the number of bundles.
        bundle: [I] the bundle of each item.
        valid: [I] bool. Items that are not valid come last, and are not computed.
        unit, row, begin, end, base: [I], see `Work`.
    """
    boundaries = jnp.arange(bundles + 1)[:, None]
    # the number of valid items before each bundle
    first = (valid & (bundle < boundaries)).sum(1, dtype=jnp.int32)
    start = jnp.zeros_like(base)
    if window is not None:
        start = jnp.maximum(base + begin + 1 - window, 0) // span
    stop = (base + end + span - 1) // span
    return Work(first, unit, row, begin, end, base, start, stop)


def decode_work(seq_lens: jax.Array, sizes: Sizes, window: int | None) -> Work:
    """Returns an item for each row that has a context; row b is tile b."""
    b = len(seq_lens)
    row, _, valid = _items((seq_lens > 0).astype(jnp.int32), b)
    zero = jnp.zeros_like(row)
    bundle = row // sizes.units
    return _work(
        bundles=-(-b // sizes.units),
        bundle=bundle,
        valid=valid,
        unit=row % sizes.units,
        row=row,
        begin=zero,
        end=zero + 1,
        base=seq_lens[row] - 1,
        span=sizes.span,
        window=window,
    )


def short_work(seq_lens, row, number, sizes: Sizes, window: int | None) -> Work:
    """Returns an item for each used slot. Slot i is tile i, and used slots come first."""
    slot = jnp.arange(len(row), dtype=jnp.int32)
    zero = jnp.zeros_like(row)
    bundle = slot // sizes.units
    return _work(
        bundles=-(-len(row) // sizes.units),
        bundle=bundle,
        valid=number > 0,
        unit=slot % sizes.units,
        row=row,
        begin=zero,
        end=number,
        base=seq_lens[row] - number,
        span=sizes.span,
        window=window,
    )


def chunk_work(chosen, seq_lens, cu_q_lens, t: int, sizes: Sizes, window: int | None) -> Work:
    """Returns an item for each pair of a tile and a `chosen` row with query tokens in it."""
    tokens = sizes.tokens
    tiles = -(-t // sizes.tokens)
    row_begin = cu_q_lens[:-1]
    row_end = cu_q_lens[1:]
    counts = jnp.where(chosen, (row_end - 1) // tokens - row_begin // tokens + 1, 0)
    # each tile is an item, and each row that begins inside a tile adds at most one
    row, index, valid = _items(counts, tiles + min(len(seq_lens), t // 2))
    tile = row_begin[row] // tokens + index
    begin = jnp.maximum(row_begin[row] - tile * tokens, 0)
    end = jnp.minimum(row_end[row] - tile * tokens, tokens)
    base = seq_lens[row] - row_end[row] + tile * tokens
    return _work(
        bundles=tiles,
        bundle=tile,
        valid=valid,
        unit=jnp.zeros_like(row),
        row=row,
        begin=begin,
        end=end,
        base=base,
        span=sizes.span,
        window=window,
    )


# --- limits ---------------------------------------------------------------------------------------


def shape_obstacle(
    dtype: str, head_size: int, block_size: int, group: int, *, interpret: bool = False
) -> str:
    """Returns why the kernel cannot take a shape, as the rest of a sentence; empty if it can.

    Args:
        interpret: check the limits of the kernel's logic alone, and not those of a TPU.
    """
    if dtype not in DTYPES:
        return f"reads pages of {' or '.join(DTYPES)} and not of {dtype}"
    if interpret:
        fits_lanes = head_size % LANES == 0 or LANES % head_size == 0
        if fits_lanes and block_size * head_size % LANES == 0:
            return ""
        return f"needs pages of whole rows of {LANES}, and they are [{block_size}, {head_size}]"
    if head_size not in HEAD_SIZES:
        return f"needs a head size of {', '.join(map(str, HEAD_SIZES))}, and it is {head_size}"
    if block_size not in BLOCK_SIZES:
        return (
            f"needs blocks of {', '.join(map(str, BLOCK_SIZES))} tokens, and they have {block_size}"
        )
    if group > MAX_GROUP:
        return f"takes at most {MAX_GROUP} query heads for each key head, and there are {group}"
    return ""


def latent_shape_obstacle(
    dtype: str, rank: int, row: int, block_size: int, heads: int, *, interpret: bool = False
) -> str:
    """As `shape_obstacle`, for pages of latents.

    Args:
        rank: numbers of a latent.
        row: numbers of a row: those that are kept of a token, or with the zeros behind them.
    """
    if dtype not in DTYPES:
        return f"reads pages of {' or '.join(DTYPES)} and not of {dtype}"
    if interpret:
        return (
            "" if row % LANES == 0 else f"needs rows of whole {LANES} numbers, and they have {row}"
        )
    sizes = rank, whole_rows(row)
    if sizes != (LATENT[0], whole_rows(LATENT[1])):
        return (
            f"reads latents of {LATENT[0]} numbers in rows of {LATENT[1]}, and they have {rank} "
            f"in rows of {row}"
        )
    if block_size not in BLOCK_SIZES:
        return (
            f"needs blocks of {', '.join(map(str, BLOCK_SIZES))} tokens, and they have {block_size}"
        )
    if heads > MAX_LATENT_HEADS:
        return f"takes at most {MAX_LATENT_HEADS} query heads over latents, and there are {heads}"
    return ""


def scalar_memory_obstacle(rows: int, width: int) -> str:
    """Returns what does not fit in scalar memory, as the rest of a sentence; empty if all does."""
    needed = 4 * rows * width
    if needed <= SMEM:
        return ""
    return (
        f"stores block tables in {SMEM:,} bytes of scalar memory, and {rows} rows of {width} "
        f"blocks take {needed:,}; lower max_num_seqs or max_model_len, or raise block_size"
    )


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
    return wrong_device(device) or shape_obstacle(dtype, head_dim, block_size, heads // kv_heads)


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
    return wrong_device(device) or latent_shape_obstacle(dtype, rank, head_dim, block_size, heads)


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    paged_attention,
    obstacle,
    row_size,
    kv_write_tpu.write,
    latents=Latents(latent_attention, latent_obstacle, whole_rows),
    takes_sinks=True,
)
