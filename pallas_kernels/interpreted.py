"""Interprets GPU kernels (Pallas, Mosaic GPU) on a CPU: products whose operands and sums are in
registers, and stores to the shared memory of another block of the cluster.

JAX's interpreter, of 0.11, knows no product whose first operand is in registers, no assignment to
the sums of a product, and no store to another block. It computes a product when it is started. Here
a product is computed as late as a GPU may compute it: when the kernel waits for it. So an operand in
shared memory that is given back too early is a race, or a wrong result.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import jax
import numpy as np

from pallas_kernels.races import raised_races

SECONDS_TO_START = 60.0  # that a block waits until another one of its cluster has its memory


@contextmanager
def interpreted(**options: Any) -> Iterator[None]:
    """Returns the context in which kernels for Hopper GPUs run on a CPU.

    options: of `plgpu.InterpretGPUParams`, such as detect_races. It needs JAX 0.11.
    """
    # JAX has no public name for the parts of its interpreter
    from jax._src.pallas.mosaic_gpu import primitives
    from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret
    from jax.experimental.pallas import mosaic_gpu as plgpu

    newer: Any = plgpu  # JAX 0.10 has no interpretation
    interpreter: Any = jaxpr_interpret.JaxprInterpreter
    newer_primitives: Any = primitives
    products = _Products()
    # The interpreter has a method for a product, and none for these, or it passes over them.
    methods = {
        newer_primitives.wgmma_accumulator_store_p: products.assign,
        newer_primitives.wgmma_wait_p: products.wait,
        newer_primitives.async_store_smem_p: _store_to_peer,
    }
    interpret = interpreter.interpret

    def interpret_all(self, jaxpr, token, *args):
        eqns = [
            eqn.replace(
                primitive=primitives.wgmma_ref_p,
                params={"method": methods[eqn.primitive], "params": eqn.params},
            )
            if eqn.primitive in methods
            else eqn
            for eqn in jaxpr.eqns
        ]
        return interpret(self, jaxpr.replace(eqns=eqns), token, *args)

    def start(self, eqn, *args):
        return eqn.params.get("method", products.start)(self, eqn, *args)

    def load(self, *args):
        return products.load(self, *args)

    with (
        mock.patch.object(interpreter, "interpret", interpret_all),
        mock.patch.object(interpreter, "_interpret_wgmma_ref_p", start),
        mock.patch.object(interpreter, "_interpret_wgmma_accumulator_deref_p", load),
        newer.force_gpu_interpret_mode(newer.InterpretGPUParams(**options)),
    ):
        yield


@contextmanager
def interpreted_without_races() -> Iterator[None]:
    """The context of `interpreted`, with JAX's detector of races. Results must be computed in it
    (`jax.block_until_ready`).

    Raises:
        RuntimeError: two threads access the same memory without an order.
    """
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    with interpreted(detect_races=True), raised_races():
        yield
    if get_races().races_found:  # JAX 0.11 logs where
        raise RuntimeError("two accesses to the same memory without an order")


class _Products:
    """The products that warpgroups have started and not awaited. Methods replace JAX's own."""

    def __init__(self) -> None:
        self.pending: dict[str, list[Callable[[], None]]] = defaultdict(list)  # of each warpgroup

    def start(self, interpreter: Any, eqn: Any, token: Any, get_invals: Callable[[], Any]) -> Any:
        """Starts a product."""
        from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret

        sums, a, b, *leaves = get_invals()
        of_sums, of_a, of_b = _transforms(eqn, leaves)
        sums_aval, a_aval, b_aval = (var.aval for var in eqn.invars[:3])
        newer: Any = jaxpr_interpret  # JAX 0.10 has less
        sums, of_sums = newer.resolve_ref(sums_aval, sums, of_sums)
        if _is_key(a_aval):
            a, of_a = newer.resolve_ref(a_aval, a, of_a)
        b, of_b = newer.resolve_ref(b_aval, b, of_b)
        multiply = partial(self._multiply, is_key=_is_key(a_aval), source=eqn.source_info)
        return _call(interpreter, multiply, token, sums, of_sums, a, of_a, b, of_b), []

    def assign(self, interpreter: Any, eqn: Any, token: Any, get_invals: Callable[[], Any]) -> Any:
        """Assigns to the sums of a product."""
        sums, value = get_invals()
        store = partial(self._store, source=eqn.source_info)
        return _call(interpreter, store, token, sums, value), [value]

    def wait(self, interpreter: Any, eqn: Any, token: Any, get_invals: Callable[[], Any]) -> Any:
        """Waits for all products but the last ones."""
        wait = partial(self._wait, wait_n=eqn.params["params"]["n"])
        return _call(interpreter, wait, token), []

    def load(self, interpreter: Any, eqn: Any, token: Any, get_invals: Callable[[], Any]) -> Any:
        """Waits for products, and returns the sums of one."""
        (sums,) = get_invals()
        load = partial(self._load, wait_n=eqn.params["wait_n"], source=eqn.source_info)
        return _call(interpreter, load, token, sums, also=eqn.outvars[0].aval)

    def _multiply(
        self, token, place, thread, sums, of_sums, a, of_a, b, of_b, *, is_key: bool, source: Any
    ):
        def read(key, transforms):
            return _access(place, thread, key, transforms, source)

        def multiply() -> None:
            first = read(a, of_a)[0] if is_key else np.asarray(a)
            second, _ = read(b, of_b)
            before, write = read(sums, of_sums)
            write(before + np.matmul(first, second, dtype=before.dtype))

        self.pending[str(thread)].append(multiply)
        return token

    def _store(self, token, place, thread, sums, value, *, source: Any):
        _, write = _access(place, thread, sums, (), source)
        write(np.asarray(value))
        return token

    def _wait(self, token, place, thread, *, wait_n: int | None):
        pending = self.pending[str(thread)]
        while wait_n is not None and len(pending) > wait_n:
            pending.pop(0)()
        return token

    def _load(self, token, place, thread, sums, *, wait_n: int | None, source: Any):
        self._wait(token, place, thread, wait_n=wait_n)
        value, _ = _access(place, thread, sums, (), source)
        return token, value


