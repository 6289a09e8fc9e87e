"""Compiled handlers: calls wait for them, and a handler that cannot be compiled is an error and never a wait."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor, TimeoutError
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

MATRIX = Matrix(64, 24)
FLOAT32 = "float32", "float32", False


class Compilation:
    """One that ends when a test says so, with an error if there is one."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.error: Exception | None = None

    def __call__(self, *arguments: Any, **options: Any) -> bytes:
        self.begun.set()
        assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error
        return compiler.object_code.original(*arguments, **options)  # type: ignore[attr-defined]


@pytest.fixture
def handler(request, monkeypatch) -> Handler:
    """A handler of float32 products that no process has compiled, of a target of its own."""
    name = f"linear_of_{request.node.name}"
    handler = Handler(name, f"pallas_kernels.tests.{name}", cpu.__package__, Path(cpu.__file__).parent, OPTIONS)
    monkeypatch.setitem(cpu.HANDLERS, FLOAT32, handler)
    monkeypatch.setattr(object_files, "place", lambda name, folder: None)
    return handler


OPTIONS = cpu.HANDLERS[FLOAT32].options


@pytest.fixture
def compilation(monkeypatch):
    trampolines.give_back(trampolines.take())  # there are some
    held, original = Compilation(), compiler.object_code
    held.original = original  # type: ignore[attr-defined]
    monkeypatch.setattr(compiler, "object_code", held)
    yield held
    held.may_end.set()


def product() -> tuple[Any, np.ndarray]:
    """A compiled program of a product, and its result."""
    x = np.arange(3 * 24, dtype=np.float32).reshape(3, 24) % 7
    weight = np.arange(64 * 24, dtype=np.float32).reshape(64, 24) % 5
    packed = jnp.asarray(IMPLS["cpu"].pack(weight, MATRIX))
    program = jax.jit(lambda x: linear(x, packed, MATRIX, impl="cpu")).lower(x).compile()
    return lambda: np.asarray(program(x)), x @ weight.T
