"""Study 019: its lengths, its search, its claims, and a quick run of all of it."""

from __future__ import annotations

import importlib
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from experiments import reproduce
from experiments.core import config
from experiments.core.pool_options import pool_experiment
from experiments.core.workloads import build
from experiments.simulation.profiles import PROFILES
from experiments.studies.findings import interval

study = importlib.import_module("experiments.studies.019_distserve.study")
FOLDER = reproduce.STUDIES / "019_distserve"


@pytest.mark.slow
def test_a_tenth_of_the_conversations_take_vllm_longer_than_its_target():
    tokens = study.slow_prompt(0.25)
    a, b, c = PROFILES["vllm/opt-13b/tp1"].prompts
    for n, within in ((tokens, True), (tokens + 1, False)):
        assert (a + b * n + c * n**2 + 3 + 1e-4 * n <= 250) == within
    (point,) = config.load(FOLDER / "config.yaml", (*study.conversations(), "workload.count=20000"))
    items = build(point.experiment.workload, "", 0, 50272, lambda text: []).items
    longer = sum(len(item.prompt_token_ids) > tokens for item in items) / len(items)
    assert longer == pytest.approx(0.1, abs=0.01)
    assert max(len(item.prompt_token_ids) + item.max_tokens for item in items) <= 2048


def test_the_engines_of_the_config_are_those_of_the_example():
    (point,) = config.load(FOLDER / "config.yaml")
    prefill, decode = (pool_experiment(point.experiment, name) for name in ("prefill", "decode"))
    assert prefill.simulate
    assert decode.simulate
    assert (prefill.simulate.profile, prefill.cache_tokens) == (
        "distserve/opt-13b/tp2",
        study.CACHE[2],
    )
    assert (decode.simulate.profile, decode.cache_tokens) == (
        "distserve/opt-13b/tp1",
        study.CACHE[1],
    )
    (of_config,) = config.load(FOLDER / "config.yaml", study.pool_options(2, 1))
    assert of_config.key == point.key
    (vllm,) = config.load(FOLDER / "config.yaml", study.alone("vllm", 1))
    assert vllm.experiment.pools is None
    assert vllm.experiment.simulate
    assert vllm.experiment.simulate.profile == "vllm/opt-13b/tp1"


@pytest.mark.parametrize("within", [study.WITHIN, study.EXAMPLES_WITHIN])
@pytest.mark.parametrize("limit", [0.3, 1.7, 4.44])
def test_the_search_finds_the_highest_rate_that_meets_a_criterion(monkeypatch, limit, within):
    calls = []

    def simulated(file: Path, *options: str):
        rate = float(options[0].partition("=")[2]) / 3
        calls.append(options)
        return [(None, [{"met": rate < limit}])]

    monkeypatch.setattr(study, "simulated", simulated)
    highest = study.highest(FOLDER, 3, lambda summary: summary["met"], 2, 50, "mine", within=within)
    assert len(highest.rates) == 2
    assert all(limit - within <= rate < limit for rate in highest.rates)
    assert not highest.bound
    assert {options[1:] for options in calls} == {
        ("workload.count=50", f"seed={seed}", "mine") for seed in range(2)
    }
    always = study.highest(FOLDER, 3, lambda summary: True, 1, 50)
    assert always.bound
    assert study.rate_text(always).startswith("at least")


def test_criteria_are_those_of_the_sources():
    def summary(ttft: float, tpot: float, share: float):
        return {"ttft_s": {"p90": ttft}, "tpot_s": {"p90": tpot}, "goodput": {"share": share}}

    assert study.each_in_time(summary(0.19, 0.09, 0.0))
    assert not study.each_in_time(summary(0.21, 0.09, 1.0))
    assert not study.each_in_time(summary(0.19, 0.11, 1.0))
    assert study.both_in_time(0.9)(summary(9.0, 9.0, 0.9))
    assert not study.both_in_time(0.9)(summary(0.0, 0.0, 0.89))
    assert study.both_in_time(0.8)(summary(0.0, 0.0, 0.89))


def test_pools_are_compared_at_their_best_split_and_seed_by_seed():
    throughput = study.Throughput(
        {(1, 3): (8.0, 12.0), (2, 2): (9.0, 9.0), (3, 1): (1.0, 1.0)}, (10.0, 12.0), (4.0, 6.0)
    )
    assert study.best(throughput) == (1, 3)
    assert study.over(throughput, throughput.chunked) == interval([0.8, 1.0])
    claims = study.throughput_claims({"first turns": throughput})
    assert [claim.agrees for claim in claims] == [True, False]
    assert claims[0].range == (0.0, 1.0)


def crossing(shares: list[tuple[float, float]], target: float) -> float:
    """The rate at which a curve falls below a share, by lines between its points."""
    for (x, above), (y, below) in pairwise(shares):
        if above >= target > below:
            return x + (y - x) * (above - target) / (above - below)
    raise AssertionError("it does not fall so far")


def test_both_printed_factors_give_one_measured_rate():
    assert crossing(list(study.VLLM_SHARES.items()), 90) == 0.5
    deepspeed = [(0.25, 91.0), (0.5, 87.0)]  # printed too
    assert study.FACTORS["DeepSpeed-MII"] * crossing(deepspeed, 90) == pytest.approx(study.MEASURED)


def test_placements_are_compared_on_the_same_seeds():
    rates = {place: study.Highest((1.0, 2.0), False) for place in study.PLACEMENTS}
    rates[study.PLACEMENTS[0]] = study.Highest((3.0, 3.0, 9.0), False)
    rate, ratio = study.example_claims(rates)
    assert rate.ours == interval([3.0, 3.0, 9.0])
    assert ratio.ours.middle == pytest.approx(3.0 / 2**0.5)
    assert ratio.agrees


@pytest.mark.slow
def test_a_quick_run_has_every_claim(tmp_path):
    assert reproduce.main(["019", "--quick", "--out", str(tmp_path)]) == 0
    findings = json.loads((tmp_path / "019_distserve" / reproduce.FINDINGS).read_text())
    assert len(findings["claims"]) == 2 + 4 + 4
    assert all(math.isfinite(claim["ours"][1]) for claim in findings["claims"])