def _transforms(eqn: Any, leaves: Any) -> Any:
    """The transforms of the sums and of the two operands of a product."""
    names = ("acc_transforms_tree", "a_transforms_tree", "b_transforms_tree")
    trees = tuple(eqn.params[name] or jax.tree.structure([]) for name in names)
    return jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)


def _store_to_peer(interpreter: Any, eqn: Any, token: Any, get_invals: Callable[[], Any]) -> Any:
    """Stores to the shared memory of a block of the cluster, and arrives at a barrier there."""
    from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret

    newer: Any = jaxpr_interpret  # JAX 0.10 has less
    params = eqn.params["params"]
    value, key, barrier, block, *leaves = get_invals()
    trees = params["ref_transforms_treedef"], params["barrier_transforms_treedef"]
    of_key, of_barrier = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
    key, of_key = newer.resolve_ref(eqn.invars[1].aval, key, of_key)
    barrier = newer._get_barrier_allocation_key_from_inval(
        barrier, trees[1], jax.tree.leaves(of_barrier)
    )
    store = partial(_store_in_block, source=eqn.source_info)
    return _call(interpreter, store, token, value, key, of_key, barrier, block), []


def _store_in_block(token, place, thread, value, key, transforms, barrier, block, *, source: Any):
    """The store is asynchronous: who has not waited at the barrier has no order with it."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    memory: Any = gpu_callbacks._get_shared_memory()
    clock = memory.incr_clock(thread) if memory.detect_races else None
    # keys of the blocks of a cluster differ in nothing but the block
    key, barrier = (
        dataclasses.replace(gpu_callbacks.HostAllocationKey.from_array(array), block_id=int(block))
        for array in (key, barrier)
    )
    deadline = time.monotonic() + SECONDS_TO_START
    while barrier not in memory.mem and time.monotonic() < deadline:
        time.sleep(0.001)  # a GPU starts the blocks of a cluster together
    indices = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    part = memory.access(key, indices)
    if clock is not None:
        clock.inc(memory.get_next_tma_thread_id())
        newer: Any = gpu_callbacks  # JAX 0.10 has less
        newer.get_races().check_write(
            thread, clock.generic_clock.copy(), key, part, source_info=source
        )
    memory.store_buffer_content(key, part, np.asarray(value), thread)
    memory.get_barrier(barrier).arrive(thread, clock)
    return token


def _is_key(aval: Any) -> bool:
    """Returns whether an operand is in shared memory, whose key the interpreter passes."""
    from jax._src.state.types import AbstractRef

    return isinstance(aval, AbstractRef)


def _call(interpreter: Any, function: Callable[..., Any], token: Any, *args: Any, also: Any = None):
    """Calls a function outside the program, behind all calls that gave the token."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental import io_callback

    newer: Any = gpu_callbacks  # JAX 0.10 has less
    token_shape = newer.TOKEN_SHAPE_DTYPE
    shapes = token_shape if also is None else (token_shape, also)
    guarded = newer.fail_on_exception(function)
    place = interpreter.mesh_location
    return io_callback(guarded, shapes, token, place, interpreter.thread, *args)


def _access(place: Any, thread: Any, key: Any, transforms: Any, source: Any) -> tuple[Any, Any]:
    """Returns what a buffer holds, and a function that writes to it."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

    memory: Any = gpu_callbacks._get_shared_memory()
    newer: Any = shared_memory  # JAX 0.10 has less
    info = newer.GPULoggingInfo(place, thread, source)
    host_key = gpu_callbacks.HostAllocationKey.from_array(key)
    indices = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    part = memory.access(host_key, indices)
    content, _, _ = memory.get_buffer_content(host_key, part, thread, logging_info=info)

    def write(value) -> None:
        memory.store_buffer_content(host_key, part, value, thread, logging_info=info)

    return content, write
