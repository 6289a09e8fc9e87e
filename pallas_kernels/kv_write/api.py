"""The contracts of writing keys and values into pages, and of rotating and writing them at once."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import pallas_tpu, xla

# (k_pages, v_pages, k, v, slots, *, rows) -> (k_pages, v_pages). Implementations of attention with a
# kernel for latents give None as v_pages and v
Write = Callable[..., tuple[jax.Array, jax.Array | None]]

IMPLS: dict[str, Write] = {"xla": xla.write, "pallas_tpu": pallas_tpu.write}

# (k_pages, v_pages, heads, angles, slots, *, queries) -> (q, k_pages, v_pages)
RotateAndWrite = Callable[..., tuple[jax.Array | None, jax.Array, jax.Array]]


def write(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    k: jax.Array,
    v: jax.Array | None,
    slots: jax.Array,
    *,
    rows: int,
    impl: str | Write,
) -> tuple[jax.Array, jax.Array | None]:
    """Writes the keys and values of T tokens into their slots.

    Args:
        k_pages, v_pages: [P, K, S, D] of one layer, or rows of several tokens, [P, K, S D / L, L].
            uint8 holds the bits of float8_e4m3fn and uint16 those of bfloat16. v_pages and v are
            None for latents, which are no keys and values.
        k, v: [T, K, D]; they are rounded to the dtype of the pages.
        slots: [T] int32, page * S + offset. Tokens of one sequence are adjacent and so are their
            slots. All padding tokens are at the end and point into page 0.
        rows: the number of sequences, B. It bounds the number of pages that are written.
        impl: one of IMPLS, or a function with this contract.

    Returns:
        (k_pages, v_pages). Only the slots of real tokens and page 0 differ from the arguments.

    Raises:
        ValueError: an unknown impl, or shapes that do not match; the message names the shapes.
    """
    if isinstance(impl, str) and impl not in IMPLS:
        raise ValueError(f"impl is {impl!r}; it must be one of {', '.join(map(repr, IMPLS))}")
    _check(k_pages, v_pages, k, v, slots)
    implementation = IMPLS[impl] if isinstance(impl, str) else impl
    return implementation(k_pages, v_pages, k, v, slots, rows=rows)


def rotate_and_write(
    k_pages: jax.Array,
    v_pages: jax.Array,
    heads: jax.Array,
    angles: jax.Array,
    slots: jax.Array,
    *,
    queries: int,
    impl: RotateAndWrite,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Rotates queries and keys, and writes keys and values into their slots.

    All heads are first rounded to the dtype of the pages. The pair (a, b) of the numbers i and
    i + D / 2 of a query or of a key becomes (a cos - b sin, b cos + a sin), in float32, and is
    rounded again.

    Args:
        k_pages, v_pages: [P, K, S, D] of one layer.
        heads: [T, queries + 2 K, D] queries, keys and values, in this order.
        angles: [2, T, D / 2] float32, cosines and sines.
        slots: [T] int32, page * S + offset. Padding tokens point into page 0.
        queries: query heads; they may be 0.
        impl: what computes it, a function of this contract.

    Returns:
        (q, k_pages, v_pages). q is [T, queries, D] in the dtype of the pages, or None without
        queries. Only the slots of real tokens and page 0 differ from the arguments.

    Raises:
        ValueError: shapes that do not match, or that impl does not take; the message names them.
    """
    kv_heads, _, d = k_pages.shape[1:]
    expected = (len(heads), queries + 2 * kv_heads, d), (2, len(heads), d // 2), (len(heads),)
    if (heads.shape, angles.shape, slots.shape) != expected or v_pages.shape != k_pages.shape:
        raise ValueError(
            f"k_pages and v_pages must both be [P, K, S, D], heads [T, {queries} + 2 K, D], angles "
            f"[2, T, D / 2] and slots [T]; got k_pages {k_pages.shape}, v_pages {v_pages.shape}, "
            f"heads {heads.shape}, angles {angles.shape}, slots {slots.shape}"
        )
    return impl(k_pages, v_pages, heads, angles, slots, queries=queries)


def _check(k_pages, v_pages, k, v, slots) -> None:
    of_values = [None if array is None else array.shape for array in (v_pages, v)]
    shapes = (
        f"k_pages {k_pages.shape}, v_pages {of_values[0]}, k {k.shape}, v {of_values[1]}, "
        f"slots {slots.shape}"
    )
    are_alike = of_values == [None, None] or of_values == [k_pages.shape, k.shape]
    if (k_pages.ndim, k.ndim, slots.ndim) != (4, 3, 1) or not are_alike:
        raise ValueError(
            "k_pages and v_pages must both be [P, K, S, D], k and v [T, K, D], or v_pages and v None "
            f"for latents, and slots [T]; got {shapes}"
        )
    t, heads, d = k.shape
    if k_pages.shape[1] != heads or k_pages.shape[3] % d or slots.shape[0] != t:
        raise ValueError(f"pages, new tokens and slots must have the same K, D and T; got {shapes}")
    if slots.dtype != jnp.int32:
        raise ValueError(f"slots is {slots.dtype}; it must be int32")
