"""Study 017: its tables and formulas, against counts by hand."""

from __future__ import annotations

import importlib
import json

import pytest

from experiments import reproduce
from experiments.simulation.cost import CHIPS, SHAPES
from experiments.studies.findings import Interval

parallel = importlib.import_module("experiments.studies.017_tensor_parallelism.study")


def test_published_rates_become_rates_of_a_chip():
    assert parallel.share_of_base((1.0, 4.0, 6.0, 16.0), 1) == 0.5
    assert parallel.share_of_base((1.0, 4.0, 6.0, 16.0), 4) == 0.75
    assert parallel.share_of_base((1.0, 4.0, 6.0, 16.0), 8) == 1.0
    assert {len(rates) for chips in parallel.PUBLISHED.values() for rates in chips.values()} == {
        len(parallel.SIZES)
    }
    assert parallel.PUBLISHED.keys() == parallel.REQUESTS.keys()


def test_decode_steps_fit_in_memory_and_the_next_batch_does_not():
    steps = parallel.decodes("llama-3-8b", "tpu-v5e", 1)
    weights = 8.03e9
    sequence_bytes = 1024 * 2 * 32 * 8 * 128
    assert [step.batch for step in steps] == [1, 2, 4, 8, 16, 32, 64]
    assert (
        weights + steps[-1].batch * sequence_bytes
        < 16e9
        < weights + 2 * steps[-1].batch * sequence_bytes
    )
    assert steps[0].latency == pytest.approx(
        2e-4 + (7.5e9 + sequence_bytes) / 0.819e12, rel=0.01
    ), "the embedding is not read"
    assert {step.exchanged for step in steps} == {0.0}
    assert parallel.decodes("llama-3-70b", "tpu-v5e", 4) == [], (
        "18 GB of weights on a chip of 16 GB"
    )


def test_best_is_the_most_throughput_within_the_limit():
    slow = parallel.Decode(8, 0.04, 200.0, 0.0)
    fast = parallel.Decode(4, 0.01, 100.0, 0.1)
    steps = {
        ("m", "c", 1): [slow],
        ("m", "c", 2): [fast],
        ("m", "d", 4): [slow._replace(per_chip=900.0)],
    }
    assert parallel.best(steps, "m", "c", 0.05) == (1, slow)
    assert parallel.best(steps, "m", "c", 0.02) == (2, fast)
    assert parallel.best(steps, "m", "c", 0.001) is None


def test_crossing_is_where_both_times_are_equal():
    """By hand for n chips: 6 H F / (n rate) = 2 (n - 1) / n * 4 H / (2 link)."""
    chip = CHIPS["tpu-v5p"]
    shape = SHAPES["llama-3-70b"]
    n = parallel.crossing(shape, chip)
    assert 6 * shape.intermediate / chip.rate == pytest.approx((n - 1) * 4 / chip.network.bandwidth)


def test_a_run_has_the_lengths_and_the_chips_of_its_setting():
    folder = reproduce.STUDIES / "017_tensor_parallelism"
    on_1, on_2, on_4, on_8 = parallel.rates(folder, (100, 20), "h200", 4)
    assert on_1 < on_2 < on_4 < on_8, "a small batch is bound by memory"
    assert on_8 < 8 * on_1


def test_kept_findings_have_all_claims():
    file = reproduce.STUDIES / "017_tensor_parallelism" / reproduce.FINDINGS
    findings = json.loads(file.read_text())
    assert len(findings["claims"]) == 12 + len(parallel.book_claims())
    by_claim = {claim.what: claim.ours for claim in parallel.book_claims()}
    for claim in findings["claims"][12:]:
        assert Interval(*claim["ours"]).middle == pytest.approx(by_claim[claim["what"]].middle)
