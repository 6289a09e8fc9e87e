"""Inputs and timers for measurements of attention kernels: a cache of random pages, and time on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

QUEUED = 3  # programs that are started before the host waits


class Inputs(NamedTuple):
    """The arguments of a `paged_attention`, in its order."""

    q: jax.Array  # [T, N, D]
    k_pages: jax.Array  # [P, K, S, D]
    v_pages: jax.Array
    block_tables: jax.Array  # [B, M]
    seq_lens: jax.Array  # [B]
    first_tokens: jax.Array  # [B + 1]


class Shape(NamedTuple):
    """Rows of equal length: query tokens and context tokens."""

    rows: int
    queries: int
    context: int
    heads: int  # of keys
    group: int
    d: int
    s: int

    def __str__(self) -> str:
        return (
            f"{self.rows} x {self.queries} of {self.context}, {self.heads} heads x {self.d}, G {self.group}, S {self.s}"
        )

    @property
    def cache_bytes(self) -> int:
        return 2 * 2 * self.rows * self.context * self.heads * self.d

    @property
    def flops(self) -> float:
        seen = self.context * self.queries - self.queries * (self.queries - 1) / 2  # pairs of query and key, causal
        return 4.0 * self.rows * seen * self.heads * self.group * self.d


def inputs(shape: Shape, seed: int = 0) -> Inputs:
    """Returns bfloat16 arguments. Every row has its own pages in random order; page 0 is unused."""
    width = -(-shape.context // shape.s)
    keys = jax.random.split(jax.random.key(seed), 4)
    cache = (shape.rows * width + 1, shape.heads, shape.s, shape.d)
    k, v = (jax.random.normal(key, cache, jnp.bfloat16) for key in keys[:2])
    q = jax.random.normal(keys[2], (shape.rows * shape.queries, shape.heads * shape.group, shape.d), jnp.bfloat16)
    tables = jax.random.permutation(keys[3], shape.rows * width).reshape(shape.rows, width).astype(jnp.int32) + 1
    first = jnp.arange(shape.rows + 1, dtype=jnp.int32) * shape.queries
    return Inputs(q, k, v, tables, jnp.full(shape.rows, shape.context, jnp.int32), first)


class Times(NamedTuple):
    """Seconds of one call, medians. busy: the sum of its kernels' times on the device; None if no profiler saw them.
    wall: from call to call when the host does not hold the device up, with the gaps between kernels."""

    busy: float | None
    wall: float

    @property
    def seconds(self) -> float:
        """The busy time, or the wall time where that is not known."""
        return self.wall if self.busy is None else self.busy


def device_times(call: Callable[..., Any], sets: Sequence[Any], rounds: int = 9) -> Times:
    """Returns the times of one call on the GPU, over rounds through all `sets` of arguments."""
    from jax.experimental.mosaic.gpu import profiler

    # One program a round, so that no time of the host is in it. The inner jit is traced once for all sets.
    each = jax.jit(call)
    whole = jax.jit(lambda many: [each(*one) for one in many]).lower(sets).compile()
    jax.block_until_ready(whole(sets))
    walls = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready([whole(sets) for _ in range(QUEUED)])
        walls.append((time.perf_counter() - began) / QUEUED / len(sets))
    try:
        _, times = profiler.measure(whole, iterations=rounds)(sets)
    except RuntimeError as error:  # the driver has no CUPTI, or other kernels ran between
        print(f"  CUPTI: {error}", flush=True)
        times = None
    busy = statistics.median(times) / 1e3 / len(sets) if times else None
    return Times(busy, statistics.median(walls))


def device_seconds(call: Callable[..., Any], sets: Sequence[Any], rounds: int = 9) -> float:
    """Returns the `seconds` of `device_times`."""
    return device_times(call, sets, rounds).seconds
