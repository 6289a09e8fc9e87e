"""Attention of prompt chunks over pages, causal within each row: Pallas, Mosaic GPU, Hopper.

    item       consecutive tokens of one row, for one key head: GROUPS runs. A run is the tokens whose queries fit
               the 64 rows of a WGMMA
    grid       (item, key head); the items with the longest contexts first; unused items end at once
    producer   a warpgroup that copies the items' queries, and the pages of their contexts into a ring of tiles
    consumers  GROUPS warpgroups that share the tiles, a run of tokens each: online softmax (FlashAttention, Dao et al.
               2022); row g * tokens + i of a product is query head g of the run's token i

The order of a consumer is that of FlashAttention-3 (Shah et al. 2024). It starts the product of a
tile's keys and, behind it, that of the values of the tile before; while the second one runs, it
computes the softmax of the first one. Weights stay in registers, and sums are added in place. The
consumers start their products in turn, so that one computes a softmax while the other multiplies.

Queries and results are read and written in place, [T, N, D]. A run at its row's end is stored in
pieces of powers of two, so it never overwrites another row's tokens. Only tiles that the item sees
are read; partly visible tiles are masked, in loops of their own.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.pallas_gpu.pages import (
    LOG2E,
    clear_outside,
    copies,
    first_tops,
    page_ids,
    sinks_of_queries,
    store_run,
    swizzled_memory,
    tokens_outside,
)

GROUPS = 2  # consumers of an item, each with a run
LANES = 64  # rows of a WGMMA
KEYS, VALUES = range(2)
PAGES = 2  # whose ids a producer has at a time
TILE = 128  # context tokens that are computed at a time
COLUMNS = 8  # over which a row's weights are summed apart until the end: each thread adds its own
PRODUCER_REGISTERS = 40  # of a thread; with those of the consumers, they are what a block can have
CONSUMER_REGISTERS = 232
WGMMA = plgpu.Layout.WGMMA


def stages_of(d: int) -> int:
    """Returns the number of tiles of keys, and of values, in shared memory."""
    return 256 // d


def shared_bytes(d: int, itemsize: int) -> int:
    """Returns the bytes of shared memory of one block of threads.

    Barriers and the compiler's scratch memory are not counted.
    """
    return itemsize * d * (2 * stages_of(d) * TILE + 2 * GROUPS * LANES)


class Items(NamedTuple):
    """The items of a key head, int32 [items] each; the used ones first, the longest of them first.

    row: of the block tables. begin: the first token in q. number: tokens of the item; 0: unused.
    position: of the first token in the row's context; negative behind the last row. length: tokens
    of the context that the item sees. row_earliest: the first context token that the row sees.
    row_length: tokens of the row's context. tile: the first tile of the context that the item sees.
    tiles: that it computes, at least 1.
    """

    row: jax.Array
    begin: jax.Array
    number: jax.Array
    position: jax.Array
    length: jax.Array
    row_earliest: jax.Array
    row_length: jax.Array
    tile: jax.Array
    tiles: jax.Array


def items_of(first, q_lens, seq_lens, total: int, t: int, size: int, window: int | None) -> Items:
    """Returns the items of up to `size` tokens.

    Args:
        total: tokens of q. t: those of them that are no padding of a short q.
    """
    b = len(seq_lens)
    end = first[-1] + q_lens[-1]
    # the tokens behind the last row are one more row, without a context
    firsts = jnp.append(first, end)
    counts = jnp.append(q_lens, total - end)
    seq_lens = jnp.append(seq_lens, 0)
    row_items = -(-counts // size)
    ends = jnp.cumsum(row_items)
    # A row has two tokens or more, and its last item may not be full.
    items = -(-total // size) + min(b, t // 2) + 1
    item = jnp.arange(items, dtype=jnp.int32)
    # `searchsorted` would be a loop of launches
    row = jnp.minimum((item[:, None] >= ends).sum(1, dtype=jnp.int32), b)
    # the item's first token, counted in its row
    offset = (item - (ends - row_items)[row]) * size
    is_used = item < ends[-1]
    number = jnp.clip(jnp.where(is_used, counts[row] - offset, 0), 0, size)
    row_position = (seq_lens - counts)[row]
    position = row_position + offset
    row_length = seq_lens[row]
    length = jnp.where(number > 0, jnp.clip(position + number, 0, row_length), 0)
    tile = earliest_of(position, window) // TILE
    unsorted = Items(
        row=jnp.minimum(row, b - 1),
        begin=firsts[row] + offset,
        number=number,
        position=position,
        length=length,
        row_earliest=earliest_of(row_position, window),
        row_length=row_length,
        tile=tile,
        tiles=jnp.maximum(-(-length // TILE) - tile, 1),
    )
    order = descending(jnp.where(is_used, length, -1))
    return Items(*(array[order].astype(jnp.int32) for array in unsorted))


def earliest_of(position, window: int | None):
    """Returns the first context token that the query at a position sees."""
    return jnp.zeros_like(position) if window is None else jnp.maximum(position + 1 - window, 0)


def descending(keys) -> jax.Array:
    """Returns the order that sorts keys [items] from the largest one: their places, int32 [items].

    A sort would be several launches.
    """
    place = jnp.arange(len(keys), dtype=jnp.int32)
    is_before = (keys > keys[:, None]) | ((keys == keys[:, None]) & (place < place[:, None]))
    rank = is_before.sum(1, dtype=jnp.int32)
    return jnp.where(rank == place[:, None], place, 0).sum(1, dtype=jnp.int32)


def chunks(
    q,
    k_pages,
    v_pages,
    block_tables,
    seq_lens,
    first,
    q_lens,
    *,
    scale,
    window,
    soft_cap,
    sinks=None,
) -> jax.Array:
    """Computes the attention of chunks of the rows' contexts.

    Row b's tokens are first[b] : first[b] + q_lens[b] of q [T, N, D]. They are the last tokens of
    its context of seq_lens[b] tokens. sinks: [N], or None.

    Returns [T, N, D]: zeros after the last row's tokens, undefined before the first row and between
    two rows.
    """
    t, n, d = q.shape
    _, heads, s, _ = k_pages.shape
    dtype = k_pages.dtype
    group = n // heads
    query_dtype = q.dtype
    tile = TILE
    stages = stages_of(d)
    tokens = LANES // group  # of a run
    of_tile = copies(tile, s)  # a page each
    total = max(t, tokens)  # tokens of q with padding, so that a run can be loaded whole
    q = jnp.pad(q.astype(dtype), ((0, total - t), (0, 0), (0, 0)))
    # One array, so that a thread keeps one address; it is an operand for the producer and one for
    # the consumers, because ptxas gives a value that both have no register of the consumers alone.
    items_array = jnp.stack(items_of(first, q_lens, seq_lens, total, t, GROUPS * tokens, window))
    sink_arrays = [] if sinks is None else [sinks_of_queries(sinks, heads, tokens, LANES)]
    # A weight is 2^(x * factor - top) of a score x, which is capped to between -1 and 1, or is a
    # product of a query and a key.
    factor = (scale if soft_cap is None else soft_cap) * LOG2E

    def overlapped_chunks(q_ref, k_ref, v_ref, tables, fetched_ref, items_ref, *refs):
        items, fetched = (
            Items(*(ref.at[field] for field in range(len(Items._fields))))
            for ref in (items_ref, fetched_ref)
        )
        o_ref, *scratch = refs[len(sink_arrays) :]
        io_s, q_s, k_s, v_s, q_full, full, free, turn = scratch
        item, head, group_id = (lax.axis_index(name) for name in ("item", "head", "warpgroup"))
        is_used = items.number[item] > 0

        def run_of(items, group_id):
            """Returns the run's first token in q, and the token from which it is loaded.

            A run is loaded whole, so the load begins earlier if the run would pass the end of q.
            """
            run_begin = items.begin[item] + group_id * tokens
            return run_begin, lax.min(run_begin, total - tokens)

        def slot_of(i):
            return lax.rem(i, jnp.int32(stages))

        @pl.when((group_id == GROUPS) & is_used)
        def fetch_all():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            for run in range(GROUPS):
                _, first_token = run_of(fetched, run)

                def fetch_queries(g, _, run=run, first_token=first_token):
                    queries = q_ref.at[pl.ds(first_token, tokens), head * group + g]
                    into = io_s.at[run, pl.ds(g * tokens, tokens)]
                    plgpu.copy_gmem_to_smem(queries, into, q_full.at[run])

                lax.fori_loop(0, group, fetch_queries, None)
            rows = tile // of_tile  # of a page
            begin = fetched.tile[item]
            count = fetched.tiles[item]

            def fetch(i, _):
                slot = slot_of(i)
                start = (begin + i) * tile
                # What an item says is read again for each tile: it takes no registers between.
                row_length = fetched.row_length[item]
                row_earliest = fetched.row_earliest[item]
                is_unclean = tokens_outside(start, tile, row_length, row_earliest, window)
                length = fetched.length[item]

                def copy(kind, source, target, barrier):
                    place = kind * stages + slot
                    for part in range(0, tile, PAGES * rows):
                        # read while the tile waits for a free slot
                        pages = page_ids(
                            tables,
                            fetched.row[item],
                            start + part,
                            length,
                            tile=min(tile, PAGES * rows),
                            block_size=s,
                        )
                        if part == 0:
                            pl.when(i >= stages)(lambda: plgpu.barrier_wait(free.at[place]))
                        for piece, page in enumerate(pages):
                            into = target.at[slot, pl.ds(part + piece * rows, rows)]
                            plgpu.copy_gmem_to_smem(source.at[page, head], into, barrier)

                copy(KEYS, k_ref, k_s, full.at[slot])
                # values that must be cleared arrive at a barrier of the producer's own
                arrival = stages + jnp.where(is_unclean, stages, slot)
                copy(VALUES, v_ref, v_s, full.at[arrival])

                @pl.when(is_unclean)
                def clear():
                    plgpu.barrier_wait(full.at[2 * stages])
                    for token in range(0, tile, 64):  # in parts for which it has registers
                        for column in range(0, d, 64):
                            part = v_s.at[slot, pl.ds(token, 64), pl.ds(column, 64)]
                            row_length = fetched.row_length[item]
                            row_earliest = fetched.row_earliest[item]
                            clear_outside(part, start + token, row_length, row_earliest, window)
                    for _ in range(of_tile):
                        plgpu.barrier_arrive(full.at[stages + slot])

            lax.fori_loop(0, count, fetch, None)

        @pl.when((group_id < GROUPS) & is_used)
        def consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            queries = q_s.at[group_id]
            own_turn = turn.at[group_id]
            next_turn = turn.at[GROUPS - 1 - group_id]
            begin = items.tile[item]
            count = items.tiles[item]
            # the run's first token in its context
            nearest = items.position[item] + group_id * tokens
            run_begin, load_begin = run_of(items, group_id)
            run_tokens = lax.clamp(0, items.number[item] - group_id * tokens, tokens)
            # the item's tiles that the run sees; of them, those that all its queries see
            own = lax.clamp(1, pl.cdiv(nearest + tokens, tile) - begin, count)
            whole_end = lax.clamp(1, lax.div(nearest + 1, tile) - begin, own)
            whole_begin = jnp.int32(1)
            if window is not None:
                edge = lax.max(nearest + tokens - window, 0)
                whole_begin = lax.clamp(1, pl.cdiv(edge, tile) - begin, whole_end)

            def give_back(i, of_values: int):
                """Tells the producer that the i-th tile of keys, or of values, is not needed, if it
                waits for that.
                """
                place = of_values * stages + slot_of(i)
                pl.when(i + stages < count)(lambda: plgpu.barrier_arrive(free.at[place]))

            def compute(scores, sums):
                def start_scores(slot):
                    zeros = jnp.full((LANES, tile), 0.0, jnp.float32)
                    scores[...] = plgpu.layout_cast(zeros, WGMMA)
                    plgpu.wgmma(scores, queries, k_s.at[slot].transpose((1, 0)))

                def masked(x, i):
                    token = lax.rem(_indices(LANES, 1), jnp.int32(tokens))
                    # the query's place, counted from the tile's first token
                    query = token + (nearest + load_begin - run_begin - (begin + i) * tile)
                    # A key's place is that of its group of 8, which is a constant for each
                    # register, and the rest, of which a thread has two. As one number it would be
                    # kept in a register for each key.
                    key = _indices(tile, 0)
                    place = lax.broadcast_in_dim(key & -8, x.shape, [1])
                    rest = lax.broadcast_in_dim(key & 7, x.shape, [1])
                    last = lax.broadcast_in_dim(query, x.shape, [0]) - rest
                    visible = place <= last
                    if window is not None:
                        visible &= place > last - window
                    return jnp.where(visible, x, -jnp.inf)

                def weigh(x, i, top, norm, is_masked: bool):
                    """Returns the weights of a tile, the largest score so far, the sums of weights
                    so far, and the factor of what was summed before.
                    """
                    if soft_cap is not None:
                        x = jnp.tanh(x * (scale / soft_cap))
                    if is_masked:
                        x = masked(x, i)
                    new = jnp.maximum(top, x.max(axis=1) * factor)
                    # -inf: the query has seen nothing yet
                    base = jnp.where(new == -jnp.inf, 0.0, new) if is_masked else new
                    decay = jnp.exp2(top - base)
                    p = jnp.exp2(x * factor - lax.broadcast_in_dim(base, x.shape, [0]))
                    norm = norm * lax.broadcast_in_dim(decay, norm.shape, [0]) + _folded(p)
                    return p, new, norm, decay

                # The carry: the weights of the last tile in 16 bits; top [LANES] the largest score
                # of each row; norm [LANES, COLUMNS] the sums of the weights 2^(score - top). `sums`
                # [LANES, D] are the values of all tiles but the last one, weighted.
                def step(i, carry, is_masked: bool):
                    p, top, norm = carry
                    slot = slot_of(i)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.barrier_wait(own_turn)
                    start_scores(slot)
                    plgpu.wgmma(sums, p, v_s.at[slot_of(i - 1)])
                    plgpu.barrier_arrive(next_turn)
                    x = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                    give_back(i, KEYS)
                    p, top, norm, decay = lax.optimization_barrier(
                        weigh(x, i, top, norm, is_masked)
                    )
                    # This tile's values are needed later. But no instruction moves across this
                    # wait, so the softmax stays before the end of the second product.
                    plgpu.barrier_wait(full.at[stages + slot])
                    # Only now the weights are rounded, into the registers that the second product
                    # has read until here. Else ptxas would let products wait for each other.
                    o, p = lax.optimization_barrier((sums[...], p))
                    give_back(i - 1, VALUES)
                    sums[...] = o * lax.broadcast_in_dim(decay, o.shape, [0])
                    return lax.optimization_barrier(p.astype(dtype)), top, norm

                run_sinks = refs[0].at[head] if sink_arrays else None
                top = first_tops(run_sinks, LANES, WGMMA.reduce(1))
                first_norm = 1.0 / COLUMNS if sink_arrays else 0.0
                norm = jnp.full((LANES, COLUMNS), first_norm, jnp.float32)
                plgpu.barrier_wait(full.at[0])
                start_scores(0)
                x = scores[...]
                give_back(0, KEYS)
                p, top, norm, _ = weigh(x, 0, top, plgpu.layout_cast(norm, WGMMA), True)
                plgpu.barrier_wait(full.at[stages])
                carry = p.astype(dtype), top, norm
                whole = partial(step, is_masked=False)
                partly = partial(step, is_masked=True)
                if window is not None:
                    carry = lax.fori_loop(1, whole_begin, partly, carry)
                carry = lax.fori_loop(whole_begin, whole_end, whole, carry)
                p, _, norm = lax.fori_loop(whole_end, own, partly, carry)
                plgpu.wgmma(sums, p, v_s.at[slot_of(own - 1)])
                o = sums[...]
                give_back(own - 1, VALUES)
                return o, norm.sum(axis=1)

            # the rows as they are stored become tiles that WGMMA reads
            plgpu.barrier_wait(q_full.at[group_id])
            queries[...] = plgpu.layout_cast(io_s[group_id], plgpu.Layout.WGMMA_UPCAST_2X)
            plgpu.commit_smem()
            pl.when(group_id == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
            shapes = (LANES, tile), (LANES, d)
            registers: Any = plgpu  # ACC is not exported by name
            o, norm = pl.run_scoped(
                compute, *(registers.ACC(shape, jnp.float32) for shape in shapes)
            )

            def pass_over(i, _):  # a tile that only the other run sees
                slot = slot_of(i)
                plgpu.barrier_wait(full.at[slot])
                give_back(i, KEYS)
                plgpu.barrier_wait(full.at[stages + slot])
                give_back(i, VALUES)
                plgpu.barrier_wait(own_turn)
                plgpu.barrier_arrive(next_turn)

            lax.fori_loop(own, count, pass_over, None)
            pl.when(group_id == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
            o = o * lax.broadcast_in_dim(1.0 / jnp.where(norm > 0, norm, 1.0), o.shape, [0])
            io = io_s.at[group_id]
            io[...] = o.astype(dtype)
            plgpu.commit_smem()
            skipped = run_begin - load_begin
            store_run(io, o_ref, (head * group, group), tokens, run_begin, skipped, run_tokens)

    ring = swizzled_memory((stages, tile, d), dtype)
    runs = (GROUPS, LANES, d)
    kernel = plgpu.kernel(
        overlapped_chunks,
        out_type=jax.ShapeDtypeStruct((total, n, d), dtype),
        scratch_types=(
            plgpu.SMEM(runs, dtype),
            swizzled_memory(runs, dtype),
            ring,
            ring,
            plgpu.Barrier(num_arrivals=group, num_barriers=GROUPS),
            plgpu.Barrier(num_arrivals=of_tile, num_barriers=2 * stages + 1),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=2 * stages),
            plgpu.Barrier(num_barriers=GROUPS),
        ),
        grid=(items_array.shape[1], heads),  # an item for all heads, then the next shorter one
        grid_names=("item", "head"),
        num_threads=GROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    results = kernel(q, k_pages, v_pages, block_tables, items_array, items_array, *sink_arrays)
    return results[:t].astype(query_dtype)


def _indices(size: int, axis: int):
    """Returns int32 [size], from 0, of the rows (1) or columns (0) of a product: what a sum over
    the axis leaves. Of two dimensions, each number would have indices of its own.
    """
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=WGMMA.reduce(axis))


def _folded(p):
    """Returns sums [LANES, COLUMNS] over the columns of weights [LANES, tile].

    Each thread adds its own numbers.
    """
    while p.shape[1] > COLUMNS:
        half = p.shape[1] // 2
        p = p[:, :half] + p[:, half:]
    return p
