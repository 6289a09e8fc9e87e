"""The shipped policies with memory: their bounds, and that every request ends."""

from __future__ import annotations

import inspect
import random
import sys
import textwrap
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from immutables import Map

from pagedjax.host import purity, scheduler
from pagedjax.host.event_log import Commit, Recorder, Schedule, Submit
from pagedjax.host.policies import (
    FCFS,
    POLICIES,
    Policy,
    deadline,
    early_rejection,
    find,
    mlfq,
    policy,
    srtf,
    vtc,
)
from pagedjax.host.policies.early_rejection import VARIANCE, StepTimes, step_seconds, with_step
from pagedjax.host.policies.vtc import Counters, Service
from pagedjax.host.replay import ReplayError, replay, verify
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Admitted, Finished, Plan, Preempted, Request, Sampled
from pagedjax.options.config import EngineConfig
from tests import drawn
from tests.host.scheduler_steps import WORD, names, start
from tests.host.test_event_log import chosen
from tests.refusals import refused

STEP_S = 0.25
# parameters with which everything that a policy may do happens in a small run
EAGER = (
    vtc(),
    mlfq(),
    srtf(),
    deadline(),
    early_rejection(),
    mlfq(levels=3, quantum=2, ratio=2, patience=9),
    srtf(patience=8, margin=1),
    deadline(targets=(("chat", 1.0),), token_s=0.5),
    early_rejection(ttft_s=3.0, itl_s=0.5),
)


def ask(name: str, prompt_len: int, max_tokens: int, **fields: Any) -> Request:
    return Request(name, prompt_len, max_tokens, **{"predicted": max_tokens, **fields})


def step(state: SchedulerState, policy: Policy) -> tuple[SchedulerState, Plan, list[Finished]]:
    """One whole step of STEP_S seconds."""
    state, plan = scheduler.schedule(state, policy, now=STEP_S * state.step)
    state, events = scheduler.commit(state, plan, [WORD] * len(plan.seqs))
    scheduler.check(state)
    return state, plan, [event for event in events if isinstance(event, Finished)]


# --- all of them ----------------------------------------------------------------------------------


@drawn.examples(6, 20)
@pytest.mark.parametrize("policy", EAGER, ids=lambda policy: policy.name)
def test_storms_of_preemptions_end(policy: Policy, number: int):
    """With branches, beams, cancels and failed steps, in a pool that is too small."""

    def holds(seed: int, host_blocks: int, budget: int, rows: int) -> None:
        draw = random.Random(seed)
        config = SchedulerConfig(2, 12, budget, rows, 16, host_blocks)
        state = scheduler.init(config)
        submitted = 0
        while submitted < 24 or state.ids:
            while submitted < 24 and draw.random() < 0.5:
                forks = tuple(
                    f"r{submitted}/{i}" for i in range(draw.randrange(min(3, config.max_running)))
                )
                new = ask(
                    f"r{submitted}",
                    draw.randint(1, 8),
                    draw.randint(1, 6),
                    user=draw.choice("xyz"),
                    service_class=draw.choice(["chat", "batch"]),
                    forks=forks,
                    beams=bool(forks) and draw.random() < 0.4,
                )
                submitted = submitted + 1
                try:
                    state = scheduler.submit(state, new)
                except scheduler.Rejected:  # beams that do not fit together
                    continue
            if state.ids and draw.random() < 0.05:
                state, _ = scheduler.cancel(state, draw.choice(sorted(state.ids)))
            if draw.random() < 0.03:
                state = scheduler.restart(state)
            state, plan = scheduler.schedule(state, policy, now=STEP_S * state.step)
            choices, ended = chosen(state, plan, draw)
            state, _ = scheduler.commit(state, plan, [WORD] * len(plan.seqs), choices=choices)
            for name in ended:
                state, _ = scheduler.cancel(state, name, "length")
            scheduler.check(state)
            hash(state.memory)
            assert state.step < 1500, "does not end"

    drawn.check(
        number,
        holds,
        seed=st.integers(0, 2**32 - 1),
        host_blocks=st.sampled_from([0, 5, 20]),
        budget=st.integers(2, 8),
        rows=st.integers(1, 4),
    )


