"""The open-loop driver: requests are added at their arrival times. The clock is simulated."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from experiments.core.drive import LONGEST_SLEEP, drive, why_failed
from experiments.core.records import request_records, step_records
from experiments.core.workloads import WorkItem
from pagedjax.host import scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.types import Request, StepResult
from pagedjax.options.params import SamplingParams
from tests.experiments.core.summaries import summarize


class Clock:
    """A clock that advances only in steps and sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += max(seconds, 1e-9)


class HostOnly:
    """The real scheduler with steps that take `step_seconds` of `clock` and sample token 30: no
    device, no model.
    """

    def __init__(self, clock: Clock, step_seconds: float = 0.25) -> None:
        self.clock = clock
        self.step_seconds = step_seconds
        self.state = scheduler.init(scheduler.SchedulerConfig(4, 64, 16, 4, 64))
        self.added: list[tuple[str, float]] = []
        self.limits: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self.state.waiting or self.state.running.seqs)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        forks: Sequence[str] = (),
    ) -> None:
        self.added.append((request_id, self.clock.now - 1000.0))
        self.limits.append(params.max_tokens)
        request = Request(request_id, len(prompt_token_ids), params.max_tokens, forks=tuple(forks))
        self.state = scheduler.submit(self.state, request)

    def step(self) -> StepResult | None:
        started = self.clock.now
        self.state, plan = scheduler.schedule(self.state, FCFS)
        self.clock.now += self.step_seconds
        self.state, events = scheduler.commit(self.state, plan, [30] * len(plan.seqs))
        return StepResult(plan, events, started, self.clock.now, self.step_seconds / 2, 16, 0)

    def reset(self) -> None:
        self.__init__(self.clock, self.step_seconds)


def items(*arrivals: float, prompt: int = 3, output: int = 2) -> list[WorkItem]:
    return [WorkItem(f"r{i}", time, (20,) * prompt, output) for i, time in enumerate(arrivals)]


def test_requests_are_added_at_their_arrival_and_never_earlier():
    clock = Clock()
    engine = HostOnly(clock)
    work = items(0.0, 0.1, 3.0, 3.0)
    start, results = drive(engine, work, SamplingParams(), clock, clock.sleep)
    assert start == 1000.0
    # r1 waits for the step that was running at 0.1 s; r2 and r3 come after a sleep with nothing to
    # do.
    assert [name for name, _ in engine.added] == ["r0", "r1", "r2", "r3"]
    assert [time for _, time in engine.added] == pytest.approx(
        [0.0, 0.25, 3.0, 3.0], abs=LONGEST_SLEEP
    )
    assert all(time >= item.arrival for (_, time), item in zip(engine.added, work, strict=True))
    assert max(clock.sleeps) <= LONGEST_SLEEP
    requests = request_records(results, work, start)
    # from the intended arrival, not from when it was added
    assert requests[1].queue == pytest.approx(0.15)
    assert {branch.finish_reason for request in requests for branch in request.branches} == {
        "length"
    }
    assert engine.limits == [2] * 4


@pytest.mark.parametrize("sampling", [SamplingParams(n=3), SamplingParams(n=2, best_of=3)])
def test_request_is_done_when_all_its_branches_are_done(sampling: SamplingParams):
    clock = Clock()
    work = items(0.0, 0.25, prompt=5, output=3)
    start, results = drive(HostOnly(clock), work, sampling, clock, clock.sleep)
    first, second = request_records(results, work, start, branches=3)
    # By hand, steps of 0.25 s: the prompt; then the two forks, which have their first token a step
    # after the first one.
    assert [branch.branch_id for branch in first.branches] == ["r0", "r0.1", "r0.2"]
    assert [branch.token_times for branch in first.branches] == [
        (0.25, 0.5, 0.75),
        *[(0.5, 0.75, 1.0)] * 2,
    ]
    assert (first.ttft, first.e2e) == (0.25, 1.0)
    assert not request_records(results[:3], work, start, branches=3)[0].done, (
        "two of its branches have not ended"
    )
    # 4 places: the second request waits for the three of the first, so it starts when the last of
    # them has ended.
    assert (second.queue, second.ttft, second.e2e) == (0.75, 1.0, 1.75)

    steps = step_records(results, start, 4)
    summary = summarize([first, second], steps, 4)
    assert (summary["requests"], summary["branches"], summary["finished"]) == (2, 6, {"length": 6})
    assert (summary["output_tokens"], summary["prompt_tokens"]) == (2 * 3 * 3, 2 * 5)
    # Prompts of 5 tokens in blocks of 4, outputs to a length of 8: each branch lists 2 blocks, and
    # all share the first. Step 0 has one sequence, step 3 the two forks without the one that ended.
    assert [(s.blocks_listed, s.blocks_used) for s in steps[:4]] == [(2, 2), (6, 4), (6, 4), (4, 3)]
    assert summary["blocks_saved_share"] == pytest.approx(1 - 13 / 18)


def test_refused_request_error_has_its_id_and_a_remedy():
    clock = Clock()
    with pytest.raises(
        ValueError,
        match=r"refused r0 \(99 prompt tokens, at most 2 .*max_model_len.* Bound the workload",
    ):
        drive(HostOnly(clock), items(0.0, prompt=99), SamplingParams(), clock, clock.sleep)


def test_engine_with_work_but_no_step_raises():
    class Stuck(HostOnly):
        def step(self) -> StepResult | None:
            return None

    clock = Clock()
    with pytest.raises(RuntimeError, match="has work but makes no step"):
        drive(Stuck(clock), items(0.0), SamplingParams(), clock, clock.sleep)


def test_run_with_compilation_or_unfinished_request_fails():
    clock = Clock()
    work = items(0.0, 0.0)
    start, results = drive(HostOnly(clock), work, SamplingParams(), clock, clock.sleep)

    def reason(results: list[StepResult]) -> str | None:
        steps = step_records(results, start, 4)
        return why_failed(steps, summarize(request_records(results, work, start), steps, 4))

    assert reason(results) is None
    compiled = [results[0]._replace(compilations=3), *results[1:]]
    assert str(reason(compiled)).startswith(
        "compiled in the measured run: 3 compilations, in step 0 (6 tokens, 2 seq"
    )
    assert reason(results[:-1]) == "2 of 2 requests did not finish"
