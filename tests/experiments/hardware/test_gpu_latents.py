"""The check of the kernel for latents, without a GPU: what it says of a right and of a wrong kernel."""

from __future__ import annotations

from functools import partial

import pytest

from experiments.hardware import gpu_latents
from experiments.hardware.gpu_numerics import ALONE, KINDS, TOLERANCE, Case
from pallas_kernels.paged_attention import latent_attention
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu


@pytest.mark.default_cases("2-False")
@pytest.mark.parametrize(("factor", "right"), [(1, True), (2, False)])
def test_each_kind_of_row_is_compared(factor, right, monkeypatch):
    def kernel(*args, scale, impl, factor, **options):
        assert impl.name == "pallas_gpu"
        return latent_attention(*args, scale=factor * scale, impl="xla", **options)

    monkeypatch.setattr(gpu_latents, "latent_attention", partial(kernel, factor=factor))
    error_of = gpu_latents.errors(Case(gpu_latents.ROW, 8, 4))
    assert set(error_of) == {*KINDS, *ALONE}
    assert all((error <= TOLERANCE) == right for error in error_of.values()), error_of


def test_a_device_that_is_no_gpu_is_the_reason():
    result = gpu_latents.check_case(gpu_latents.REHEARSED[0])
    assert not result["right"]
    assert "runs on platform 'gpu' and not on 'cpu'; --rehearse interprets" in result["failed"]


def test_cases_have_every_block_size():
    every = list(gpu_latents.cases())
    assert {case.s for case in every} == set(pallas_gpu.BLOCK_SIZES)
    assert {case.d for case in every} == {pallas_gpu.LATENT[1]}
    assert {16, 20, 128} == {case.group for case in every}