@pytest.mark.parametrize(
    "policy",
    [mlfq(quantum=2, ratio=2, patience=9), srtf(patience=8, margin=1), deadline(), vtc()],
    ids=lambda policy: policy.name,
)
def test_no_request_starves_in_an_endless_stream(policy: Policy):
    """A long request, and short ones that always fill the pool and are more urgent."""
    state = start(num_blocks=12, seqs=3, model_len=32)
    state = scheduler.submit(state, ask("long", 9, 20, user="old", deadline=30.0))
    for number in range(600):
        while len(state.waiting) < 3:
            new = ask(f"s{number}.{len(state.ids)}", 4, 3, user="new", deadline=20.0)
            state = scheduler.submit(state, new)
        state, _, ended = step(state, policy)
        if "long" in [event.request_id for event in ended]:
            return
    raise AssertionError("the long request has not ended")


@pytest.mark.parametrize("policy", EAGER, ids=lambda policy: policy.name)
def test_recordings_replay_byte_for_byte_with_their_times(policy: Policy, tmp_path: Path):
    path = tmp_path / "run.jsonl"
    config = SchedulerConfig(2, 12, 8, 3, 16, host_blocks=4)
    draw = random.Random(7)
    state = scheduler.init(config)
    own_policy = None if policy.name in POLICIES else f"pagedjax.policies:{policy.name}"
    with closing(Recorder(path, config, policy.name, own_policy=own_policy)) as recorder:
        for number in range(60):
            if number < 40 and draw.random() < 0.5:
                size = draw.randint(1, 8)
                new = ask(f"r{number}", size, draw.randint(1, 6), user=draw.choice("xyz"))
                state = scheduler.submit(state, new)
                recorder.write(Submit(new))
            state, plan = scheduler.schedule(state, policy, now=number / 7)
            recorder.write(Schedule(plan))
            sampled = [WORD] * len(plan.seqs)
            state, events = scheduler.commit(state, plan, sampled)
            recorder.write(Commit(plan, sampled, {}, {}, events))
    assert verify(path).identical  # parameters need no --policy
    *_, last = replay(path)
    assert last.state.memory == state.memory
    text = path.read_text()
    assert ('"now":0.14285714285714285' in text) == policy.timed
    if policy.timed:
        path.write_text(
            text.replace('"now":0.14285714285714285,', "").replace(',"now":0.14285714285714285', "")
        )
        difference = verify(path).difference
        assert difference is not None
        assert "is timed; give schedule" in difference.recomputed


def test_a_recording_with_parameters_that_no_policy_has_is_refused(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    config = SchedulerConfig(2, 12, 8, 3, 16)
    own_policy = "pagedjax.policies:vtc(speed=1)"
    Recorder(path, config, "vtc(speed=1)", own_policy=own_policy).close()
    with pytest.raises(
        ReplayError, match=r"line 1 names the policy .*speed is no parameter of vtc"
    ):
        verify(path)


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("mlfq", "mlfq"),
        ({"name": "vtc", "output_weight": 3}, "vtc(output_weight=3.0)"),
        ("srtf(patience=9,margin=2)", "srtf(margin=2, patience=9)"),
        ({"name": "srtf", "patience": 256}, "srtf"),
        (
            {"name": "deadline", "targets": [["chat", 2]]},
            "deadline(targets=(('chat', 2.0),))",
        ),
    ],
)
def test_a_shipped_policy_takes_parameters(option, name):
    assert find(EngineConfig(policy=option).policy).name == name


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"name": "fcfs", "worth": 2}, "'fcfs', which has no parameters, and worth is given"),
        ({"name": "vtc", "output_wait": 3}, "did you mean 'output_weight'"),
        ({"name": "vtc", "output_weight": 0.0}, "vtc has output_weight 0.0; it must be above 0"),
        ({"name": "mlfq", "quantum": 0}, "quantum is 0; it must be an integer of at least 1"),
        ({"name": "deadline", "default_s": -1.0}, "deadline has default_s -1.0; it must be sec"),
        ({"name": "early_rejection", "speed": 2.0}, "early_rejection has speed 2.0; it must be"),
    ],
)
def test_wrong_parameters_of_a_shipped_policy_are_refused(option, message):
    with refused(message):
        find(EngineConfig(policy=option).policy)


