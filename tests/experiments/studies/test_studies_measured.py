"""The measured studies: their formulas, and each study on a tiny model."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench.sharing import Row
from experiments.simulation.cost import SHAPES, Chip, Roofline
from experiments.studies.findings import Interval


def study(name: str) -> ModuleType:
    return importlib.import_module(f"experiments.studies.{name}.study")


timed = importlib.import_module("experiments.studies.005_decode_attention.timed")
decode_attention, sharing, prediction = map(
    study, ("005_decode_attention", "008_sharing", "010_prediction")
)


# 005 ----------------------------------------------------------------------------------------------


def test_step_demand_by_hand():
    shape = SHAPES["gpt2-xl"]
    layers = 48 * (4 * 1600 * 1600 + 2 * 1600 * 6400)
    head = 1600 * 50257
    cached = decode_attention.demand(shape, decode_attention.decode(2, 100))
    assert cached.operations == 2 * 2 * (layers + head) + 4 * 48 * 1600 * 2 * 100
    assert cached.bytes == 2 * (layers + head) + 307_200 * 200
    uncached = decode_attention.demand(shape, decode_attention.again(2, 100))
    assert uncached.operations == 2 * (layers * 200 + head * 2) + 4 * 48 * 1600 * 2 * 100 * 101 / 2
    assert uncached.bytes == cached.bytes


@pytest.mark.parametrize("work", ["decode", "again"])
def test_demand_matches_roofline(work):
    shape = SHAPES["smollm2-135m"]
    step_work = getattr(decode_attention, work)(4, 64)
    demand = decode_attention.demand(shape, step_work)
    slow_memory = Chip(1.0, 1e30, 0.0, launch=0.0)
    slow_products = Chip(1e30, 1.0, 0.0, launch=0.0)
    assert Roofline(shape, slow_memory)(step_work) == pytest.approx(demand.bytes)
    assert Roofline(shape, slow_products)(step_work) == pytest.approx(demand.operations)


def test_gpt2_xl_bounds_match_lecture():
    claims = decode_attention.lecture()
    assert len(claims) == 4
    assert all(claim.agrees for claim in claims)
    # 2 x 1.475e9 operations a token and 3.1e9 bytes of weights: 153 operations a byte at a little
    # over 150 tokens
    chip = Chip(2.039e12, 312e12, 0.0)
    assert 150 < decode_attention.crossing(SHAPES["gpt2-xl"], chip) < 180


def test_plan_is_decode_at_given_context():
    plan = timed.make_plan(3, 31, 16, prefilled=True)
    assert (plan.starts, plan.counts) == ((31,) * 3, (1,) * 3)
    uncached = timed.make_plan(3, 32, 16, prefilled=False)
    assert (uncached.starts, uncached.counts) == ((0,) * 3, (32,) * 3)
    assert len({block for seq in uncached.seqs for block in seq.blocks}) == 3 * 2, (
        "sequences share no block"
    )


@pytest.mark.slow
def test_all_contenders_compute_equal_attention(tiny):
    model = tiny.model
    batch = 3
    context = 40
    c = model.config
    draw = np.random.default_rng(0)
    q = draw.standard_normal((batch, c.heads, c.head_dim), np.float32)
    k, v = draw.standard_normal((2, batch, context, c.kv_heads, c.head_dim), np.float32)
    results = {}
    for together in timed.contenders(model, batch, context, 64):
        for name, contender in together.items():
            if contender.arguments:
                keys, values = (in_pages(x, contender) for x in (k, v))
            else:
                minor = contender.shape[1] == c.kv_heads
                keys, values = (x.swapaxes(1, 2) if minor else x for x in (k, v))
            chex.assert_shape([keys, values], contender.shape)
            results[name] = np.asarray(
                jax.jit(contender.attend)(
                    *map(jnp.asarray, (q, keys, values)), *contender.arguments
                )
            )
    first = results["einsum"]
    assert len(results) >= 5
    chex.assert_shape(first, q.shape)
    chex.assert_tree_all_finite(first)
    for name, result in results.items():
        chex.assert_trees_all_close(result, first, rtol=1e-7, atol=1e-5, custom_message=name)


def in_pages(x, contender):
    """x [B, C, K, D] in the pages of the contender's block tables; NaN in slots without a token."""
    pages = np.full(contender.shape, np.nan, np.float32)
    tables = np.asarray(contender.arguments[0])
    size = contender.shape[2]
    positions = np.arange(x.shape[1])
    pages[tables[:, positions // size], :, positions % size] = x
    return pages


def test_slowdown_is_geometric_mean():
    times = {
        (1, 64): {"a": [2.0, 1.0], "b": [1.0, 1.0]},
        (8, 64): {"a": [8.0, 4.0], "b": [1.0, 1.0]},
    }
    assert timed.slower(times, list(times), "a", "b") == pytest.approx([4.0, 2.0])


@pytest.mark.slow
def test_decode_attention_study_on_tiny_model(tiny_folder, monkeypatch, tmp_path):
    grid = timed.Grid((64, 128), (8,), 512, 2, 1)
    for name, value in {"DEFAULT_MODEL": str(tiny_folder), "QUICK": grid}.items():
        monkeypatch.setattr(decode_attention, name, value)
    monkeypatch.setattr(timed, "BEYOND_L2", 1 << 16)
    findings = decode_attention.run(tmp_path, quick=True)
    assert len(findings.claims) in (6, 7)  # without llvmlite, no kernel supports every block size
    assert all(claim.ours.low > 0 for claim in findings.claims)
    assert sorted(findings.figures) == ["attention.svg", "roofline.svg", "steps.svg"]
    _, steps = findings.tables
    cells = [line.split(" | ")[2] for line in steps.splitlines()[2:]]
    assert [bool(cell) for cell in cells] == [True, False], "at most 512 tokens without a cache"


# 008 ----------------------------------------------------------------------------------------------


def row(lengths, saved, paper):
    return Row("alpaca", 4, lengths, saved, 0.1, paper, 10)


def test_sharing_claim_spans_both_kinds_of_lengths():
    claim = sharing.sampling_claim(row("own", 7.0, 8.0), row("same", 11.0, 8.0))
    assert claim.ours == Interval(7.0, 9.0, 11.0, "range")
    assert claim.agrees
    above = sharing.sampling_claim(row("own", 7.0, 12.0), row("same", 11.0, 12.0))
    assert not above.agrees
    assert sharing.sampling_claim(row("own", 7.0, None), row("same", 11.0, None)) is None


def test_common_prefix_length():
    assert sharing.constant({2: 10.0, 4: 15.0, 6: None}) == pytest.approx(20.0)


@pytest.mark.slow
def test_sharing_study_on_tiny_model(tiny_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(sharing, "DEFAULT_MODEL", str(tiny_folder))
    monkeypatch.setattr(sharing, "pairs", lambda requests, pairs=sharing.pairs: pairs(4))
    monkeypatch.setattr(
        sharing, "beams", lambda widths, draws, requests, beams=sharing.beams: beams((2, 3), 1, 2)
    )
    monkeypatch.setattr(sharing, "ALPACA", sharing.ALPACA._replace(beams={2: 37.56, 3: 45.0}))
    findings = sharing.run(tmp_path, quick=True)
    assert len(findings.claims) == 5 + 2
    assert all(0 <= claim.ours.low <= claim.ours.high < 100 for claim in findings.claims)


# 010 ----------------------------------------------------------------------------------------------


def summary(rate):
    return {"output_tokens_per_s": rate}


def compared(measured, fitted, roofline):
    return prediction.Compared(
        *([summary(rate) for rate in way] for way in (measured, fitted, roofline))
    )


def test_prediction_errors_exclude_fitted_run():
    comparisons = {
        prediction.FIT: compared([100.0, 100.0], [50.0, 50.0], [1.0, 1.0]),
        "another": compared([100.0, 80.0], [110.0, 76.0], [200.0, 160.0]),
    }
    path = "output_tokens_per_s"
    assert prediction.held_out(comparisons, prediction.FITTED, path) == pytest.approx([10.0, 5.0])
    assert prediction.held_out(comparisons, prediction.ROOFLINE, path) == pytest.approx(
        [100.0, 100.0]
    )
    assert prediction.repeat_differences(comparisons, path) == pytest.approx([25.0])


@pytest.mark.slow
def test_prediction_study_on_tiny_model(tiny_folder, monkeypatch, tmp_path):
    # before each of 20 runs, of all that the tests of a session hold
    monkeypatch.setattr("experiments.core.drive.gc", SimpleNamespace(collect=lambda: 0))
    text = prediction.Path(prediction.__file__.replace("study.py", "config.yaml")).read_text(
        encoding="utf-8"
    )
    config = text.replace("smollm2-135m", str(tiny_folder)).replace("repeats: 3", "repeats: 2")
    (tmp_path / "config.yaml").write_text(config, encoding="utf-8")
    findings = prediction.run(tmp_path, quick=True)
    assert len(findings.claims) == len(prediction.METRICS)
    assert all(
        0 <= claim.ours.low <= claim.ours.middle <= claim.ours.high for claim in findings.claims
    )
    assert sorted(findings.figures) == ["predicted.svg"]
