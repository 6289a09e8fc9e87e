"""The contract of every implementation of paged attention, and the list of implementations."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import reference, xla
from pallas_kernels.paged_attention.cpu import implementation as cpu
from pallas_kernels.paged_attention.expanded import expanded
from pallas_kernels.paged_attention.implementation import Implementation
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.paged_attention.pallas_tpu import implementation as pallas_tpu
from pallas_kernels.paged_attention.probabilities import probabilities

MODULES = reference, xla, cpu, pallas_gpu, pallas_tpu
IMPLS: dict[str, Implementation] = {
    implementation.name: implementation._replace(probabilities=probabilities)
    for implementation in (
        *(module.IMPLEMENTATION for module in MODULES),
        pallas_gpu.OVERLAPPED,
        pallas_gpu.FUSED,
    )
}
for name in set(IMPLS) - {"reference"}:  # which has one definition for all rows
    IMPLS[name] = IMPLS[name]._replace(expanded=expanded)


# traced once for all layers that call it
@partial(jax.jit, static_argnames=("scale", "impl", "window", "soft_cap"))
def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array | None,
    *,
    scale: float,
    impl: str | Implementation,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes the attention of any mix of prompt chunks and decodes.

    Row b (a sequence of the step) owns the query tokens cu_q_lens[b] : cu_q_lens[b + 1]. They are
    the *last* tokens of its context of seq_lens[b] tokens. The keys and values of the whole
    context, those of the query tokens included, are in the pages before the call. The query at
    distance i from the end of its row sees the first seq_lens[b] - i tokens. GQA: query head n
    reads KV head n * K // N. Softmax and sums are in float32.

    Args:
        q: [T, N, D] packed query tokens; tokens from cu_q_lens[B] on are padding.
        k_pages, v_pages: [P, K, S, D] keys and values, of q's dtype or another. uint8 holds the
            bits of float8_e4m3fn and uint16 those of bfloat16. Each implementation defines which it
            reads. The same numbers may come in rows of several tokens, [P, K, S D / L, L].
        block_tables: [B, M] int32 page ids in token order; entries past a row's context may be any
            valid page id.
        seq_lens: [B] int32 context lengths; 0 for padding rows.
        cu_q_lens: [B + 1] int32 offsets of the rows in q, from 0, never decreasing; a padding row
            has no tokens. None: a batch of decodes, in which T is B and row b has the token b;
            padding rows are the last ones.
        scale: factor of q k^T. It has no default, because a wrong one gives no error.
        impl: one of IMPLS, by name, or a record of your own. It has no default, because a fallback
            gives no error.
        window: a query sees the last `window` tokens up to itself; None is all.
        soft_cap: scores x become soft_cap * tanh(x / soft_cap) before the softmax (Gemma 2); None
            leaves them.
        sinks: [N] float32, a score of each query head that joins the softmax, once for each query,
            and has no value: the weights of the values add up to less than 1 (GPT-OSS). None: there
            are none.

    Returns:
        [T, N, D] in q's dtype; padding tokens have zeros.

    Raises:
        ValueError: an unknown impl, or one without sinks that gets some, shapes that do not match,
            a window or a soft cap that is not above 0; the message names the values.
    """
    chosen = _chosen(impl)
    row = chosen.page_row(q.shape[-1])
    _check(q, k_pages, v_pages, block_tables, seq_lens, cu_q_lens)
    _check_options(window, soft_cap)
    if k_pages.shape[2] * k_pages.shape[3] % row:
        raise ValueError(
            f"impl {chosen.name!r} needs pages of whole rows of {row}, "
            f"and they are {list(k_pages.shape[2:])}; impl 'xla' has no such limit"
        )
    k_pages, v_pages = (pages.reshape(*pages.shape[:2], -1, row) for pages in (k_pages, v_pages))
    if cu_q_lens is None and not chosen.decodes_alone:
        cu_q_lens = offsets_of_decodes(seq_lens)
    options = {}
    if sinks is not None:
        _check_sinks(sinks, q, chosen)
        options["sinks"] = sinks
    return chosen.attend(
        q,
        k_pages,
        v_pages,
        block_tables,
        seq_lens,
        cu_q_lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        **options,
    )