def test_the_documented_policy_takes_turns_and_ends(documented_file):
    path = documented_file("policies-with-memory.md", "round_robin.py")
    policy = purity.find_pure(f"{path}:ROUND_ROBIN")
    state = start(seqs=1)
    for _ in range(3):
        for user in "xxy":
            state = scheduler.submit(state, ask(f"{user}{len(state.ids)}", 2, 2, user=user))
    first: list[str] = []
    while state.ids:
        state, plan, _ = step(state, policy)
        first += plan.admitted
    assert "".join(name[0] for name in first) == "xyxyxyxxx"


# --- vtc ------------------------------------------------------------------------------------------

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0


def largest_differences(
    policy: Policy, config: SchedulerConfig, draw: random.Random, num_steps: int
) -> float:
    """The largest difference of service of two users in an interval in which both have requests in
    the queue all the time.

    Users come and go: each of them sends requests in some phases of the run.
    """
    users: tuple[str, ...] = ("x", "y", "z")
    state = scheduler.init(config)
    service = dict.fromkeys(users, 0.0)
    served: set[str] = set()  # whose prompt was admitted
    lowest: dict[tuple[str, str], float] = {}  # difference since both are in the queue: the least
    largest = 0.0
    active = dict.fromkeys(users, True)
    sizes = {user: (draw.randint(1, 6), draw.randint(1, 6)) for user in users}
    count = 0
    for _ in range(num_steps):
        for user in users:
            if draw.random() < 0.05:
                active[user] = not active[user]
            prompt, output = sizes[user]
            queued = sum([seq.request.user == user for seq in state.waiting])
            while active[user] and queued < 3:
                new = ask(f"{user}{count}", draw.randint(1, prompt), draw.randint(1, output))
                state = scheduler.submit(state, new._replace(user=user))
                count = count + 1
                queued = queued + 1
        before = {seq.request.user for seq in state.waiting}
        starts = dict(service)
        state, plan = scheduler.schedule(state, policy)
        backlogged = before & {seq.request.user for seq in state.waiting}
        state, events = scheduler.commit(state, plan, [WORD] * len(plan.seqs))
        for event in events:
            if isinstance(event, Admitted) and event.request_id not in served:
                served.add(event.request_id)
                service[event.request_id[0]] += INPUT_WEIGHT * event.num_tokens
            elif isinstance(event, Sampled):
                for name in event.request_ids:
                    service[name[0]] += OUTPUT_WEIGHT
        for first in users:
            for second in users:
                pair = (first, second)
                if first == second or not {first, second} <= backlogged:
                    lowest.pop(pair, None)
                    continue
                lowest_difference = lowest.get(pair, starts[first] - starts[second])
                difference = service[first] - service[second]
                largest = max(largest, difference - lowest_difference)
                lowest[pair] = min(lowest_difference, difference)
    return largest


def bound(config: SchedulerConfig) -> float:
    """2 * max(w_p * L_input, w_q * M), with prompts of at most 6 tokens."""
    most_tokens = config.max_num_seqs * config.max_model_len
    return 2 * max(INPUT_WEIGHT * 6, OUTPUT_WEIGHT * most_tokens)


def vtc_config(rows: int, tight: bool, budget: int) -> SchedulerConfig:
    """tight: the pool does not hold all rows to their ends, so that sequences are preempted."""
    return SchedulerConfig(2, 6 if tight else 6 * rows, max(budget, rows), rows, 12)


@drawn.given(
    20,
    400,  # of 10_000, in half an hour, the largest difference was two thirds of the bound
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 3),
    tight=st.booleans(),
    budget=st.integers(1, 12),
)
def test_the_service_of_two_users_in_the_queue_differs_by_at_most_the_bound(
    seed: int, rows: int, tight: bool, budget: int
):
    config = vtc_config(rows, tight, budget)
    assert largest_differences(vtc(), config, random.Random(seed), 150) <= bound(config)


