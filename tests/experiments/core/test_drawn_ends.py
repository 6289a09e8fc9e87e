"""Requests that end at the lengths that a workload draws, before the limits that a scheduler knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.core.config import expand
from experiments.core.distributions import Fixed, Multiple, Uniform, draw_limits
from experiments.core.drive import drive
from experiments.core.records import request_records
from experiments.core.submit import in_order
from experiments.core.workloads import Prompts, Synthetic, WorkItem
from pagedjax.options.params import SamplingParams
from tests.experiments.core.summaries import BASE, GREEDY, MEASURED, changed_workload, simulated_run
from tests.experiments.core.test_replicas import engines
from tests.experiments.core.test_workloads import make

EQUAL = Synthetic("synthetic", 30, Fixed("fixed", 9), Uniform("uniform", 2, 20))
WORK = [WorkItem(f"r{i}", 0.3 * i, (20 + i,) * (3 + i), 40, ends_at=1 + 3 * i) for i in range(6)]


@pytest.mark.parametrize(
    ("limits", "of_output"),
    [
        (12, lambda output: 12),
        (Multiple("multiple", 1.5), lambda output: -(-3 * output // 2)),
        (Multiple("multiple", 2, max=15), lambda output: min(2 * output, 15)),
    ],
)
def test_limits_change_no_length_that_they_do_not_cut(limits, of_output):
    apart = make(replace(EQUAL, max_tokens=limits))
    outputs = [item.max_tokens for item in make(EQUAL).items]
    assert [item.max_tokens for item in apart.items] == [*map(of_output, outputs)]
    assert [item.longest_output for item in apart.items] == [
        min(output, of_output(output)) for output in outputs
    ]
    cut = sum(output > of_output(output) for output in outputs)
    assert apart.clipped_outputs == cut
    drawn = apart.describe()["drawn_output_tokens"]
    assert drawn == sum(min(output, of_output(output)) for output in outputs)
    assert "drawn_output_tokens" not in make(EQUAL).describe()


def test_a_multiple_has_no_token_of_rounding():
    spec = Multiple("multiple", 1.1)
    outputs = list(range(1, 3000))
    limits = draw_limits(spec, outputs, np.random.default_rng(0))
    assert limits == [-(-11 * output // 10) for output in outputs]


def test_limits_may_be_drawn_and_prompts_may_end_at_drawn_lengths():
    apart = make(replace(EQUAL, max_tokens=Uniform("uniform", 20, 60))).items
    assert len({item.max_tokens for item in apart}) > 10
    assert all(20 <= item.max_tokens <= 60 for item in apart)
    prompts = Prompts("prompts", "p.txt", 60, max_tokens=8, output=Uniform("uniform", 1, 12))
    items = make(prompts, "one\ntwo\n").items
    assert {item.max_tokens for item in items} == {8}
    assert {item.longest_output for item in items} == set(range(1, 9))


def records_of(engine: Any, work: list[WorkItem], sampling: SamplingParams = GREEDY) -> Any:
    clocks = (engine.clock, engine.sleep) if hasattr(engine, "clock") else ()
    start, results = drive(engine, work, sampling, *clocks)
    plans = [(result.plan.counts, result.plan.preempted) for result in results]
    return request_records(results, work, start, sampling.n), plans


@pytest.mark.parametrize("branches", [1, 2])
def test_an_end_token_of_a_simulation_and_a_cancellation_make_the_same_steps(branches):
    sampling = replace(GREEDY, n=branches, temperature=float(branches - 1))
    (cancelled,) = engines(1, block_size=4, max_num_seqs=4)
    by_driver, plans = records_of(cancelled, WORK, sampling)
    ending: Any = engines(1, block_size=4, max_num_seqs=4)[0]
    add = ending.add
    ends = {item.request_id: item.ends_at for item in WORK}
    ending.add = lambda name, *args, **options: add(name, *args, **options, ends_at=ends[name])
    by_token, plans_by_token = records_of(
        ending, [w._replace(ends_at=None) for w in WORK], sampling
    )
    assert plans == plans_by_token
    for request, given_request, item in zip(by_driver, by_token, WORK, strict=True):
        for branch, given_branch in zip(request.branches, given_request.branches, strict=True):
            assert branch.num_tokens == item.ends_at
            assert branch.finish_reason == given_branch.finish_reason == "stop"
            assert branch.token_times == given_branch.token_times
    assert not cancelled.has_work


def test_a_measured_request_ends_at_its_drawn_length(tiny_llm):
    requests, plans = records_of(tiny_llm.engine, WORK)
    short = [item._replace(max_tokens=item.longest_output, ends_at=None) for item in WORK]
    equal, equal_plans = records_of(tiny_llm.engine, short)
    assert [request.branches[0].token_ids for request in requests] == [
        request.branches[0].token_ids for request in equal
    ]
    assert {request.branches[0].finish_reason for request in requests} == {"stop"}
    assert sum(sum(counts) for counts, _ in plans) == sum(sum(counts) for counts, _ in equal_plans)
    assert not tiny_llm.engine.has_work


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"engine": {**BASE["engine"], "enable_prefix_caching": False}},
        {"pools": {"decode": {"count": 2}}},
        {"replicas": {"count": 2, "changes": [{"at": 0.05, "fail": 1}]}},
        {
            "engine": {**BASE["engine"], "speculative": {"method": "ngram", "num_tokens": 3}},
            "simulate": {**BASE["simulate"], "acceptance": 0.8},
        },
        {
            "engine": {**BASE["engine"], "policy": "static"},
            "simulate": {**BASE["simulate"], "whole_batches": True},
        },
        {"records": "sums"},
    ],
    ids=["plain", "no sharing", "pools", "failing", "speculation", "whole batches", "sums"],
)
def test_a_simulated_request_ends_at_its_drawn_length(sections: dict[str, Any]):
    measured = simulated_run({**BASE, **sections, "workload": changed_workload(max_tokens=100)})
    assert {item.max_tokens for item in measured.workload.items} == {100}
    for request, item in zip(measured.requests, measured.workload.items, strict=True):
        (branch,) = request.branches
        assert branch.num_tokens == item.ends_at
        assert branch.finish_reason == "stop"
    assert measured.failed is None


def test_a_request_ends_before_the_least_number_of_tokens():
    with pytest.raises(
        ValueError,
        match=r"^sampling\.min_tokens is 3, and r0 ends after 1 tokens; lower it, or raise the min "
        r"of the workload's output$",
    ):
        in_order(WORK, replace(GREEDY, min_tokens=3))


@pytest.mark.parametrize(
    ("raw", "sections", "why"),
    [
        (MEASURED, {"sampling": {"temperature": 0.0}}, r"sampling\.ignore_eos is false"),
        (MEASURED, {"engine": {"speculative": {"method": "ngram"}}}, r"engine\.speculative is set"),
        (
            BASE,
            {"engine": {"reservation": "oracle", "enable_prefix_caching": False}},
            r"engine\.reservation is 'oracle', .*; set it to pow2 or max",
        ),
    ],
)
def test_options_that_do_not_let_a_request_end_are_refused(raw, sections, why):
    workload = {**raw["workload"], "max_tokens": 50}
    with pytest.raises(
        ValueError, match=rf"^workload\.max_tokens sets limits apart from the .*, and {why}"
    ):
        expand({**raw, **sections, "workload": workload}, folder=Path())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, r"workload\.max_tokens is 0; it must be at least 1, or null"),
        ({"dist": "multiple", "times": 0.5}, r"workload\.max_tokens\.times is 0\.5; it must be at"),
        ("long", r"workload\.max_tokens is 'long'; it must be an integer or"),
    ],
)
def test_a_wrong_limit_is_an_error(value, message):
    with pytest.raises(ValueError, match=message):
        expand({**BASE, "workload": changed_workload(max_tokens=value)}, folder=Path())
