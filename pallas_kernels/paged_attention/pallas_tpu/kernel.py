"""Attention of tiles of queries over pages: Pallas, Mosaic TPU. Decodes, short rows and chunks run
the same kernel in different sizes.

    grid        bundles of U tiles of queries, one after another; Pallas copies queries in and results out
    item        (tile of a bundle, row of the batch): the tile's queries of one sequence, over the context they see
    step        an item's next `span` context tokens: its pages, each copied whole from HBM by one DMA
    ring        `stages` spans of keys and values in VMEM. A cursor in scalar memory walks all items ahead of the
                computation, across tiles and bundles, so that a short context is copied while another is computed

A tile has R rows for each key head, one for each (stream, query head, query token). A row of a page
has L lanes, 128 or D if it is larger, so L / D tokens share it. The tile has the query once for
each of these tokens, a *stream*:

        row of a page    | token 2 i       | token 2 i + 1   |          D = 64
        stream 0         | q               | 0               |          scores of the even tokens
        stream 1         | 0               | q               |          scores of the odd tokens

Each stream has its own softmax. At the item's end the streams are merged like the parts of a split
context (Flash-Decoding). So no lane is padding, neither in HBM nor in a copy. Exponentials are
powers of two.

Latents (`Sizes.values`) have one key head, and no pages of values: the first lanes of a key's row
are its value. A row is copied once, and read twice in VMEM.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.shared.tpu import LANES, pinned

# In the place of minus infinity. It is finite, so exp2(NEG - NEG) is a number. Beside a real score
# its weight is 0.
NEG = -1e30
UNROLLED = 4  # key heads in one body of the loop over them
LOG2E = math.log2(math.e)
# Places in the cursor
ITEM = 0  # the item and the step that are copied next
STEP = 1
SENT = 2  # spans whose copies have been started
USED = 3  # spans that have been used


class Work(NamedTuple):
    """The work, for scalar memory: I items, those of a bundle side by side."""

    first: jax.Array  # [bundles + 1] the items of bundle i are first[i] : first[i + 1]
    unit: jax.Array  # [I] which tile of its bundle
    row: jax.Array  # [I] the row of the block tables
    begin: jax.Array  # [I] the tile's query tokens begin : end are the row's
    end: jax.Array  # [I]
    # [I] position in the row's context of the tile's token 0; below 0 if another row has that token
    base: jax.Array
    start: jax.Array  # [I] the item's steps are start : stop of the row's context, at least one
    stop: jax.Array  # [I]


class Sizes(NamedTuple):
    """The sizes of a kernel."""

    units: int  # tiles of a bundle: U
    tokens: int  # query tokens of a tile, a power of two
    streams: int
    block_size: int
    span: int  # context tokens of a step, a multiple of the block size
    stages: int
    kernel: str = "decode"  # its name in profiles and in the compiler's reports
    # Lanes of a row of keys that are its values, a multiple of 128, in pages of latents; None:
    # values have pages of their own
    values: int | None = None


class Scores(NamedTuple):
    """The options of q k^T, as in the contract."""

    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool = False


class Refs(NamedTuple):
    """A kernel's sizes and options, its arguments and its scratch memory."""

    sizes: Sizes
    scores: Scores
    width: int  # M
    work: Work
    tables: Any  # [B * M]
    q: Any  # [1, U, K, R, L]
    k_pages: Any  # [P, K, S / streams, L]
    v_pages: Any  # the same; None: values are in the rows of keys
    out: Any  # [1, U, K, R / streams, V], V as in `attend`
    k_ring: Any  # [stages, pages, K, S / streams, L]
    v_ring: Any  # the same; None: as v_pages
    acc: Any  # [K, R, V] f32 running weighted sums
    top: Any  # [K, R, 128] f32 running maxima
    norm: Any  # [K, R, 128] f32 running sums of weights
    cursor: Any  # [4]
    arrived: Any  # [stages] semaphores
    sinks: Any = None  # [K, R / streams, 128] f32, in powers of two; None: there are none


