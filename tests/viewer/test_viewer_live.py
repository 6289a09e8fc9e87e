"""The buffer of a live page: the same pictures as from a recording, bounded, read from any
thread.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from immutables import Map

from pagedjax import BeamSearchParams, SamplingParams
from pagedjax.host import scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import Event, Plan, Request, StepResult
from pagedjax.options.config import Speculative
from pagedjax.viewer import Live, picture, read
from pagedjax.viewer.picture import Picture
from pagedjax.viewer.text import generated
from tests.engine.runs import greedy, sampled, small_llm, steps
from tests.host.test_event_log import SMALL, filled
from tests.refusals import refused
from tests.viewer.runs import pictures, samples


class FakeEngine:
    """An engine without a device: requests come, are cancelled, and every step goes into a `Live`.

    `drafts`: most drafts that a sequence is offered.
    """

    def __init__(self, seed: int, drafts: int = 0, **options: Any) -> None:
        self.draw = random.Random(seed)
        self.drafts = drafts
        self.state = scheduler.init(SMALL._replace(num_blocks=10, host_blocks=4 * (seed % 2)))
        self.live = Live(self.state, **options)
        self.now = 50.0
        self.count = 0
        self.planned: list[tuple[SchedulerState, Plan]] = []

    def run(self, steps: int, rate: float = 0.5) -> None:
        for _ in range(steps):
            if self.draw.random() < rate:
                request = Request(
                    f"q{self.count}", self.draw.randint(1, 6), self.draw.randint(1, 6)
                )
                self.state = scheduler.submit(self.state, request)
                self.count += 1
                self.live.added((request.request_id,), None, 0.0, self.state)
            if self.state.waiting or self.state.running.seqs:
                self.step()
                self.cancel()

    def step(self) -> None:
        before = self.state
        offered = {}
        if self.drafts:
            offered = {name: self.draw.randint(0, self.drafts) for name in sorted(before.ids)}
        running, plan = scheduler.schedule(before, FCFS, offered)
        self.planned.append((running, plan))
        tokens = samples(plan, self.draw)
        hashes = filled(plan, SMALL.block_size, tokens)
        self.state, events = scheduler.commit(running, plan, tokens, hashes)
        self.live.stepped(before, self.result(plan, events), events, self.state)

    def cancel(self) -> None:
        alive = list(self.state.ids)
        if not alive or self.draw.random() > 0.1:
            return
        before = self.state
        self.state, events = scheduler.cancel(self.state, self.draw.choice(sorted(alive)), "stop")
        if self.draw.random() < 0.5:  # else only the state of the next step shows it
            self.live.stepped(before, None, events, self.state)

    def result(self, plan: Plan, events: tuple[Event, ...]) -> StepResult:
        self.now += 1
        return StepResult(plan, events, self.now, self.now + 0.5, 0.1, plan.num_tokens, 0)


class Page:
    """Does what the page does: requests frames, applies them, requests the next ones."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.next = 0
        self.picture = Picture()
        self.seen: list[Picture] = []
        self.num_bases = 0  # replies from which the page began anew
        self.about: dict = {}

    def ask(self) -> dict:
        reply = json.loads(json.dumps(self.live.since(self.next)))
        if "base" in reply:
            self.num_bases += 1
            self.about = reply["about"]
            self.picture = picture.apply(Picture(), reply["base"])
        for frame in reply["frames"]:
            self.picture = picture.apply(self.picture, frame)
            self.seen.append(self.picture)
        self.next = reply["next"]
        return reply

    def tables(self) -> dict[str, tuple[int, ...]]:
        return {self.picture.requests[n][1]: table for n, table in self.picture.tables.items()}

    def check(self, fake: FakeEngine) -> None:
        """It has seen every step that was planned."""
        assert [
            (view.step, tuple(sorted(view.tables.values())))
            for view in self.seen
            if not view.at_rest
        ] == [
            (plan.step, tuple(sorted(seq.blocks for seq in state.running.seqs)))
            for state, plan in fake.planned
        ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("every", [1, 7, 1000])
@pytest.mark.parametrize("drafts", [0, 4])
def test_a_live_page_shows_every_step(seed, every, drafts):
    fake = FakeEngine(seed, drafts)
    page = Page(fake.live)
    for _ in range(0, 140, min(every, 140)):
        fake.run(min(every, 140))
        page.ask()
    page.check(fake)
    for view in page.seen:  # also of requests that end with the step
        assert set(view.requests) >= {*view.tables, *(row[0] for row in view.rows)}
    waits = [view for view in page.seen if view.waiting]
    assert all(view.why for view in waits if not view.at_rest)
    assert page.num_bases == 1
    assert bool(page.picture.verified[0]) == bool(drafts)
    assert page.about["config"]["num_blocks"] == 10
    if not fake.state.ids:  # then the page shows the cache as it stays
        assert page.picture.at_rest
        assert set(page.picture.published) == set(fake.state.pool.hashes)
        assert not page.tables()


def test_a_late_page_starts_with_the_kept_frames():
    fake = FakeEngine(1, keep=10)
    early = Page(fake.live)
    late = Page(fake.live)
    for _ in range(60):
        fake.run(2, rate=0.9)
        early.ask()
    reply = late.ask()
    assert "base" in reply
    assert len(reply["frames"]) == 10
    assert (late.picture, late.next) == (early.picture, early.next)
    assert early.num_bases == 1
    assert early.seen[-10:] == late.seen


def test_without_readers_only_the_last_steps_are_kept():
    fake = FakeEngine(4, keep=5)
    page = Page(fake.live)
    page.ask()
    fake.run(100, rate=1.0)
    assert len(fake.live._records) == 5
    page.ask()
    assert page.num_bases == 2  # the page's frames and the kept frames have a gap
    state, plan = fake.planned[-1]
    assert page.picture.step == plan.step
    assert page.tables() == {seq.request_id: seq.blocks for seq in state.running.seqs}
    assert set(page.picture.published) == set(state.pool.hashes)
    assert [page.picture.requests[n][1] for n in page.picture.waiting] == [
        seq.request_id for seq in state.waiting
    ]


def test_a_page_with_unknown_frames_starts_again():
    fake = FakeEngine(3)
    fake.run(20)
    for k in (10_000, 0):
        assert "base" in fake.live.since(k)
    assert "base" not in fake.live.since(fake.live.since(0)["next"])
    assert FakeEngine(3).live.since(0)["run"] != fake.live.since(0)["run"]


def test_replies_are_bounded_and_mark_that_more_frames_exist(monkeypatch):
    monkeypatch.setattr("pagedjax.viewer.live.REPLY", 4)
    fake = FakeEngine(4)
    fake.run(40, rate=1.0)
    page = Page(fake.live)
    sizes = set()
    while (reply := page.ask())["more"]:
        sizes.add(len(reply["frames"]))
    assert sizes == {4}
    page.check(fake)
    assert page.num_bases == 1


def test_the_reason_of_an_end_is_shown_if_its_event_was_recorded():
    state = scheduler.init(SMALL)
    live = Live(state)
    for name in "ab":
        state = scheduler.submit(state, Request(name, 2, 4))
    before = state
    running, plan = scheduler.schedule(state, FCFS)
    state, events = scheduler.commit(running, plan, [5, 5])
    result = StepResult(plan, events, 1.0, 2.0, 0.5, 4, 0)
    state, stopped = scheduler.cancel(state, "a", "stop")
    live.stepped(before, result, (*events, *stopped), state)
    before = state
    state, _ = scheduler.cancel(state, "b")
    live.stepped(before, None, (), state)
    assert [entry for entry in log_of(live.since(0)["frames"]) if entry[0] == "ended"] == [
        ["ended", 0, "stop", 1],
        ["ended", 1, "abort", None],
    ]


def test_threads_can_read_while_the_engine_runs():
    fake = FakeEngine(5)
    pages = [Page(fake.live) for _ in range(3)]
    over = threading.Event()

    def poll(page: Page) -> None:
        while not over.is_set():
            page.ask()

    with ThreadPoolExecutor(3) as pool:
        polls = [pool.submit(poll, page) for page in pages]
        fake.run(300)
        over.set()
        for call in polls:
            call.result()
    for page in pages:
        while page.ask()["more"]:
            pass
        page.check(fake)


@contextmanager
def watched(engine: Any, path: Path) -> Iterator[Live]:
    """A recording of the block's steps, and a live page that sees the engine's steps and cancels."""
    engine.record(path)
    live = Live(engine.scheduler_state, engine.config.policy)
    step = engine.step
    cancel = engine.cancel

    def stepped() -> Any:
        before = engine.scheduler_state
        result = step()
        live.stepped(before, result, result.events, engine.scheduler_state)
        return result

    def cancelled(name: str) -> None:
        before = engine.scheduler_state
        live.stepped(before, None, cancel(name), engine.scheduler_state)

    engine.step = stepped
    engine.cancel = cancelled
    yield live
    engine.record(None)


@pytest.mark.parametrize("k", [-1, 1.5, True, "3", None])
def test_since_is_a_number_of_a_frame(k):
    with refused(r"since is .*; it must be a whole number from 0"):
        Live(scheduler.init(SMALL)).since(k)


def test_arguments_of_live_are_checked():
    with refused("keep is 0; a page shows at least 1 step"):
        Live(scheduler.init(SMALL), keep=0)
    with refused("policy is 'lifo'"):
        Live(scheduler.init(SMALL), "lifo")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_live_frames_of_an_engine_match_its_recording(tiny, tmp_path, preemption):
    """Branches, beams, shared prefixes, preemptions and a cancel, in a pool too small for all of
    them.
    """
    engine = small_llm(
        tiny, block_size=4, num_blocks=11, max_num_seqs=6, max_num_batched_tokens=16,
        max_model_len=32, preemption=preemption, swap_space_gib=0.001,
    ).engine  # fmt: skip
    with watched(engine, tmp_path / "run.jsonl") as live:
        for i in range(4):
            engine.add(f"r{i}", [5, 6, 7, 8, 9, i + 10], greedy(14))
        engine.add("n", [5, 6, 7, 8, 9], SamplingParams(max_tokens=9, seed=1), forks=["n/1"])
        engine.add("b", [9, 8, 7], BeamSearchParams(beam_width=2, max_tokens=6), forks=["b/1"])
        for _ in range(6):
            engine.step()
        engine.cancel("r1")
        list(steps(engine))
    recorded = list(read(tmp_path / "run.jsonl").frames)
    frames = live.since(0)["frames"][1:]  # the first is of before the run
    views, recorded_views = (
        [view._replace(requests=Map(), ended=()) for _, view in pictures(side)]
        for side in (frames, recorded)
    )
    assert views == recorded_views
    log = log_of(recorded)
    assert "preempted" in {entry[0] for entry in log}
    assert log_of(frames) == log  # though the end of a search is the next step's in a recording


@pytest.mark.slow
def test_live_frames_of_a_speculating_engine_match_its_recording(tiny, tmp_path):
    engine = small_llm(
        tiny, block_size=4, num_blocks=40, max_num_seqs=4, max_num_batched_tokens=32,
        max_model_len=64, speculative=Speculative(num_tokens=3, ngram_min=1, adaptive=False),
    ).engine  # fmt: skip
    with watched(engine, tmp_path / "run.jsonl") as live:
        for i in range(3):
            engine.add(f"r{i}", [5, 6, 7, 5, 6, i + 10], greedy(30))
        outputs = sampled(steps(engine))
    recorded = list(read(tmp_path / "run.jsonl").frames)
    frames = live.since(0)["frames"][1:]
    for key in ("rows", "tables", "counts", "sampled", "accepted", "verified"):
        assert [frame.get(key) for frame in frames] == [frame.get(key) for frame in recorded]
    drafts, accepted = [frame["verified"] for frame in recorded if "verified" in frame][-1]
    assert 0 < accepted < drafts
    assert generated(recorded) == {n: outputs[f"r{n}"] for n in range(3)}


def log_of(frames: list[dict]) -> list[list]:
    return [
        entry for frame in frames for part in ("before", "after") for entry in frame.get(part, ())
    ]
