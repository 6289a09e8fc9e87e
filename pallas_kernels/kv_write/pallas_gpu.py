"""Rotation of queries and keys, and the write of keys and values in place, as one kernel for Hopper
GPUs: Pallas, Mosaic GPU.

    grid    a token: 128 threads read its row of the joined product, and write its queries, and its
            keys and values into the pages
    warp    a head at a time: its 32 threads have the pairs (i, i + D / 2) of the head, a few each

XLA makes three kernels of this, which each read the product, because their results have different
shapes. A step of decodes has so little of it that launches are most of the time. So this kernel has
as few steps as it can: it reads all numbers of its token before it writes the first one, from
registers straight to where they belong. There is no shared memory and no barrier: no thread reads
what another one writes.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.hopper import old_jax, store

WARPS = 4  # of a warpgroup, which is a block of threads
LANES = 32  # threads of a warp
DTYPES = ("bfloat16", "float16", "float32")  # of pages
# A thread has all its numbers in registers, of which it has at most 255.
MAX_NUMBERS = 160


def shape_obstacle(dtype: str, head_size: int, heads: int, kv_heads: int) -> str:
    """Returns why the kernel cannot write to pages of such a shape, as the rest of a sentence; empty
    if it can.
    """
    if reason := old_jax():
        return reason
    if dtype not in DTYPES:
        return f"writes pages of {', '.join(DTYPES)} and not of {dtype}"
    if head_size % (2 * LANES):
        return f"needs a head size that is a multiple of {2 * LANES}, and it is {head_size}"
    rows = sum(count // gcd(count, WARPS) for count in (heads, kv_heads, kv_heads))
    numbers = rows * head_size // LANES
    if numbers > MAX_NUMBERS:
        return (
            f"has at most {MAX_NUMBERS} numbers of a token in each thread, and {heads} query heads "
            f"and {kv_heads} key heads of {head_size} numbers would be {numbers}"
        )
    return ""


def rotate_and_write(k_pages, v_pages, heads, angles, slots, *, queries: int):
    """See `api.rotate_and_write`. The pages are donated, and page 0 is not written.

    Raises:
        ValueError: `shape_obstacle` gives a reason.
    """
    t, _, d = heads.shape
    _, kv_heads, block_size, _ = k_pages.shape
    if reason := shape_obstacle(str(k_pages.dtype), d, queries, kv_heads):
        raise ValueError(f"the kernel that rotates and writes {reason}")
    halves = pl.ds(0, d // 2), pl.ds(d // 2, d // 2)
    dtype = k_pages.dtype

    def rotated_write(heads_ref, angles_ref, slots_ref, k_ref, v_ref, *q_refs):
        token = lax.axis_index("token")
        slot = slots_ref[token]
        page = lax.div(slot, jnp.int32(block_size))
        offset = lax.rem(slot, jnp.int32(block_size))

        def read(first: int, count: int) -> list[jax.Array]:
            """Returns the halves of some heads, each [count, D / 2] float32."""
            layout = _layout(count, d // 2)
            numbers = (
                _load(heads_ref.at[token, pl.ds(first, count), half], layout) for half in halves
            )
            return [x.astype(dtype).astype(jnp.float32) for x in numbers]

        def rotated(first: int, count: int) -> list[jax.Array]:
            a, b = read(first, count)
            of_pairs = _layout(count, d // 2).reduce(0)
            cos, sin = (
                lax.broadcast_in_dim(_load(angles_ref.at[i, token], of_pairs), a.shape, [1])
                for i in range(2)
            )
            return [a * cos - b * sin, b * cos + a * sin]

        def write(target: Any, numbers: list[jax.Array]) -> None:
            for half, x in zip(halves, numbers, strict=True):
                store(target.at[:, half], x.astype(dtype))

        q = rotated(0, queries) if queries else []
        k = rotated(queries, kv_heads)
        v = read(queries + kv_heads, kv_heads)
        if queries:
            write(q_refs[0].at[token], q)

        @pl.when(page > 0)  # padding tokens share slots of page 0, which nobody reads
        def write_pages():
            write(k_ref.at[page, :, offset], k)
            write(v_ref.at[page, :, offset], v)

    kernel = plgpu.kernel(
        rotated_write,
        out_type=[jax.ShapeDtypeStruct((t, queries, d), dtype)] if queries else [],
        grid=(t,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,  # see above
        ),
    )
    k_ref = jax.new_ref(k_pages)
    v_ref = jax.new_ref(v_pages)
    results = kernel(heads, angles, slots, k_ref, v_ref)
    return results[0] if queries else None, jax.freeze(k_ref), jax.freeze(v_ref)


def _layout(rows: int, columns: int) -> Any:
    """Returns the layout of [rows, columns]: a row is the numbers of a warp. Warps repeat the work
    of others if `rows` is no multiple of four.
    """
    warps = gcd(rows, WARPS)
    repeated = plgpu.Replicated(WARPS // warps)
    warp_dims = {1: (repeated,), WARPS: (-3,)}.get(warps, (-3, repeated))
    return plgpu.Layout.TILED(
        plgpu.Tiling(((warps, columns), (columns // LANES,))),
        warp_dims=warp_dims,
        lane_dims=(-2,),
        vector_dim=-1,
    )


def _load(ref: Any, layout: Any) -> jax.Array:
    """Returns numbers in global memory, in a layout."""
    # JAX 0.10 has one more argument, and the kernels need JAX 0.11
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]
