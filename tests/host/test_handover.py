"""Sequences between two schedulers: `release` and `adopt`, each side against the reference
model.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pagedjax.host import replay, scheduler
from pagedjax.host.event_log import Adopt, Commit, Recorder, Release, Schedule, Submit
from pagedjax.host.kv_policies import ALL, View
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import Rejected, SchedulerConfig
from pagedjax.host.types import Released, Request
from pagedjax.options.config import PrefixCheckpoints
from tests import drawn
from tests.host.test_scheduler_machine import (
    USUAL,
    Driver,
    config_of,
    seeds,
    sizes,
    small_config,
)
from tests.refusals import refused

SMALL = SchedulerConfig(
    block_size=4, num_blocks=8, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=64
)
other_sizes = st.fixed_dictionaries(
    {name: draw for name, draw in sizes.items() if name != "block_size"}
)


class Pair:
    """Two schedulers with blocks of one size, each beside its model, and sequences that move
    between them.
    """

    def __init__(
        self, configs: tuple[SchedulerConfig, SchedulerConfig], tally: Counter[str]
    ) -> None:
        self.sides = [Driver(config, tally) for config in configs]
        self.tally = tally
        self.moves = 0

    def move(self, source: int, draw: random.Random) -> None:
        giver = self.sides[source]
        taker = self.sides[1 - source]
        if not (names := giver.model.names()):
            return
        name = draw.choice(names)
        leaver = giver.model.leave(name)
        if leaver is None:
            with refused(f"{name!r} (is|has)"):
                scheduler.release(giver.state, name)
            self.tally["refused"] += 1
            return
        state, released = scheduler.release(giver.state, name)
        giver.check_new_state(state)
        assert (released.length, released.computed, list(released.blocks)) == (
            leaver.known,
            leaver.computed,
            leaver.table,
        )
        self.moves += 1
        private = name.startswith("private")
        new_name = f"private-m{self.moves}" if private else f"m{self.moves}{name}"
        released = released._replace(request=released.request._replace(request_id=new_name))
        if not taker.model.accepts(released.request) or leaver.known >= taker.model.limit(
            released.request
        ):
            with pytest.raises(Rejected):
                scheduler.adopt(taker.state, FCFS, released)
            self.tally["rejected there"] += 1
            return
        room = scheduler.has_room(taker.state, FCFS, released)
        state, adopted = scheduler.adopt(taker.state, FCFS, released)
        assert bool(adopted.blocks) == (room and released.computed > 0)
        taker.model.enter(leaver, released, giver.model.slots, adopted)
        taker.check_new_state(state)
        self.tally["adopted"] += bool(adopted.blocks)
        self.tally["adopted in flight"] += bool(adopted.blocks) and taker.plan is not None
        self.tally["waits"] += not adopted.blocks
        self.tally["some blocks shared"] += 0 < len(adopted.copies) < len(released.blocks)

    def begin_or_end_a_step(self, side: int, draw: random.Random) -> None:
        driver = self.sides[side]
        if driver.plan is None:
            driver.schedule()
        else:
            driver.commit([draw.randrange(40) for _ in driver.plan.seqs], draw.randrange(2**32))


class HandoverMachine(RuleBasedStateMachine):
    tally: ClassVar[Counter[str]]

    @initialize(size=st.integers(1, 8), first=other_sizes, second=other_sizes)
    def start(self, size: int, first: dict, second: dict) -> None:
        configs = [config_of(USUAL, block_size=size, **sizes) for sizes in (first, second)]
        self.pair = Pair((configs[0], configs[1]), self.tally)

    @rule(side=st.integers(0, 1), seed=seeds)
    def move(self, side: int, seed: int) -> None:
        self.pair.move(side, random.Random(seed))

    @rule(
        side=st.integers(0, 1),
        number=st.integers(1, 6),
        seed=seeds,
        drafting=st.sampled_from([0.0, 0.7]),
    )
    def traffic(self, side: int, number: int, seed: int, drafting: float) -> None:
        self.pair.sides[side].traffic(number, seed, drafting=drafting)

    @rule(side=st.integers(0, 1), seed=seeds)
    def begin_or_end_a_step(self, side: int, seed: int) -> None:
        self.pair.begin_or_end_a_step(side, random.Random(seed))

    @rule(seed=seeds)
    def all_of_it_many_times(self, seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(15):
            self.pair.sides[draw.randrange(2)].traffic(draw.randint(1, 3), draw.randrange(2**32))
            self.pair.move(draw.randrange(2), draw)

    def teardown(self) -> None:
        for driver in self.pair.sides if hasattr(self, "pair") else ():
            driver.drain(seed=0)


@drawn.examples(6, 30)
def test_sequences_move_between_schedulers_at_any_time(number: int):
    """Counts, owners, content of every slot, published blocks and their order of eviction, on both
    sides.
    """
    HandoverMachine.tally = Counter()
    drawn.run_machine(HandoverMachine, number, steps=10)


def test_the_moves_of_a_fixed_seed_are_of_every_kind():
    draw = random.Random(0)
    tally = Counter[str]()
    for size in (1, 2, 3, 4):
        first, second = (small_config(draw)._replace(block_size=size) for _ in range(2))
        pair = Pair(
            (first, second._replace(num_blocks=draw.choice([10, 60]), max_num_seqs=8)), tally
        )
        for _ in range(20):
            pair.sides[draw.randrange(2)].traffic(draw.randint(1, 3), draw.randrange(2**32))
            pair.move(draw.randrange(2), draw)
            pair.begin_or_end_a_step(draw.randrange(2), draw)
        for driver in pair.sides:
            driver.drain(seed=0)
    kinds = (
        "adopted",
        "adopted in flight",
        "waits",
        "some blocks shared",
        "refused",
        "rejected there",
    )
    assert all(tally[name] for name in kinds), {name: tally[name] for name in kinds}


def state_after_prompt() -> scheduler.SchedulerState:
    """A scheduler whose request "a", a prompt of 10 tokens, has its first token."""
    request = Request("a", 10, 8, stop_token_ids=frozenset({7}), hashes=("h0", "h1"))
    state = scheduler.submit(scheduler.init(SMALL), request)
    state, plan = scheduler.schedule(state, FCFS)
    return scheduler.commit(state, plan, [1])[0]


def test_what_cannot_be_released_says_why():
    state = scheduler.submit(scheduler.init(SMALL), Request("a", 10, 8, forks=("b",)))
    with refused(r"sequence 'x' is not unfinished here"):
        scheduler.release(state, "x")
    with refused(r"'a' has 2 branches, whose prompt is not computed; release them one by one"):
        scheduler.release(state, "a")
    state = scheduler.submit(scheduler.init(SMALL), Request("a", 6, 4, forks=("b",), beams=True))
    with refused(r"'a' is a beam of a search"):
        scheduler.release(state, "a")
    state = scheduler.submit(scheduler.init(SMALL), Request("a", 10, 0))
    with refused(r"'a' is a prompt that samples nothing"):
        scheduler.release(state, "a")


def test_what_cannot_be_adopted_says_why():
    _, released = scheduler.release(state_after_prompt(), "a")
    state = scheduler.init(SMALL)
    with pytest.raises(
        Rejected, match=r"'a' has 11 tokens, and may have 11 here; raise max_model_len \(11\)"
    ):
        scheduler.adopt(scheduler.init(SMALL._replace(max_model_len=11)), FCFS, released)
    with pytest.raises(Rejected, match="raise num_blocks to 5"):
        scheduler.adopt(scheduler.init(SMALL._replace(num_blocks=4)), FCFS, released)
    with pytest.raises(Rejected, match="request id 'a' is in use"):
        scheduler.adopt(state_after_prompt(), FCFS, released)
    hashless = released._replace(request=released.request._replace(hashes=()))
    with refused("11 tokens, 10 of them computed, 3 blocks and 2 hashes, with blocks of 8"):
        scheduler.adopt(scheduler.init(SMALL._replace(block_size=8)), FCFS, hashless)
    with refused("'a' has branches or beams, or samples nothing"):
        scheduler.adopt(
            state, FCFS, released._replace(request=released.request._replace(forks=("b",)))
        )


def write_recording(path: Path, config: SchedulerConfig, moves) -> None:
    recorder = Recorder(path, config)
    moves(recorder, scheduler.init(config))
    recorder.close()


def test_the_recordings_of_both_sides_replay(tmp_path):
    moved: list[Released] = []

    def steps(recorder, state, number):
        for _ in range(number):
            state, plan = scheduler.schedule(state, FCFS)
            recorder.write(Schedule(plan))
            state, events = scheduler.commit(state, plan, [1] * len(plan.seqs))
            recorder.write(Commit(plan, [1] * len(plan.seqs), {}, {}, events))
        return state

    def prefill(recorder, state):
        for name in "ab":
            request = Request(name, 10, 8, hashes=("h0", f"h{name}"), tags=("t",))
            recorder.write(Submit(request))
            state = scheduler.submit(state, request)
        state = steps(recorder, state, 2)
        for name in "ab":
            state, released = scheduler.release(state, name)
            recorder.write(Release(released))
            moved.append(released)
        steps(recorder, state, 1)

    def decode(recorder, state):
        for released in moved:
            state, adopted = scheduler.adopt(state, FCFS, released)
            recorder.write(Adopt(released, adopted))
        assert state.running.seqs
        while state.ids:
            state = steps(recorder, state, 1)

    write_recording(tmp_path / "prefill.jsonl", SMALL, prefill)
    write_recording(tmp_path / "decode.jsonl", SMALL, decode)
    write_recording(tmp_path / "tight.jsonl", SMALL._replace(num_blocks=5), decode)
    for name in ("prefill", "decode", "tight"):
        report = replay.verify(tmp_path / f"{name}.jsonl")
        assert report.identical, report.difference
    lines = (tmp_path / "decode.jsonl").read_text().splitlines()
    assert (
        '"from":[1,2,3],"hashes":["h0","ha"],"blocks":[1,2,3],"copies":[[1,1],[2,2],[3,3]]'
        in lines[1]
    )
    assert '"copies":[[4,4],[5,5]]' in lines[2], "the second one shares its first block"


def test_an_adopted_sequence_publishes_the_checkpoints_of_its_states_alone():
    checkpoints = PrefixCheckpoints(interval=8, texts=True)
    config = SMALL._replace(
        num_blocks=40, views=(ALL, View(2)), shares_filling=False, prefix_checkpoints=checkpoints
    )
    hashes = tuple(map(str, range(5)))
    request = Request("a", 21, 8, hashes=hashes)
    state = scheduler.submit(scheduler.init(config), request)
    while not state.running.seqs or scheduler.running(state)[0].computed < 21:
        state, plan = scheduler.schedule(state, FCFS)
        state, _ = scheduler.commit(state, plan, [1] * len(plan.seqs))
    attention = {*hashes}
    assert {*state.pool.contents} == attention | {"1.1", "3.1"}  # boundaries 2 and 4 of blocks of 4
    state, released = scheduler.release(state, "a")
    assert {*state.pool.contents} == attention | {"1.1", "3.1", "4.1"}  # the text ends at 5
    other, adopted = scheduler.adopt(scheduler.init(config), FCFS, released)
    assert adopted.computed == 21
    scheduler.check(other)
    assert {*other.pool.contents} == attention  # of the states, it came with blocks 4 and 5 alone


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"release":{}}', "line 2 is a malformed release: KeyError"),
        ('{"release":{"request_id":"x"}}', "refused: sequence 'x' is not unfinished here"),
        ('{"adopt":{"request":{}}}', "line 2 is a malformed adopt: KeyError"),
    ],
)
def test_wrong_lines_of_a_recording_are_named(tmp_path, line, message):
    write_recording(tmp_path / "run.jsonl", SMALL, lambda recorder, state: recorder._write(line))
    with pytest.raises(replay.ReplayError, match=message):
        list(replay.replay(tmp_path / "run.jsonl"))
