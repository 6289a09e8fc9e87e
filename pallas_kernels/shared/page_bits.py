"""Floats in pages of integers, which hold their bits: float8_e4m3fn in uint8, bfloat16 in uint16.

To write a few floats of 8 or 16 bits, XLA for a CPU widens the whole array and narrows it again (of 16 bits in JAX
0.10). It does not do this to integers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

FLOATS = {"uint8": jnp.float8_e4m3fn, "uint16": jnp.bfloat16}  # by the dtype of the pages


def read(pages: jax.Array) -> jax.Array:
    """Returns the numbers in pages: bits become floats, other dtypes are returned unchanged."""
    floats = FLOATS.get(pages.dtype.name)
    return pages if floats is None else jax.lax.bitcast_convert_type(pages, floats)


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns x in the dtype of the pages. In 8 bits, numbers above 448 become 448; a plain cast makes them NaN."""
    floats = FLOATS.get(jnp.dtype(dtype).name)
    if floats is None:
        return x.astype(dtype)
    if floats == jnp.float8_e4m3fn:
        largest = float(jnp.finfo(floats).max)
        x = jnp.clip(x, -largest, largest)
    return jax.lax.bitcast_convert_type(x.astype(floats), dtype)
