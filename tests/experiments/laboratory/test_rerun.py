"""Reruns: without a change they are the recording, byte for byte; with one they are what a
scheduler does that is run so.
"""

from __future__ import annotations

import random
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from experiments.laboratory import outcomes, past, rerun, times
from experiments.simulation.cost import Work, work_of
from pagedjax.host.event_log import with_notes
from pagedjax.host.policies import FCFS, POLICIES
from pagedjax.host.replay import verify
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Request
from tests import drawn
from tests.experiments.laboratory import simulated, world
from tests.host.test_event_log import SMALL, modes, record
from tests.refusals import refused

POLICY_NAMES = sorted(POLICIES)
GOLDEN = Path("tests/viewer/goldens/run.jsonl")
LATE = Path("tests/host/goldens/late.jsonl")


def rerun_of(path: Path, **changed) -> tuple[rerun.Run, Path]:
    """A run with a change, and its recording."""
    before = past.read(path)
    repeated_run = rerun.run(before, rerun.unchanged(before)._replace(**changed))
    copy = path.with_name("again.jsonl")
    rerun.record(copy, repeated_run)
    return repeated_run, copy


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def with_effect(path: Path) -> list[str]:
    """The lines of a recording without cancellations of requests that had ended."""
    return [line for line in lines(path) if '"events":[]}' not in line or '{"cancel"' not in line]


def with_numbers(path: Path) -> list[str]:
    """The lines of a recording with a number in the place of each hash: those that are equal have
    the same one.
    """
    numbers: dict[str, str] = {}
    return [
        re.sub("[0-9a-f]{32}", lambda match: numbers.setdefault(match[0], str(len(numbers))), line)
        for line in lines(path)
    ]


def with_times(path: Path, seed: int) -> None:
    """Gives the lines of a recording times, and its submits prompts."""
    draw = random.Random(seed)
    header, *transitions = lines(path)
    at = 0.0
    timed = [header]
    for line in transitions:
        at = round(at + draw.choice([0, 0.001, 0.5]), 6)
        notes: dict[str, Any] = {"at": at}
        if line.startswith('{"submit"'):
            length = int(line.partition('"prompt_len":')[2].partition(",")[0])
            notes["prompt"] = draw.choices(range(50), k=length)
        timed.append(with_notes(line, notes))
    path.write_text("\n".join([*timed, ""]))


def recordings() -> list[Path]:
    """The recordings among the files of the tests and of the results, but for those with late stops,
    which are not made again.
    """
    files = [file for folder in ("tests", "experiments") for file in Path(folder).rglob("*.jsonl*")]
    return [file for file in sorted(files) if is_recording(file) and file != LATE]


def is_recording(file: Path) -> bool:
    return file.open("rb").read(17) == b'{"pagedjax_replay'


