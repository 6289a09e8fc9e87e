"""The guess of what the next call of a kernel reads, and waits for other threads."""

from __future__ import annotations

import importlib.util
import threading

import numpy as np
import pytest

if importlib.util.find_spec("llvmlite") is None:
    pytest.skip("the cpu extra is not installed", allow_module_level=True)

from pallas_kernels.shared.cpu import team
from pallas_kernels.shared.cpu.memory import fetch_add, load_word, wait_for
from pallas_kernels.shared.cpu.team import expect
from pallas_kernels.shared.cpu.translate import compiled
from tests.pallas_kernels.test_cpu_translate import native_function

WEIGHTS = [(2**40 + 4096 * i, 100 + i) for i in range(6)]  # (address, bytes of a share)


@compiled
def _next_after(address, memory, share):
    """Returns the guess of the next memory, plus the bytes of its share."""
    expect(address, memory, share)
    share = load_word(address + team.NEXT_SHARE)
    return load_word(address + team.NEXT) + share if share > 0 else 0


@compiled
def _next_share(address):
    return load_word(address + team.NEXT_SHARE)


@compiled
def _wait(counter, count):
    wait_for(counter, count)
    return fetch_add(counter, 1)


@compiled
def _add_one(counter):
    return fetch_add(counter, 1)


def test_a_guess_is_what_followed_last_time():
    memory = np.zeros(team.BYTES // 8, np.int64)
    next_after = native_function(_next_after)

    def guesses(weights: list[tuple[int, int]]) -> list[int]:
        return [next_after(memory.ctypes.data, *weight) for weight in weights]

    followers = [sum(weight) for weight in (*WEIGHTS[1:], WEIGHTS[0])]
    assert guesses(WEIGHTS) == [0] * len(WEIGHTS)  # nothing is known of the first round
    assert guesses(WEIGHTS) == followers
    # another order is learned in a round
    other = WEIGHTS[::-1]
    guesses(other)
    assert guesses(other) == [sum(weight) for weight in (*other[1:], other[0])]
    # an address with the same place in the table has another entry
    twin = WEIGHTS[0][0] + team.LINE * team.ENTRIES, 7
    assert guesses([twin]) == [0]
    assert native_function(_next_share)(memory.ctypes.data) == 0


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
