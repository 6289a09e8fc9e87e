"""Zeros that the system makes when a page is first read."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.shared.cpu.zeros import zeros

pytest.importorskip("llvmlite", reason="the `cpu` extra is not installed")


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *(("float32", shape) for shape in [(), (7,), (3, 5000), (200, 3, 16, 64), (0, 4)]),
        *((dtype, (3, 5000)) for dtype in ("uint16", "uint8")),
    ],
)
def test_all_numbers_are_zero_also_in_memory_that_was_used_before(dtype, shape):
    used = jnp.ones(shape, dtype) * 7
    jax.block_until_ready(used)
    del used
    arrays = [zeros(shape, dtype) for _ in range(3)]
    for array in arrays:
        chex.assert_trees_all_equal(array, np.zeros(shape, dtype))


def test_zeros_can_be_donated_and_written_in_place():
    put = jax.jit(lambda pages: pages.at[100, 1].set(3.0), donate_argnums=0)
    pages = zeros((200, 3, 16, 64), "float32")
    place = pages.unsafe_buffer_pointer()
    written = put(pages)
    assert written.unsafe_buffer_pointer() == place
    chex.assert_trees_all_equal(written.sum(), jnp.float32(3 * 16 * 64))
    assert pages.is_deleted()
