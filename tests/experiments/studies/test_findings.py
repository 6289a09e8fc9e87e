"""Intervals and claims of studies: coverage, and no claim without a result."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.studies import load
from experiments.studies.findings import Claim, exactly, interval, ratios, times

paged_load = importlib.import_module("experiments.studies.011_paged_load.study")
recorded = importlib.import_module("experiments.studies.012_recorded_load.study")


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_interval_coverage(count):
    """An interval of a bootstrap over three values has the truth in three of four cases alone."""
    draw = np.random.default_rng(count)
    for samples, truth in (
        (draw.lognormal(2.0, 0.3, (400, count)), np.exp(2.0)),
        (draw.normal(10.0, 1.0, (400, count)), 10.0),
    ):
        estimates = [interval(values.tolist()) for values in samples]
        covered = np.mean([estimate.low <= truth <= estimate.high for estimate in estimates])
        assert 0.92 < covered < 0.98


def test_interval_of_positive_numbers_uses_logarithms():
    estimate = interval([1.0, 2.0, 4.0])
    assert estimate.middle == pytest.approx(2.0)
    # t with two degrees of freedom, at 97.5 %, and a deviation of one doubling
    half = 4.302653 / 3**0.5
    assert (estimate.low, estimate.high) == pytest.approx((2.0 ** (1 - half), 2.0 ** (1 + half)))
    assert (estimate.kind, estimate.n) == ("interval", 3)
    zero = interval([0.0, 1.0, 2.0])
    assert (zero.low, zero.middle, zero.high) == pytest.approx((1 - half, 1.0, 1 + half))


def test_constant_values_have_no_interval():
    assert interval([3.0]) == (3.0, 3.0, 3.0, "interval", 1)
    assert interval([0.0, 0.0]) == (0.0, 0.0, 0.0, "interval", 2)
    assert exactly(4.0) == (4.0, 4.0, 4.0, "interval", None)
    json.dumps(interval([1.0, 1e9]), allow_nan=False)


def test_ratios_are_taken_seed_by_seed():
    above = [{"a": {"b": value}} for value in (2.0, 40.0)]
    below = [{"a": {"b": value}} for value in (1.0, 20.0)]
    assert ratios(above, below, "a.b") == (2.0, 2.0, 2.0, "interval", 2)
    assert ratios(above, [{"a": {"b": 0.0}}, below[1]], "a.b") is None
    none = ratios([{"a": {"b": 0.0}}] * 2, below, "a.b")
    assert none is not None
    assert none.middle == 0.0


def test_ratio_to_zero():
    claim = Claim("a paper", "a thing", (0.0, 9.0), exactly(0.0))
    assert claim.ratio is None
    assert claim.agrees
    assert (times(claim.ratio), times(2.0)) == ("none", "2.00")


RATES = (1.0, 2.0, 4.0, 8.0)


def test_rate_outside_grid_is_not_found():
    # halfway in logarithms
    assert load.highest(RATES, (0.1, 0.1, 0.4, 0.1), 0.2) == pytest.approx(8**0.5)
    assert load.highest(RATES, (0.3, 0.1, 0.1, 0.1), 0.2) is None
    assert load.highest(RATES, (0.1, 0.1, 0.1, 0.1), 0.2) is None
    assert load.highest(RATES, (0.1, 0.4), 0.2) == pytest.approx(2**0.5), (
        "higher rates may have been left out"
    )


def test_end_of_grid_is_no_result():
    latencies = {
        "in": [[0.1, 0.1], [0.1, 0.4], [0.4, 0.4], [0.5, 0.5]],
        "fast": [[0.1, 0.1]] * 4,
        "slow": [[0.3, 0.1]] * 4,
    }
    latencies["part"] = [[0.1, 0.1], [0.1, 0.1], [0.4, 0.1], [0.5, 0.1]]
    assert load.gain(latencies, RATES, 0.2, "in", "in") == (1.0, 1.0, 1.0, "interval", 2)
    for policy in ("fast", "slow", "part"):
        assert load.gain(latencies, RATES, 0.2, "in", policy) is None
        assert load.gain(latencies, RATES, 0.2, policy, "in") is None
    words = [load.rate_text(latencies, RATES, 0.2, name) for name in latencies]
    assert words == ["2", ">= 8", "not met at 1", ">= 2.83"]
    assert load.fewer((1.0, 2.0, 3.0, 4.0, 5.0)) == (1.0, 4.0, 5.0)


def test_engine_beyond_latency_is_not_driven_further(monkeypatch, tmp_path):
    """Latencies are the rate over the capacity of each engine."""
    (tmp_path / "config.yaml").write_text("sweep: {list: [{speed: 1}, {speed: 4}]}")
    calls = []

    def simulated(file, sweep, rate, *overrides, repeats, on_run):
        speeds = [point["speed"] for point in json.loads(sweep.removeprefix("sweep="))["list"]]
        calls.append((float(rate.split("=")[1]), speeds))
        for speed in speeds:
            request = SimpleNamespace(e2e=calls[-1][0] / speed, max_tokens=1)
            on_run(SimpleNamespace(label=str(speed)), SimpleNamespace(requests=[request]))

    monkeypatch.setattr(load, "simulated", simulated)
    rates = (1.0, 2.0, 4.0, 8.0, 16.0)
    latencies = load.by_rate(tmp_path / "config.yaml", ("slow", "fast"), rates, until=1.0)
    assert calls == [(1.0, [1, 4]), (2.0, [1, 4]), (4.0, [4]), (8.0, [4])]
    assert latencies == {"slow": [[1.0], [2.0]], "fast": [[0.25], [0.5], [1.0], [2.0]]}


def test_missing_factors_give_no_claims():
    of_target = {paged_load.ORACLE: exactly(2.0), paged_load.MAX: None}
    of_others = dict.fromkeys(paged_load.PUBLISHED)
    gains = {paged_load.TARGET: of_target, **dict.fromkeys(paged_load.OTHERS, of_others)}
    (claim,) = paged_load.claims_of("ShareGPT", gains)
    assert claim.ours == exactly(2.0)


def shares(*values):
    return [{"goodput": {"share": value}, "ttft_s": {"p99": 1.0}} for value in values]


def test_windows_of_a_trace_are_scenarios():
    assert recorded.gain(shares(0.4, 0.9), shares(0.2, 0.3)) == (
        2.0,
        2.5,
        pytest.approx(3.0),
        "range",
        2,
    )
    assert recorded.gain(shares(0.4), shares(0.0)) is None