LINES = (
    "memory = lifted(memory, event.seq.request.user)",
    "memory = served(memory, event.request_ids, output_weight, shares)",
)


def without_line(line: str) -> Policy:
    """vtc, with a line of its `observe` replaced by `pass`."""
    source = inspect.getsource(sys.modules[vtc.__module__])
    assert source.count(line) == 1
    changed = textwrap.dedent(source.replace(line, "pass"))
    values: dict[str, Any] = {"__name__": "changed"}
    exec(compile(changed, "changed.py", "exec"), values)
    return values["vtc"]()


@pytest.mark.parametrize("line", LINES)
def test_the_bound_breaks_without_a_line_of_observe(line: str):
    policy = without_line(line)
    config = vtc_config(2, False, 8)
    runs = (largest_differences(policy, config, random.Random(seed), 600) for seed in range(12))
    assert any(difference > bound(config) for difference in runs)


def test_first_come_first_served_breaks_the_bound():
    config = vtc_config(2, False, 8)
    runs = (largest_differences(FCFS, config, random.Random(seed), 600) for seed in range(12))
    assert any(difference > bound(config) for difference in runs)


def test_a_user_of_twice_the_weight_gets_twice_the_service():
    policy = vtc(weights=(("x", 2.0),))
    state = start(num_blocks=64, seqs=1)
    tokens = {"x": 0, "y": 0}
    for number in range(400):
        for user in "xy":
            if sum([seq.request.user == user for seq in state.waiting]) < 3:
                state = scheduler.submit(state, ask(f"{user}{number}", 4, 4, user=user))
        state, plan, _ = step(state, policy)
        for seq in plan.seqs:
            tokens[seq.request.user] += 1
    assert 1.9 < tokens["x"] / tokens["y"] < 2.1


def test_a_user_who_is_preempted_gets_no_credit_for_the_time_without_a_queue():
    service = Map({"a": Service("x", False, 0), "b": Service("y", True, 0)})
    memory = Counters(Map({"x": 1.0, "y": 90.0}), service, Map({"y": 1}))
    observe: Any = vtc().observe
    counters = observe(memory, (Preempted(3, "a", False),), None).counters
    assert counters["x"] == counters["y"] == 90.0


def test_a_counter_is_forgotten_when_it_gives_nothing():
    state = start()
    for number in range(50):
        state = scheduler.submit(state, ask(f"r{number}", 2, 2, user=f"u{number}"))
        state, *_ = step(state, vtc())
    assert len(state.memory.counters) < 6
    assert "waiting" in vtc().show(state.memory)


# --- mlfq -----------------------------------------------------------------------------------------


def test_a_request_joins_the_level_that_holds_its_prompt_and_is_demoted_by_its_work():
    policy = mlfq(levels=3, quantum=2, ratio=2, prompt_work=0.5)
    state = start(ask("short", 2, 8), ask("long", 6, 8), ask("huge", 40, 8))
    state, *_ = step(state, policy)
    jobs = state.memory.jobs
    assert [jobs[name].level for name in ("short", "long", "huge")] == [0, 1, 2]
    for _ in range(2):
        state, *_ = step(state, policy)
    assert state.memory.jobs["short"].level == 1
    levels = policy.show(state.memory)
    assert levels == "level 0: none\nlevel 1: short\nlevel 2: huge long"


def test_a_new_request_evicts_one_that_was_demoted_in_its_second_step():
    policy = mlfq(quantum=1, ratio=2, prompt_work=0.0)
    state = start(ask("old", 4, 9), seqs=1)
    for _ in range(4):
        state, *_ = step(state, policy)
    state = scheduler.submit(state, ask("new", 4, 1))
    state, plan, _ = step(state, policy)
    assert (plan.preempted, plan.admitted) == ((), ())
    state, plan, _ = step(state, policy)
    assert (plan.preempted, plan.admitted) == (("old",), ("new",))
    state, plan, _ = step(state, policy)
    assert plan.admitted == ("old",)


