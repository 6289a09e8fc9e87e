"""Reruns: without a change they are the recording, byte for byte; with one they are what a
scheduler does that is run so.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from experiments.laboratory import past, rerun
from pagedjax.host.event_log import with_notes
from pagedjax.host.policies import POLICIES
from pagedjax.host.scheduler import SchedulerConfig
from tests import drawn
from tests.experiments.laboratory import world
from tests.host.test_event_log import modes, record

GOLDEN = Path("tests/viewer/goldens/run.jsonl")


def rerun_of(path: Path, **changed) -> tuple[rerun.Run, Path]:
    """A run with a change, and its recording."""
    before = past.read(path)
    made = rerun.run(before, rerun.unchanged(before)._replace(**changed))
    copy = path.with_name("again.jsonl")
    rerun.record(copy, made)
    return made, copy


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def with_effect(path: Path) -> list[str]:
    """The lines of a recording without cancellations of requests that had ended."""
    return [line for line in lines(path) if '"events":[]}' not in line or '{"cancel"' not in line]


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


def test_without_a_change_the_golden_recording_is_made_again(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(GOLDEN.read_bytes())
    _, copy = rerun_of(path)
    assert lines(copy)[1:] == lines(path)[1:]


@drawn.examples(40, 1000)
def test_without_a_change_random_recordings_are_made_again(tmp_path: Path, number: int):
    path = tmp_path / "run.jsonl"

    def holds(config: SchedulerConfig, seed: int, timed: bool) -> None:
        record(path, config, seed, length=60)
        if timed:
            with_times(path, seed)
        made, copy = rerun_of(path)
        assert copy.read_bytes() == path.read_bytes()
        assert made.follows
        assert not made.inexact

    drawn.check(number, holds, config=modes, seed=st.integers(0, 2**32 - 1), timed=st.booleans())


POLICY_NAMES = sorted(POLICIES)


@drawn.examples(60, 1000)
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
        made, copy = rerun_of(path, config=changed, policy=after)
        expected = tmp_path / "expected.jsonl"
        world.drive(expected, changed, after, arrivals, timed=timed)
        exact = not made.inexact
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
