"""Numbers of float8_e4m3fn in pages of uint8, which hold their bits.

To write a few floats of 8 bits, XLA for a CPU widens the whole array and narrows it again. It does not do this to
integers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def read(pages: jax.Array) -> jax.Array:
    """Returns the numbers in pages: uint8 becomes float8_e4m3fn, other dtypes are returned unchanged."""
    return jax.lax.bitcast_convert_type(pages, jnp.float8_e4m3fn) if pages.dtype == jnp.uint8 else pages


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns x in the dtype of the pages. In 8 bits, numbers above 448 become 448; a plain cast makes them NaN."""
    if dtype != jnp.uint8:
        return x.astype(dtype)
    largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
    return jax.lax.bitcast_convert_type(jnp.clip(x, -largest, largest).astype(jnp.float8_e4m3fn), jnp.uint8)
