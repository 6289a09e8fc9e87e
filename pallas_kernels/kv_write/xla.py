"""Writing keys and values by XLA's scatter.

It works in place on every device except in a step for a TPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.shared.page_bits import stored


def write(
    k_pages, v_pages, k, v, slots, *, rows: int | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """See `api.write`. `rows` is not used."""
    if k_pages.shape[3] != k.shape[2]:  # the rows of pages are not those of one token each
        k_pages = _into_rows(k_pages, k, slots)
        return k_pages, None if v_pages is None else _into_rows(v_pages, v, slots)
    size = k_pages.shape[2]
    block = slots // size
    offset = slots % size
    # Padding tokens share slots of page 0, so the indices are not unique. The order of these writes
    # does not matter.
    k_pages = k_pages.at[block, :, offset].set(stored(k, k_pages.dtype), mode="promise_in_bounds")
    if v_pages is not None:
        new = stored(v, v_pages.dtype)
        v_pages = v_pages.at[block, :, offset].set(new, mode="promise_in_bounds")
    return k_pages, v_pages


def _into_rows(pages: jax.Array, x: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes x [T, K, D] into pages whose rows hold several tokens, [P, K, S D / L, L]."""
    d = x.shape[2]
    rows, row_size = pages.shape[2:]
    tokens_of_row = row_size // d
    block_size = rows * tokens_of_row
    offset = slots % block_size
    # [T, 3] the page, the row and the first number of each token
    starts = jnp.stack(
        [slots // block_size, offset // tokens_of_row, offset % tokens_of_row * d], axis=1
    )
    window = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2),
        inserted_window_dims=(0, 2),
        scatter_dims_to_operand_dims=(0, 2, 3),
    )
    mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return jax.lax.scatter(pages, starts, stored(x, pages.dtype), window, mode=mode)
