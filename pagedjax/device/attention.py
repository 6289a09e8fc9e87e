"""Binds a model's attention to one implementation. `attention.py` and `linear.py` alone import
pallas_kernels.

An implementation is one record, `Implementation`. Its name is one of `IMPLS`; the name of your own
is "folder/file.py:NAME" or "module:NAME".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax.config import own_value
from pagedjax.device.batch import Batch
from pallas_kernels import kv_write
from pallas_kernels.paged_attention import IMPLS, Implementation, paged_attention
from pallas_kernels.shared.page_bits import read, stored

BUILT_IN = dict(IMPLS)  # also if someone adds to IMPLS

# (q, k_pages, v_pages, block_tables, seq_lens, cu_q_lens, *, window, soft_cap) -> [T, N, D]
Attend = Callable[..., jax.Array]

# The first one that can serve is the default. "xla" runs everywhere. "pallas_gpu" is here since its
# first run (experiments/results/h200); "pallas_tpu" is not until it has run on a TPU.
DEFAULTS = "cpu", "pallas_gpu", "xla"


def find(name: str) -> Implementation:
    """Returns the implementation of that name: one of IMPLS, or your own.

    Raises:
        ValueError: there is no such implementation, module, file or value.
    """
    if name in IMPLS:
        return IMPLS[name]
    file = name.rpartition(":")[0]
    return _own(
        name, os.path.abspath(file), os.stat(file).st_mtime_ns if os.path.isfile(file) else 0
    )


# one record for all callers, so that `prepare` and `attend` share the file's globals; a new one if
# it changes
@cache
def _own(name: str, file: str, changed: int) -> Implementation:
    return own_value("attention_impl", name, Implementation, IMPLS)


def choose(wanted: str | None, device: Any, *, invariant: bool = False, **sizes: Any) -> str:
    """Returns the name of an engine's implementation: the wanted one, or the default.

    Args:
        invariant: the engine is batch-invariant.
        sizes: the keyword arguments of `Implementation.obstacle`. `dtype` is that of the keys and
            values in the cache.

    Raises:
        ValueError: the wanted one cannot serve this cache on this device; the message gives the
            reason. There is no fallback.
    """
    if invariant and (reason := _not_invariant(wanted, device, **sizes)):
        raise ValueError(f"batch_invariant is True, and {reason}; or set batch_invariant=False")
    if wanted is None:
        return next(name for name in DEFAULTS if not find(name).obstacle(device, **sizes))
    if wrong := find(wanted).obstacle(device, **sizes):
        raise ValueError(f"attention_impl {wanted!r} {wrong}; 'xla' has no such limit")
    return wanted


def _not_invariant(wanted: str | None, device: Any, **sizes: Any) -> str:
    """Returns why an engine cannot be batch-invariant with this attention, and a remedy; empty if
    it can.
    """
    impl = find(wanted or DEFAULTS[0])
    able = ", ".join(repr(name) for name, one in IMPLS.items() if one.invariant)
    if not impl.invariant:
        return f"attention_impl {wanted!r} has no batch-invariant form; those that have one: {able}"
    if obstacle := impl.obstacle(device, **sizes):
        return f"attention_impl {impl.name!r}, which has a batch-invariant form, {obstacle}"
    return ""


def page_row(impl: str | None, head_dim: int) -> int:
    """Returns the numbers in a row of a page: head_dim, or those of several tokens if the
    implementation needs it.
    """
    return find(impl or "xla").page_row(head_dim)


def page_dtype(impl: str | None, dtype: str) -> str:
    """Returns the dtype of pages whose keys and values are of `dtype`: the same, or integers of
    their bits.
    """
    return find(impl or "xla").page_dtype(dtype)


def pages_of(impl: str) -> Callable[..., jax.Array]:
    """Returns (shape, dtype, device=None) -> zeros for pages on the default device, as an
    implementation makes them.
    """
    pages = find(impl).pages
    return jnp.zeros if pages is None else lambda shape, dtype, device=None: pages(shape, dtype)


# the numbers in pages, and numbers as pages of a dtype have them
numbers_in, stored_in = read, stored


def prepare(wanted: str | None, *, dtype: str, query_dtype: str, invariant: bool) -> None:
    """Starts an implementation's work of once a process, before there is a model to trace.

    Args:
        dtype, query_dtype, invariant: see `Implementation.prepare`.
    """
    find(wanted or DEFAULTS[0]).prepare(dtype=dtype, query_dtype=query_dtype, invariant=invariant)


def is_built_in(attend: Bound) -> bool:
    """Returns whether this is one of IMPLS in one of its forms, and nothing of one's own."""
    impl = BUILT_IN.get(attend.impl.name)
    if impl is None:
        return False
    forms = [
        form for form in (impl.attend, impl.invariant, impl.without_drafts) if form is not None
    ]
    others = attend.impl._replace(attend=impl.attend, decodes_alone=impl.decodes_alone)
    return attend.impl.attend in forms and others == impl


def register_kernels(program: bytes) -> None:
    """Makes the kernels callable that a compiled program calls, before it is loaded from disk."""
    from pallas_kernels.shared.cpu.handler import register_called

    register_called(program)


@dataclass(frozen=True)
class Bound:
    """`paged_attention` with its implementation and scale: an `Attend`."""

    impl: Implementation
    scale: float

    def __call__(self, *arrays: jax.Array, **options: Any) -> jax.Array:
        return paged_attention(*arrays, scale=self.scale, impl=self.impl, **options)


def attend(impl: str, scale: float, *, invariant: bool = False, drafts: bool = True) -> Attend:
    """Returns `paged_attention` with its implementation and scale.

    Args:
        invariant: in its batch-invariant form.
        drafts: whether rows may have drafts to verify.

    Raises:
        ValueError: an unknown name, or there is no such form.
    """
    found = find(impl)
    if not drafts and found.without_drafts:
        found = found._replace(attend=found.without_drafts)
    if not invariant:
        return Bound(found, scale)
    if found.invariant is None:
        raise ValueError(f"attention_impl {impl!r} has no batch-invariant form")
    return Bound(found._replace(attend=found.invariant, decodes_alone=False), scale)


def probabilities(
    attend: Attend,
    q: jax.Array,
    k_pages: jax.Array,
    rows: Batch,
    heads: Sequence[int],
    **options: Any,
) -> jax.Array:
    """Returns what the implementation weighs values with, [R, heads, M S] float32 by position.

    Args:
        q: [R, N, D] the queries of `rows`, which have one token each.
        options: window and soft_cap, as of an `Attend`.

    Raises:
        ValueError: an implementation of one's own without `probabilities`.
    """
    if not isinstance(attend, Bound) or attend.impl.probabilities is None:
        name = attend.impl.name if isinstance(attend, Bound) else attend
        raise ValueError(
            f"attention {name!r} has no `probabilities`, which taps of attention read; add that field"
        )
    arrays = q, k_pages, rows.block_tables, rows.seq_lens
    return attend.impl.probabilities(*arrays, tuple(heads), scale=attend.scale, **options)


def write(
    attend: Attend, k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, batch: Batch
):
    """Writes the keys and values of the batch's tokens into their slots, as the implementation does
    it.

    An `Attend` that is not `Bound` gets XLA's scatter.
    """
    how = attend.impl.write if isinstance(attend, Bound) else "xla"
    return kv_write.write(k_pages, v_pages, k, v, batch.slots, rows=len(batch.seq_lens), impl=how)
