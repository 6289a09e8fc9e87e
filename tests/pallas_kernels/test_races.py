"""The race detector's answer: a kernel that waits for its copy, and one that does not."""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.races import MODES, without_races

pytestmark = pytest.mark.few_optimisations

X = jnp.arange(1024, dtype=jnp.float32).reshape(8, 128)


def doubled(interpret, *, wait: bool):
    """Return 2 X, from a buffer that a copy fills."""

    def kernel(x, out, buffer, arrived):
        copy = pltpu.make_async_copy(x, buffer, arrived)
        copy.start()
        if wait:
            copy.wait()
        out[...] = 2 * buffer[...]

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    scratch = [pltpu.VMEM(X.shape, X.dtype), pltpu.SemaphoreType.DMA]
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    call = pl.pallas_call(
        kernel, in_specs=[in_hbm], out_shape=shape, scratch_shapes=scratch, interpret=interpret
    )
    return call(X)


@pytest.mark.parametrize("mode", MODES)
def test_a_kernel_that_waits_returns_its_result(mode):
    chex.assert_trees_all_equal(without_races(partial(doubled, wait=True), mode), 2 * X)


def test_a_missing_wait_is_a_race_where_the_copy_is_early_and_no_number_where_it_is_late():
    with pytest.raises(
        RuntimeError, match=r"same memory without an order:\n  read of .*\n.*\n  write of "
    ):
        without_races(partial(doubled, wait=False), "eager")
    assert np.isnan(without_races(partial(doubled, wait=False), "on_wait")).all()


def test_a_call_without_a_kernel_is_an_error_and_not_a_success():
    with pytest.raises(
        RuntimeError, match="ran no Pallas kernel, or not with this argument; pass it on"
    ):
        without_races(lambda interpret: X + 1, "eager")