def latent_attention(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array | None,
    *,
    rank: int,
    scale: float,
    impl: str | Implementation,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Computes attention over pages of latents: a row of a token is its key for all query heads,
    and the row's first numbers are its value (MLA with absorbed queries, see expanded.py).

    Args:
        q: [T, N, R] packed query tokens. Where a row ends with zeros, q may have any numbers.
        pages: [P, 1, S, R] rows, as `Latents.page_row` wants them; of an implementation without
            `latents`, those of `paged_attention`.
        rank: numbers of a value, and of the result.
        block_tables, seq_lens, cu_q_lens: [B, blocks], [B] and [B + 1], as of `paged_attention`.
        scale, impl, window, soft_cap: as of `paged_attention`.

    Returns:
        [T, N, rank] in q's dtype; padding tokens have zeros.

    Raises:
        ValueError: see `paged_attention`; or a rank that is not in a row; the message names the
            values.
    """
    chosen = _chosen(impl)
    arrays = block_tables, seq_lens, cu_q_lens
    options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap}
    if not 0 < rank <= q.shape[-1]:
        raise ValueError(
            f"rank is {rank}; q {q.shape} has rows whose first 1 to {q.shape[-1]} numbers can be "
            "values"
        )
    if chosen.latents is None:
        return paged_attention(q, pages, pages, *arrays, impl=impl, **options)[..., :rank]
    return _by_kernel(q, pages, *arrays, rank=rank, impl=chosen, **options)


# traced once for all layers that call it
@partial(jax.jit, static_argnames=("rank", "scale", "impl", "window", "soft_cap"))
def _by_kernel(
    q,
    pages,
    block_tables,
    seq_lens,
    cu_q_lens,
    *,
    rank: int,
    scale: float,
    impl: Implementation,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """`latent_attention` of an implementation with `latents`."""
    assert impl.latents is not None
    if (q.ndim, pages.ndim) != (3, 4) or (pages.shape[1], pages.shape[3]) != (1, q.shape[2]):
        raise ValueError(
            "q must be [T, N, R] and pages of latents [P, 1, S, R] with q's R; "
            f"got q {q.shape}, pages {pages.shape}"
        )
    _check(q, pages, pages, block_tables, seq_lens, cu_q_lens)
    _check_options(window, soft_cap)
    if cu_q_lens is None and not impl.decodes_alone:
        cu_q_lens = offsets_of_decodes(seq_lens)
    return impl.latents.attend(
        q,
        pages,
        block_tables,
        seq_lens,
        cu_q_lens,
        rank=rank,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )


def _chosen(impl: str | Implementation) -> Implementation:
    if isinstance(impl, str) and impl not in IMPLS:
        raise ValueError(f"impl is {impl!r}; it must be one of {', '.join(map(repr, IMPLS))}")
    return IMPLS[impl] if isinstance(impl, str) else impl


def _check_options(window: int | None, soft_cap: float | None) -> None:
    if (window is not None and window < 1) or (soft_cap is not None and soft_cap <= 0):
        raise ValueError(
            f"window is {window} and soft_cap {soft_cap}; each must be above 0, or None"
        )


def _check_sinks(sinks: jax.Array, q: jax.Array, impl: Implementation) -> None:
    if not impl.takes_sinks:
        names = ", ".join(repr(name) for name, other in IMPLS.items() if other.takes_sinks)
        raise ValueError(f"impl {impl.name!r} takes no sinks; those that do: {names}")
    if sinks.shape != q.shape[1:2] or sinks.dtype != jnp.float32:
        raise ValueError(
            f"sinks is {sinks.dtype} {sinks.shape}; q {q.shape} needs float32 ({q.shape[1]},)"
        )


def offsets_of_decodes(seq_lens: jax.Array) -> jax.Array:
    """Returns the `cu_q_lens` [B + 1] of a batch of decodes."""
    return jnp.cumsum(jnp.pad(seq_lens > 0, (1, 0)), dtype=jnp.int32)


def _check(q, k_pages, v_pages, block_tables, seq_lens, cu_q_lens) -> None:
    shapes = (
        f"q {q.shape}, k_pages {k_pages.shape}, v_pages {v_pages.shape}, "
        f"block_tables {block_tables.shape}, seq_lens {seq_lens.shape}, "
        f"cu_q_lens {None if cu_q_lens is None else cu_q_lens.shape}"
    )
    of_decodes = cu_q_lens is None
    cu_q_lens = jax.ShapeDtypeStruct((len(q) + 1,), jnp.int32) if of_decodes else cu_q_lens
    ranks = (q.ndim, k_pages.ndim, v_pages.ndim, block_tables.ndim, seq_lens.ndim, cu_q_lens.ndim)
    if ranks != (3, 4, 4, 2, 1, 1):
        raise ValueError(f"expected ranks 3, 4, 4, 2, 1, 1; got {shapes}")
    _, n, d = q.shape
    _, k, _, kd = k_pages.shape
    b = seq_lens.shape[0]
    if kd % d or v_pages.shape != k_pages.shape:
        raise ValueError(
            f"k_pages and v_pages must both be [P, K, S, D] with q's head size {d}; got {shapes}"
        )
    if n % k:
        raise ValueError(f"{n} query heads cannot share {k} key heads evenly; got {shapes}")
    if of_decodes and len(q) != b:
        raise ValueError(
            "without cu_q_lens every row has one token, so T must be seq_lens's B = "
            f"{b}; got {shapes}"
        )
    if block_tables.shape[0] != b or cu_q_lens.shape[0] != b + 1:
        raise ValueError(
            "block_tables must be [B, M] and cu_q_lens [B + 1] with seq_lens's B = "
            f"{b}; got {shapes}"
        )
    arrays = {"block_tables": block_tables, "seq_lens": seq_lens, "cu_q_lens": cu_q_lens}
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}; it must be int32")
