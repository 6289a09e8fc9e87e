"""Metrics: a hand-made run with known numbers, and random runs against a slow reference."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.core.config import Slo
from experiments.core.metrics import steady_rate
from experiments.core.records import (
    BranchRecord,
    RequestRecord,
    StepRecord,
    request_records,
    step_records,
)
from experiments.core.workloads import WorkItem, branch_ids
from pagedjax.host import scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.types import (
    EMPTY_PLAN,
    Admitted,
    Event,
    Finished,
    Preempted,
    Request,
    Row,
    Sampled,
    Seq,
    StepResult,
    Verified,
)
from pagedjax.server.load_client.summary import spread
from tests import drawn
from tests.experiments.core.summaries import summarize

S = 4  # block size
START = 100.0


def item(name: str, arrival: float, prompt: int, output: int) -> WorkItem:
    return WorkItem(name, arrival, tuple(range(20, 20 + prompt)), output)


def row(work: WorkItem, length: int, computed: int, count: int) -> Row:
    request = Request(work.request_id, len(work.prompt_token_ids), work.max_tokens)
    limit = request.prompt_len + request.max_tokens
    first = 10 * ord(work.request_id)  # requests share no block
    return Row(
        Seq(request, 0, limit, length, computed, tuple(range(first, first + limit // S + 1))), count
    )


def step(
    number: int,
    rows: Sequence[Row],
    events: Sequence[Event],
    seconds: tuple[float, float, float],
    padded: int = 8,
    compilations: int = 0,
    **fields: Any,
) -> StepResult:
    """`seconds`: start and end after START, and time on the device. `fields`: of the plan."""
    admitted = fields.get("admitted", ())
    plan = EMPTY_PLAN._replace(
        step=number,
        seqs=tuple(row.seq for row in rows),
        lengths=tuple(row.seq.length for row in rows),
        starts=tuple(row.seq.computed for row in rows),
        counts=tuple(row.count for row in rows),
        known=(5,) * len(admitted),
        cached=(0,) * len(admitted),
        num_blocks=10,
        **fields,
    )
    started, finished, device = seconds
    return StepResult(
        plan, tuple(events), START + started, START + finished, device, padded, compilations
    )


A = item("a", 0.0, 6, 3)
B = item("b", 0.5, 3, 2)
# a's prompt in two chunks; b waits in the cache through step 2, is preempted in step 3 and computes
# again in step 4.
RUN = [
    step(
        0,
        [row(A, 6, 0, 5)],
        [Admitted(0, "a", 6, 0)],
        (0.0, 1.0, 0.8),
        admitted=("a",),
        blocks_used=2,
    ),
    step(
        1,
        [row(A, 6, 5, 1), row(B, 3, 0, 3)],
        [Admitted(1, "b", 3, 0), Sampled(1, ("a", "b"), (40, 50))],
        (1.0, 1.5, 0.4),
        admitted=("b",),
        blocks_used=3,
    ),
    step(
        2, [row(A, 7, 6, 1)], [Sampled(2, ("a",), (41,))], (1.5, 1.75, 0.2), blocks_used=3, padded=2
    ),
    step(
        3,
        [row(A, 8, 7, 1)],
        [Preempted(3, "b", False), Sampled(3, ("a",), (42,)), Finished(3, "a", "length", 3)],
        (2.0, 2.25, 0.2),
        preempted=("b",),
        blocks_used=2,
        num_waiting=1,
        padded=2,
    ),
    step(
        4,
        [row(B, 4, 0, 4)],
        [Admitted(4, "b", 4, 0), Sampled(4, ("b",), (2,)), Finished(4, "b", "stop", 2)],
        (2.25, 3.0, 0.5),
        admitted=("b",),
        blocks_used=1,
        compilations=2,
    ),
]


def test_request_records_of_hand_made_run():
    a, b = request_records(RUN, [A, B], START)
    assert (a.first_scheduled, b.first_scheduled) == (0.0, 1.0)
    assert a.branches == (BranchRecord("a", (1.5, 1.75, 2.25), (40, 41, 42), 0, "length"),)
    assert b.branches == (BranchRecord("b", (1.5, 3.0), (50, 2), 1, "stop"),)
    assert (a.ttft, b.ttft) == (1.5, 1.0)
    assert (a.e2e, b.e2e) == (2.25, 2.5)
    assert (a.queue, b.queue) == (0.0, 0.5)
    assert (a.branches[0].gaps, b.branches[0].gaps) == ((0.25, 0.5), (1.5,))
    assert (a.branches[0].tpot, b.branches[0].tpot) == (0.375, 1.5)


def test_step_records_of_hand_made_run():
    steps = step_records(RUN, START, S)
    # Step 2 leaves b out, but b's 3 tokens are still in its block; step 3 has preempted b before it
    # runs.
    assert [s.held_tokens for s in steps] == [5, 6 + 3, 7 + 3, 8, 4]
    assert [s.prompt_tokens for s in steps] == [5, 4, 0, 0, 3]
    assert [s.sampled for s in steps] == [0, 2, 1, 1, 1]
    assert [s.finished for s in steps] == [0, 0, 0, 1, 1]
    assert [s.host_seconds for s in steps] == pytest.approx([0.2, 0.1, 0.05, 0.05, 0.25])


def test_summary_of_hand_made_run():
    summary = summarize(
        request_records(RUN, [A, B], START), step_records(RUN, START, S), S, Slo(ttft=1.2, itl=2.0)
    )
    assert summary["duration_s"] == 3.0
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (9, 5)
    assert summary["output_tokens_per_s"] == pytest.approx(5 / 3)
    assert summary["total_tokens_per_s"] == pytest.approx(14 / 3)
    assert summary["finished"] == {"length": 1, "stop": 1}
    assert summary["unfinished"] == 0
    assert summary["prefix_hit_share"] == 0.0
    assert summary["padding_share"] == pytest.approx(1 - 15 / 28)
    assert summary["blocks_used"] == {"mean": 2.2, "peak": 3}
    assert summary["slots_used"] == {"mean": pytest.approx(8.8), "peak": 12}
    assert summary["fragmentation_share"] == pytest.approx(1 - (5 + 9 + 10 + 8 + 4) / (11 * S))
    assert (summary["preemptions"], summary["compilations"], summary["steps"]) == (1, 2, 5)
    assert summary["between_steps_s"] == pytest.approx(0.25)
    assert summary["itl_s"]["p50"] == 0.5
    # linear between the 2nd and the 3rd of three
    assert summary["itl_s"]["p90"] == pytest.approx(0.5 + 0.8 * 1.0)
    assert summary["ttft_s"]["mean"] == 1.25
    # a's 1.5 s misses 1.2 s
    assert summary["goodput"] == {"requests_per_s": pytest.approx(1 / 3), "share": 0.5}


def test_drafts_of_hand_made_run():
    """a decodes with 3 drafts, 2 of them accepted; then with 1, which is wrong; then with none,
    beside b's prompt.
    """
    a = item("a", 0.0, 3, 9)
    b = item("b", 0.0, 1, 2)

    def verified(number: int, length: int, tokens: tuple[int, ...], drafts: int) -> StepResult:
        """A step of a alone, which accepts all of its drafts that it samples."""
        sampled = Sampled(number, ("a",) * len(tokens), tokens)
        counts = Verified(number, ("a",), (drafts,), (len(tokens) - 1,), (2,))
        rows = [row(a, length, length - 1, drafts + 1)]
        return step(number, rows, [sampled, counts], (number, number + 1, 0.8), drafts=(drafts,))

    first = [row(a, 3, 0, 3)]
    rows = [row(a, 8, 7, 1), row(b, 1, 0, 1)]
    run = [
        step(0, first, [Sampled(0, ("a",), (9,))], (0.0, 1.0, 0.8), admitted=("a",)),
        verified(1, 4, (5, 6, 7), 3),
        verified(2, 7, (8,), 1),
        step(3, rows, [Sampled(3, ("a", "b"), (4, 4))], (3.0, 4.0, 0.8), admitted=("b",)),
    ]
    steps = step_records(run, START, S)
    assert [(s.drafts, s.accepted, s.decodes) for s in steps] == [
        (0, 0, 0),
        (3, 2, 1),
        (1, 0, 1),
        (0, 0, 1),
    ]
    requests = request_records(run, [a, b], START)
    summary = summarize(requests, steps, S, speculates=True)
    assert summary.pop("speculation") == {
        "drafts": 4,
        "accepted": 2,
        "acceptance": 0.5,
        "tokens_per_decode": 5 / 3,
    }
    assert summary == summarize(requests, steps, S)  # nothing else changes
    alone = summarize(requests, steps[:1], S, speculates=True)["speculation"]
    assert alone == {"drafts": 0, "accepted": 0, "acceptance": None, "tokens_per_decode": None}


def test_steady_rate_excludes_start_and_end():
    # 5 tokens by hand: a tenth of them exist after step 1 (at 1.5 s, 2 tokens), nine tenths after
    # step 4 (3.0 s, 5).
    times = [
        time
        for request in request_records(RUN, [A, B], START)
        for time in request.branches[0].token_times
    ]
    assert steady_rate(times) == pytest.approx((5 - 2) / (3.0 - 1.5))
    assert steady_rate([2.0, 2.0]) is steady_rate([]) is None
    # 2 slow tokens, 16 of a second each, 2 slow ones: the slow ones do not count.
    assert steady_rate(np.cumsum([10.0] * 2 + [1.0] * 16 + [10.0] * 2)) == pytest.approx(1.0)


def test_goodput_counts_requests_that_meet_every_target():
    requests = request_records(RUN, [A, B], START)
    steps = step_records(RUN, START, S)

    def share(slo: Slo) -> float | None:
        result = summarize(requests, steps, S, slo)["goodput"]
        return None if result is None else result["share"]

    assert share(Slo()) is None
    assert share(Slo(ttft=1.0)) == 0.5  # exactly on target is in time
    assert share(Slo(itl=1.0)) == 0.5
    assert share(Slo(ttft=1.2, itl=1.0)) == 0.0
    (branch,) = requests[1].branches
    requests[1] = requests[1]._replace(branches=(branch._replace(finish_reason="abort"),))
    assert share(Slo(ttft=9.0)) == 0.5
    # One branch that is too slow (a's gaps of 0.25 and 0.5 seconds) makes a bad request of two.
    slow = requests[0].branches[0]
    fast = branch._replace(finish_reason="stop", token_times=(1.5, 1.6))
    requests[:] = [requests[0]._replace(branches=branches) for branches in ((fast, slow), (fast,))]
    assert share(Slo(itl=0.3)) == 0.5
    assert share(Slo(itl=0.4)) == 1.0


def test_token_digest_differs_for_different_outputs():
    steps = step_records(RUN, START, S)
    records = request_records(RUN, [A, B], START)
    (branch,) = records[1].branches
    other_branch = branch._replace(token_ids=(50, 3))
    other_tokens = [records[0], records[1]._replace(branches=(other_branch,))]
    shifted = [request._replace(arrival=7.0) for request in records]
    digest, of_other_tokens, of_shifted = (
        summarize(requests, steps, S)["tokens_sha256"]
        for requests in (records, other_tokens, shifted)
    )
    assert digest == of_shifted != of_other_tokens


def test_interrupted_run_counts_unfinished_requests():
    requests = request_records(RUN[:2], [A, B, item("c", 9.0, 2, 1)], START)
    steps = step_records(RUN[:2], START, S)
    summary = summarize(requests, steps, S)
    assert (summary["unfinished"], summary["finished"], summary["prompt_tokens"]) == (3, {}, 0)
    assert requests[2].queue is None
    assert summary["itl_s"] == spread([])


def test_summarize_refuses_empty_or_foreign_runs():
    with pytest.raises(ValueError, match="no steps"):
        summarize([], [], S)
    with pytest.raises(ValueError, match="step 1 runs the request 'b', not in the workload"):
        request_records(RUN, [A], START)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_percentiles_are_linear_between_the_values(values: list[float]):
    summary = spread([*values, None])
    for p in (50, 90, 99):
        expected = float(np.percentile(values, p))
        assert summary[f"p{p}"] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert summary["mean"] == pytest.approx(float(np.mean(values)))
    assert (summary["max"], summary["count"]) == (max(values), len(values))


class Observed(NamedTuple):
    """A step as the scheduler's state shows it: tokens in every used block once the step has
    computed, and the block tables of all running sequences."""

    inside: dict[int, int]
    tables: list[tuple[int, ...]]


def observed_of(tables: Mapping[str, tuple[int, tuple[int, ...]]]) -> Observed:
    """tables: the computed tokens of each running sequence, and its block table."""
    inside: dict[int, int] = {}
    for tokens, blocks in tables.values():
        for i, block in enumerate(blocks):
            inside[block] = max(inside.get(block, 0), min(S, max(0, tokens - i * S)))
    return Observed(inside, [blocks for _, blocks in tables.values()])


def request_of(work: WorkItem, branches: int, *, has_hashes: bool) -> Request:
    prompt = len(work.prompt_token_ids)
    hashes = tuple(map(str, range(prompt // S))) if has_hashes else ()
    _, *forks = branch_ids(work.request_id, branches)
    return Request(
        work.request_id,
        prompt,
        work.max_tokens,
        0,
        frozenset({2}),
        forks=tuple(forks),
        hashes=hashes,
    )


def random_run(seed: int) -> tuple[list[StepResult], list[WorkItem], list[Observed], int]:
    """The real scheduler on a small pool, with random tokens and times. Every prompt is a beginning
    of the longest one.

    Returns the results, the requests, what each step looks like from outside, and how many branches
    a request has.
    """
    rng = random.Random(seed)
    items = [
        item(f"q{i}", rng.random() * i, rng.randint(1, 9), rng.randint(1, 6))
        for i in range(rng.randint(1, 6))
    ]
    config = scheduler.SchedulerConfig(
        S, rng.randint(4, 8), rng.randint(2, 12), rng.randint(1, 4), 32
    )
    branches = min(1 + seed % 3, config.max_num_seqs, config.max_num_batched_tokens)
    state = scheduler.init(config)
    waiting = list(items)
    results = []
    observed = []
    clock = 0.0
    while waiting or state.waiting or state.running.seqs:
        while waiting and rng.random() < 0.6:
            request = request_of(waiting.pop(0), branches, has_hashes=bool(seed % 2))
            state = scheduler.submit(state, request)
        before = clock + rng.random()
        clock = before + rng.random()
        state, plan = scheduler.schedule(state, FCFS)
        if not plan.seqs:
            continue
        tables = {seq.request_id: (seq.computed, seq.blocks) for seq in scheduler.running(state)}
        tables |= {
            row.seq.request_id: (row.seq.computed + row.count, row.seq.blocks) for row in plan.rows
        }
        state, events = scheduler.commit(state, plan, [rng.randrange(30) for _ in plan.seqs])
        times = (START + before, START + clock, (clock - before) / 2)
        results.append(
            StepResult(plan, events, *times, padded_tokens=2 * plan.num_tokens, compilations=0)
        )
        observed.append(observed_of(tables))
    return results, items, observed, branches


def test_random_runs_cover_preemption_sharing_and_hits():
    runs = [random_run(seed) for seed in range(60)]
    results = [result for run in runs for result in run[0]]
    assert any(result.plan.preempted for result in results)
    assert any(
        event.num_cached
        for result in results
        for event in result.events
        if isinstance(event, Admitted)
    )
    assert {branches for *_, branches in runs} == {1, 2, 3}
    assert any(result.plan.copies for result in results), "branches share a block that is not full"


@drawn.given(30, 100, st.integers(0, 10**6))
def test_metrics_of_random_runs_match_slow_reference(seed: int):
    results, items, observed, branches = random_run(seed)
    requests = request_records(results, items, START, branches)
    steps = step_records(results, START, S)
    summary = summarize(requests, steps, S)
    assert [s.held_tokens for s in steps] == [
        sum(observation.inside.values()) for observation in observed
    ]
    physical = [
        len({block for table in observation.tables for block in table}) for observation in observed
    ]
    logical = [sum(map(len, observation.tables)) for observation in observed]
    assert [s.blocks_used for s in steps] == physical
    assert [s.blocks_listed for s in steps] == logical
    assert summary["blocks_saved_share"] == pytest.approx(1 - sum(physical) / sum(logical))
    slots = sum(physical) * S
    assert summary["fragmentation_share"] == pytest.approx(
        1 - sum(s.held_tokens for s in steps) / slots
    )
    assert summary["padding_share"] == pytest.approx(0.5)
    assert summary["output_tokens"] == sum(
        event.num_output
        for result in results
        for event in result.events
        if isinstance(event, Finished)
    )
    assert sum(summary["finished"].values()) == summary["branches"] == len(items) * branches
    assert summary["itl_s"]["count"] == summary["output_tokens"] - len(items) * branches
    for work, record in zip(items, requests, strict=True):
        assert len(record.branches) == branches
        check_record(record, work, results)
    if not summary["preemptions"]:
        check_computed_once(summary, steps, items, branches)
    total = summary["between_steps_s"] + sum(s.device_seconds + s.host_seconds for s in steps)
    assert total == pytest.approx(summary["duration_s"])


def check_record(record: RequestRecord, work: WorkItem, results: Sequence[StepResult]) -> None:
    """Compares the record of a request with the events of all steps."""
    assert record.request_id == work.request_id == record.branches[0].branch_id
    for branch in record.branches:
        sampled = [
            (result.finished - START, token)
            for result in results
            for event in result.events
            if isinstance(event, Sampled)
            for name, token in zip(event.request_ids, event.token_ids, strict=True)
            if name == branch.branch_id
        ]
        assert list(zip(branch.token_times, branch.token_ids, strict=True)) == sampled
        assert branch.preemptions == sum(
            branch.branch_id in result.plan.preempted for result in results
        )
    ends = [branch.token_times[0] + sum(branch.gaps) for branch in record.branches]
    assert record.e2e == pytest.approx(max(ends) - work.arrival)
    assert record.ttft == record.branches[0].token_times[0] - work.arrival, (
        "the first branch is the first"
    )


def check_computed_once(
    summary: Mapping[str, Any],
    steps: Sequence[StepRecord],
    items: Sequence[WorkItem],
    branches: int,
) -> None:
    """Each prompt is computed once, and of the outputs all tokens but the last one of each."""
    hits = sum(s.hit_tokens for s in steps)
    # each further branch computes the prompt's last token again
    recomputed = len(items) * (branches - 1)
    prompt = sum(len(work.prompt_token_ids) for work in items)
    assert sum(s.prompt_tokens for s in steps) + hits == prompt + recomputed
    assert sum(s.tokens for s in steps) + hits == summary["prompt_tokens"] + summary[
        "output_tokens"
    ] - len(items)
    assert summary["prefix_hit_share"] == pytest.approx(hits / summary["prompt_tokens"])