@pytest.mark.parametrize("file", recordings(), ids=str)
def test_without_a_change_recordings_that_are_kept_are_made_again(file: Path, tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(file.read_bytes())
    _, copy = rerun_of(path)
    assert lines(copy)[1:] == lines(path)[1:]  # the header has the version


def test_the_golden_recording_is_one_that_is_kept():
    assert GOLDEN in recordings()


@drawn.examples(25, 250)
def test_without_a_change_random_recordings_are_made_again(tmp_path: Path, number: int):
    path = tmp_path / "run.jsonl"

    def holds(config: SchedulerConfig, seed: int, timed: bool) -> None:
        record(path, config, seed, length=60)
        if timed:
            with_times(path, seed)
        repeated_run, copy = rerun_of(path)
        assert copy.read_bytes() == path.read_bytes()
        assert repeated_run.follows
        assert not repeated_run.inexact

    drawn.check(number, holds, config=modes, seed=st.integers(0, 2**32 - 1), timed=st.booleans())


@drawn.examples(15, 150)
def test_changed_random_recordings_replay_or_are_refused(tmp_path: Path, number: int):
    """With all transitions: ids that are used again, cancels in flight, restarts, updates."""
    path = tmp_path / "run.jsonl"

    def holds(seed: int, policy: str, budget: int) -> None:
        record(path, SMALL, seed, length=30)
        with_times(path, seed)
        config = SMALL._replace(max_num_batched_tokens=budget, num_blocks=8, host_blocks=seed % 5)
        with suppress(rerun.Refused):  # because of an update
            _, copy = rerun_of(path, config=config, policy=POLICIES[policy])
            assert verify(copy, POLICIES).identical

    drawn.check(
        number,
        holds,
        seed=st.integers(0, 2**32 - 1),
        policy=st.sampled_from([name for name in POLICY_NAMES if name != "srtf"]),
        budget=st.integers(4, 9),
    )


@drawn.examples(25, 250)
def test_a_changed_run_is_what_a_scheduler_does_that_is_run_so(tmp_path: Path, number: int):
    """The same bytes: decisions, blocks, copies, preemptions, tokens and times."""

    def holds(seed: int, policies: tuple[str, str], timed: bool) -> None:
        draw = random.Random(seed)
        config = world.random_config(draw)
        arrivals = world.random_arrivals(draw, draw.randint(1, 12))
        if not timed:  # then a recording does not say how long the engine was idle
            arrivals = [arrival._replace(at=0, aborted_at=None) for arrival in arrivals]
        changed = world.random_config(draw, block_size=config.block_size * draw.choice([1, 2, 4]))
        before, after = (POLICIES[name] for name in policies)
        path = tmp_path / "run.jsonl"
        world.drive(path, config, before, arrivals, timed=timed)
        repeated_run, copy = rerun_of(path, config=changed, policy=after)
        expected = tmp_path / "expected.jsonl"
        world.drive(expected, changed, after, arrivals, timed=timed)
        exact = not repeated_run.inexact
        assert exact or before.reject or any(arrival.aborted_at for arrival in arrivals)
        if exact:
            assert with_effect(copy) == with_effect(expected)

    drawn.check(
        number,
        holds,
        seed=st.integers(0, 2**32 - 1),
        policies=st.tuples(st.sampled_from(POLICY_NAMES), st.sampled_from(POLICY_NAMES)),
        timed=st.booleans(),
    )


@drawn.examples(6, 40)
def test_without_a_change_recordings_of_simulated_engines_are_made_again(
    tmp_path: Path, number: int
):
    """With drafts, prompts, prefix cache and times."""
    path = tmp_path / "run.jsonl"
    engines = {drafting: simulated.engine(drafting=drafting) for drafting in (False, True)}

    def holds(seed: int, drafting: bool, times: bool) -> None:
        draw = random.Random(seed)
        simulated.record(path, engines[drafting], simulated.requests(draw, 6), times=times)
        repeated_run, copy = rerun_of(path)
        assert copy.read_bytes() == path.read_bytes()
        assert repeated_run.follows

    drawn.check(
        number,
        holds,
        seed=st.integers(0, 2**32 - 1),
        drafting=st.booleans(),
        times=st.booleans(),
    )


@drawn.examples(6, 40)
def test_blocks_of_any_size_have_the_hashes_that_an_engine_makes(tmp_path: Path, number: int):
    """The hashes of a size that is no multiple of the recorded one come from recorded prompts."""
    path = tmp_path / "run.jsonl"
    expected = tmp_path / "expected.jsonl"
    sizes = {
        size: simulated.engine(block_size=size, seconds=lambda work: 0.25) for size in (3, 4, 8)
    }

    def holds(seed: int, before: int, after: int) -> None:
        draw = random.Random(seed)
        arrivals = simulated.requests(draw, 8)
        simulated.record(path, sizes[before], arrivals)
        recorded = past.read(path)
        config = recorded.config._replace(block_size=after)
        repeated_run, copy = rerun_of(path, config=config, seconds=lambda plan: 0.25)
        simulated.record(expected, sizes[after], simulated.as_submitted(recorded, arrivals))
        assert with_numbers(copy) == with_numbers(expected)
        assert not repeated_run.inexact

    size = st.sampled_from([3, 4, 8])
    drawn.check(number, holds, seed=st.integers(0, 2**32 - 1), before=size, after=size)


@pytest.fixture
def busy(tmp_path: Path) -> Path:
    """A timed recording of a few requests that wait for each other."""
    path = tmp_path / "run.jsonl"
    requests = [
        Request("a", 8, 8, user="ann"),
        Request("b", 8, 4, user="bob"),
        Request("c", 4, 4, user="ann", forks=("c/1",)),
    ]
    arrivals = [world.Arrival(at, request) for at, request in zip((0, 1, 2), requests, strict=True)]
    config = SchedulerConfig(4, 4, 16, 8, 16)
    world.drive(path, config, FCFS, arrivals, timed=True)
    return path


def some(number: float | None) -> float:
    assert number is not None
    return number


def submitted(path: Path) -> list[str]:
    return [line.split('"')[5] for line in lines(path) if line.startswith('{"submit"')]


def test_a_request_and_its_branches_may_stay_away(busy: Path):
    repeated_run, copy = rerun_of(busy, without=frozenset({0}))
    assert submitted(copy) == ["b", "c"]
    assert repeated_run.past_arrivals == [1, 2, 3]
    assert verify(copy).identical
    results = outcomes.outcomes(rerun.run(repeated_run.past, repeated_run.change))
    alone = outcomes.outcomes(
        rerun.run(repeated_run.past, repeated_run.change._replace(without=frozenset({0, 2})))
    )
    recorded = outcomes.outcomes(rerun.run(repeated_run.past, rerun.unchanged(repeated_run.past)))
    seconds = [some(run[1].seconds) for run in (recorded, results, alone)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[2] == 4.0
    assert [*results] == [1, 2, 3]
    assert results[3].first == 2


def test_a_request_may_follow_the_end_of_another_one(busy: Path):
    before = past.read(busy)
    changed = rerun.unchanged(before)._replace(
        config=before.config._replace(max_num_batched_tokens=2),
        predecessors={1: rerun.Predecessor(0, 0.5), 2: rerun.Predecessor(1, 0.0)},
    )
    results = outcomes.outcomes(rerun.run(before, changed))
    assert results[1].submitted == some(results[0].ended) + 0.5
    assert results[2].submitted == results[1].ended


def test_an_id_that_is_still_in_use_gets_a_stroke(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    arrivals = [world.Arrival(0, Request("a", 4, 4)), world.Arrival(4, Request("a", 4, 2))]
    world.drive(path, SchedulerConfig(4, 4, 16, 8, 16), FCFS, arrivals, timed=True)
    slow = SchedulerConfig(4, 4, 1, 8, 16)
    _, copy = rerun_of(path, config=slow)
    assert submitted(copy) == ["a", "a'"]
    assert verify(copy).identical


def test_a_sequence_that_was_cut_off_goes_on_with_tokens_of_no_meaning(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    arrivals = [world.Arrival(0, Request("a", 4, 8), aborted_at=5)]
    config = SchedulerConfig(4, 4, 2, 8, 16)
    world.drive(path, config, FCFS, arrivals, timed=True)
    repeated_run, copy = rerun_of(path, config=config._replace(max_num_batched_tokens=4))
    assert repeated_run.inexact == {rerun.CUT_OFF: 1}
    assert '"reason":"abort","num_output":5' in copy.read_text()


def test_what_another_run_cannot_have_is_refused(tmp_path: Path, busy: Path):
    before = past.read(busy)
    with busy.open("a") as file:
        file.write('{"update":{"version":1,"pending":"restart"},"at":90.0}\n')
    with refused("'update' at 90, .*without updates of the weights"):
        rerun_of(busy, config=before.config._replace(max_num_batched_tokens=4))
    path = tmp_path / "run.jsonl"
    arrivals = [world.Arrival(0, Request("a", 8, 8), family=1)]
    world.drive(path, before.config, FCFS, arrivals)
    with refused("need the prompt of request 'a'.*multiple of the recorded block size 4"):
        rerun_of(path, config=before.config._replace(block_size=2))
    with refused("has no times.*record with times=True"):
        times.fitted(past.read(path))
    world.drive(path, before.config, FCFS, [world.Arrival(0, Request("a", 8, 1))], timed=True)
    with refused("has 1 steps with tokens; a fit takes at least 8"):
        times.fitted(past.read(path))
    ((at, keywords),) = simulated.requests(random.Random(0), 1)
    keywords["params"] = replace(keywords["params"], cache_salt="bob")
    simulated.record(path, simulated.engine(), [(at, keywords)])
    with refused("'r0' has a cache salt or an adapter.*multiple of the recorded block size 4"):
        rerun_of(path, config=past.read(path).config._replace(block_size=3))


@pytest.mark.parametrize(
    ("computes_padding", "program_seconds"), [(True, 0.0), (False, 0.0), (False, 4e-4)]
)
def test_a_fit_finds_out_whether_padding_is_computed(
    tmp_path: Path, computes_padding: bool, program_seconds: float
):
    """Samples take time beside the tokens, and decodes are samples. A program also takes time for
    each token that it has room for.
    """
    buckets = (4, 16)

    def seconds(work: Work) -> float:
        full = next(size for size in buckets if size >= work.tokens)
        tokens = full if computes_padding else work.tokens
        return 0.01 + 0.002 * tokens + 0.001 * work.sampled + program_seconds * full

    path = tmp_path / "run.jsonl"
    engine = simulated.engine(seconds=seconds)
    simulated.record(path, engine, simulated.requests(random.Random(1), 30))
    steps = times.fitted(past.read(path), buckets=buckets)
    assert steps.computes_padding == computes_padding
    assert steps.model.error < 1e-3
    assert steps.residuals == pytest.approx([1.0] * len(steps.residuals), rel=1e-2)


def test_the_times_of_steps_are_fitted(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    simulated.record(path, simulated.engine(), simulated.requests(random.Random(1), 30))
    before = past.read(path)
    steps = times.fitted(before, buckets=())
    assert steps.model.error < 0.02
    for step in before.steps:
        assert steps(step.plan) == pytest.approx(
            simulated.step_time(work_of(step.plan, step.plan.num_tokens)), rel=0.2
        )
