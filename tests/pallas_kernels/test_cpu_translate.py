"""Functions that are translated to LLVM compute what Python computes."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import math
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("llvmlite") is None:
    pytest.skip("the cpu extra is not installed", allow_module_level=True)

from pallas_kernels.shared.cpu import compiler, object_files
from pallas_kernels.shared.cpu.memory import free, load_float, malloc, store_float
from pallas_kernels.shared.cpu.translate import Option, Translation, compiled, compiled_apart

NUMBERS = -130, -64, -7, -1, 0, 1, 3, 7, 64, 129
WIDTH: Any = Option("width")
PLACES = 3, 5, 8


def native_function(function: Any, **options: int) -> Any:
    """The compiled function, which takes and returns words of 64 bits."""
    translation = Translation()
    translation.export(function, "tested", options)
    (address,) = object_files.load(compiler.object_code(translation, level=1), "tested")
    words = [ctypes.c_int64] * len(function.tree.args.args)
    return ctypes.CFUNCTYPE(ctypes.c_int64, *words)(address)


def assert_same(function: Any, *ranges: Any) -> None:
    native = native_function(function)
    for arguments in itertools.product(*ranges):
        assert native(*arguments) == function.function(*arguments), arguments


def test_divisions_round_down():
    @compiled
    def divided(a, b):
        return 1000 * (a // b) + a % b + 7 * (a // 48) + -(-a // 16) - a % 64

    assert_same(divided, NUMBERS, [number for number in NUMBERS if number])
    assert native_function(divided)(0, 0) == 0


def test_loops_end_as_those_of_python():
    @compiled
    def counted(start, stop):
        total = 0
        for i in range(start, stop, 3):
            if i == 60:
                break
            if i % 2 == 0:
                continue
            total += i
        for i in range(stop - stop % 16, -1, -16):
            total = 2 * total + i
        for place in (2, 3, 5):
            total += place * start
        while total > 1000 or total < -1000:
            total //= 2
            if total % 5 == 1:
                total -= 1
        return total

    assert_same(counted, NUMBERS, NUMBERS)


def test_what_follows_a_decisive_value_is_not_evaluated():
    @compiled
    def read(address, limit):
        if address == 0 or load_float(address) < np.float32(limit):
            return 1
        return 2 if not (limit > 5 and load_float(address) > 0) else 3

    native = native_function(read)
    number = ctypes.c_float(4)
    assert [native(0, 3), native(0, 9)] == [1, 1]
    assert [native(ctypes.addressof(number), limit) for limit in (3, 4, 6)] == [2, 2, 1]
    number.value = 9
    assert [native(ctypes.addressof(number), limit) for limit in (3, 6, 9)] == [2, 3, 3]


def test_results_of_other_functions_and_choices():
    @compiled
    def ordered(a, b):
        if a < b:
            return a, b
        return b, a

    @compiled_apart
    def spread(a, b):
        low, high = ordered(a, b)
        low, high = high, low
        return low - high

    @compiled
    def chosen(a, b):
        is_far = a != b and spread(a, b) > 5
        largest = max(a, b, 3) if is_far else min(a, b, -3)
        return largest + (10 if is_far else 20)

    native = native_function(chosen)
    for a, b in itertools.product(NUMBERS, NUMBERS):
        assert native(a, b) == (max(a, b, 3) + 10 if abs(a - b) > 5 else min(a, b, -3) + 20)


def test_numbers_are_float32():
    @compiled
    def ratio_and_difference(x, y) -> tuple[np.float32, np.float32]:
        return x / y, math.exp(x) - y

    @compiled
    def number(a, b):
        place = malloc(8)
        ratio, difference = ratio_and_difference(np.float32(a), np.float32(b))
        store_float(place, -max(ratio, difference))
        equal = load_float(place) == np.float32(a) * np.float32(0.1)
        store_float(place, np.float32(a) * np.float32(0.1) + load_float(place))
        scaled = 1 if load_float(place) > 0 else 0
        free(place)
        return scaled + 2 * equal

    native = native_function(number)
    for a, b in itertools.product((-3, 1, 2), (-1, 1, 3)):
        x = np.float32(a)
        y = np.float32(b)
        tenth = np.float32(a) * np.float32(0.1)
        largest = max(x / y, np.exp(x) - y)
        assert native(a, b) == (tenth - largest > 0) + 2 * (tenth == -largest)


def test_a_variant_has_the_code_of_its_options_alone():
    @compiled
    def unknown(a):
        return a.nothing  # type: ignore[attr-defined]

    @compiled
    def of_width(a):
        if WIDTH == 4:
            return unknown(a)
        return a * WIDTH + (PLACES[1] if WIDTH == 4 else 0)

    assert native_function(of_width, width=2)(21) == 42
    wrong = r"test_cpu_translate.py:\d+: an attribute of anything but a module cannot be translated"
    with pytest.raises(TypeError, match=wrong):
        native_function(of_width, width=4)
    with pytest.raises(TypeError, match="option 'width' has a value in translated code alone"):
        bool(WIDTH)


def test_what_is_not_known_is_named_with_its_line():
    @compiled
    def chained(a):
        return 1 < a < 3

    @compiled
    def mixed(a):
        return a + np.float32(a)

    @compiled
    def named(a):
        return nowhere + a  # type: ignore[name-defined] # noqa: F821

    @compiled
    def strings(a):
        return len("words") + a

    for function, reason in (
        (chained, "a chain of comparisons"),
        (mixed, "an operation of a word and a float32 number"),
        (named, "the name nowhere, which has no value,"),
        (strings, "a call of <built-in function len>"),
    ):
        line = function.function.__code__.co_firstlineno + 2
        message = f"test_cpu_translate.py:{line}: {reason} cannot be translated"
        with pytest.raises(TypeError, match=message):
            native_function(function)