# the arrays of `Refs` in a call's order: arguments, the result, scratch memory
ARRAYS = (
    *("tables", "q", "k_pages", "v_pages", "sinks"),
    "out",
    *("k_ring", "v_ring", "acc", "top", "norm", "cursor", "arrived"),
)


def vmem_bytes(
    q_shape, q_itemsize: int, itemsize: int, sizes: Sizes, *, has_sinks: bool = False
) -> int:
    """Returns the bytes of VMEM that a kernel needs.

    They hold the ring, the running sums, scores, sinks, and queries and results. The last three are
    there twice, because Pallas copies those of the next bundle while one is computed. The
    compiler's memory for scores is an estimate: four numbers of 32 bits for each score of the heads
    in one body of the loop. They are six if pages are in float32, which needs several passes of the
    matrix unit. Rows of latents are so long that the three parts of 16 bits count too, in which
    float32 is multiplied.

    Args:
        q_shape: [bundles, U, K, R, L].
        itemsize: of the pages.
    """
    _, units, heads, rows, lanes = q_shape
    arrays = 2 if sizes.values is None else 1
    result_lanes = sizes.values or lanes
    ring = arrays * sizes.stages * heads * sizes.span // sizes.streams * lanes * itemsize
    sums = heads * rows * (result_lanes + 2 * LANES) * 4
    scores = min(heads, UNROLLED) * rows * sizes.span // sizes.streams * 4 * (2 + itemsize)
    sinks = 2 * heads * rows // sizes.streams * LANES * 4 if has_sinks else 0
    has_parts = sizes.values is not None and itemsize == 4
    operands = (rows + sizes.span) * lanes + (rows + result_lanes) * sizes.span
    parts = 3 * 2 * operands if has_parts else 0
    return (
        ring
        + sums
        + scores
        + sinks
        + parts
        + 2 * units * heads * (rows * lanes + rows // sizes.streams * result_lanes) * q_itemsize
    )


def attend(
    q,
    k_pages,
    v_pages,
    tables,
    work: Work,
    sizes: Sizes,
    scores: Scores,
    sinks=None,
    *,
    width,
    vmem_limit,
    interpret,
):
    """Computes the attention of every tile's queries over the tokens that they see.

    Args:
        q: [bundles, U, K, R, L] tiles, R in the order (stream, query head, query token).
        k_pages, v_pages: [P, K, S / streams, L]. v_pages is None for latents, where K and streams
            are 1.
        tables: [B * M] page ids.
        sinks: [K, R / streams] float32, of each row of a result; None: there are none.
        width: M.
        vmem_limit: bytes that the compiler may use.
        interpret: False compiles; True or pltpu.InterpretParams runs it on a CPU.

    Returns:
        [bundles, U, K, R / streams, V] in q's dtype, with a row for each (query head, query token).
        V is L, and of latents `sizes.values`. The result is in the first D lanes, or those of a
        latent. Queries without an item have zeros.
    """
    bundles, units, heads, rows, lanes = q.shape
    ring = (sizes.stages, sizes.span // sizes.block_size, heads, *k_pages.shape[2:])
    result_rows = rows // sizes.streams
    result_lanes = sizes.values or lanes
    pages = [k_pages] if sizes.values else [k_pages, v_pages]

    def bundle_spec(rows, lanes):
        return pl.BlockSpec((1, units, heads, rows, lanes), lambda i, *_: (i, 0, 0, 0, 0))

    in_hbm = [pl.BlockSpec(memory_space=pltpu.HBM) for _ in pages]
    sink_rows = []
    sink_specs = []
    if sinks is not None:
        shape = (heads, result_rows, LANES)
        sink_rows = [jnp.broadcast_to((sinks * LOG2E)[:, :, None], shape)]
        sink_specs = [pl.BlockSpec(shape, lambda i, *_: (0, 0, 0))]
    call = pl.pallas_call(
        partial(_kernel, sizes, scores, width),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work) + 1,
            grid=(bundles,),
            in_specs=[bundle_spec(rows, lanes), *in_hbm, *sink_specs],
            out_specs=bundle_spec(result_rows, result_lanes),
            scratch_shapes=[
                *[pltpu.VMEM(ring, array.dtype) for array in pages],
                pltpu.VMEM((heads, rows, result_lanes), jnp.float32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.SMEM((4,), jnp.int32),
                pltpu.SemaphoreType.DMA((sizes.stages,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((bundles, units, heads, result_rows, result_lanes), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit
        ),
        interpret=interpret,
        name=f"paged_attention_{sizes.kernel}",
    )
    return call(*work, tables, q, *pinned(*pages, interpret=interpret), *sink_rows)


def _kernel(sizes: Sizes, scores: Scores, width: int, *refs) -> None:
    """Computes one bundle of the grid."""
    scalar_count = len(Work._fields)
    work = Work(*refs[:scalar_count])
    absent = set() if scores.has_sinks else {"sinks"}
    if sizes.values:
        absent |= {"v_pages", "v_ring"}
    names = [name for name in ARRAYS if name not in absent]
    arrays = dict.fromkeys(absent) | dict(zip(names, refs[scalar_count:], strict=True))
    r = Refs(sizes, scores, width, work, **arrays)
    bundle = pl.program_id(0)
    total = r.work.first[pl.num_programs(0)]

    @pl.when(bundle == 0)
    def begin():
        r.cursor[ITEM] = 0
        r.cursor[STEP] = r.work.start[0]
        r.cursor[SENT] = 0
        r.cursor[USED] = 0
        lax.fori_loop(0, sizes.stages - 1, lambda _, none: _send(r, total), None)

    r.out[...] = jnp.zeros_like(r.out)
    lax.fori_loop(
        r.work.first[bundle],
        r.work.first[bundle + 1],
        lambda i, _: _compute_item(r, i, total),
        None,
    )


# --- copies ---------------------------------------------------------------------------------------


def _visible_range(r: Refs, item):
    """Returns (first, last + 1) of the context tokens that the item's queries see."""
    w = r.work
    first = jnp.int32(0)
    if r.scores.window is not None:
        first = lax.max(w.base[item] + w.begin[item] + 1 - r.scores.window, first)
    return first, w.base[item] + w.end[item]


def page_range(r: Refs, step, visible) -> tuple[Any, Any]:
    """Returns (first, last + 1) of a step's pages with visible tokens, counted in the step."""
    start = step * r.sizes.span
    first = lax.max(visible[0] - start, 0) // r.sizes.block_size
    return first, pl.cdiv(lax.min(visible[1] - start, r.sizes.span), r.sizes.block_size)


def page_of(r: Refs, item, step, page):
    """Returns the id of a step's page."""
    return r.tables[r.work.row[item] * r.width + step * (r.sizes.span // r.sizes.block_size) + page]


def _copies(r: Refs, slot, item, step, act) -> None:
    """Calls `act` for the copy of each page of a step, keys and values, into a slot of the
    rings."""
    arrays = [(r.k_pages, r.k_ring)]
    if r.v_pages is not None:
        arrays.append((r.v_pages, r.v_ring))

    def copy_page(page, _):
        source = page_of(r, item, step, page)
        for pages, ring in arrays:
            act(pltpu.make_async_copy(pages.at[source], ring.at[slot, page], r.arrived.at[slot]))

    lax.fori_loop(*page_range(r, step, _visible_range(r, item)), copy_page, None)


def _send(r: Refs, total) -> None:
    """Starts the copies of the cursor's step, if there is one, and moves the cursor to the next."""
    item = r.cursor[ITEM]
    step = r.cursor[STEP]

    @pl.when(item < total)
    def send():
        slot = slot_of(r, r.cursor[SENT])
        _copies(r, slot, item, step, lambda copy: copy.start())
        last = step + 1 == r.work.stop[item]
        following = lax.min(item + 1, r.work.start.shape[0] - 1)
        r.cursor[ITEM] = jnp.where(last, item + 1, item)
        r.cursor[STEP] = jnp.where(last, r.work.start[following], step + 1)
        r.cursor[SENT] = r.cursor[SENT] + 1


def slot_of(r: Refs, number):
    """Returns the slot in the rings of the span with this number, in the order of the copies."""
    return lax.rem(number, jnp.int32(r.sizes.stages))


def wait(r: Refs, slot, item, step) -> None:
    """Waits until a step's pages have arrived."""
    _copies(r, slot, item, step, lambda copy: copy.wait())


# --- computation ----------------------------------------------------------------------------------


def bodies(heads: int) -> int:
    """Returns how often the loop over key heads turns.

    Its body has as many heads as divide them, UNROLLED at most.
    """
    return next(heads // n for n in range(min(UNROLLED, heads), 0, -1) if heads % n == 0)


def _over_heads(heads: int, body) -> None:
    """Calls body(head) for each key head, a few in one body of the loop.

    Products of one head then run beside exponentials of another.
    """
    at_once = heads // bodies(heads)

    def run_heads(i, _):
        for j in range(at_once):
            body(i * at_once + j)

    if at_once == heads:
        run_heads(0, None)
    else:
        lax.fori_loop(0, heads // at_once, run_heads, None)


def _compute_item(r: Refs, item, total) -> None:
    """Computes an item: its steps one after the other, then its results. total: of all items."""
    r.acc[...] = jnp.zeros_like(r.acc)
    r.top[...] = jnp.full_like(r.top, NEG)
    r.norm[...] = jnp.zeros_like(r.norm)
    visible = _visible_range(r, item)

    def step(i, _):
        _send(r, total)  # into the slot that the step before this one has left
        slot = slot_of(r, r.cursor[USED])
        r.cursor[USED] = r.cursor[USED] + 1
        wait(r, slot, item, i)
        pl.when((i * r.sizes.span < visible[0]) | ((i + 1) * r.sizes.span > visible[1]))(
            lambda: _clear(r, slot, i, visible)
        )
        hidden = _hidden_keys(r, item, i)
        _over_heads(r.acc.shape[0], lambda head: _update(r, r.work.unit[item], slot, head, hidden))

    lax.fori_loop(r.work.start[item], r.work.stop[item], step, None)
    _over_heads(r.acc.shape[0], lambda head: _finish(r, item, head))


def _clear(r: Refs, slot, step, visible) -> None:
    """Sets values that are not visible to zero, because 0 * NaN is not 0.

    With several streams it also clears keys: the zeros of one stream's query are multiplied by the
    tokens of the other streams. Latents are both.
    """
    _, pages, heads, rows, lanes = r.k_ring.shape

    def index(axis):
        return lax.broadcasted_iota(jnp.int32, (pages, rows, lanes), axis)

    token = (
        index(0) * r.sizes.block_size
        + index(1) * r.sizes.streams
        + index(2) // (lanes // r.sizes.streams)
    )
    token = token + step * r.sizes.span
    real = (token >= visible[0]) & (token < visible[1])
    if r.v_ring is None:
        rings = (r.k_ring,)
    else:
        rings = (r.v_ring,) if r.sizes.streams == 1 else (r.v_ring, r.k_ring)

    def clear_head(head, _):
        for ring in rings:
            numbers = jnp.where(real, ring[slot, :, head].astype(jnp.float32), 0.0)
            ring[slot, :, head] = numbers.astype(ring.dtype)

    lax.fori_loop(0, heads, clear_head, None)


def _hidden_keys(r: Refs, item, step):
    """Returns [R, span / streams] bool: the keys of a step that a row of the tile does not see."""
    rows = r.acc.shape[1]
    shape = (rows, r.sizes.span // r.sizes.streams)
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    stream = row // (rows // r.sizes.streams)
    key = column * r.sizes.streams + stream + step * r.sizes.span
    query = (row & (r.sizes.tokens - 1)) + r.work.base[item]
    return (
        key > query if r.scores.window is None else (key > query) | (key <= query - r.scores.window)
    )


def _update(r: Refs, unit, slot, head, hidden) -> None:
    """Merges one head's span into the running softmax."""
    q = r.q[0, unit, head]  # [R, L]
    keys = r.k_ring[slot, :, head]  # [pages, S / streams, L]
    values = keys[:, :, : r.sizes.values] if r.v_ring is None else r.v_ring[slot, :, head]
    dtype = jnp.promote_types(q.dtype, keys.dtype)
    keys, values = (a.reshape(-1, a.shape[-1]).astype(dtype) for a in (keys, values))
    exact = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    dot = partial(lax.dot_general, preferred_element_type=jnp.float32, precision=exact)
    x = log2_scores(dot(q.astype(dtype), keys, (((1,), (1,)), ((), ()))), r.scores)
    x = jnp.where(hidden, NEG, x)  # [R, span / streams]
    top = r.top[head][:, :1]
    new = jnp.maximum(top, x.max(axis=1, keepdims=True))
    decay = jnp.exp2(top - new)
    weights = jnp.exp2(x - new)
    part = dot(weights.astype(dtype), values, (((1,), (0,)), ((), ())))
    r.acc[head] = r.acc[head] * decay + part
    r.norm[head] = r.norm[head] * decay + weights.sum(axis=1, keepdims=True)
    r.top[head] = jnp.broadcast_to(new, r.top.shape[1:])


def log2_scores(x, scores: Scores):
    """Returns scores as powers of two.

    exp2 of the result is exp of the product, which is scaled and perhaps capped.
    """
    if scores.soft_cap is None:
        return x * (scores.scale * LOG2E)
    return jnp.tanh(x * (scores.scale / scores.soft_cap)) * (scores.soft_cap * LOG2E)


def _finish(r: Refs, item, head) -> None:
    """Merges the streams and writes the results of the item's queries.

    Results of other items of the tile stay.
    """
    rows, lanes = r.acc.shape[1:]
    result_rows = rows // r.sizes.streams
    parts = [pl.ds(stream * result_rows, result_rows) for stream in range(r.sizes.streams)]
    tops = [r.top[head, part][:, :1] for part in parts]
    best = tops[0]
    for top in tops[1:]:
        best = jnp.maximum(best, top)
    total = jnp.zeros((result_rows, lanes), jnp.float32)
    norm = jnp.zeros((result_rows, 1), jnp.float32)
    for stream, (part, top) in enumerate(zip(parts, tops, strict=True)):
        weight = jnp.exp2(top - best)  # 0 for a stream that has seen nothing
        acc = r.acc[head, part]
        if stream:  # the numbers of the stream are moved to the first lanes
            acc = pltpu.roll(acc, lanes - stream * (lanes // r.sizes.streams), 1)
        total = total + acc * weight
        norm = norm + r.norm[head, part][:, :1] * weight
    if r.sinks is not None:  # infinite for a sink far above all scores: the result is then 0
        norm = norm + jnp.exp2(r.sinks[head][:, :1] - best)
    result = (total / norm).astype(r.out.dtype)
    unit = r.work.unit[item]
    if r.sizes.tokens > 1:
        token = lax.broadcasted_iota(jnp.int32, (result_rows, lanes), 0) & (r.sizes.tokens - 1)
        is_of_row = (token >= r.work.begin[item]) & (token < r.work.end[item])
        old = r.out[0, unit, head].astype(jnp.float32)
        result = jnp.where(is_of_row, total / norm, old).astype(r.out.dtype)
    r.out[0, unit, head] = result
