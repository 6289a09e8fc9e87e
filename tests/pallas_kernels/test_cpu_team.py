"""A thread of a compiled kernel waits for other threads."""

from __future__ import annotations

import importlib.util
import threading

import numpy as np
import pytest

if importlib.util.find_spec("llvmlite") is None:
    pytest.skip("the cpu extra is not installed", allow_module_level=True)

from pallas_kernels.shared.cpu.memory import fetch_add, wait_for
from pallas_kernels.shared.cpu.translate import compiled
from tests.pallas_kernels.test_cpu_translate import native_function


@compiled
def _wait(counter, count):
    wait_for(counter, count)
    return fetch_add(counter, 1)


@compiled
def _add_one(counter):
    return fetch_add(counter, 1)


def test_a_thread_waits_until_others_have_counted():
    counter = np.zeros(1, np.int64)
    wait = native_function(_wait)
    assert wait(counter.ctypes.data, 0) == 0
    results: list[int] = []
    waiting = threading.Thread(target=lambda: results.append(wait(counter.ctypes.data, 3)))
    waiting.start()
    waiting.join(0.05)  # longer than it looks before it gives its CPU away
    assert not results
    count = native_function(_add_one)
    assert count(counter.ctypes.data) == 1
    assert waiting.is_alive()
    count(counter.ctypes.data)
    waiting.join(10)
    assert results == [3]
