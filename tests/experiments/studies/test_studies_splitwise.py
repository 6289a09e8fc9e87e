"""Study 020: its machines, its requests and targets, its search, and a quick run of all of it."""

from __future__ import annotations

import csv
import importlib
import json
import math
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import reproduce
from experiments.core import config
from experiments.core.records import BranchRecord, RequestRecord
from experiments.simulation.cost import SHAPES
from experiments.studies import splitwise_machines as machines
from experiments.studies import splitwise_requests as requests
from experiments.studies.findings import NoTraces
from experiments.studies.splitwise_batches import MOST, WHOLE
from pagedjax.host.types import Request, Running, Seq

study = importlib.import_module("experiments.studies.020_splitwise.study")
FOLDER = reproduce.STUDIES / "020_splitwise"


def test_clusters_are_a_fifth_of_the_papers():
    assert machines.SCALE * machines.H100S == 40
    assert machines.SCALE * machines.A100S == 70
    assert machines.PRICED_A100S == 86 // machines.SCALE
    assert machines.PRICE["h100"] * 8 == pytest.approx(38, rel=0.01)
    assert machines.PRICE["a100"] * 8 == pytest.approx(17.6, rel=0.01)


@pytest.mark.parametrize("kind", study.TRACES)
def test_designs_keep_their_budget_and_one_machine_more_would_not(kind):
    for budget, designs, first in study.systems(kind).values():
        assert 0 <= first < len(designs)
        for design in designs:
            last, _ = design.tokens or design.prompts
            if "power" in budget:
                assert (
                    machines.MOST_POWER - machines.POWER[last]
                    < design.power
                    <= machines.MOST_POWER + 1e-9
                )
            if "cost" in budget:
                assert (
                    machines.MOST_PRICE - machines.PRICE[last]
                    < design.price
                    <= machines.MOST_PRICE + 1e-9
                )


@pytest.mark.parametrize(
    ("kind", "name", "division"),
    [
        ("conversations", "ha", (25, 26)),
        ("conversations", "aa, cost", (51, 35)),
        ("code", "aa", (55, 15)),
    ],
)
def test_a_search_begins_with_a_fifth_of_the_notebook_s_division(kind, name, division):
    _, designs, first = study.systems(kind)[name]
    design = designs[first]
    assert (design.prompts[1], design.tokens[1]) == tuple(round(n / 5) for n in division)


@pytest.fixture
def recorded(tmp_path) -> Path:
    """A folder with both traces, short ones: prompts of 200 tokens or more, answers of at most
    12.
    """
    for name in study.TRACES.values():
        lines = [f"2023-11-16 18:15:{i:02d}.5,{200 + 40 * i},{3 + i % 10}" for i in range(30)]
        text = "\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *lines))
        (tmp_path / f"azure_{name}.csv").write_text(text, encoding="utf-8")
    return tmp_path


def test_a_design_is_what_its_config_says(recorded):
    design = machines.mixed_designs()[4]
    assert design.name == "Splitwise-HA, 5 + 5"
    assert design.price == pytest.approx(5 * 4.76 + 5 * 2.21)
    assert design.power == pytest.approx(5 * 44 + 5 * 24.8)
    file = f"workload.file={recorded / 'azure_conv.csv'}"
    (point,) = config.load(FOLDER / "config.yaml", (file, *design.overrides("splitwise")))
    pools = point.experiment.pools
    assert (pools.prefill.count, pools.prefill.simulate.profile) == (5, "splitwise/bloom-176b/h100")
    assert (pools.decode.count, pools.decode.simulate.profile) == (5, "splitwise/bloom-176b/a100")
    assert pools.latency_s == 0.005
    (alone,) = config.load(
        FOLDER / "config.yaml", (file, *machines.BASELINE_A100.overrides("splitwise-sim"))
    )
    assert alone.experiment.replicas.count == machines.A100S
    assert alone.experiment.simulate.profile == "splitwise-sim/bloom-176b/a100"


def test_a_cache_has_the_memory_that_weights_leave():
    cache = config.load_file(FOLDER / "config.yaml")["cache_tokens"]
    free = 8 * 80 * 2**30 - 329e9  # a100-80gb.yaml and bloom-176b-fp16.yaml of the simulator
    assert cache % 16 == 0
    assert cache <= free / SHAPES["bloom-176b"].token_bytes < cache + 16


