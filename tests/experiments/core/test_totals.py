"""`records: sums`: the sums of a run against its records, the distributions in constant memory, and
the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from experiments import compare, run
from experiments.core import store
from experiments.core.config import expand
from experiments.core.drive import Measured
from experiments.core.metrics import steady_rate
from experiments.core.totals import METHOD, Tally, Timeline
from pagedjax.server.load_client.summary import PERCENTILES, spread
from tests import drawn
from tests.experiments.core.summaries import simulated_run
from tests.experiments.core.test_decodes_together import RAW, changed

PART = 1 / 1024  # of a number, that rounding may take


@given(
    st.lists(
        st.tuples(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=20), st.integers(1, 5)),
        min_size=1,
        max_size=20,
    )
)
def test_a_tally_is_the_distribution_of_all_numbers(drawn):
    tally = Tally()
    for values, times in drawn:
        tally.add(np.array(values), times)
        tally.add_one(values[0])
    every = [value for values, times in drawn for value in [*values * times, values[0]]]
    estimate = tally.spread()
    exact = spread(every)
    assert estimate["count"] == exact["count"]
    assert estimate["max"] == exact["max"]
    chex.assert_trees_all_close(estimate["mean"], exact["mean"], rtol=1e-12)
    names = [f"p{p}" for p in PERCENTILES]
    low = np.array([estimate[name] for name in names])
    high = np.array([exact[name] for name in names])
    assert (high * (1 - PART) <= low).all()
    assert (low <= high * (1 + 1e-12)).all()


def test_small_whole_numbers_are_exact_and_nothing_has_no_percentiles():
    tally = Tally()
    numbers = np.arange(1.0, 1001.0)
    assert tally.spread() == spread([])
    tally.add(numbers)
    assert tally.spread() == spread(numbers.tolist())
    tally = Tally()
    tally.add(np.zeros(3))
    assert tally.spread() == spread([0.0] * 3)


def test_a_tally_counts_more_numbers_than_wait_at_a_time(monkeypatch):
    monkeypatch.setattr("experiments.core.totals._BUFFER", 100)
    tally = Tally()
    rng = np.random.default_rng(0)
    values = rng.lognormal(size=5_000)
    for part in np.split(values, 100):
        tally.add(part)
    chex.assert_trees_all_close(tally.spread(), spread(values.tolist()), rtol=PART)


@drawn.given(15, 50, st.floats(0, 1e5), st.floats(1e-3, 1e5), st.integers(1, 2**16))
def test_a_steady_rate_is_near_the_exact_one_or_not_given(start, length, seed):
    rng = np.random.default_rng(seed)
    timeline = Timeline()
    times = start + length * np.sort(rng.random(4_000))
    for part in np.split(times, 8):
        timeline.add(part, 3)
    timeline.add_one(start)
    estimate = timeline.steady_rate()
    exact = steady_rate([*times.repeat(3), start])
    if length > start / 100:
        assert estimate is not None
    if estimate is not None:
        # 2 % of the time, and the tokens of one part
        chex.assert_trees_all_close(estimate, exact, rtol=0.03)
    assert Timeline().steady_rate() is None


def test_an_array_that_waits_keeps_no_other_in_memory():
    tally = Tally()
    ones = np.ones(1_000_000)
    tally.add(ones[:1])
    assert sum(array.base is None for array in tally._arrays) == len(tally._arrays) == 1


def both(changes: dict[str, Any]) -> tuple[Measured, Measured]:
    """A run with all records, and one with sums."""
    raw = changed(changes)
    return simulated_run(raw), simulated_run(raw | {"records": "sums"})


@pytest.mark.parametrize(
    "changes",
    [
        {"slo": {"ttft": 0.05, "itl": 0.01}},
        {"simulate": {"host_s": 0.001}, "cache_tokens": 208},
        {"sampling": {"n": 2, "temperature": 0.7}},
        {"workload": {"arrivals": {"process": "closed_loop", "clients": 5}}},
        {
            "simulate": {"acceptance": 0.7},
            "engine": {"speculative": {"method": "ngram", "num_tokens": 3}},
        },
        {"replicas": {"count": 2, "changes": [{"at": 0.1, "join": 2}, {"at": 0.2, "leave": 1}]}},
    ],
    ids=["targets", "preemptions", "branches", "closed", "speculation", "changes"],
)
def test_sums_are_those_of_all_records(changes):
    full, sums = both(changes)
    assert sums.steps == []
    rounded = {
        name: sums.summary.pop(name)
        for name in ("itl_s", "step_s", "device_s", "host_s", "sequences_per_step")
    }
    exact = {name: full.summary.pop(name) for name in rounded}
    chex.assert_trees_all_close(rounded, exact, rtol=PART, atol=1e-12)
    assert (sums.summary.pop("percentile_method"), full.summary.pop("percentile_method")) == (
        METHOD,
        "linear",
    )
    assert sums.summary.pop("tokens_sha256") is None
    assert full.summary.pop("tokens_sha256")
    rates = (
        sums.summary.pop("steady_output_tokens_per_s"),
        full.summary.pop("steady_output_tokens_per_s"),
    )
    chex.assert_trees_all_close(*rates, rtol=0.03)
    assert sums.summary.keys() == full.summary.keys()
    for name, value in full.summary.items():
        close = {"rtol": 1e-9, "atol": 1e-9}  # sums of floats in another order
        chex.assert_trees_all_close(
            json.loads(json.dumps(sums.summary[name])), json.loads(json.dumps(value)), **close
        )
    for of_sums, recorded in zip(sums.requests, full.requests, strict=True):
        assert of_sums._replace(branches=()) == recorded._replace(branches=())
        for branch, full_branch in zip(of_sums.branches, recorded.branches, strict=True):
            times = full_branch.token_times
            assert branch.counted == len(full_branch.token_ids)
            assert branch.token_times == (times[0], times[-1])
            assert branch.preemptions == full_branch.preemptions
            assert branch.finish_reason == full_branch.finish_reason


def test_the_times_that_were_not_kept_are_refused():
    _, sums = both({})
    with pytest.raises(
        ValueError,
        match=r"r00000 has the times of its first and last token alone; set records: full",
    ):
        _ = sums.requests[0].branches[0].gaps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"records": "some"}, r"records is 'some'; it must be one of 'full', 'sums'"),
        (
            {"simulate": None, "replicas": None},
            r"records is 'sums', and there is no simulate section: .* leave records out",
        ),
        (
            {"replicas": {"count": 2, "changes": [{"at": 1.0, "fail": 1}]}},
            r"replicas.changes has a replica that fails, whose lost tokens cannot be taken out of sums; leave records",
        ),
        (
            {
                "replicas": None,
                "pools": {"prefill": {"count": 1}, "decode": {"count": 1}, "link_gb_s": 1.0},
            },
            r"with pools, transfers are counted by their records; leave records out",
        ),
    ],
)
def test_runs_that_cannot_keep_sums_are_refused(changes, message):
    raw = {**RAW, "records": "sums", **changes}
    with pytest.raises(ValueError, match=message):
        expand(raw, folder=Path())


@pytest.mark.slow
def test_a_folder_of_sums_has_no_steps_and_is_compared(tmp_path, capsys):
    """The report and the comparison do without what was not kept."""
    path = tmp_path / "runs.yaml"
    for name, host, records in (
        ("a", 0.0, "sums"),
        ("b", 0.001, "sums"),
        ("c", 0.0, "full"),
        ("d", 1e-9, "sums"),
    ):
        simulate = {**RAW["simulate"], "host_s": host}
        path.write_text(
            yaml.safe_dump({**RAW, "simulate": simulate, "records": records, "name": name}), "utf-8"
        )
        assert run.main([str(path), "--out", str(tmp_path / "out")]) == 0
    (folder,) = (tmp_path / "out" / "a").glob("*/0")
    assert not (folder / "steps.jsonl").exists()
    for request in store.read_requests(folder):
        (branch,) = request.branches
        assert len(branch.token_times) == 2
        assert branch.counted is not None
        assert branch.counted > 1
    assert (tmp_path / "out" / "a" / "report.html").is_file()
    capsys.readouterr()

    def printed(second: str, metric: str) -> str:
        folders = [str(tmp_path / "out" / name) for name in ("a", second)]
        assert compare.main([*folders, "--metric", metric]) == 0
        return capsys.readouterr().out

    assert "over 40 requests" not in printed("b", "itl_s.p90")
    assert "over 40 requests" in printed("b", "ttft_s.p90")
    assert "one side keeps sums" in printed("c", "itl_s.p90")
    verdict = "no difference is shown beyond the rounding of runs that keep sums"
    assert verdict in printed("d", "itl_s.p90")
