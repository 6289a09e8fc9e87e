"""Attention of prompt chunks over pages, causal within each row: Pallas, Mosaic GPU, Hopper.

    item       consecutive tokens of one row, for one key head: GROUPS runs. A run is the tokens whose queries fit
               the 64 rows of a WGMMA
    grid       (key head, item), as many items as the batch can need; unused items end at once
    producer   a warpgroup that copies the item's queries, and the pages of its context into a ring of tiles
    consumers  GROUPS warpgroups that share the tiles, a run of tokens each: online softmax (FlashAttention, Dao et al.
               2022); row g * tokens + i of a product is query head g of the run's token i

Queries and results are read and written in place, [T, N, D]. A run at its row's end is stored in
pieces of powers of two, so it never overwrites another row's tokens. Only tiles that the item sees
are read; partly visible tiles are masked.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.pallas_gpu.pages import (
    Ring,
    barrier_of_pages,
    clear_outside,
    first_tops,
    index_along,
    log2_scores,
    produce,
    product,
    sinks_of_queries,
    store_run,
    swizzled_memory,
    tokens_outside,
)
from pallas_kernels.tiles import Tiles

GROUPS = 2  # consumers of an item, each with a run
LANES = 64  # rows of a WGMMA
WGMMA = plgpu.Layout.WGMMA


def shared_bytes(d: int, itemsize: int, tiles: Tiles) -> int:
    """Returns the bytes of shared memory of one block of threads.

    Barriers and the compiler's scratch memory are not counted.
    """
    return itemsize * (
        2 * tiles.chunk_stages * tiles.chunk_tile * d + GROUPS * LANES * (2 * d + tiles.chunk_tile)
    )


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
    tiles: Tiles,
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
    b = len(seq_lens)
    dtype = k_pages.dtype
    group = n // heads
    query_dtype = q.dtype
    tile = tiles.chunk_tile
    stages = tiles.chunk_stages
    tokens = LANES // group  # of a run
    total = max(t, tokens)  # tokens of q with padding, so that a run can be loaded whole
    q = jnp.pad(q.astype(dtype), ((0, total - t), (0, 0), (0, 0)))

    end = first[-1] + q_lens[-1]
    # the tokens behind the last row are one more row, without a context
    firsts = jnp.append(first, end)
    counts = jnp.append(q_lens, total - end)
    seq_lens = jnp.append(seq_lens, 0)
    row_items = -(-counts // (GROUPS * tokens))
    ends = jnp.cumsum(row_items)
    # A row has two tokens or more, and its last item may not be full.
    items = -(-total // (GROUPS * tokens)) + min(b, t // 2) + 1
    item = jnp.arange(items, dtype=jnp.int32)
    # `searchsorted` would be a loop of launches
    row = jnp.minimum((item[:, None] >= ends).sum(1, dtype=jnp.int32), b)
    # the item's first token, counted in its row
    offset = (item - (ends - row_items)[row]) * GROUPS * tokens
    item_tokens = jnp.clip(jnp.where(item < ends[-1], counts[row] - offset, 0), 0, GROUPS * tokens)
    # the item's first token, counted in the row's context
    position = (seq_lens - counts)[row] + offset
    # context tokens that the item sees
    length = jnp.where(item_tokens > 0, jnp.clip(position + item_tokens, 0, seq_lens[row]), 0)
    row_of_table = jnp.minimum(row, b - 1)
    item_arrays = [
        array.astype(jnp.int32)
        for array in (row_of_table, firsts[row] + offset, item_tokens, position, length)
    ]
    sink_arrays = [] if sinks is None else [sinks_of_queries(sinks, heads, tokens, LANES)]

    def paged_chunks(q_ref, k_ref, v_ref, tables, rows, begins, numbers, positions, lengths, *refs):
        o_ref, *scratch = refs[len(sink_arrays) :]
        io_s, q_s, k_s, v_s, p_s, q_full, k_full, v_full, k_free, v_free, clean = scratch
        head, item, group_id = (lax.axis_index(name) for name in ("head", "item", "warpgroup"))
        length = lengths[item]
        earliest = jnp.int32(0) if window is None else lax.max(positions[item] + 1 - window, 0)
        begin = earliest // tile
        count = lax.max(pl.cdiv(length, tile) - begin, 0)

        def run_of(group_id):
            """Returns the run's first token in q, and the token from which it is loaded.

            A run is loaded whole, so the load begins earlier if the run would pass the end of q.
            """
            run_begin = begins[item] + group_id * tokens
            return run_begin, lax.min(run_begin, total - tokens)

        @pl.when((group_id == GROUPS) & (numbers[item] > 0))
        def fetch_all():
            plgpu.set_max_registers(40, action="decrease")
            for run in range(GROUPS):
                _, start = run_of(run)
                for g in range(group):
                    queries = q_ref.at[pl.ds(start, tokens), head * group + g]
                    plgpu.copy_gmem_to_smem(
                        queries, io_s.at[run, pl.ds(g * tokens, tokens)], q_full.at[run]
                    )
            rings = Ring(k_ref, k_s, k_full, k_free), Ring(v_ref, v_s, v_full, v_free)
            produce(rings, head, tables, rows[item], begin, count, length)

        @pl.when((group_id < GROUPS) & (numbers[item] > 0))
        def consume():
            plgpu.set_max_registers(232, action="increase")
            run_begin, load_begin = run_of(group_id)
            nearest = positions[item] + group_id * tokens  # the run's first token in its context
            queries = q_s.at[group_id]
            weights = p_s.at[group_id]
            io = io_s.at[group_id]
            plgpu.barrier_wait(q_full.at[group_id])
            # the rows as they are stored become tiles that WGMMA reads
            queries[...] = plgpu.layout_cast(io[...], WGMMA)
            plgpu.commit_smem()

            # The carry, for each row of the run over the tiles so far: o [LANES, D] the sum of the
            # values, weighted by 2^(score - top); top [LANES] the largest score; norm [LANES] the
            # sum of these weights.
            def attend(i, carry):
                o, top, norm = carry
                slot = lax.rem(i, jnp.int32(stages))
                start = (begin + i) * tile  # the tile's first context token
                last_use = i + stages >= count

                plgpu.barrier_wait(k_full.at[slot])
                x = product((LANES, tile), queries, k_s.at[slot].transpose((1, 0)))
                pl.when(~last_use)(lambda: plgpu.barrier_arrive(k_free.at[slot]))

                def masked(x):
                    token = lax.rem(index_along((LANES, tile), 0), jnp.int32(tokens))
                    query = token + (nearest + load_begin - run_begin)
                    key = index_along((LANES, tile), 1) + start
                    visible = (key <= query) & (key < length)
                    if window is not None:
                        visible &= key > query - window
                    return jnp.where(visible, x, -jnp.inf)

                is_partly_visible = start + tile - 1 > nearest
                if window is not None:
                    is_partly_visible |= start <= nearest + tokens - 1 - window
                x = lax.cond(
                    is_partly_visible, masked, lambda x: x, log2_scores(x, scale, soft_cap)
                )
                new = jnp.maximum(top, x.max(axis=1))
                base = jnp.where(new == -jnp.inf, 0.0, new)  # -inf: the query has seen nothing yet
                decay = jnp.exp2(top - base)
                p = jnp.exp2(x - lax.broadcast_in_dim(base, x.shape, [0]))
                norm = norm * decay + p.sum(axis=1)
                weights[...] = p.astype(dtype)
                plgpu.commit_smem()

                plgpu.barrier_wait(v_full.at[slot])

                @pl.when(tokens_outside(start, tile, length, earliest, window))
                def clear():
                    @pl.when(group_id == 0)  # one warpgroup clears the values for all
                    def write():
                        clear_outside(v_s.at[slot], start, length, earliest, window)
                        plgpu.barrier_arrive(clean.at[slot])

                    plgpu.barrier_wait(clean.at[slot])

                y = product((LANES, d), weights, v_s.at[slot])
                pl.when(~last_use)(lambda: plgpu.barrier_arrive(v_free.at[slot]))
                return o * lax.broadcast_in_dim(decay, o.shape, [0]) + y, new, norm

            o = plgpu.layout_cast(jnp.full((LANES, d), 0.0, jnp.float32), WGMMA)
            run_sinks = refs[0].at[head] if sink_arrays else None
            top = first_tops(run_sinks, LANES, WGMMA.reduce(1))
            first_norm = 1.0 if sink_arrays else 0.0
            norm = plgpu.layout_cast(jnp.full((LANES,), first_norm, jnp.float32), WGMMA.reduce(1))
            o, _, norm = lax.fori_loop(0, count, attend, (o, top, norm))
            o = o * lax.broadcast_in_dim(1.0 / jnp.where(norm > 0, norm, 1.0), o.shape, [0])
            io[...] = o.astype(dtype)
            plgpu.commit_smem()
            run_tokens = lax.clamp(0, numbers[item] - group_id * tokens, tokens)
            skipped = run_begin - load_begin
            store_run(io, o_ref, (head * group, group), tokens, run_begin, skipped, run_tokens)

    ring = swizzled_memory((stages, tile, d), dtype)
    runs = (GROUPS, LANES, d)
    kernel = plgpu.kernel(
        paged_chunks,
        out_type=jax.ShapeDtypeStruct((total, n, d), dtype),
        scratch_types=(
            plgpu.SMEM(runs, dtype),
            swizzled_memory(runs, dtype),
            ring,
            ring,
            swizzled_memory((GROUPS, LANES, tile), dtype),
            plgpu.Barrier(num_arrivals=group, num_barriers=GROUPS),
            barrier_of_pages(tile, s, stages),
            barrier_of_pages(tile, s, stages),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
            # a slot is filled again when both consumers have passed this barrier
            plgpu.Barrier(num_barriers=stages),
        ),
        grid=(heads, items),
        grid_names=("head", "item"),
        num_threads=GROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    results = kernel(q, k_pages, v_pages, block_tables, *item_arrays, *sink_arrays)
    return results[:t].astype(query_dtype)
