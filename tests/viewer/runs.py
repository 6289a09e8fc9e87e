"""Recorded runs for the tests of the viewer: random runs of the scheduler without an engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from pagedjax.host import replay, scheduler
from pagedjax.host.event_log import Recorder
from pagedjax.host.policies import FCFS
from pagedjax.host.replay import Transition
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Plan, Request
from pagedjax.viewer.picture import Frame, Picture, apply
from tests.host.test_event_log import SMALL, record


def random_run(path: Path, seed: int, length: int = 120, **config) -> list[Transition]:
    """Records a random run with all kinds of transitions -> the transitions of the recording."""
    record(path, SMALL._replace(**config), seed, length)
    return list(replay.replay(path))


def crowd(path: Path, *, steps: int, blocks: int, seqs: int, size: int = 16, seed: int = 0) -> SchedulerConfig:
    """Records `steps` steps of many requests with common prefixes in a pool that is too small."""
    config = SchedulerConfig(size, blocks, 256, seqs, 1024)
    draw, state, count = random.Random(seed), scheduler.init(config), 0
    recorder = Recorder(path, config)
    for _ in range(steps):
        while len(state.waiting) < 3:
            prompt = draw.randint(4, 8 * size)
            family = draw.randrange(3)
            hashes = tuple(f"{family}/{i}" if i < 4 else f"{count}.{i}" for i in range(prompt // size))
            request = Request(f"r{count}", prompt, draw.randint(2, 6 * size), hashes=hashes)
            state, count = scheduler.submit(state, request), count + 1
            recorder.submit(request)
        state, plan = scheduler.schedule(state, FCFS)
        recorder.schedule(plan)
        tokens = [draw.randrange(49152) for _ in plan.seqs]
        state, events = scheduler.commit(state, plan, tokens)
        recorder.commit(tokens, {}, {}, events)
    recorder.close()
    return config


def pictures(frames: list[Frame]) -> Iterator[tuple[Frame, Picture]]:
    picture = Picture()
    for frame in frames:
        picture = apply(picture, frame)
        yield frame, picture


def names(frames: list[Frame]) -> dict[int, str]:
    return {record[0]: record[1] for frame in frames for record in frame.get("came", ())}


def brute_force_empty(state: SchedulerState, plan: Plan) -> int:
    """Slots of owned blocks without a token when the step has computed, block by block."""
    size = state.config.block_size
    ends = {seq.arrival: a + c for seq, a, c in zip(plan.seqs, plan.starts, plan.counts, strict=True)}
    filled: dict[int, int] = {}
    for seq in scheduler.running(state):
        end = ends.get(seq.arrival, seq.computed)
        for i, block in enumerate(seq.blocks):
            filled[block] = max(filled.get(block, 0), min(size, max(0, end - i * size)))
    return sum(size - tokens for tokens in filled.values())
