"""The open-loop driver: requests are added at their arrival times. The clock is simulated."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.core.drive import LONGEST_SLEEP, drive, why_failed
from experiments.core.records import request_records, step_records
from experiments.core.workloads import WorkItem
from pagedjax.host.types import StepResult
from pagedjax.options.params import SamplingParams
from tests.experiments.core.summaries import GREEDY, summarize
from tests.experiments.core.test_replicas import engines


def items(*arrivals: float, prompt: int = 3, output: int = 2) -> list[WorkItem]:
    return [WorkItem(f"r{i}", time, (20,) * prompt, output) for i, time in enumerate(arrivals)]


def drive_engine(
    work: list[WorkItem], sampling: SamplingParams = GREEDY
) -> tuple[float, list[StepResult]]:
    """Steps of one second, and room for four sequences."""
    engine = engine_of_four()
    return drive(engine, work, sampling, engine.clock, engine.sleep)


def engine_of_four() -> Any:
    (engine,) = engines(1, block_size=4, max_num_seqs=4, enable_prefix_caching=False)
    return engine


def test_requests_are_added_at_their_arrival_and_never_earlier():
    engine = engine_of_four()
    work = items(0.0, 0.4, 12.0, 12.0)
    added = []
    sleeps = []
    add = engine.add

    def noted_add(name, prompt, params, **options):
        added.append((name, engine.now, params.max_tokens))
        add(name, prompt, params, **options)

    def noted_sleep(seconds):
        sleeps.append(seconds)
        engine.sleep(seconds)

    engine.add = noted_add
    start, results = drive(engine, work, GREEDY, engine.clock, noted_sleep)
    names, times, limits = zip(*added, strict=True)
    # r1 waits for the step that was running at 0.4 s; r2 and r3 come after a sleep with nothing to
    # do.
    assert names == ("r0", "r1", "r2", "r3")
    assert times == pytest.approx([0.0, 1.0, 12.0, 12.0], abs=LONGEST_SLEEP)
    assert all(time >= item.arrival for time, item in zip(times, work, strict=True))
    assert max(sleeps) <= LONGEST_SLEEP
    assert limits == (2,) * 4
    requests = request_records(results, work, start)
    # from the intended arrival, not from when it was added
    assert requests[1].queue == pytest.approx(0.6)


@pytest.mark.parametrize("branches", [{"n": 3}, {"n": 2, "best_of": 3}], ids=str)
def test_request_is_done_when_all_its_branches_are_done(branches: dict[str, int]):
    work = items(0.0, 1.0, prompt=5, output=3)
    sampling = SamplingParams(temperature=1.0, ignore_eos=True, **branches)
    start, results = drive_engine(work, sampling)
    first, second = request_records(results, work, start, branches=3)
    # By hand, steps of 1 s: the prompt; then the two forks, which have their first token a step
    # after the first one.
    assert [branch.branch_id for branch in first.branches] == ["r0", "r0.1", "r0.2"]
    assert [branch.token_times for branch in first.branches] == [
        (1.0, 2.0, 3.0),
        *[(2.0, 3.0, 4.0)] * 2,
    ]
    assert (first.ttft, first.e2e) == (1.0, 4.0)
    assert not request_records(results[:3], work, start, branches=3)[0].done, (
        "two of its branches have not ended"
    )
    # 4 places: the second request waits for the three of the first, so it starts when the last of
    # them has ended.
    assert (second.queue, second.ttft, second.e2e) == (3.0, 4.0, 7.0)

    steps = step_records(results, start, 4)
    summary = summarize([first, second], steps, 4)
    assert (summary["requests"], summary["branches"], summary["finished"]) == (2, 6, {"length": 6})
    assert (summary["output_tokens"], summary["prompt_tokens"]) == (2 * 3 * 3, 2 * 5)
    # Prompts of 5 tokens in blocks of 4, outputs to a length of 8: each branch lists 2 blocks, and
    # all share the first. Step 0 has one sequence, step 3 the two forks without the one that ended.
    assert [(s.blocks_listed, s.blocks_used) for s in steps[:4]] == [(2, 2), (6, 4), (6, 4), (4, 3)]
    assert summary["blocks_saved_share"] == pytest.approx(1 - 13 / 18)


def test_refused_request_error_has_its_id_and_a_remedy():
    with pytest.raises(
        ValueError,
        match=r"refused r0 \(99 prompt tokens, at most 2 .*max_model_len.* Bound the workload",
    ):
        drive_engine(items(0.0, prompt=99))


def test_items_out_of_arrival_order_are_refused():
    with pytest.raises(ValueError, match="in order of arrival"):
        drive_engine(items(1.0, 0.0))


def test_engine_with_work_but_no_step_raises():
    engine = engine_of_four()
    engine.step = lambda: None
    with pytest.raises(RuntimeError, match="has work but makes no step"):
        drive(engine, items(0.0), GREEDY, engine.clock, engine.sleep)


def test_run_with_compilation_or_unfinished_request_fails():
    work = items(0.0, 0.0)
    start, results = drive_engine(work)

    def reason(results: list[StepResult]) -> str | None:
        steps = step_records(results, start, 4)
        return why_failed(steps, summarize(request_records(results, work, start), steps, 4))

    assert reason(results) is None
    compiled = [results[0]._replace(compilations=3), *results[1:]]
    assert str(reason(compiled)).startswith(
        "compiled in the measured run: 3 compilations, in step 0 (6 tokens, 2 seq"
    )
    assert reason(results[:-1]) == "2 of 2 requests did not finish"
