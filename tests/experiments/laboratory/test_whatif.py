"""`whatif`: a changed run is what an engine does that is run so, and its paired differences."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from experiments import diff, whatif
from experiments.core.replicas import drive_replicas
from experiments.core.workloads import WorkItem
from experiments.laboratory import clock, paired, past, rerun, times
from experiments.laboratory.outcomes import Outcome, outcomes
from experiments.laboratory.prediction import predict, reading
from experiments.laboratory.replicas import Fleet
from experiments.simulation.cost import Simulate
from experiments.simulation.simulate import SimulatedEngine, SimulatedLLM
from pagedjax import routing
from pagedjax.commands.cli import main
from pagedjax.engine.engine import Engine
from pagedjax.host.event_log import Schedule, Submit
from pagedjax.host.kv_policies import ALL, View
from pagedjax.host.policies import FCFS, POLICIES
from pagedjax.host.replay import verify
from pagedjax.host.types import Finished, Request, Sampled, SchedulerConfig
from pagedjax.options.config import EngineConfig
from pagedjax.options.params import SamplingParams
from tests import drawn
from tests.engine.runs import small_llm
from tests.experiments.laboratory import simulated, world
from tests.experiments.laboratory.test_rerun import with_numbers

ENGINES = {
    "small": {"block_size": 4, "num_blocks": 13, "max_num_batched_tokens": 16, "max_num_seqs": 4},
    "large": {"block_size": 8, "num_blocks": 12, "max_num_batched_tokens": 16, "max_num_seqs": 4},
    "wide": {"block_size": 4, "num_blocks": 20, "max_num_batched_tokens": 32, "max_num_seqs": 8},
    "eager": {"block_size": 4, "num_blocks": 13, "max_num_batched_tokens": 32, "max_num_seqs": 4},
}
POLICY_NAMES = sorted(POLICIES)
ENGINE_POLICIES = ("fcfs", "shortest", "longest_prefix", "fair", "priority")


class Asked(NamedTuple):
    """A request of a real engine.

    at: the number of steps before it.
    stops_after: output tokens after which each of its sequences is ended from outside.
    """

    at: int
    keywords: dict[str, Any]
    stops_after: int | None


def asked(draw: random.Random, count: int) -> list[Asked]:
    """Requests with seeds, stop tokens, stops from outside, branches, users and priorities."""
    requests: list[Asked] = []
    at = 0
    for i in range(count):
        at += draw.choice([0, 0, 1, 5])
        name = f"r{i}"
        forks = tuple([f"{name}/{k}" for k in range(draw.choice([0, 0, 0, 1, 2]))])
        params = SamplingParams(
            temperature=draw.choice([0.0, 1.0]),
            seed=draw.randrange(1000),
            max_tokens=draw.randint(1, 14),
            stop_token_ids=tuple(draw.sample(range(64), 8)),
            n=1 + len(forks),
        )
        keywords = {
            "request_id": name,
            "prompt_token_ids": [
                token % 60 for token in simulated.prompt(draw, draw.randint(1, 26))
            ],
            "params": params,
            "forks": forks,
            "user": draw.choice("ab"),
            "priority": draw.randrange(3),
        }
        requests.append(Asked(at, keywords, draw.choice([None, None, draw.randint(1, 6)])))
    return requests


def drive(engine: Engine, path: Path, requests: list[Asked]) -> None:
    """Records an engine that gets each request before the step of its number."""
    engine.reset()
    engine.record(path, prompts=True)
    queue = list(requests)
    stops: dict[str, int | None] = {}
    tokens: dict[str, int] = {}
    steps = 0
    while queue or engine.has_work:
        while queue and queue[0].at <= steps:
            request = queue.pop(0)
            engine.add(**request.keywords)
            for name in (request.keywords["request_id"], *request.keywords["forks"]):
                stops[name] = request.stops_after
        result = engine.step() if engine.has_work else None
        if result is None:
            steps = queue[0].at
            continue
        steps += 1
        sampled = [event for event in result.events if isinstance(event, Sampled)]
        for name in [name for event in sampled for name in event.request_ids]:
            tokens[name] = tokens.get(name, 0) + 1
            if tokens[name] == stops[name] and name in engine.scheduler_state.ids:
                engine.cancel(name, "stop")
    engine.record(None)


@pytest.fixture(scope="module")
def engine_of(one_layer) -> Callable[[str, str], Engine]:
    """Engines with these sizes and policies, each made once."""

    @cache
    def engine(name: str, policy: str) -> Engine:
        options = {"max_model_len": 48, "token_buckets": (48,), "policy": policy, **ENGINES[name]}
        return small_llm(one_layer, **options).engine

    return engine


@drawn.examples(3, 25)
def test_a_changed_run_is_what_a_real_engine_does(
    tmp_path: Path, engine_of: Callable[[str, str], Engine], number: int
):
    """The same bytes: decisions, blocks, copies, preemptions, hashes and tokens."""
    path = tmp_path / "run.jsonl"
    expected = tmp_path / "expected.jsonl"
    copy = tmp_path / "copy.jsonl"

    def holds(seed: int, names: tuple[str, str], policies: tuple[str, str]) -> None:
        requests = asked(random.Random(seed), 10)
        before, after = [engine_of(*pair) for pair in zip(names, policies, strict=True)]
        drive(before, path, requests)
        recorded = past.read(path)
        steps = [int(entry.at) for entry in recorded.entries if isinstance(entry.entry, Submit)]
        pairs = zip(requests, steps, strict=True)  # idle times are not recorded
        drive(after, expected, [request._replace(at=at) for request, at in pairs])
        change = rerun.unchanged(recorded)._replace(
            config=after.scheduler_state.config, policy=POLICIES[policies[1]]
        )
        repeated_run = rerun.run(recorded, change)
        rerun.record(copy, repeated_run)
        assert with_numbers(copy) == with_numbers(expected)
        assert not repeated_run.inexact

    # each pool and number of rows has a program, so the sample has one, that of test_confirm
    name = st.sampled_from(sorted(ENGINES)) if number > 3 else None
    pair = st.just(("small", "eager")) if name is None else st.tuples(name, name)
    policy = st.sampled_from(ENGINE_POLICIES)
    drawn.check(
        number,
        holds,
        seed=st.integers(0, 2**32 - 1),
        names=pair,
        policies=st.tuples(policy, policy),
    )


# --- loops and replicas -----------------------------------------------------------------------------


def drive_closed(
    engine: SimulatedEngine,
    path: Path,
    clients: int,
    requests: list[dict[str, Any]],
    scripts: list[list[int]] | None = None,
) -> list[list[int]]:
    """Records a closed loop whose clients do not think -> the requests that each client sent.

    Args:
        scripts: the requests of each client; None: a client that is free sends the next one.
    """
    engine.reset()
    engine.record(path, times=True, prompts=True)
    requests_left = list(range(len(requests)))
    sent: list[list[int]] = [[] for _ in range(clients)]
    free = list(range(clients))
    while requests_left or engine.has_work:
        turns: list[tuple[int, int]] = []
        for client in free:
            if scripts is None and requests_left:
                turns.append((requests_left.pop(0), client))
            elif scripts is not None and len(sent[client]) < len(scripts[client]):
                turns.append((scripts[client][len(sent[client])], client))
        for number, client in sorted(turns):
            engine.add(**requests[number])
            sent[client].append(number)
            if scripts is not None:
                requests_left.remove(number)
        result = engine.step()
        assert result is not None
        numbers = sorted([int(name[1:]) for name in ended(result)])
        free = [c for number in numbers for c in range(clients) if sent[c][-1:] == [number]]
    engine.record(None)
    return sent


def ended(result: Any) -> list[str]:
    return [event.request_id for event in result.events if isinstance(event, Finished)]


@drawn.examples(3, 40)
def test_clients_of_a_closed_loop_send_when_they_are_free(tmp_path: Path, number: int):
    """A changed run is the recording of a changed engine with the same clients.

    All steps have one padded size: a fit would take longer for steps of more tokens than any
    recorded one.
    """
    path = tmp_path / "run.jsonl"
    expected = tmp_path / "expected.jsonl"
    sizes = {
        seqs: simulated.engine(max_num_seqs=seqs, seconds=lambda work: 0.25) for seqs in (2, 3, 8)
    }

    def holds(seed: int, before: int, after: int, clients: int) -> None:
        requests = [keywords for _, keywords in simulated.requests(random.Random(seed), 15)]
        scripts = drive_closed(sizes[before], path, clients, requests)
        drive_closed(sizes[after], expected, clients, requests, scripts)
        recorded = past.read(path)
        config = recorded.config._replace(max_num_seqs=after)
        change = rerun.unchanged(recorded)._replace(config=config)
        result = predict(recorded, change, router=routing.ROUND_ROBIN, loop="closed", buckets=(16,))
        assert len(result.change.predecessors) == 15 - clients
        assert times_by_id(result.changed.outcomes) == times_by_id(outcomes_of(expected))

    size = st.sampled_from(sorted(sizes))
    drawn.check(
        number,
        holds,
        seed=st.integers(0, 2**32 - 1),
        before=size,
        after=size,
        clients=st.integers(1, 6),
    )


def outcomes_of(path: Path) -> dict[int, Outcome]:
    recorded = past.read(path)
    return outcomes(rerun.run(recorded, rerun.unchanged(recorded)))


def times_by_id(results: dict[int, Outcome]) -> dict[str, tuple[float, list[float]]]:
    """When each request came and got its tokens, without the rounding of a fit."""
    return {
        result.request.request_id: (
            round(result.submitted, 6),
            [round(time, 6) for time in result.token_times],
        )
        for result in results.values()
    }


def test_a_turn_of_a_session_follows_the_turn_before(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    turns = [
        world.Arrival(at, Request(name, 4, 4, user=user))
        for at, name, user in [(0, "a", "ann"), (1, "b", "bob"), (2, "c", ""), (9, "d", "ann")]
    ]
    config = world.random_config(random.Random(0))._replace(max_num_seqs=3)
    world.drive(path, config, FCFS, turns, timed=True)
    recorded = past.read(path)
    slower = rerun.unchanged(recorded)._replace(config=config._replace(max_num_seqs=1))
    result = predict(recorded, slower, router=routing.ROUND_ROBIN, loop="sessions")
    first_end = outcomes_of(path)[0].ended
    assert first_end is not None
    assert dict(result.change.predecessors) == {3: rerun.Predecessor(0, 9 - first_end)}


@drawn.examples(10, 60)
def test_one_replica_is_the_engine(tmp_path: Path, number: int):
    path = tmp_path / "run.jsonl"

    def holds(seed: int, policy: str) -> None:
        draw = random.Random(seed)
        world.drive(
            path,
            world.random_config(draw),
            POLICIES[policy],
            world.random_arrivals(draw, draw.randint(1, 12), aborts=False),
            timed=True,
        )
        recorded = past.read(path)
        alone = reading(rerun.run(recorded, rerun.unchanged(recorded)))
        fleet = reading(Fleet(recorded, rerun.unchanged(recorded), 1, routing.ROUND_ROBIN))
        if not fleet.inexact:
            assert fleet.outcomes == alone.outcomes
            assert fleet.end == alone.end

    drawn.check(number, holds, seed=st.integers(0, 2**32 - 1), policy=st.sampled_from(POLICY_NAMES))


class Ends:
    """Notes when each request ended."""

    def __init__(self) -> None:
        self.times: dict[str, Any] = {}

    def step(self, replica: int, result: Any) -> None:
        self.times |= dict.fromkeys(ended(result), result.finished)

    def span(self, replica: int, span) -> None:
        raise AssertionError("an engine that records makes every step")


@drawn.examples(6, 40)
def test_replicas_are_those_of_the_simulator(tmp_path: Path, number: int):
    """The same replica for each request, and the same ends, with caches and every router."""
    path = tmp_path / "run.jsonl"
    single_engine = simulated.engine(seconds=lambda work: 0.25)
    engines = [simulated.engine(seconds=lambda work: 0.25, max_num_seqs=3) for _ in range(2)]

    def holds(seed: int, name: str) -> None:
        simulated.record(path, single_engine, simulated.requests(random.Random(seed), 12))
        recorded = past.read(path)
        items = [
            WorkItem(
                entry.entry.request.request_id,
                entry.at,
                tuple(entry.entry.prompt),
                entry.entry.request.max_tokens,
                user=entry.entry.request.user,
            )
            for entry in recorded.entries
            if isinstance(entry.entry, Submit)
        ]
        for number, engine in enumerate(engines):
            engine.reset()
            engine.record(tmp_path / f"{number}.jsonl")
        ends = Ends()
        sampling = SamplingParams(temperature=0, ignore_eos=True)
        router = routing.find(name)
        replicas = drive_replicas(
            engines, router, recorded.config.num_blocks, items, sampling, ends
        )
        config = recorded.config._replace(max_num_seqs=3)
        change = rerun.unchanged(recorded)._replace(config=config, seconds=lambda plan: 0.25)
        fleet = Fleet(recorded, change, 2, router)
        outcomes = reading(fleet).outcomes
        names = {first: request.request_id for first, request in recorded.requests.items()}
        assert {names[first]: n for first, n in fleet.replica_of.items()} == replicas
        assert {names[first]: outcome.ended for first, outcome in outcomes.items()} == ends.times

    drawn.check(
        number,
        holds,
        seed=st.integers(0, 2**32 - 1),
        name=st.sampled_from(sorted(routing.ROUTERS)),
    )


def test_a_replica_shares_the_blocks_that_the_recorded_engine_generated(tmp_path: Path):
    """The tokens of a request are the recorded ones, whatever its number in its replica is. So a
    later turn finds them there.
    """
    path = tmp_path / "run.jsonl"
    engine = simulated.engine(seconds=lambda work: 0.25)
    arrivals = [
        (
            float(i),
            {
                "request_id": f"r{i}",
                "prompt_token_ids": [100 * i + k for k in range(6)],
                "params": SamplingParams(max_tokens=8, ignore_eos=True),
            },
        )
        for i in range(3)
    ]
    simulated.record(path, engine, arrivals)
    outputs = past.read(path).outputs
    prompt = [*arrivals[1][1]["prompt_token_ids"], *outputs[1].tokens, 900]
    turn = {**arrivals[1][1], "request_id": "turn", "prompt_token_ids": prompt}
    simulated.record(path, engine, [*arrivals, (30.0, turn)])
    recorded = past.read(path)
    change = rerun.unchanged(recorded)._replace(seconds=lambda plan: 0.25)
    fleet = Fleet(recorded, change, 2, routing.ROUND_ROBIN)
    cached = {
        name: tokens
        for _, transition in fleet
        if isinstance(transition.entry, Schedule)
        for name, tokens in zip(
            transition.entry.plan.admitted, transition.entry.plan.cached, strict=True
        )
    }
    assert fleet.replica_of == {0: 0, 1: 1, 2: 0, 3: 1}
    assert fleet.replicas[1].past_arrivals == [1, 3]
    assert cached == {"r0": 0, "r1": 0, "r2": 0, "turn": 12}


# --- times and differences ----------------------------------------------------------------------------


def noisy_engine(**options: Any) -> SimulatedEngine:
    """An engine whose steps vary by a tenth, and stall twice."""
    draw = random.Random(5)
    steps = iter(range(10_000))

    def seconds(work):
        stall = 1.0 if next(steps) in (3, 40) else 0.0
        return simulated.step_time(work) * draw.uniform(0.9, 1.1) + stall

    return simulated.engine(seconds=seconds, **options)


@pytest.fixture
def noisy(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    simulated.record(path, noisy_engine(), simulated.requests(random.Random(5), 60))
    return path


def test_a_step_of_the_recording_takes_its_recorded_seconds(noisy: Path):
    recorded = past.read(noisy)
    fit = times.fitted(recorded, ())
    of_run = clock.clock(recorded, fit, recorded.config, ())
    steps = times.steps_with_tokens(recorded)
    assert [of_run(step.plan) for step in steps] == pytest.approx([step.seconds for step in steps])
    assert of_run.stalls == pytest.approx([1.0, 1.0], abs=0.05)
    drawn_by_other_seed = clock.drawn(recorded, of_run, fit, seed=1)
    assert sorted(drawn_by_other_seed.order) != list(of_run.order)
    assert drawn_by_other_seed.times.model != of_run.times.model


def test_steps_are_drawn_in_blocks_that_follow_each_other():
    places = clock.blocks_of(100, random.Random(0))
    assert len(places) == 100
    breaks = sum([(b - a) % 100 != 1 for a, b in pairwise(places)])
    assert 0 < breaks < 10


def test_a_changed_run_of_a_simulated_engine_is_predicted(noisy: Path, tmp_path: Path):
    """Medians of the differences are those of the changed engine, and lie in the intervals."""
    recorded = past.read(noisy)
    config = recorded.config._replace(max_num_seqs=3)
    change = rerun.unchanged(recorded)._replace(config=config)
    result = predict(recorded, change, router=routing.ROUND_ROBIN, draws=5, buckets=())
    expected = tmp_path / "expected.jsonl"
    engine = noisy_engine(max_num_seqs=3)
    arrivals = simulated.requests(random.Random(5), 60)
    simulated.record(expected, engine, simulated.as_submitted(recorded, arrivals))
    for first, times_of_request in result.after.items():
        since = result.recorded.outcomes[first].submitted  # and not since the changed run took it
        token_times = result.changed.outcomes[first].token_times
        assert times_of_request.first_token == token_times[0] - since
    measured = outcomes_of(expected)
    rows = paired.rows(
        {"all": list(result.before)},
        result.before,
        paired.times_of(measured, paired.came(result.recorded.outcomes, measured, {})),
    )
    for row in rows:
        prediction = next(r for r in result.table if (r.group, r.measure) == ("all", row.measure))
        assert prediction.after == pytest.approx(row.after, rel=0.1)
        assert prediction.low <= prediction.differences <= prediction.high


def outcome(request: Request, submitted: float, *token_times: float, **fields: Any) -> Outcome:
    ended = token_times[-1] if token_times else None
    values = {"first": 0, "ended": ended, "reason": "length", **fields}
    return Outcome(request, submitted=submitted, token_times=list(token_times), **values)


def test_times_of_a_request_are_counted_from_when_it_came():
    request = Request("a", 4, 4, forks=("a/1",))
    sequences = {0: outcome(request, 1.5, 3.0, 4.0, 7.0), 1: outcome(request, 1.5, 2.0, 4.0)}
    (got,) = paired.times_of(sequences, {0: 1.0}).values()
    assert got == paired.Times(first_token=1.0, mean_gap=2.0, largest_gap=3.0, end=6.0)
    cut = {0: outcome(request, 1.0, 3.0, 4.0, reason="abort")}
    assert paired.times_of(cut, {0: 1.0}) == {0: paired.Times(first_token=2.0)}
    assert paired.times_of({0: outcome(request, 1.0, reason="rejected")}, {0: 1.0}) == {
        0: paired.Times()
    }


def test_a_request_comes_as_recorded_or_after_the_end_that_it_follows():
    request = Request("a", 4, 4)
    recorded = {i: outcome(request, float(i), 5.0, first=i) for i in range(3)}
    changed = {
        0: outcome(request, 0.5, 9.0),  # taken when a step had ended
        1: outcome(request, 10.5, 12.0, first=1),
        2: outcome(request, 2.0, ended=None, first=2),
    }
    predecessors = {1: rerun.Predecessor(0, 1.0), 0: rerun.Predecessor(2, 1.0)}
    assert paired.came(recorded, changed, predecessors) == {0: 0.0, 1: 10.0, 2: 2.0}


def test_differences_are_of_pairs():
    before = {i: paired.Times(first_token=float(i)) for i in range(101)}
    after = {i: paired.Times(first_token=2.0 * i) for i in range(100)}
    (row,) = paired.rows({"all": range(101)}, before, after)
    assert row.requests == 100
    assert row.differences == pytest.approx((49.5, 89.1, 98.01, 99))
    assert (row.before, row.after) == (49.5, 99.0)
    draws = [[row._replace(differences=tuple([d + shift] * 4))] for d, shift in [(48, 0), (48, 4)]]
    (wide,) = paired.with_intervals([row], draws)
    assert wide.low[0] == pytest.approx(48.2)
    assert wide.high == pytest.approx((51.8, 89.1, 98.01, 99))


def test_groups_are_users_and_classes_where_there_are_several():
    requests = [
        Request("a", 1, 1, user="ann"),
        Request("b", 1, 1, user="bob"),
        Request("c", 1, 1, user="bob"),
    ]
    sequences = {i: outcome(request, 0.0, first=i) for i, request in enumerate(requests)}
    assert paired.groups_of(sequences) == {
        "all": [0, 1, 2],
        "user bob": [1, 2],
        "user ann": [0],
    }


# --- the command ----------------------------------------------------------------------------------------


def result_of(path: Path, *words: str) -> dict[str, Any]:
    report = path.with_name("result.json")
    assert whatif.main([str(path), "--json", str(report), *words]) == 0
    return json.loads(report.read_text())


def test_without_a_change_the_run_is_identical(noisy: Path, capsys):
    result = result_of(noisy)
    assert result["identical"] is True
    assert {number for row in result["table"] for number in row["differences"]} == {0.0}
    text = capsys.readouterr().out
    assert "changed: nothing" in text
    assert "identical: none of" in text


def test_a_changed_run_is_a_recording(noisy: Path, tmp_path: Path, capsys):
    other_recording = tmp_path / "other.jsonl"
    result = result_of(
        noisy,
        "--set",
        "max_num_seqs=2",
        "--without-caching",
        "--record",
        str(other_recording),
        "--draws",
        "3",
    )
    assert result["identical"] is False
    assert result["changed"] == ["max_num_seqs 8 -> 2", "no prefix caching"]
    assert result["totals"]["cached_tokens"]["changed"] == 0
    assert {row["group"] for row in result["table"]} == {"all", "user ann", "user bob"}
    assert len(result["requests"]) == 60
    first = next(row for row in result["table"] if row["measure"] == "first_token")
    assert first["low"][0] <= first["differences"][0] <= first["high"][0]
    text = capsys.readouterr().out
    assert "2 recorded steps took more than 3 times the fit" in text
    assert verify(other_recording).identical
    assert past.read(other_recording).config.max_num_seqs == 2
    assert diff.main([str(noisy), str(other_recording)]) == 1
    assert f"step {result['parts_at_step']} " in capsys.readouterr().out
    assert main(["view", str(noisy), str(other_recording), "-o", str(tmp_path / "pair.html")]) == 0


def test_a_recording_without_times_is_counted_in_steps(tmp_path: Path, capsys):
    path = tmp_path / "run.jsonl"
    config = world.random_config(random.Random(0))
    arrivals = world.random_arrivals(random.Random(0), 12)
    world.drive(path, config, FCFS, arrivals)
    result = result_of(path, "--policy", "shortest", "--replicas", "2", "--router", "round_robin")
    assert result["unit"] == "steps"
    assert result["fit_error"] is None
    assert result["changed"] == [
        "policy fcfs -> shortest",
        "2 replicas behind the router round_robin",
    ]
    assert "changed - recorded (steps)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "blocks=3"], "--set 'blocks=3' names no field.*block_size, num_blocks"),
        (["--set", "views=()"], "names no field"),
        (["--set", "block_size=two"], "block_size is 'two'; it must be a whole number"),
        (["--set", "mixed_steps=1"], "mixed_steps is '1'; it must be true or false"),
        (["--set", "num_blocks=0"], "num_blocks is 0; it must be at least 1"),
        (["--set", "reservation=some"], "reservation is 'some'"),
        (["--set", "max_model_len=8"], "it must be|max_model_len"),
        (["--set", "prefix_checkpoints=first"], "prefix_checkpoints is 'first'; it must be one"),
        (["--set", "prefix_checkpoints=last"], "all layers .* see whole sequences"),
        (["--policy", "none_such"], "policy is 'none_such'; write one of"),
        (["--router", "none_such"], "router is 'none_such'; write one of"),
        (["--draws", "-1"], "draws is -1; it must be at least 0"),
        (["--replicas", "0"], "replicas is 0; it must be at least 1"),
        (["--replicas", "2", "--record", "x.jsonl"], "--record writes the recording of one engine"),
        (["--record", "no/such/x.jsonl"], "has no folder"),
    ],
)
def test_what_cannot_be_changed_is_refused(noisy: Path, capsys, words: list[str], message: str):
    assert whatif.main([str(noisy), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"cannot change {noisy}: ")
    assert re.search(message, error)


def test_a_run_whose_queries_see_windows_says_what_it_keeps(tmp_path: Path, capsys):
    path = tmp_path / "windows.jsonl"
    config = EngineConfig(
        block_size=16, num_blocks=12, max_model_len=512, max_num_batched_tokens=64
    )
    llm = SimulatedLLM(Simulate(step_s=1.0, model="gpt-oss-20b"), config, "none")
    simulated.record(path, llm.engine, simulated.requests(random.Random(0), 8))
    # windows of 128 tokens lie in 9 blocks of 16
    sentence = r"2 groups of layers: .* 512 tokens keeps 41 of 64 blocks \(64 %\), and 0 such"
    assert result_of(path)["identical"] is True
    assert re.search(sentence, capsys.readouterr().out)
    result_of(path, "--set", "num_blocks=100", "--page", str(tmp_path / "page.html"))
    assert "keeps 41 of 64 blocks (64 %), and 2 such" in (tmp_path / "page.html").read_text()
    assert whatif.main([str(path), "--set", "block_size=32"]) == 2
    assert re.search(
        "block_size is 32, .* blocks of 16 tokens, .*; leave it as it was", capsys.readouterr().err
    )


def test_the_states_that_are_kept_are_changed(tmp_path: Path, capsys):
    """A second request of one prompt finds it at its end, or at a multiple of 32 tokens."""
    path = tmp_path / "run.jsonl"
    config = SchedulerConfig(
        block_size=8,
        num_blocks=60,
        max_num_batched_tokens=64,
        max_num_seqs=2,
        max_model_len=100,
        views=(ALL, View(2)),
        shares_filling=False,
    )
    arrivals = [world.Arrival(20 * i, Request(name, 60, 4), 0) for i, name in enumerate("ab")]
    world.drive(path, config, FCFS, arrivals)
    changed = tmp_path / "other.jsonl"
    cached = []
    for value in ("every", "last", "interval=32"):
        setting = f"prefix_checkpoints={value}"
        result = result_of(path, "--set", setting, "--record", str(changed), "--draws", "0")
        cached.append(result["totals"]["cached_tokens"]["changed"])
        assert verify(changed).identical
    assert cached == [56, 56, 32]
    assert '"prefix_checkpoints":{"interval":32,' in changed.read_text()
    page = tmp_path / "pair.html"
    assert main(["view", str(path), str(changed), "-o", str(page)]) == 0
    capsys.readouterr()


def test_what_is_not_exact_is_named(tmp_path: Path, capsys):
    """Cancellations by clients, a clock that decides, and a drafter that learns."""
    path = tmp_path / "run.jsonl"
    config = world.random_config(random.Random(0))._replace(max_num_seqs=8, num_blocks=200)
    requests = [Request(name, 8, 8) for name in "abcd"]
    arrivals = [
        world.Arrival(0, request, aborted_at=3 if request.request_id == "b" else None)
        for request in requests
    ]
    world.drive(path, config, FCFS, arrivals, timed=True)
    result = result_of(path, "--set", "max_num_seqs=2", "--policy", "deadline")
    cancelled, clock_of_policy, *other_notes = result["notes"]
    assert cancelled == (
        "not exact: 1 sequences were cancelled by their clients, or by a timeout, and are cancelled "
        "at the same times here, whatever they have by then"
    )
    assert clock_of_policy == (
        "not exact: the policy deadline reads the clock, and here that is the clock of the "
        "predicted steps"
    )
    assert not any("drafts" in note for note in other_notes)
    engine = simulated.engine(drafting=True)
    simulated.record(path, engine, simulated.requests(random.Random(0), 8))
    result = result_of(path, "--set", "max_num_seqs=2")
    assert (
        "not exact: the recorded drafts come again at the same lengths; a drafter that learns from "
        "other requests would give others"
    ) in result["notes"]
    assert "NOTE: not exact: the recorded drafts" in capsys.readouterr().out
    assert not any("clients, or by" in note for note in result["notes"])
    assert not any("not exact" in note for note in result_of(path)["notes"])  # without a change


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(noisy: Path, capsys):
    before = noisy.read_bytes()
    assert whatif.main([str(noisy), "--record", str(noisy)]) == 2
    assert "is the recording that is read, and would be overwritten" in capsys.readouterr().err
    assert noisy.read_bytes() == before
    assert whatif.main([str(noisy), "--json", str(noisy.parent / "no" / "whatif.json")]) == 2
    assert "has no folder" in capsys.readouterr().err
