"""Late stops: plans behind one whose tokens are unknown. Whatever is submitted, cancelled and
scheduled, a request gets the tokens that it would get alone, and blocks are neither lost nor shared.

GOLDEN is a recording of the plans. `python -m tests.host.test_late_stops` writes it again, if a rule
of late plans was changed on purpose.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from pagedjax.host import event_log, scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.replay import verify
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Event, Finished, Plan, Request, Sampled
from tests import drawn

CONFIG = SchedulerConfig(4, 24, 12, 5, 40, late_stops=True)
GOLDEN = Path(__file__).parent / "goldens" / "late.jsonl"


def late_config(**sizes: Any) -> SchedulerConfig:
    return SchedulerConfig(**sizes, late_stops=True)


configs = st.builds(
    late_config,
    block_size=st.integers(1, 6),
    num_blocks=st.integers(4, 24),
    max_num_batched_tokens=st.integers(2, 24),
    max_num_seqs=st.integers(1, 6),
    max_model_len=st.integers(8, 40),
    host_blocks=st.sampled_from([0, 8]),
    mixed_steps=st.booleans(),
)


def token_of(name: str, position: int) -> int:
    """The token that a request samples at a position: it depends on nothing else."""
    return random.Random(f"{name} {position}").randrange(10)


def expected_output(request: Request, config: SchedulerConfig) -> tuple[list[int], str]:
    """The tokens of a request that runs alone to its end, and why it ends."""
    limit = scheduler.final_length(request, config)
    tokens: list[int] = []
    while True:
        tokens.append(token_of(request.request_id, request.prompt_len + len(tokens)))
        long_enough = len(tokens) >= request.min_tokens
        if tokens[-1] in request.stop_token_ids and long_enough:
            return tokens, "stop"
        if request.prompt_len + len(tokens) >= limit:
            return tokens, "length"


class Loop:
    """A scheduler with late stops, and what its steps gave."""

    def __init__(self, config: SchedulerConfig, recorder: event_log.Recorder | None = None) -> None:
        self.state = scheduler.init(config)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, Finished] = {}
        self.late_plans = 0
        self.dropped = 0
        self.recorder = recorder

    def step(self, cancelled: tuple[str, ...] = ()) -> None:
        """As an engine does it: the next plan is made before the oldest one is committed.

        Args:
            cancelled: requests that are cancelled between the two.
        """
        if not self.state.in_flight:
            state, plan = scheduler.schedule(self.state, FCFS)
            self.write(event_log.Schedule(plan))
            self.set(state)
        planned = scheduler.schedule_late(self.state, FCFS)
        if planned is not None:
            self.write(event_log.Schedule(planned[1]))
            self.set(planned[0])
            self.late_plans += 1
        for name in cancelled:
            self.cancel(name)
        self.commit(self.state.in_flight[0])

    def commit(self, plan: Plan) -> None:
        sampled = [
            token_of(seq.request_id, length)
            for seq, length in zip(plan.seqs, plan.lengths, strict=True)
        ]
        state, events = scheduler.commit(self.state, plan, sampled)
        self.write(event_log.Commit(plan, sampled, {}, {}, events))
        self.set(state)
        self.read(events)
        rows = zip(plan.seqs, plan.lengths, plan.starts, plan.counts, strict=True)
        sampling = [seq.request_id for seq, length, start, count in rows if start + count == length]
        with_token = {
            name for event in events if isinstance(event, Sampled) for name in event.request_ids
        }
        self.dropped += len(set(sampling) - with_token)

    def cancel(self, name: str) -> None:
        state, events = scheduler.cancel(self.state, name)
        if events:
            self.write(event_log.Cancel(name, "abort", events))
        self.set(state)
        self.read(events)

    def read(self, events: tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, Sampled):
                for name, token in zip(event.request_ids, event.token_ids, strict=True):
                    assert name not in self.ends, "a token behind the end"
                    self.tokens[name].append(token)
            if isinstance(event, Finished):
                assert event.request_id not in self.ends, "it ended twice"
                self.ends[event.request_id] = event

    def set(self, state: SchedulerState) -> None:
        scheduler.check(state)
        self.state = state

    def write(self, entry: event_log.Entry) -> None:
        if self.recorder:
            self.recorder.write(entry)


class Arrival(NamedTuple):
    """A request that comes before a step, and the step before which it is cancelled, if at all.

    within: it is cancelled in that step, when the next plan is made.
    """

    step: int
    prompt_len: int
    max_tokens: int
    min_tokens: int
    stops: frozenset[int]
    cancelled: int | None
    within: bool


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    prompt_len=st.integers(1, 12),
    max_tokens=st.integers(1, 14),
    min_tokens=st.integers(0, 3),
    stops=st.frozensets(st.integers(0, 9), max_size=3),
    cancelled=st.none() | st.integers(1, 25),
    within=st.booleans(),
)


@drawn.examples(60, 2000)
def test_each_request_gets_the_tokens_that_it_would_get_alone(number):
    requests = st.lists(arrivals, min_size=1, max_size=10)
    drawn.check(number, gets_the_tokens_it_would_get_alone, config=configs, requests=requests)


def gets_the_tokens_it_would_get_alone(config: SchedulerConfig, requests: list[Arrival]) -> None:
    loop = Loop(config)
    accepted: dict[str, Request] = {}
    step = 0
    while step < 30 or loop.state.ids or loop.state.in_flight:
        cancelled_within = []
        for i, arrival in enumerate(requests):
            name = f"r{i}"
            if arrival.step == step:
                request = Request(
                    name,
                    arrival.prompt_len,
                    arrival.max_tokens,
                    min(arrival.min_tokens, arrival.max_tokens),
                    arrival.stops,
                )
                try:
                    loop.set(scheduler.submit(loop.state, request))
                    accepted[name] = request
                except scheduler.Rejected:
                    continue
            if arrival.cancelled == step and name in accepted:
                if arrival.within:
                    cancelled_within.append(name)
                else:
                    loop.cancel(name)
        if loop.state.ids or loop.state.in_flight:
            loop.step(tuple(cancelled_within))
        step += 1
        assert step < 2000, "requests do not end"
    assert loop.state.pool.num_free == config.num_blocks, "blocks leaked"
    assert loop.ends.keys() == accepted.keys()
    for name, request in accepted.items():
        tokens, reason = expected_output(request, config)
        end = loop.ends[name]
        if end.reason == "abort":
            assert loop.tokens[name] == tokens[: len(loop.tokens[name])]
        else:
            assert (loop.tokens[name], end.reason) == (tokens, reason)
        assert end.num_output == len(loop.tokens[name])


def record_some_requests(path: Path) -> Loop:
    """A run with stops, ends, cancellations, waiting requests and preemptions."""
    draw = random.Random(0)
    config = CONFIG._replace(num_blocks=12, max_num_seqs=4, host_blocks=8)
    recorder = event_log.Recorder(path, config, "fcfs")
    loop = Loop(config, recorder)
    for step in range(40):
        if step % 2 == 0:
            stops = frozenset(draw.sample(range(10), draw.randint(0, 1)))
            sizes = draw.randint(1, 12), draw.randint(8, 24), draw.randint(0, 1)
            request = Request(f"r{step}", *sizes, stop_token_ids=stops)
            recorder.write(event_log.Submit(request))
            loop.set(scheduler.submit(loop.state, request))
        cancelled = f"r{draw.randrange(40)}" if draw.random() < 0.2 else ""
        loop.step((cancelled,))
    while loop.state.ids or loop.state.in_flight:
        loop.step()
    recorder.close()
    return loop


def test_late_plans_are_those_of_the_golden_recording(tmp_path):
    loop = record_some_requests(tmp_path / "run.jsonl")
    assert {end.reason for end in loop.ends.values()} == {"stop", "length", "abort"}
    assert loop.late_plans > 30
    assert loop.dropped > 3
    text = (tmp_path / "run.jsonl").read_text()
    assert '"preempted":["' in text
    assert '"swapped":["' in text
    assert verify(GOLDEN).identical
    # the first line has the version and the configuration
    assert text.splitlines()[1:] == GOLDEN.read_text("utf-8").splitlines()[1:]


def test_a_stop_is_known_one_step_late_and_its_token_is_dropped(tmp_path):
    recorder = event_log.Recorder(tmp_path / "run.jsonl", CONFIG, "fcfs")
    loop = Loop(CONFIG, recorder)
    stop = token_of("a", 4 + 2)  # the third token
    first_stop = [token_of("a", 4 + i) for i in range(3)].index(stop)
    for request in (Request("a", 4, 20, 0, frozenset([stop])), Request("b", 4, 6)):
        state = scheduler.submit(loop.state, request)
        recorder.write(event_log.Submit(request))
        loop.set(state)
    while loop.state.ids or loop.state.in_flight:
        loop.step()
    recorder.close()
    assert len(loop.tokens["a"]) == first_stop + 1
    assert loop.ends["b"].reason == "length"
    assert loop.dropped == 1  # of a; the end of b was known
    assert loop.late_plans == 5
    assert verify(tmp_path / "run.jsonl").identical


def test_a_request_that_waits_runs_while_the_tokens_before_are_unknown():
    """A row that reaches its limit is free in the next step, although its last token is unknown."""
    loop = Loop(CONFIG._replace(max_num_seqs=1))
    for name in "ab":
        loop.set(scheduler.submit(loop.state, Request(name, 4, 3)))
    steps = 0
    while loop.state.ids or loop.state.in_flight:
        loop.step()
        steps += 1
    assert steps == 6, "no step is lost between the two"
    assert loop.late_plans == 5


@pytest.mark.parametrize("transition", ["restart", "update", "release"])
def test_what_needs_all_tokens_is_refused_while_they_are_unknown(transition):
    loop = Loop(CONFIG)
    loop.set(scheduler.submit(loop.state, Request("a", 4, 8)))
    state, _ = scheduler.schedule(loop.state, FCFS)
    planned = scheduler.schedule_late(state, FCFS)
    assert planned is not None
    transitions = {
        "restart": lambda state: scheduler.restart(state),
        "update": lambda state: scheduler.update(state, "keep"),
        "release": lambda state: scheduler.release(state, "a"),
    }
    with pytest.raises(ValueError, match=r"steps \[0, 1\] are in flight.*commit"):
        transitions[transition](planned[0])


def test_branches_and_drafts_wait_for_the_tokens():
    loop = Loop(CONFIG)
    loop.set(scheduler.submit(loop.state, Request("a", 4, 8, forks=("b",))))
    state, plan = scheduler.schedule(loop.state, FCFS)
    assert scheduler.schedule_late(state, FCFS) is None
    state, _ = scheduler.commit(state, plan, [5])
    state, plan = scheduler.schedule(state, FCFS, {"a": 2})
    assert plan.drafts
    assert scheduler.schedule_late(state, FCFS) is None


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    record_some_requests(GOLDEN)
