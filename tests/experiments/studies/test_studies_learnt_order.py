"""Study 029 as a whole with --quick on files like those of a recorded service, and its parts."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest

from experiments import reproduce
from experiments.studies.findings import NoTraces
from experiments.twin import learned

pytestmark = pytest.mark.few_optimisations

study = importlib.import_module("experiments.studies.029_learnt_order.study")

NET = learned.Network(
    hidden=((0, 0, 0, 64, 0, 0),), bias=(0,), output=(128,), output_bias=0, patience=64
)
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{i // 60:02}:{i % 60:02}.5,{100 + 37 * i % 900},{1 + i % 7}\n"
    for i in range(60)
)


@pytest.mark.slow
def test_the_study_runs_quick_on_given_traces(tmp_path):
    for kind in ("conv", "code"):
        (tmp_path / f"a_{kind}_trace.csv").write_text(TRACE, encoding="utf-8")
    (name,) = reproduce.choose(["029"])
    findings = reproduce.run(name, True, tmp_path)
    answer = " ".join(findings["answer"])
    assert "In 6 of 6 measured runs" in answer
    assert "stop after 2 episodes, or the first one behind 60 s. 2 were played." in answer
    assert "learning.svg" in findings["svg"]
    assert len(findings["tables"]) == 4


def test_without_traces_the_study_says_which_files(tmp_path):
    with pytest.raises(NoTraces, match=r"there is no \*conv\*.csv in the folder of --traces"):
        study.run(tmp_path, True, tmp_path)


def test_what_was_learnt_is_read_from_the_weights():
    """Of a network that knows the predicted length alone: two arrivals for each doubling."""
    by_doubling = study.slopes(NET)
    assert by_doubling["predicted length"] == pytest.approx(2.0, abs=0.1)
    assert by_doubling["prompt"] == 0
    sentence = study.weights_sentence(NET)
    assert "a doubling of the predicted length moves a request 2.0 arrivals back" in sentence


def test_gains_are_paired_and_shares_are_of_the_oracles_gain():
    rng = np.random.default_rng(0)
    fcfs = rng.uniform(1, 5, 30)
    latencies = {"fcfs": fcfs, study.LEARNED: fcfs - 0.3, study.ORACLE: fcfs - 0.4}
    gain = study.gain(latencies, "fcfs")
    assert (gain.low, gain.mean, gain.high) == pytest.approx((0.3, 0.3, 0.3))
    assert study.gap(latencies) == pytest.approx(0.75)
    even = {**latencies, study.ORACLE: fcfs}
    assert math.isnan(study.gap(even))


def test_windows_keep_the_recorded_lengths_and_scale_the_times(tmp_path):
    file = tmp_path / "conv.csv"
    file.write_text(TRACE, encoding="utf-8")
    first, last = study.windows_of(file, study.QUICK, 0.5)
    count = study.QUICK.setup.requests
    np.testing.assert_array_equal(first.workload.arrival, 500_000 * np.arange(count))
    np.testing.assert_array_equal(
        last.workload.prompt_len, [100 + 37 * i % 900 for i in range(60 - count, 60)]
    )
