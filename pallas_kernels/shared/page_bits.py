"""Floats in pages of integers, which hold their bits: float8_e4m3fn in uint8, bfloat16 in uint16.

When XLA for a CPU writes a few float8 numbers, it first converts the whole array to a wider type.
JAX 0.10, the newest one for Python 3.11, does this to bfloat16 too. Integers are not converted.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

FLOATS = {"uint8": jnp.float8_e4m3fn, "uint16": jnp.bfloat16}  # by the dtype of the pages
BITS = {jnp.dtype(floats).name: integers for integers, floats in FLOATS.items()}


def read(pages: jax.Array) -> jax.Array:
    """Returns the numbers in pages: bits become floats, other dtypes are returned unchanged."""
    floats = FLOATS.get(pages.dtype.name)
    return pages if floats is None else jax.lax.bitcast_convert_type(pages, floats)


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns x in the dtype of the pages.

    As float8, numbers above 448 become 448, and numbers below -448 become -448. A plain cast would
    make them NaN.
    """
    floats = FLOATS.get(jnp.dtype(dtype).name, dtype)
    if floats == jnp.float8_e4m3fn:
        largest = float(jnp.finfo(floats).max)
        x = jnp.clip(x, -largest, largest)
    x = x.astype(floats)
    return x if floats == dtype else jax.lax.bitcast_convert_type(x, dtype)
