"""Interprets GPU kernels (Pallas, Mosaic GPU) on a CPU, with operands and sums in registers.

JAX's interpreter, of 0.11, knows no product whose first operand is in registers, and no assignment
to the sums of a product. It computes a product when it is started. Here a product is computed as
late as a GPU may compute it: when the kernel waits for it. So an operand in shared memory that is
given back too early is a race, or a wrong result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import jax
import numpy as np

from pallas_kernels.races import raised_races


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
    stored = primitives.wgmma_accumulator_store_p  # pyright: ignore[reportAttributeAccessIssue]
    interpret = interpreter.interpret

    def interpret_all(self, jaxpr, token, *args):
        # the interpreter has a method for a product, and none for an assignment to its sums
        eqns = [
            eqn.replace(primitive=primitives.wgmma_ref_p, params={"is_stored": True})
            if eqn.primitive is stored
            else eqn
            for eqn in jaxpr.eqns
        ]
        return interpret(self, jaxpr.replace(eqns=eqns), token, *args)

    products = _Products()

    def start(self, *args):
        return products.start(self, *args)

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
        """Starts a product, or assigns to its sums."""
        from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret

        if "is_stored" in eqn.params:
            sums, value = get_invals()
            store = partial(self._store, source=eqn.source_info)
            return _call(interpreter, store, token, sums, value), [value]
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

    def _load(self, token, place, thread, sums, *, wait_n: int | None, source: Any):
        pending = self.pending[str(thread)]
        while wait_n is not None and len(pending) > wait_n:
            pending.pop(0)()
        value, _ = _access(place, thread, sums, (), source)
        return token, value


def _transforms(eqn: Any, leaves: Any) -> Any:
    """The transforms of the sums and of the two operands of a product."""
    names = ("acc_transforms_tree", "a_transforms_tree", "b_transforms_tree")
    trees = tuple(eqn.params[name] or jax.tree.structure([]) for name in names)
    return jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)


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
