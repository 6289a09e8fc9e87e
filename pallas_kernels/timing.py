"""Inputs and timers to measure attention kernels: random pages, and time on the device."""

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
    cu_q_lens: jax.Array | None  # [B + 1]; None for decodes


class Shape(NamedTuple):
    """The sizes of a call whose rows are equal."""

    rows: int
    queries: int  # query tokens of a row
    context: int  # context tokens of a row
    heads: int  # key heads
    group: int  # query heads of a key head
    d: int  # head size
    s: int  # token slots of a page

    def __str__(self) -> str:
        return (
            f"{self.rows} x {self.queries} of {self.context}, "
            f"{self.heads} heads x {self.d}, G {self.group}, S {self.s}"
        )

    @property
    def cache_bytes(self) -> int:
        """The bytes of the keys and values of all rows, in bfloat16."""
        number_bytes = 2
        return 2 * number_bytes * self.rows * self.context * self.heads * self.d

    @property
    def flops(self) -> float:
        """The operations of q k^T and of the sums of values: 2 each, for each number of a pair."""
        # pairs of a query and a key that it sees, in a row
        pairs = self.context * self.queries - self.queries * (self.queries - 1) / 2
        return 4.0 * self.rows * pairs * self.heads * self.group * self.d


def inputs(shape: Shape, seed: int = 0) -> Inputs:
    """Returns bfloat16 arguments. Every row has its own pages in random order; page 0 is unused."""
    # without jit each operation would be a program of its own
    return jax.jit(_inputs, static_argnums=0)(shape, seed)


def arguments(shape: Shape) -> Inputs:
    """Returns the shapes of `inputs`."""
    return jax.eval_shape(lambda: _inputs(shape, 0))


def _inputs(shape: Shape, seed: int) -> Inputs:
    width = -(-shape.context // shape.s)
    keys = jax.random.split(jax.random.key(seed), 4)
    cache = (shape.rows * width + 1, shape.heads, shape.s, shape.d)
    k, v = (jax.random.normal(key, cache, jnp.bfloat16) for key in keys[:2])
    q = jax.random.normal(
        keys[2], (shape.rows * shape.queries, shape.heads * shape.group, shape.d), jnp.bfloat16
    )
    pages = jax.random.permutation(keys[3], shape.rows * width).reshape(shape.rows, width)
    tables = pages.astype(jnp.int32) + 1
    first = None
    if shape.queries > 1:
        first = jnp.arange(shape.rows + 1, dtype=jnp.int32) * shape.queries
    return Inputs(q, k, v, tables, jnp.full(shape.rows, shape.context, jnp.int32), first)


class Times(NamedTuple):
    """The time of one call: medians, in seconds.

    busy: the sum of its kernels' times on the device; None if no profiler saw them.
    wall: the time from call to call, with the gaps between kernels, when the device never waits
        for the host.
    """

    busy: float | None
    wall: float

    @property
    def seconds(self) -> float:
        """The busy time, or the wall time where that is not known."""
        return self.wall if self.busy is None else self.busy


def compiled(call: Callable[..., Any], arguments: Any, sets: int) -> Any:
    """Returns the program that calls `call` once on each of `sets` sets of arguments.

    It is one program, so that no time of the host is between the calls. Compiling takes one core
    and no arrays, so programs can be compiled side by side in threads.

    Args:
        arguments: of one call, as arrays or as their shapes.
    """
    jitted = jax.jit(call)  # traced once for all sets
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)
    calls = jax.jit(lambda argument_sets: [jitted(*set_) for set_ in argument_sets])
    return calls.lower([shapes] * sets).compile()


def device_times(program: Any, sets: Sequence[Any], rounds: int = 9) -> Times:
    """Returns the times of one call of a program of `compiled` on the GPU.

    They are measured over rounds through all sets of arguments. The busy time is None if CUPTI sees
    no kernels, as on a CPU.
    """
    sets = list(sets)
    jax.block_until_ready(program(sets))
    walls = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready([program(sets) for _ in range(QUEUED)])
        walls.append((time.perf_counter() - started) / QUEUED / len(sets))
    busy = _busy(program, sets, rounds) if jax.default_backend() == "gpu" else None
    return Times(busy and busy / len(sets), statistics.median(walls))


def _busy(program: Any, sets: Sequence[Any], rounds: int) -> float | None:
    """Returns the median sum of the kernels' times of one round."""
    from jax.experimental.mosaic.gpu import profiler

    try:
        _, times = profiler.measure(program, iterations=rounds)(sets)
    except RuntimeError as error:  # no CUPTI, or it lost kernels
        print(f"  CUPTI: {error}", flush=True)
        return None
    return statistics.median(times) / 1e3 if times else None
