"""Binds a model's attention to one implementation. `attention.py`, `linear.py` and `states.py` alone
import pallas_kernels.

An implementation is one record, `Implementation`. Its name is one of `IMPLS`; the name of your own
is "folder/file.py:NAME" or "module:NAME".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax.device import states as device_states
from pagedjax.device.batch import Batch
from pagedjax.options.own_errors import placed
from pagedjax.options.own_values import named_value
from pallas_kernels import kv_write
from pallas_kernels.paged_attention import (
    IMPLS,
    Implementation,
    latent_attention,
    paged_attention,
)
from pallas_kernels.paged_attention.expanded import Expansion as Expansion
from pallas_kernels.paged_attention.probabilities import weights_of as weights_of
from pallas_kernels.shared.page_bits import BITS, read, stored

BUILT_IN = dict(IMPLS)  # a copy: what a user adds to IMPLS is not built in

# (q, k_pages, v_pages, block_tables, seq_lens, cu_q_lens, *, window, soft_cap) -> [T, N, D]; a
# model with sinks gives the keyword `sinks` too
Attend = Callable[..., jax.Array]

# The first one that can serve is the default. "xla" runs everywhere. "pallas_gpu" is here since its
# first run (experiments/results/h200); "pallas_tpu" is not until it has run on a TPU. All of them
# take sinks.
DEFAULTS = "cpu", "pallas_gpu", "xla"
# The same for latents, whose kernels have run on no GPU and no TPU.
LATENT_DEFAULTS = "cpu", "xla"


def find(name: Any) -> Implementation:
    """Returns the implementation of that name: one of IMPLS, or your own. An `Implementation` is
    returned as it is.

    Raises:
        ValueError: there is no such implementation, module, file or value.
    """
    return named_value("attention_impl", name, Implementation, IMPLS, shared=True)


def choose(
    name: Any, device: Any, *, invariant: bool = False, sinks: bool = False, **sizes: Any
) -> str:
    """Returns the name of an engine's implementation: `name`, or the default if that is None.

    Args:
        invariant: the engine is batch-invariant.
        sinks: the model has attention sinks.
        sizes: the keyword arguments of `Implementation.obstacle`. `dtype` is that of the keys and
            values in the cache. `heads_of_layers` may be in the place of those of heads: such
            arguments for each size of heads that a layer has. One implementation serves all. Heads
            over latents have `rank` too, the numbers of a latent.

    Raises:
        ValueError: the implementation `name` cannot serve this cache on this device; the message
            gives the reason. There is no fallback.
    """
    if invariant:
        reason = _not_invariant(name, device, **sizes)
        if reason:
            raise ValueError(f"batch_invariant is True, and {reason}; or set batch_invariant=False")
    if name is None:
        has_latents = any("rank" in heads for heads in sizes.get("heads_of_layers", ()))
        defaults = LATENT_DEFAULTS if has_latents else DEFAULTS
        return next(impl for impl in defaults if not _obstacle(find(impl), device, **sizes))
    if sinks and not find(name).takes_sinks:
        able = ", ".join(repr(impl.name) for impl in IMPLS.values() if impl.takes_sinks)
        raise ValueError(
            f"attention_impl {name!r} takes no sinks, and the model has a sink in each head; those "
            f"that take them: {able} (one of your own says so with takes_sinks=True)"
        )
    obstacle = _obstacle(find(name), device, **sizes)
    if obstacle:
        raise ValueError(f"attention_impl {name!r} {obstacle}; 'xla' has no such limit")
    return name


def _obstacle(
    impl: Implementation,
    device: Any,
    *,
    heads_of_layers: Sequence[Mapping[str, int]] = ({},),
    **sizes: Any,
) -> str:
    """Returns the first obstacle of an implementation among those of all sizes of heads."""
    reasons = [_obstacle_of_heads(impl, device, **sizes, **heads) for heads in heads_of_layers]
    return next(filter(None, reasons), "")


def _obstacle_of_heads(
    impl: Implementation, device: Any, *, rank: int | None = None, **sizes: Any
) -> str:
    if rank is None or impl.latents is None:
        return impl.obstacle(device, **sizes)
    return impl.latents.obstacle(device, rank=rank, **sizes)


def _not_invariant(name: Any, device: Any, **sizes: Any) -> str:
    """Returns why an engine cannot be batch-invariant with this attention, and a remedy; empty if
    it can.
    """
    impl = find(name or DEFAULTS[0])
    if not impl.invariant:
        names = ", ".join(repr(impl.name) for impl in IMPLS.values() if impl.invariant)
        return f"attention_impl {name!r} has no batch-invariant form; those that have one: {names}"
    obstacle = _obstacle(impl, device, **sizes)
    if obstacle:
        return f"attention_impl {impl.name!r}, which has a batch-invariant form, {obstacle}"
    return ""


def page_row(impl: str | None, head_dim: int) -> int:
    """Returns the numbers in a row of a page: head_dim, or those of several tokens if the
    implementation needs it.
    """
    return find(impl or "xla").page_row(head_dim)


def latent_row(impl: str | None, numbers: int) -> int:
    """Returns the numbers in a token's row of a page of latents, of which `numbers` are kept: as
    many, or with zeros behind them if the implementation needs it.
    """
    latents = find(impl or "xla").latents
    return numbers if latents is None else latents.page_row(numbers)


def pages_of_heads(attend: Attend, memory: jax.Array, kv_heads: int, head_dim: int) -> jax.Array:
    """Returns memory of blocks as pages of K heads of D numbers: [P, 1, S, n K D], which n layers
    share, as [P n, K, S, D], or in rows of several tokens. Page `i n + j` is part j of block i.
    """
    row = attend.impl.page_row(head_dim) if isinstance(attend, Bound) else head_dim
    rows = memory.shape[2] * head_dim // row
    return memory.reshape(-1, kv_heads, rows, row)


def page_dtype(impl: str | None, dtype: str, *, words: bool = False) -> str:
    """Returns the dtype of pages whose keys and values are of `dtype`: the same, or integers of
    their bits.

    Args:
        words: other layers keep words of any bits in such pages, which must not be converted as
            floats.
    """
    implementation = find(impl or "xla")
    pages = implementation.page_dtype(dtype)
    reads_bits = implementation.name in ("xla", "reference")
    return BITS.get(pages, pages) if words and reads_bits else pages


def pages_of(impl: str) -> Callable[..., jax.Array]:
    """Returns the function (shape, dtype, device=None) -> zeros with which an implementation makes
    pages on the default device.
    """
    pages = find(impl).pages
    return jnp.zeros if pages is None else lambda shape, dtype, device=None: pages(shape, dtype)


numbers_in = read  # (pages) -> their numbers: integers of bits become floats
stored_in = stored  # (numbers, dtype of pages) -> the numbers as such pages have them


def prepare(name: Any, *, dtype: str, query_dtype: str, invariant: bool) -> None:
    """Starts the work that an implementation does once in a process, before there is a model to
    trace.

    Args:
        dtype, query_dtype, invariant: see `Implementation.prepare`.
    """
    find(name or DEFAULTS[0]).prepare(dtype=dtype, query_dtype=query_dtype, invariant=invariant)


def is_built_in(attend: Bound) -> bool:
    """Returns whether `attend` is a built-in implementation, in one of its forms, as it was
    shipped, and so is what computes states.
    """
    impl = BUILT_IN.get(attend.impl.name)
    if impl is None or not device_states.is_built_in(attend.states):
        return False
    forms = [
        form for form in (impl.attend, impl.invariant, impl.without_drafts) if form is not None
    ]
    # the forms of an implementation differ in these two fields alone
    in_usual_form = attend.impl._replace(attend=impl.attend, decodes_alone=impl.decodes_alone)
    return attend.impl.attend in forms and in_usual_form == impl


def register_kernels(program: bytes) -> None:
    """Registers the kernels that a compiled program calls, before it is loaded from disk."""
    from pallas_kernels.shared.cpu.handler import register_called

    register_called(program)


@dataclass(frozen=True)
class Bound:
    """`paged_attention` with its implementation and scale: an `Attend`.

    states: the kernel for the states of layers without attention; None: plain JAX.
    """

    impl: Implementation
    scale: float
    states: device_states.Implementation | None = None

    def __call__(self, *arrays: jax.Array, **options: Any) -> jax.Array:
        with placed(f"attend of the attention {self.impl.name!r}"):
            return paged_attention(*arrays, scale=self.scale, impl=self.impl, **options)


def attend(
    impl: str,
    scale: float,
    *,
    invariant: bool = False,
    drafts: bool = True,
    states: str = device_states.DEFAULT,
) -> Attend:
    """Returns `paged_attention` with its implementation and scale.

    Args:
        invariant: take its batch-invariant form.
        drafts: whether rows may have drafts to verify.
        states: the name of what computes the states of layers without attention.

    Raises:
        ValueError: an unknown name, or there is no such form.
    """
    implementation = find(impl)
    if not drafts and implementation.without_drafts:
        implementation = implementation._replace(attend=implementation.without_drafts)
    kernel = device_states.find(states)
    if not invariant:
        return Bound(implementation, scale, kernel)
    if implementation.invariant is None:
        raise ValueError(f"attention_impl {impl!r} has no batch-invariant form")
    form = implementation._replace(attend=implementation.invariant, decodes_alone=False)
    return Bound(form, scale, kernel)


def states_of(attend: Attend) -> device_states.Implementation | None:
    """Returns the kernel for states that goes with an attention; None: plain JAX."""
    return attend.states if isinstance(attend, Bound) else None


def probabilities(
    attend: Attend,
    q: jax.Array,
    k_pages: jax.Array,
    rows: Batch,
    heads: Sequence[int],
    **options: Any,
) -> jax.Array:
    """Returns the weights that the implementation gives to values, [R, len(heads), M S] float32, by
    position.

    Args:
        q: [R, N, D] the queries of `rows`, which have one token each.
        heads: the query heads whose weights are wanted.
        options: window and soft_cap, and sinks, as of an `Attend`.

    Raises:
        ValueError: an implementation of one's own without `probabilities`.
    """
    if not isinstance(attend, Bound) or attend.impl.probabilities is None:
        name = attend.impl.name if isinstance(attend, Bound) else attend
        raise ValueError(
            f"attention {name!r} has no `probabilities`, which taps of attention read; add that "
            "field"
        )
    arrays = q, k_pages, rows.block_tables, rows.seq_lens
    return attend.impl.probabilities(*arrays, tuple(heads), scale=attend.scale, **options)


def over_latents(
    attend: Attend, q: jax.Array, pages: jax.Array, rows: Sequence[Any], rank: int, **options: Any
) -> jax.Array:
    """Returns the attention over pages of latents, [T, N, rank], as
    `pallas_kernels.paged_attention.api.latent_attention` defines it.

    Args:
        q: [T, N, R].
        pages: [P, 1, S, R].
        rows: block_tables, seq_lens and cu_q_lens.
        options: window and soft_cap, as of an `Attend`.
    """
    if not isinstance(attend, Bound) or attend.impl.latents is None:
        return attend(q, pages, pages, *rows, **options)[..., :rank]
    with placed(f"attend of the attention {attend.impl.name!r}"):
        return latent_attention(
            q, pages, *rows, rank=rank, scale=attend.scale, impl=attend.impl, **options
        )


def expanded(attend: Attend) -> Callable[..., jax.Array] | None:
    """Returns the function by which an implementation computes long chunks over latents, the
    contract of `pallas_kernels.paged_attention.expanded`, with its scale; None: it has none.
    """
    if not isinstance(attend, Bound) or attend.impl.expanded is None:
        return None
    return partial(attend.impl.expanded, scale=attend.scale)


def write(
    attend: Attend,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    k: jax.Array,
    v: jax.Array | None,
    batch: Batch,
):
    """Writes the keys and values of the batch's tokens into their slots, as the implementation does
    it.

    An `Attend` that is not `Bound` gets XLA's scatter.
    """
    impl = attend.impl.write if isinstance(attend, Bound) else "xla"
    return kv_write.write(k_pages, v_pages, k, v, batch.slots, rows=len(batch.seq_lens), impl=impl)


def rotate_and_write(attend: Attend) -> Callable[..., Any] | None:
    """Returns the function by which an implementation rotates queries and keys and writes keys and
    values at once, `pallas_kernels.kv_write.rotate_and_write`; None: it has none.
    """
    if not isinstance(attend, Bound) or attend.impl.rotate_and_write is None:
        return None
    return partial(kv_write.rotate_and_write, impl=attend.impl.rotate_and_write)


def write_latents(attend: Attend, pages: jax.Array, x: jax.Array, batch: Batch) -> jax.Array:
    """Writes rows x [T, 1, R] of latents into pages [P, 1, S, R]. Returns the pages."""
    if isinstance(attend, Bound) and attend.impl.latents is not None:
        written, _ = write(attend, pages, None, x, None, batch)
    else:  # rows are keys and values: the second result is the same array, and is not computed
        written, _ = write(attend, pages, pages, x, x, batch)
    return written
