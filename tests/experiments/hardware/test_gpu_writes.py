"""The check of the kernel that rotates and writes, without a GPU: what it says of a right and of a
wrong kernel.
"""

from __future__ import annotations

import pytest

from experiments.hardware import gpu_writes

pytestmark = pytest.mark.few_optimisations

CASE = gpu_writes.Case(6, 2, 1, 64)
NUMBERS = 12 * CASE.s * CASE.d  # of the pages of keys, without page 0


def next_page(k_pages, v_pages, heads, angles, slots, **options):
    return gpu_writes.by_xla(k_pages, v_pages, heads, angles, slots + CASE.s, **options)


def without_rotation(k_pages, v_pages, heads, angles, slots, **options):
    return gpu_writes.by_xla(k_pages, v_pages, heads, 1 - 0 * angles, slots, **options)


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        (gpu_writes.by_xla, []),
        (without_rotation, ["queries", "keys"]),
        pytest.param(next_page, ["keys", "values"], marks=pytest.mark.slow),
    ],
)
def test_what_differs_is_named(kernel, wrong):
    faults = gpu_writes.faults_of(CASE, kernel)
    assert [fault.split()[-1] for fault in faults] == wrong
    assert all(f" of {NUMBERS} " in fault for fault in faults if "keys" in fault)
