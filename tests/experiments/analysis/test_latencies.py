"""Latencies of requests: distributions and medians by length, against their definitions."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import strategies as st

from experiments import report
from experiments.analysis import latencies
from experiments.core import store
from tests import drawn
from tests.experiments.core.summaries import BASE, changed_workload, run_files, simulated_run

NUMBERS = st.lists(st.floats(0, 100), min_size=1, max_size=500)


@drawn.given(30, 300, NUMBERS)
def test_curve_has_the_share_of_values_up_to_each(values: list[float]):
    xs, shares = latencies.cumulative(np.array(values))
    assert len(xs) <= latencies.MOST_POINTS
    assert (xs[0], xs[-1], shares[-1]) == (min(values), max(values), 1.0)
    for x, share in zip(xs, shares, strict=True):
        below = sum(value < x for value in values) / len(values)
        up_to = sum(value <= x for value in values) / len(values)
        assert below < share <= up_to + 1e-12


@drawn.given(30, 300, st.lists(st.integers(1, 60), min_size=6, max_size=60))
def test_each_prompt_is_in_the_bin_that_has_its_length(prompts: list[int]):
    bins = latencies.length_bins(np.array(prompts))
    if bins is None:
        return
    seconds = np.array(prompts, float)
    point = latencies.Latencies(np.array(prompts), {"ttft_s": seconds}, np.empty(0))
    medians = latencies.medians_by_length(point, "ttft_s", bins)
    for place, label in enumerate(bins.labels):
        low, _, high = label.partition("-")
        members = [n for n in prompts if int(low) <= n <= int(high or low)]
        if len(members) >= latencies.MIN_REQUESTS:
            assert medians[place] == statistics.median(members)
        else:
            assert place not in medians
    assert bins.edges[0] == min(prompts)
    assert bins.edges[-1] == max(prompts) + 1


def test_latencies_are_those_of_the_summary(tmp_path):
    measured = simulated_run({**BASE, "workload": changed_workload(count=12)})
    point = latencies.latencies(measured.requests)
    for name in ("ttft_s", "e2e_s", "itl_s"):
        assert np.percentile(point.values(name), 99) == pytest.approx(measured.summary[name]["p99"])


def test_points_without_requests_and_long_files_are_left_out(tmp_path, monkeypatch):
    folder = run_files(tmp_path, {**BASE, "workload": changed_workload(count=12)})
    runs = store.read_runs(folder)
    key = runs[0]["point"]
    samples, left_out = latencies.read(runs, [key, "other"])
    assert len(samples[key].prompts) == 12
    assert left_out == ""
    drawn = report.prepare(runs, report.Choice())
    about = {"name": "unit", "question": "", "command": ""}
    sections = report.draw({}, runs, drawn)
    assert not any("Left out" in section.note for section in sections)
    monkeypatch.setattr(latencies, "MOST_BYTES", 10)
    page = report.page(about, runs, [{}], drawn, report.draw({}, runs, drawn))
    assert "Left out: the files requests.jsonl of the points that are shown here have" in page