# --- srtf -----------------------------------------------------------------------------------------


def test_the_shortest_prediction_runs_first_and_evicts_a_much_longer_one():
    policy = srtf(margin=4)
    state = start(*(ask(name, 2, n) for name, n in {"a": 9, "b": 3, "c": 6}.items()), seqs=1)
    state, plan, _ = step(state, policy)
    assert plan.admitted == ("b",)
    for _ in range(2):
        state, *_ = step(state, policy)
    state, plan, _ = step(state, policy)
    assert plan.admitted == ("c",)
    state = scheduler.submit(state, ask("d", 2, 1))
    state, *_ = step(state, policy)
    state, plan, _ = step(state, policy)
    assert plan.preempted == ()  # c has 3 left: not 4 more than d
    state, *_ = step(start(ask("a", 2, 9), seqs=1), policy)
    state = scheduler.submit(state, ask("d", 2, 1))
    state, *_ = step(state, policy)
    state, plan, _ = step(state, policy)
    assert (plan.preempted, plan.admitted) == (("a",), ("d",))


def test_a_request_without_a_prediction_is_an_error():
    with refused("request 'a' has no predicted length, and the policy reads one"):
        step(start(Request("a", 2, 4), Request("b", 2, 4)), srtf())


# --- deadline and early rejection -----------------------------------------------------------------


def test_the_least_slack_is_first():
    policy = deadline(targets=(("chat", 2.0), ("batch", 600.0)), token_s=0.5)
    state = start(
        ask("batch", 2, 1, service_class="batch"),
        ask("none", 2, 1),
        ask("chat", 2, 1, service_class="chat"),
        ask("long chat", 2, 3, service_class="chat"),
        ask("own", 2, 1, service_class="batch", deadline=0.5),
        seqs=1,
    )
    first: list[str] = []
    while state.ids:
        state, plan, _ = step(state, policy)
        first += plan.admitted
    assert first == ["own", "long chat", "chat", "none", "batch"]


def test_who_would_wait_too_long_is_rejected_and_others_are_not():
    """A step takes STEP_S and computes 4 prompt tokens, so a prompt of 4 behind n others waits."""
    policy = early_rejection(ttft_s=1.1, itl_s=100.0, targets=(("batch", 100.0, 100.0),))
    state = start(ask("first", 4, 1), budget=4, seqs=1)
    for _ in range(2):
        state, plan, _ = step(state, policy)
        assert plan.rejected == ()
    state = scheduler.submit(state, ask("again", 4, 1))  # the rate is known after one step
    state, *_ = step(state, policy)
    for number in range(6):
        state = scheduler.submit(state, ask(f"r{number}", 4, 1))
    state = scheduler.submit(state, ask("batch", 4, 1, service_class="batch"))
    state, plan, ended = step(state, policy)
    assert plan.rejected == ("r4", "r5")
    assert {event.reason for event in ended if event.request_id in plan.rejected} == {"rejected"}
    unfinished = {"r1", "r2", "r3", "batch"}
    while state.ids:
        state, plan, ended = step(state, policy)
        assert plan.rejected == ()
        unfinished -= {event.request_id for event in ended if event.reason == "length"}
    assert unfinished <= {"r0"}


def step_from(
    time: float, state: SchedulerState, policy: Policy, seconds: Callable[[int], float]
) -> tuple[float, SchedulerState, Plan]:
    """One whole step, and the time when it ends.

    Args:
        time: when it begins.
        seconds: of a step, by its sequences.
    """
    state, plan = scheduler.schedule(state, policy, now=time)
    state, _ = scheduler.commit(state, plan, [WORD] * len(plan.seqs))
    return time + seconds(len(plan.seqs)), state, plan


