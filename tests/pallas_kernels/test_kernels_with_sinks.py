"""Sinks: a score of each query head that joins the softmax once, in every implementation and form,
against numpy's float64. Those of the GPU kernels are in test_paged_attention_gpu.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import IMPLS, paged_attention
from pallas_kernels.paged_attention.cpu import implementation as cpu
from pallas_kernels.paged_attention.pallas_tpu import implementation as pallas_tpu
from pallas_kernels.paged_attention.probabilities import probabilities
from tests.pallas_kernels.test_paged_attention import (
    GOOD,
    MANY,
    Case,
    assert_contract,
    every_impl,
    every_impl_and_size,
    make,
    oracle,
    run,
    scatter,
)
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations
# decodes of one span and of several, rows of drafts, and chunks of one tile and of several
ROWS = [(1, 700), (17, 17), (1, 1), (60, 530), (3, 300), (1, 40)]
FEW_ROWS = [(1, 700), (1, 1), (3, 300), (20, 90)]
# below all scores, among them, above them, and so far above that nothing else has weight
SINKS = np.array([-100.0, 0.3, 2.0, 500.0], np.float32)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    attend = partial(pallas_tpu.paged_attention, interpret=True)
    monkeypatch.setitem(IMPLS, "pallas_tpu", IMPLS["pallas_tpu"]._replace(attend=attend))


def batch(t: int, **options: Any) -> Case:
    rows = ROWS if t == MANY else FEW_ROWS
    return make(rows, t=t, b=8, **options)._replace(sinks=SINKS)


def test_the_oracle_is_jaxs_own_attention_with_one_more_token():
    """The token has a value of zeros, and a bias makes its score that of the sink."""
    case = make([(17, 40)], t=17, b=1)._replace(sinks=SINKS)
    k, v = (np.pad(a[:, :40], ((0, 0), (0, 1), (0, 0), (0, 0))) for a in (case.k, case.v))
    bias = np.zeros((1, 4, 17, 41), np.float32)
    bias[0, :, :, 40] = SINKS[:, None]
    mask = np.arange(41) < 24 + np.arange(17)[:, None]
    mask[:, 40] = True
    attend = jax.jit(partial(jax.nn.dot_product_attention, implementation="xla", scale=0.25))
    jaxs = attend(case.q[None], k, v, bias=bias, mask=mask[None, None])[0]
    chex.assert_trees_all_close(oracle(case), jaxs, atol=1e-5, rtol=0)


@every_impl_and_size
def test_sinks_join_the_softmax_once_wherever_it_is_split(impl, t):
    windows = {"window": 290, "soft_cap": 3.0} if t == MANY else {}
    case = batch(t)._replace(**windows)
    assert_contract(case, impl)
    without = oracle(case._replace(sinks=None))
    assert np.abs(oracle(case) - without).max() > 0.1, "the sinks hardly matter"
    of_last_head = run(case, impl)[:, -1]
    chex.assert_trees_all_equal(of_last_head, np.zeros_like(of_last_head))


@pytest.mark.parametrize("window", [None, 300])
def test_sinks_beside_pages_of_16_bits(window):
    """A chunk multiplies pairs of bfloat16 numbers, where the CPU can."""
    assert_contract(batch(MANY, dtype=jnp.bfloat16)._replace(window=window), "cpu")
    single = batch(MANY, k=1, g=4, s=8)._replace(window=window)
    assert_contract(single, "cpu")


def test_a_sink_of_minus_infinity_changes_no_bit():
    case = batch(MANY)._replace(sinks=np.full(4, -np.inf, np.float32))
    chex.assert_trees_all_equal(run(case, "cpu"), run(case._replace(sinks=None), "cpu"))


def test_the_invariant_form_has_the_same_bits_in_any_chunk():
    form = IMPLS["cpu"]._replace(attend=IMPLS["cpu"].invariant)
    whole = batch(MANY)._replace(window=290)
    assert_contract(whole, form)  # type: ignore[arg-type]  # a record is an implementation too
    expected = run(whole, form)
    # the last token of each row alone, as a decode
    last = whole.cu_q_lens[1:7] - 1
    alone = whole._replace(
        q=whole.q[last],
        cu_q_lens=np.minimum(np.arange(9), 6).astype(np.int32),
    )
    chex.assert_trees_all_equal(run(alone, form), expected[last])


def test_queries_of_one_row_without_offsets_have_sinks_too():
    """A step of decodes alone."""
    case = make([(1, 300), (1, 9), (1, 40)], t=3, b=3)._replace(sinks=SINKS)
    arguments = (*case.arguments[:5], None)
    got = paged_attention(*arguments, scale=case.scale, impl="cpu", sinks=SINKS)
    chex.assert_trees_all_close(np.asarray(got), oracle(case), atol=2e-5)


def test_probabilities_leave_the_weight_of_the_sink_out():
    """With the values of a token all equal to a basis vector, attention gives its weights."""
    case = make([(1, 11), (1, 1), (1, 4)], t=3, b=3, s=4)._replace(sinks=SINKS)
    bases = np.broadcast_to(np.eye(12, 16, dtype=np.float32)[:, None], case.v.shape)
    expected = oracle(scatter(case._replace(v=bases), garbage=0.0)._replace(window=5))[:, :, :12]
    heads = (3, 1, 0, 2)
    options = {"scale": case.scale, "window": 5, "sinks": jnp.asarray(SINKS)}
    output = jax.jit(lambda *a: probabilities(*a, heads, **options))(
        case.q, case.k_pages, case.block_tables, case.seq_lens
    )
    chex.assert_trees_all_close(np.asarray(output), expected[:, list(heads)], atol=1e-6)
    assert (np.asarray(output).sum(-1) < 1.001).all()


@every_impl
def test_a_program_without_sinks_has_no_operand_for_them(impl):
    case = make([(1, 5)], t=1, b=1)
    options = {"scale": case.scale, "impl": impl}
    without = paged_attention.lower(*case.arguments, **options).as_text()
    assert without == paged_attention.lower(*case.arguments, sinks=None, **options).as_text()
    having = paged_attention.lower(*case.arguments, sinks=SINKS, **options).as_text()
    assert "tensor<4xf32>" in having
    assert "tensor<4xf32>" not in without


def test_sinks_of_another_shape_or_for_an_implementation_without_them_are_refused():
    arguments = [np.zeros(*value) for value in GOOD.values()]
    heads = arguments[0].shape[1]
    with refused(r"sinks is float32 \(3,\); q .* needs float32"):
        paged_attention(*arguments, scale=1.0, impl="xla", sinks=np.zeros(3, np.float32))
    own = IMPLS["xla"]._replace(name="own", takes_sinks=False)
    with refused(
        "impl 'own' takes no sinks; those that do: 'reference', 'xla', 'cpu', 'pallas_gpu'"
    ):
        paged_attention(*arguments, scale=1.0, impl=own, sinks=np.zeros(heads, np.float32))


def test_handlers_with_sinks_have_targets_of_their_own():
    """A program on disk that was compiled without sinks must not call code that reads them."""
    targets = {handler.target for handler in cpu._HANDLERS.values()}
    assert len(targets) == len(cpu._HANDLERS)
    for (kind, invariant, sinks), handler in cpu._HANDLERS.items():
        assert handler.target.endswith("_sinks.") == sinks, (kind, invariant)
