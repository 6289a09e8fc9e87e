"""The check of the GPU kernels' numbers, without a GPU: its oracle, and what it says of wrong
kernels.
"""

from __future__ import annotations

import json
import time
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.hardware import gpu_numerics
from experiments.hardware.gpu_numerics import (
    ALONE,
    GROUPS,
    KINDS,
    TOLERANCE,
    Case,
    cases,
    check_case,
    errors,
    exact,
)
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.paged_attention.reference import paged_attention as reference
from pallas_kernels.tiles import Tiles

SMALL = Case(64, 8, 3)
EVERY = {*KINDS, *ALONE}
xla = partial(paged_attention, impl="xla")


@pytest.mark.default_cases(
    "{}-1-1", "{}-5-19", "{'window': 7}-19-19", "{'soft_cap': 2.0}-1-19", "{'sinks': True}-5-19"
)
@pytest.mark.parametrize(("count", "length"), [(1, 1), (1, 19), (5, 19), (19, 19)])
@pytest.mark.parametrize(
    "options", [{}, {"window": 7}, {"soft_cap": 2.0}, {"sinks": True}], ids=str
)
def test_exact_attention_equals_the_reference(count, length, options):
    case = Case(64, 8, 3, **options)
    rng = np.random.default_rng(count)
    q = rng.standard_normal((count, 6, 64)).astype(np.float32)
    k, v = rng.standard_normal((2, length, 2, 64)).astype(np.float32)
    pages = [np.pad(a, ((0, 32 - length), (0, 0), (0, 0))).swapaxes(0, 1)[None] for a in (k, v)]
    expected = jax.jit(partial(reference, scale=64**-0.5, **case.options(6)))(
        q,
        *pages,
        np.zeros((1, 1), np.int32),
        np.array([length], np.int32),
        np.array([0, count], np.int32),
    )
    chex.assert_trees_all_close(
        exact(q, k, v, 3, case), np.asarray(expected, np.float64), atol=1e-5
    )


@pytest.mark.slow
def test_one_wrong_row_is_an_error_of_its_kind():
    def last_token_forgotten(q, k, v, tables, lengths, first, *, alone, **options):
        """Of decodes: of those in a call of their own, or of those among other rows."""
        decodes = alone if first is None else (first[1:] - first[:-1] == 1) & (not alone)
        shorter = jnp.where(decodes & (lengths > 1), lengths - 1, lengths)
        return xla(q, k, v, tables, shorter, first, **options)

    for alone, wrong in ((True, [*ALONE]), (False, ["decode"])):
        error_of = errors(SMALL, impl=partial(last_token_forgotten, alone=alone))
        assert all(error_of.pop(kind) > TOLERANCE for kind in wrong)
        assert max(error_of.values()) <= TOLERANCE


def test_a_result_that_is_not_finite_is_an_infinite_error():
    error_of = errors(SMALL, impl=lambda *args, **options: xla(*args, **options).at[0].set(jnp.nan))
    assert all(error_of[kind] == float("inf") for kind in ("decode", *ALONE))


def test_a_wrong_kernel_is_reported_as_wrong_and_a_right_one_with_every_option_as_right(
    monkeypatch,
):
    def kernel(*args, scale, impl, factor, **options):
        assert impl.name == "pallas_gpu"
        return xla(*args, scale=factor * scale, **options)

    for case, factor, right in (
        (SMALL, 2, False),
        (Case(64, 16, 4, window=33, soft_cap=5.0, sinks=True), 1, True),
    ):
        monkeypatch.setattr(gpu_numerics, "paged_attention", partial(kernel, factor=factor))
        result = check_case(case, anywhere=True)
        assert result["right"] is right
        assert set(result["errors"]) == EVERY
        if right:
            assert 0 < max(result["errors"].values()) <= TOLERANCE
        else:
            assert min(result["errors"].values()) > TOLERANCE, "every kind of row is wrong"


def test_a_device_that_is_no_gpu_is_the_reason():
    result = check_case(SMALL)
    assert not result["right"]
    assert (
        "runs on platform 'gpu' and not on 'cpu'; --rehearse interprets the kernels"
        in result["failed"]
    )


def hang_or_not(case: Case) -> dict[str, object]:
    if case.window:
        time.sleep(600)
    return {"case": str(case)[4:], "errors": dict.fromkeys(EVERY, 0.0), "right": True}


@pytest.mark.slow  # test_job_processes.py has a job that hangs
def test_a_kernel_that_hangs_does_not_hang_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_numerics, "cases", lambda every: [SMALL._replace(window=33), SMALL])
    monkeypatch.setattr(gpu_numerics, "check_case", hang_or_not)
    file = tmp_path / "found.json"
    assert gpu_numerics.main(["--processes", "2", "--seconds", "10", "--json", str(file)]) == 1
    right, hung = json.loads(file.read_text())["cases"]
    assert right["right"]
    assert hung["failed"] == "not done after 10 s"


def test_cases_have_every_size_and_every_option():
    every = list(cases())
    assert len(every) == 80
    assert {case.d for case in every} == set(pallas_gpu.HEAD_SIZES)
    assert {case.s for case in every} == set(pallas_gpu.BLOCK_SIZES)
    for option in ("window", "soft_cap", "sinks"):
        assert {case.group for case in every if getattr(case, option)} == set(GROUPS)
    assert len(list(cases(7))) < 15


def test_both_ways_of_a_decode_are_checked():
    """A context that is not split is written by the kernel, and parts are merged by XLA."""
    decode = pytest.importorskip("pallas_kernels.paged_attention.pallas_gpu.decode")
    tiles = Tiles.read("h200")
    for case in cases():
        longest = -(-max(length for _, length in case.rows()) // case.s) * case.s
        rows = sum(count == 1 for count, _ in case.rows())
        parts = [
            decode.parts_of(rows, 2, longest, tiles._replace(min_split=n)) for n in ALONE.values()
        ]
        assert parts[0] == 1
        assert parts[1] > 1
