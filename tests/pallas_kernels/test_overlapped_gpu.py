"""The kernel for prompts in FlashAttention-3's order, interpreted on a CPU with race detection.

Products are computed as late as a GPU may compute them (`pallas_kernels.interpreted`). Cases and
oracle are those of test_paged_attention_gpu.py: what no query sees is NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import IMPLS, paged_attention
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from tests.pallas_kernels.test_paged_attention_gpu import (
    EVERY,
    MIXED,
    OFTEN,
    Case,
    assert_mixed,
    check,
    needs_interpreter,
    run,
    sinks_of,
)
from tests.refusals import refused

PLAIN = Case([(20, 150), (3, 3)], group=4)  # two tiles of context


@needs_interpreter
def test_a_chunk_behind_a_context():
    check(PLAIN, overlapped=True)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "s", "group"),
    [
        *OFTEN,
        *(
            pytest.param(*shape, marks=pytest.mark.exhaustive)
            for shape in EVERY
            if shape not in OFTEN
        ),
    ],
)
def test_chunks_of_contexts_around_a_block_border(d, s, group):
    rows = [(2, 2), (0, 0), (s - 1, s - 1), (5, s + 4), (130 // group + 2, s + 150)]
    check(Case(rows, d=d, s=s, group=group, seed=s), overlapped=True)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 7, 16])
def test_a_batch_smaller_than_the_load_of_a_chunk(group):
    check(Case([(2, 20), (3, 3)], group=group), overlapped=True)


@needs_interpreter
@pytest.mark.slow
def test_chunks_behind_a_long_context_in_float16():
    """More tiles than the rings hold, and for the two warpgroups not as many."""
    check(Case([(40, 1200), (9, 700)], heads=2, group=3, dtype="float16"), overlapped=True)
    check(Case([(70, 600)], d=128, group=1), overlapped=True)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"window": 20}, {"window": 300}, {"soft_cap": 1.5}, {"window": 70, "soft_cap": 3.0}],
)
def test_windows_and_caps(options):
    check(Case([(40, 600), (2, 90)], group=2), overlapped=True, **options)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"window": 70, "soft_cap": 3.0}])
def test_sinks(options):
    case = Case([(40, 200), (2, 90)], heads=2, group=3, mean=1.0)
    check(case, overlapped=True, sinks=sinks_of(case), **options)


@needs_interpreter
@pytest.mark.slow
def test_results_are_those_of_attention_in_float32():
    """JAX's own attention, over contiguous keys."""
    case = Case([(50, 400)], group=4, d=128)
    batch = case.batch()
    output = run(case, overlapped=True)
    q, k, v = (np.asarray(array, np.float32) for array in (batch.q[None, :50], batch.k, batch.v))
    mask = np.tri(50, 400, 350, dtype=bool)
    expected = jax.nn.dot_product_attention(q, k, v, mask=mask[None, None])
    np.testing.assert_allclose(output[:50], expected[0], atol=2.0**-6)


@needs_interpreter
@pytest.mark.slow
def test_neither_the_order_of_pages_nor_unowned_slots_change_a_bit():
    case = Case([(30, 150), (9, 9)])
    first = run(case, overlapped=True)
    np.testing.assert_array_equal(first, run(case, overlapped=True, order=1))
    np.testing.assert_array_equal(first, run(case._replace(poison=0.0), overlapped=True))


@needs_interpreter
@pytest.mark.slow
def test_a_mixed_batch_keeps_the_contract():
    from pallas_kernels.interpreted import interpreted

    options = {"window": 20, "soft_cap": 2.0}
    with interpreted():
        output = paged_attention(
            *MIXED.arguments(), scale=MIXED.d**-0.5, impl="pallas_gpu_overlapped", **options
        )
    assert_mixed(output, options)


@needs_interpreter
def test_items_are_in_the_order_of_their_contexts():
    """The grid begins with the longest one, and unused items are the last."""
    from pallas_kernels.paged_attention.pallas_gpu import overlapped

    q_lens = jnp.array([40, 0, 70, 3])
    lengths = jnp.array([40, 0, 900, 200])
    first = jnp.cumsum(q_lens) - q_lens
    items = overlapped.items_of(first, q_lens, lengths, total=130, t=130, size=32, window=None)
    used = int((items.number > 0).sum())
    assert items.length[:used].tolist() == [900, 894, 862, 200, 40, 32, 0]
    assert items.number[:used].tolist() == [6, 32, 32, 3, 8, 32, 17]
    assert items.row[: used - 1].tolist() == [2, 2, 2, 3, 0, 0]
    assert not items.number[used:].any()


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("place", ["fetch", "step", "consume"])
def test_the_checks_detect_a_missing_wait(place, monkeypatch):
    """For room in the rings, for tiles, and for queries."""
    import sys

    from jax.experimental.pallas import mosaic_gpu as plgpu

    wait = plgpu.barrier_wait

    def careless(barrier):
        caller = sys._getframe(1).f_code
        return None if place in caller.co_qualname.split(".")[-3:] else wait(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", careless)
    with pytest.raises(Exception, match=r"without an order|[Bb]arrier|[Mm]ismatch|finite"):
        check(Case([(30, 600), (9, 9)]), overlapped=True)


def test_latents_are_refused_with_a_reason(monkeypatch):
    from typing import NamedTuple

    class Device(NamedTuple):
        platform: str = "gpu"
        device_kind: str = "NVIDIA H200"
        compute_capability: str = "9.0"

    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    overlapped = IMPLS["pallas_gpu_overlapped"]
    assert overlapped.latents is None
    sizes = {"block_size": 16, "kv_heads": 1, "heads": 16}
    dtypes = {"dtype": "bfloat16", "query_dtype": "bfloat16"}
    obstacle = overlapped.obstacle(Device(), head_dim=pallas_gpu.LATENT[1], **sizes, **dtypes)
    assert obstacle == "needs a head size of 64 or 128, and it is 576"


@needs_interpreter
def test_a_shape_that_it_does_not_take_raises_under_its_name():
    case = Case([(1, 5)], d=96)
    with refused(
        "impl 'pallas_gpu_overlapped' needs a head size of 64 or 128, and it is 96; impl 'xla'"
    ):
        paged_attention(*case.arguments(), scale=1.0, impl="pallas_gpu_overlapped")
