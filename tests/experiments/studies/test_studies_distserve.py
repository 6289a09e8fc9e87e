"""Study 019: its lengths, its search, its claims, and a quick run of all of it."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest

from experiments import reproduce
from experiments.core import config
from experiments.core.clusters import of_pool
from experiments.core.workloads import build
from experiments.simulation.cost import Work
from experiments.simulation.profiles import PROFILES
from experiments.studies.findings import interval

study = importlib.import_module("experiments.studies.019_distserve.study")
FOLDER = reproduce.STUDIES / "019_distserve"


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
    prefill, decode = (of_pool(point.experiment, name) for name in ("prefill", "decode"))
    assert (prefill.simulate.profile, prefill.cache_tokens) == ("distserve/opt-13b/tp2", study.CACHE[2])
    assert (decode.simulate.profile, decode.cache_tokens) == ("distserve/opt-13b/tp1", study.CACHE[1])
    (same,) = config.load(FOLDER / "config.yaml", study.placed(2, 1))
    assert same.key == point.key
    (vllm,) = config.load(FOLDER / "config.yaml", study.alone("vllm", 1))
    assert vllm.experiment.pools is None
    assert vllm.experiment.simulate.profile == "vllm/opt-13b/tp1"
    assert {engine: Work(1, 1, 1, 1, 1) for engine in PROFILES}.keys() >= {
        f"distserve/opt-13b/tp{n}" for n in study.CACHE
    }


@pytest.mark.parametrize("limit", [0.3, 1.7, 4.44])
def test_the_search_finds_the_rate_at_which_a_criterion_fails(monkeypatch, limit):
    asked = []

    def simulated(file: Path, *options: str):
        rate = float(options[0].partition("=")[2]) / 3
        asked.append(options)
        return [(None, [{"met": rate < limit}])]

    monkeypatch.setattr(study, "simulated", simulated)
    found = study.highest(FOLDER, 3, lambda summary: summary["met"], 2, 50, "mine")
    assert len(found.rates) == 2
    assert max(abs(rate - limit) for rate in found.rates) <= study.WITHIN
    assert not found.bound
    assert {options[1:] for options in asked} == {("workload.count=50", f"seed={seed}", "mine") for seed in range(2)}
    always = study.highest(FOLDER, 3, lambda summary: True, 1, 50)
    assert always.bound
    assert study.said(always).startswith("at least")


def test_criteria_are_those_of_the_sources():
    def summary(ttft: float, tpot: float, share: float):
        return {"ttft_s": {"p90": ttft}, "tpot_s": {"p90": tpot}, "goodput": {"share": share}}

    assert study.each_in_time(summary(0.19, 0.09, 0.0))
    assert not study.each_in_time(summary(0.21, 0.09, 1.0))
    assert not study.each_in_time(summary(0.19, 0.11, 1.0))
    assert study.both_in_time(summary(9.0, 9.0, 0.9))
    assert not study.both_in_time(summary(0.0, 0.0, 0.89))


def test_pools_are_compared_at_their_best_split_and_seed_by_seed():
    found = study.Throughput({(1, 3): (8.0, 12.0), (2, 2): (9.0, 9.0), (3, 1): (1.0, 1.0)}, (10.0, 12.0), (4.0, 6.0))
    assert study.best(found) == (1, 3)
    assert study.over(found, found.chunked) == interval([0.8, 1.0])
    claims = study.throughput_claims({"first turns": found})
    assert [claim.agrees for claim in claims] == [True, False]
    assert claims[0].range == (0.0, 1.0)


def test_measured_rates_follow_from_the_printed_factors():
    assert study.MEASURED["pools"] == pytest.approx(study.MEASURED["factor"] * study.MEASURED["vllm"])
    # the other factor that the notebook prints: DeepSpeed-MII's curve, 91 % at 0.25 and 87 % at 0.5 requests/s
    deepspeed = 0.25 + 0.25 * (91 - 90) / (91 - 87)
    assert study.MEASURED["pools"] / deepspeed == pytest.approx(7.36)


@pytest.mark.slow
def test_a_quick_run_has_every_claim(tmp_path):
    assert reproduce.main(["019", "--quick", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "019_distserve" / reproduce.FINDINGS).read_text())
    assert len(found["claims"]) == 3 + 5 + 4
    assert all(math.isfinite(claim["ours"][1]) for claim in found["claims"])