@given(st.lists(st.integers(1, 3000), max_size=12))
def test_a_step_gets_whole_prompts_up_to_a_sum_or_one_longer_prompt(lengths):
    waiting = tuple(Seq(Request(f"r{i}", n, 4), i, n + 4, n) for i, n in enumerate(lengths))
    line = WHOLE.order(waiting, Running(), len)
    assert tuple(line) == waiting[: len(line)]
    assert len(line) <= 1 or sum(seq.length for seq in line) <= MOST
    if len(line) < len(waiting):
        assert line
        assert sum(seq.length for seq in waiting[: len(line) + 1]) > MOST


def record(prompt: int, arrival: float, *times: float) -> RequestRecord:
    branch = BranchRecord("r", times, (1,) * len(times), 0, "length")
    return RequestRecord("r", arrival, prompt, len(times), arrival, (branch,))


def test_slowdowns_are_over_a_request_alone_on_a_dgx_a100():
    """1,024 tokens alone: 287.47 ms for the first token and 49.442 ms for each other one."""
    slowdowns = requests.slowdowns(
        [record(1024, 1.0, 1.0 + 2 * 0.28747, 1.9, 2.0, 2.0 + 0.28747 + 3 * 0.049442)]
    )
    after = (1.0 - 0.28747 + 3 * 0.049442) / 4
    assert slowdowns["TTFT"] == pytest.approx((2.0,) * 3)
    assert slowdowns["TBT"] == pytest.approx((after / 0.049442,) * 3)
    assert slowdowns["E2E"] == pytest.approx((1 + 1.0 / (0.28747 + 3 * 0.049442),) * 3)


def test_all_nine_targets_must_be_met():
    fine = {"TTFT": (1.9, 2.9, 5.9), "TBT": (1.2, 1.4, 4.9), "E2E": (1.2, 1.4, 4.9)}
    assert requests.missed_targets(fine) == ()
    assert requests.missed_targets({**fine, "TBT": (1.25, 1.4, 4.9)}) == ("TBT P50",)
    assert requests.missed_targets({**fine, "TTFT": (2.5, 2.9, 7.0)}) == ("TTFT P50", "TTFT P99")


def test_requests_have_recorded_lengths_and_poisson_arrivals(recorded, tmp_path):
    file = requests.write(recorded / "azure_code.csv", tmp_path, 4000, 0)
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    prompts, answers = (
        [int(row[name]) for row in rows] for name in ("ContextTokens", "GeneratedTokens")
    )
    assert set(prompts) == {200 + 40 * i for i in range(30)}
    assert set(answers) == set(range(3, 13))
    assert abs(np.corrcoef(prompts, answers)[0, 1]) < 0.05
    times = [datetime.fromisoformat(row["TIMESTAMP"]).timestamp() for row in rows]
    gaps = np.diff(times)
    assert np.mean(gaps) == pytest.approx(1.0, rel=0.05)
    assert np.std(gaps) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("first", [0, 2, 5])
@pytest.mark.parametrize("peak", [1, 3, 4])
def test_the_search_climbs_to_the_best_division(first, peak):
    designs = machines.mixed_designs()
    served = {division: 30.0 - 6.3 * abs(i - peak) for i, division in enumerate(designs)}
    calls = []

    def missed(design: machines.Design, rate: float) -> tuple[str, ...]:
        calls.append((design, rate))
        return ("TBT P50",) if rate > served[design] else ()

    best = study.best(missed, designs, 0.5, first)
    assert best.design == designs[peak]
    assert best.rate <= served[best.design] < best.rate + 0.5
    assert best.failed == ("TBT P50",)
    assert len(calls) == len(set(calls))


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(NoTraces, match=r"there is no \*conv\*.csv in the folder of --traces"):
        study.run(FOLDER, True, tmp_path)


@pytest.mark.slow
def test_a_quick_run_has_every_claim(recorded, tmp_path):
    assert (
        reproduce.main(
            ["020", "--quick", "--traces", str(recorded), "--out", str(tmp_path / "out")]
        )
        == 0
    )
    findings = json.loads((tmp_path / "out" / "020_splitwise" / reproduce.FINDINGS).read_text())
    assert [claim["published"] for claim in findings["claims"]] == [2.15, 1.18, 1.4, 0.89, 0.75] * 2
    assert all(math.isfinite(claim["ours"][1]) for claim in findings["claims"])
