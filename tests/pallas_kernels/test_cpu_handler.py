"""Calls wait for a compiled handler. One that cannot be compiled is an error and never a wait."""

from __future__ import annotations

import importlib.util
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Unfinished
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

if importlib.util.find_spec("llvmlite") is None:
    pytest.skip("the cpu extra is not installed", allow_module_level=True)

from pallas_kernels.linear import IMPLS, Matrix, linear
from pallas_kernels.linear.cpu import implementation as cpu
from pallas_kernels.shared.cpu import compiler, object_files, trampolines
from pallas_kernels.shared.cpu.handler import Handler

FLOAT32 = "float32", "float32", False, False
OPTIONS = cpu.HANDLERS[FLOAT32].options


class Compilation:
    """One that ends when a test says so, with an error if there is one."""

    def __init__(self, compile_: Callable[..., bytes]) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.error: Exception | None = None
        self.compile = compile_

    def __call__(self, *arguments: Any, **options: Any) -> bytes:
        self.begun.set()
        assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error
        return self.compile(*arguments, **options)


@pytest.fixture
def compilation(monkeypatch) -> Iterator[Compilation]:
    trampolines.take()
    if not trampolines._spare:  # that was the last one: more would be compiled by the paused one
        trampolines.take()
    paused = Compilation(compiler.object_code)
    monkeypatch.setattr(compiler, "object_code", paused)
    yield paused
    paused.may_end.set()


@pytest.fixture
def handler(request, monkeypatch, compilation) -> Handler:
    """A handler of float32 products that is not compiled, of a target of its own."""
    name = f"linear_of_{request.node.name}"
    target = f"pallas_kernels.tests.{name}"
    folder = Path(cpu.__file__).parent
    handler = Handler(name, target, cpu.__package__, folder, OPTIONS)
    monkeypatch.setitem(cpu.HANDLERS, FLOAT32, handler)
    monkeypatch.setattr(object_files, "place", lambda name, folder: None)
    return handler


def program_and_result(inputs: int) -> tuple[Callable[[], np.ndarray], np.ndarray]:
    """A compiled program of a product, and its result. inputs: a number that no other test has."""
    matrix = Matrix(64, inputs)
    x = np.arange(3 * inputs, dtype=np.float32).reshape(3, inputs) % 7
    weight = np.arange(64 * inputs, dtype=np.float32).reshape(64, inputs) % 5
    packed = jnp.asarray(IMPLS["cpu"].pack(weight, matrix))
    program = jax.jit(lambda x: linear(x, packed, matrix, impl="cpu")).lower(x).compile()
    return lambda: np.asarray(program(x)), x @ weight.T


def test_programs_are_compiled_before_their_handler_and_wait_for_it(handler, compilation):
    run, expected = program_and_result(1237)
    assert compilation.begun.wait(60)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(run) for _ in range(2)]
        for call in calls:
            with pytest.raises(Unfinished):  # and Python goes on
                call.result(timeout=0.2)
        compilation.may_end.set()
        for call in calls:
            chex.assert_trees_all_equal(call.result(timeout=60), expected)
    handler.wait()
    chex.assert_trees_all_equal(run(), expected)


def test_a_handler_that_cannot_be_compiled_fails_calls_and_then_tracing(handler, compilation):
    compilation.error = ValueError("LLVM is broken")
    run, _ = program_and_result(1241)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(run)
        with pytest.raises(Unfinished):
            call.result(timeout=0.2)
        compilation.may_end.set()
        message = f"kernel '{handler.name}' could not be compiled: ValueError: LLVM is broken"
        message = message.replace("[", r"\[")
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call.result(timeout=60)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run()
    with pytest.raises(RuntimeError, match=message) as raised:
        program_and_result(1249)
    assert raised.value.__cause__ is compilation.error
    with pytest.raises(RuntimeError, match=message):
        handler.wait()


def test_a_handler_is_compiled_once_for_all_that_start_it(handler, compilation):
    compilation.may_end.set()
    with ThreadPoolExecutor(4) as pool:
        for call in [pool.submit(handler.start if i % 2 else handler.register) for i in range(16)]:
            call.result(timeout=60)
    handler.wait()
    run, expected = program_and_result(1259)
    chex.assert_trees_all_equal(run(), expected)


def test_trampolines_are_enough_for_every_variant_of_a_model():
    """Of one dtype, with matrices of two formats; others are made when they are needed."""
    from pallas_kernels.paged_attention.cpu import implementation as attention

    products = Counter(variant[:2] for variant in cpu.HANDLERS)
    pages = Counter(variant[0] for variant in attention._HANDLERS)
    assert 2 * max(products.values()) + max(pages.values()) < trampolines.SPARE
    number = trampolines.SPARE + 3
    assert len({trampolines.take().address for _ in range(number)}) == number


def test_targets_and_names_of_variants_differ():
    from pallas_kernels.paged_attention.cpu import implementation as attention

    handlers = [*cpu.HANDLERS.values(), *attention._HANDLERS.values()]
    for values in (
        [handler.target for handler in handlers],
        [handler.name for handler in handlers],
    ):
        assert len(set(values)) == len(values)
    for invariant in (False, True):
        kinds = [attention.handler_of("bfloat16", q, invariant) for q in ("bfloat16", "float32")]
        assert (kinds[0] == kinds[1]) == invariant