@pytest.mark.parametrize(
    ("base", "slope", "rejected"),
    [
        (0.24, 0.01, ""),  # in proportion to its one sequence, two would be too many
        (0.05, 0.10, "34567"),  # four sequences take 0.45 s
    ],
)
def test_who_would_make_steps_too_slow_is_rejected(base: float, slope: float, rejected: str):
    policy = early_rejection(ttft_s=100.0, itl_s=0.36)
    state = start(ask("a", 2, 40), ask("b", 2, 4))
    time = 0.0
    for _ in range(8):
        time, state, _ = step_from(time, state, policy, lambda rows: base + slope * rows)
    assert names(state.running.seqs) == ["a"]
    for number in range(1, 8):
        state = scheduler.submit(state, ask(str(number), 2, 4))
    _, _, plan = step_from(time, state, policy, float)
    assert "".join(plan.rejected) == rejected


def test_a_second_sequence_is_accepted_and_shows_what_it_costs():
    policy = early_rejection(ttft_s=100.0, itl_s=0.3)
    state = start(ask("a", 2, 40))
    time = 0.0
    for number in range(12):
        if number in (5, 10):
            state = scheduler.submit(state, ask(str(number), 2, 20))
        time, state, plan = step_from(time, state, policy, lambda rows: 0.25 * rows)
        assert plan.rejected == (("10",) if number == 10 else ())


def test_gaps_with_prompts_of_others_count_until_they_are_past():
    policy = early_rejection(ttft_s=100.0, itl_s=0.4)
    state = start(ask("a", 2, 40))
    time = 0.0
    rejected: list[str] = []
    for number in range(8):
        time, state, plan = step_from(time, state, policy, lambda rows: 0.1 if rows == 1 else 0.5)
        rejected += plan.rejected
        state = scheduler.submit(state, ask(str(number), 2, 1))
    assert rejected[:3] == ["1", "2", "3"]
    assert "4" not in rejected


def test_what_two_sequences_took_is_forgotten_while_one_runs():
    means = StepTimes(sequences=2.0, seconds=0.3)
    for _ in range(100):
        means = with_step(means, 1, 0.2, speed=0.1)
    assert step_seconds(means, 2) == pytest.approx(0.2, abs=0.001)


@drawn.given(
    30,
    300,
    steps=st.lists(st.tuples(st.integers(1, 8), st.floats(0.01, 1.0)), min_size=1, max_size=12),
    speed=st.floats(0.1, 0.5),
)
def test_seconds_of_steps_are_fitted_by_least_squares(steps: list[tuple[int, float]], speed: float):
    """Weights of earlier steps decay, and the line is between a level one and a proportional one."""
    means = StepTimes()
    for sequences, seconds in steps:
        means = with_step(means, sequences, seconds, speed)
    sequences, seconds = np.array(steps).T
    weights = speed * (1 - speed) ** np.arange(len(steps))[::-1]
    weights[0] /= speed
    mean_sequences = np.average(sequences, weights=weights)
    mean_seconds = np.average(seconds, weights=weights)
    slope = 0.0
    if len(set(sequences)) > 1:
        slope, _ = np.polyfit(sequences, seconds, 1, w=np.sqrt(weights))
    variance = np.average((sequences - mean_sequences) ** 2, weights=weights)
    slope *= variance / (variance + VARIANCE)
    slope = np.clip(slope, 0.0, mean_seconds / mean_sequences)
    for rows in (1, 5, 50):
        expected = mean_seconds + slope * (rows - mean_sequences)
        assert step_seconds(means, rows) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_idle_time_is_not_the_time_of_a_step():
    policy = early_rejection(ttft_s=2.0, itl_s=1.0)
    state = start(ask("a", 2, 4))
    while state.ids:
        state, *_ = step(state, policy)
    rates = state.memory.token_s, state.memory.plain
    state = scheduler.submit(state, ask("b", 2, 4))
    state, plan = scheduler.schedule(state, policy, now=100.0)
    assert plan.rejected == ()
    assert (state.memory.token_s, state.memory.plain) == rates


def test_what_a_memory_shows_is_text():
    for shipped in EAGER:
        state, *_ = step(start(ask("a", 2, 4), ask("b", 2, 4), seqs=1), shipped)
        assert isinstance(policy.called(shipped, "show", state.memory), str)
