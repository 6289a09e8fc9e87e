"""The loads of the scheduler's benchmark do what their names say. No times are tested."""

from __future__ import annotations

import json

import pytest

from experiments.bench import scheduler as bench_scheduler
from experiments.bench.scheduler import (
    LOADS,
    Step,
    Stream,
    advance,
    scheduler_config,
    start,
    timing,
)
from pagedjax.host import scheduler

SEQS = 16
Ran = dict[str, tuple[Stream, list[Step]]]


@pytest.fixture(scope="module")
def ran() -> Ran:
    """Each load through its warm-up and 80 steps more, with SEQS sequences and as many blocks as
    they need.
    """
    config = scheduler_config(seqs=SEQS, blocks=80 * SEQS, block_size=16, steps=80)
    return {load.name: advance(start(load, config), load.warm_up + 80) for load in LOADS}


def total(ran: Ran, load: str, column: str) -> int:
    return sum(getattr(step, column) for step in ran[load][1])


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_load_keeps_scheduler_busy_and_consistent(ran: Ran, load: bench_scheduler.Load):
    stream, steps = ran[load.name]
    scheduler.check(stream.state)
    assert all(step.schedule > 0 and step.commit > 0 for step in steps)
    assert total(ran, load.name, "sequences") > 0.7 * SEQS * len(steps)
    assert (total(ran, load.name, "finished") == 0) == load.name.startswith("decode")
    assert (total(ran, load.name, "preempted") > 0) == load.name.startswith("tight")
    assert (stream.state.host_pool is not None) == load.swap


def test_load_uses_its_features(ran: Ran):
    assert total(ran, "arrivals", "found") == total(ran, "arrivals", "copies") == 0
    assert total(ran, "chunks", "tokens") > 1.5 * total(ran, "chunks", "sequences")
    features = {
        "arrivals+branches": ["copies"],
        "arrivals+hashes": ["found"],
        "arrivals+all": ["found", "copies"],
        "tight+swap": ["swapped"],
        "tight+all": ["found", "copies", "swapped"],
    }
    for load, columns in features.items():
        assert all(total(ran, load, column) > 0 for column in columns)
    pool = ran["arrivals+hashes"][0].state.pool
    assert pool.oldest > 0, "blocks have been evicted"
    assert len(pool.idle) > pool.num_blocks // 2
    groups = ran["decode+all"][0].state
    assert {seq.group is not None for seq in groups.running.seqs} == {True}
    assert all(len(seq.hashes) >= seq.computed // 16 - 1 for seq in groups.running.seqs), (
        "outputs are published"
    )


def test_timing_of_known_steps():
    def step(schedule: float, commit: float) -> Step:
        return Step(schedule * 1e-6, commit * 1e-6, 4, 5, 1, 0, 0, 0, 0)

    rounds = [[step(10, 20), step(30, 40), step(10, 20)], [step(50, 50)] * 3]
    result = timing("x", rounds)
    assert (result.median, result.low, result.high) == (85.0, 30.0, 100.0)
    assert (result.schedule, result.commit) == (40.0, 45.0)
    assert (result.sequences, result.tokens, result.finished) == (4, 5, 1)


def test_the_command(capsys):
    small = ["--seqs", "4", "--blocks", "320", "--measure", "10"]
    assert bench_scheduler.main([*small, "--loads", "decode", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [load["load"] for load in result["loads_us"]] == ["decode"]
    assert result["met"] == {"decode": True}, "4 sequences are no work at all"
