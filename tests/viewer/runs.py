"""Recorded runs for the tests of the viewer: random runs of the scheduler without an engine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pagedjax.host import drafts, replay, scheduler
from pagedjax.host.event_log import Cancel, Commit, Recorder, Schedule, Submit
from pagedjax.host.policies import FCFS, Policy
from pagedjax.host.replay import Transition
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Plan, Request
from pagedjax.viewer.picture import Frame, Picture, apply
from tests.host.test_event_log import SMALL, filled, record

# of the version before drafts, but for the ids of blocks
GOLDENS = Path(__file__).parent / "goldens"
DRAFTING = SchedulerConfig(
    block_size=2, num_blocks=16, max_num_batched_tokens=14, max_num_seqs=4, max_model_len=24
)


class Writer:
    """A scheduler without an engine, whose transitions are recorded."""

    def __init__(
        self, path: Path, config: SchedulerConfig, policy: Policy = FCFS, **options: Any
    ) -> None:
        self.policy = policy
        self.recorder = Recorder(path, config, policy.name, **options)
        self.state = scheduler.init(config)
        self.requests = 0

    def submit(self, request: Request, prompt: Sequence[int] = ()) -> None:
        self.state = scheduler.submit(self.state, request)
        self.requests += 1
        self.recorder.write(Submit(request, prompt))

    def schedule(self, offered: dict[str, int] | None = None) -> Plan:
        self.state, plan = scheduler.schedule(self.state, self.policy, offered or {})
        self.recorder.write(Schedule(plan, offered or {}))
        return plan

    def commit(self, plan: Plan, sampled: Sequence[drafts.Sample], hashes: Any = None) -> None:
        hashes = hashes or {}
        self.state, events = scheduler.commit(self.state, plan, sampled, hashes)
        self.recorder.write(Commit(plan, sampled, hashes, {}, events))


def random_run(path: Path, seed: int, length: int = 120, **config) -> list[Transition]:
    """Record a random run with all kinds of transitions. Returns the transitions of the recording."""
    record(path, SMALL._replace(**config), seed, length)
    return list(replay.replay(path))


def crowd(path: Path, *, steps: int, blocks: int, seqs: int) -> None:
    """Records `steps` steps of many requests with common prefixes in a pool that is too small."""
    size = 16
    draw = random.Random(0)
    writer = Writer(path, SchedulerConfig(size, blocks, 256, seqs, 1024))
    for _ in range(steps):
        while len(writer.state.waiting) < 3:
            count = writer.requests
            prompt = draw.randint(4, 8 * size)
            family = draw.randrange(3)
            hashes = [f"{family}/{i}" if i < 4 else f"{count}.{i}" for i in range(prompt // size)]
            length = draw.randint(2, 6 * size)
            writer.submit(Request(f"r{count}", prompt, length, hashes=tuple(hashes)))
        plan = writer.schedule()
        writer.commit(plan, [draw.randrange(49152) for _ in plan.seqs])
    writer.recorder.close()


def drafting_run(path: Path, seed: int, steps: int = 60, **config) -> list[Transition]:
    """Record a random run with drafts, right and wrong ones, and cancels. Returns the transitions
    of the recording.
    """
    draw = random.Random(seed)
    writer = Writer(path, DRAFTING._replace(**config))
    for _ in range(steps):
        while len(writer.state.waiting) < 2:
            name = f"r{writer.requests}"
            lengths = draw.randint(1, 6), draw.randint(1, 10)
            writer.submit(Request(name, *lengths, 0, frozenset({3})))
        plan = writer.schedule(
            {name: k for name in sorted(writer.state.ids) if (k := draw.randrange(5))}
        )
        if draw.random() < 0.2:
            name = draw.choice(sorted(writer.state.ids))
            writer.state, events = scheduler.cancel(writer.state, name, "abort")
            writer.recorder.write(Cancel(name, "abort", events))
        sampled = samples(plan, draw)
        hashes = filled(plan, writer.state.config.block_size, sampled)
        writer.commit(plan, sampled, hashes)
    writer.recorder.close()
    return list(replay.replay(path))


def any_run(path: Path, seed: int, num_blocks: int, **config) -> list[Transition]:
    """A run with drafts if the seed is odd, else one of all kinds of transitions."""
    if seed % 2:
        return drafting_run(path, seed, num_blocks=num_blocks + 2, **config)
    return random_run(path, seed, num_blocks=num_blocks, **config)


def samples(plan: Plan, draw: random.Random) -> list[drafts.Sample]:
    """Made-up samples of a plan: of a row with drafts a random number of accepted ones, and one
    more.
    """
    of_rows = plan.drafts or (0,) * len(plan.seqs)
    tokens = [tuple(draw.randrange(20) for _ in range(draw.randint(1, k + 1))) for k in of_rows]
    return (
        list(drafts.cut_at_the_end(plan, tokens))
        if plan.drafts
        else [sample for (sample,) in tokens]
    )


def pictures(frames: list[Frame]) -> Iterator[tuple[Frame, Picture]]:
    picture = Picture()
    for frame in frames:
        picture = apply(picture, frame)
        yield frame, picture


def without_why(frames: list[Frame]) -> list[Frame]:
    """Frames as of the version before reasons."""
    return [{name: part for name, part in frame.items() if name != "why"} for frame in frames]


def names(frames: list[Frame]) -> dict[int, str]:
    return {record[0]: record[1] for frame in frames for record in frame.get("came", ())}


def brute_force_empty(state: SchedulerState, plan: Plan) -> int:
    """Slots of owned blocks without a token when the step has computed, block by block."""
    size = state.config.block_size
    ends = {
        seq.arrival: a + c for seq, a, c in zip(plan.seqs, plan.starts, plan.counts, strict=True)
    }
    used: dict[int, int] = {}
    for seq in scheduler.running(state):
        end = ends.get(seq.arrival, seq.computed)
        for entry, block in enumerate(seq.blocks):
            if block:
                i = entry // state.config.groups
                used[block] = max(used.get(block, 0), min(size, max(0, end - i * size)))
    return sum(size - tokens for tokens in used.values())
