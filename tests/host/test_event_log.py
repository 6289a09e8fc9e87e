"""The event log: a recording replays byte for byte, and any change of it is found at its line."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import strategies as st

from pagedjax import __version__
from pagedjax.host import drafts, event_log, replay, scheduler
from pagedjax.host.event_log import (
    Cancel,
    Commit,
    Forget,
    Recorder,
    Restart,
    Schedule,
    Submit,
    Update,
)
from pagedjax.host.policies import FCFS, Policy
from pagedjax.host.replay import ReplayError, Transition, verify
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Choice, Finished, Plan, Request, Seq
from pagedjax.options.config import Reservation
from tests import drawn
from tests.host import drawn_views
from tests.refusals import refused

SMALL = SchedulerConfig(
    block_size=2, num_blocks=6, max_num_batched_tokens=5, max_num_seqs=4, max_model_len=12
)


def random_request(
    draw: random.Random, name: str, config: SchedulerConfig, ids: Iterable[str]
) -> Request:
    """Ids of branches are used again only after all of them ended. A reservation shares nothing."""
    stops = frozenset(draw.sample(range(4), draw.randrange(3)))
    prompt = draw.randint(1, 6)
    hashes = tuple(f"{draw.randrange(2)}{i}" for i in range(prompt // config.block_size))
    max_tokens = draw.randint(1, 6)
    priority = draw.randrange(3)
    request = Request(
        name,
        prompt,
        max_tokens,
        0,
        stops,
        priority,
        service_class=("", "chat", "batch")[priority],
        deadline=0.25 * priority or None,
    )
    forks = tuple(f"{name}/{i}" for i in range(draw.randrange(min(3, config.max_num_seqs))))
    beams = draw.random() < 0.3
    if config.reservation != "none":
        return request
    if any(request_id.startswith(f"{name}/") for request_id in ids):
        forks = ()
    forks = forks[: config.max_num_batched_tokens - 1]
    return request._replace(forks=forks, hashes=hashes, beams=beams)


def record(
    path: Path,
    config: SchedulerConfig,
    seed: int,
    length: int,
    names: str = "r",
    policy: Policy = FCFS,
) -> list[Transition]:
    """Records a random run with all kinds of transitions -> these transitions."""
    draw = random.Random(seed)
    state = scheduler.init(config)
    plan = None
    transitions = [Transition("init", state, None, ())]
    with closing(Recorder(path, config, policy.name)) as recorder:

        def write(record: Any, new: SchedulerState, plan: Plan | None = None, events=()) -> None:
            kind = type(record).__name__.lower()
            transitions.append(Transition(kind, new, plan, events))
            recorder.write(record)

        def cancel(state: SchedulerState, name: str, reason: Any) -> SchedulerState:
            state, events = scheduler.cancel(state, name, reason)
            write(Cancel(name, reason, events), state, None, events)
            return state

        for _ in range(length):
            name = f"{names}{draw.randrange(8)}"  # ids are used again after their request ended
            alive = [seq.request_id for seq in (*state.waiting, *state.running.seqs)]
            if draw.random() < 0.4 and name not in alive:
                request = random_request(draw, name, config, state.ids)
                try:
                    state = scheduler.submit(state, request)
                except scheduler.Rejected:
                    # more beams than the pool has blocks for, or a budget below a whole prompt
                    continue
                write(Submit(request), state)
            alive = [seq.request_id for seq in (*state.waiting, *state.running.seqs)]
            if alive and draw.random() < 0.15:
                state = cancel(state, draw.choice(alive), draw.choice(["abort", "stop"]))
            if draw.random() < 0.05:
                state = scheduler.forget(state)
                write(Forget(), state)
            if plan is None and draw.random() < 0.05:
                state = scheduler.restart(state)
                write(Restart(), state)
            if plan is None and draw.random() < 0.05:
                pending: Any = draw.choice(["restart", "keep"])
                state = scheduler.update(state, pending)
                write(Update(len(transitions) + 1, pending), state)
            if plan is None:
                state, plan = scheduler.schedule(state, policy)
                write(Schedule(plan), state, plan)
            else:
                sampled = [draw.randrange(20) for _ in plan.seqs]
                hashes = filled(plan, config.block_size) if config.reservation == "none" else {}
                choices, ended = chosen(state, plan, draw)
                state, events = scheduler.commit(state, plan, sampled, hashes, choices)
                write(Commit(plan, sampled, hashes, choices, events), state, None, events)
                plan = None
                for name in ended:
                    state = cancel(state, name, "length")
    return transitions


def chosen(
    state: SchedulerState, plan: Plan, draw: random.Random
) -> tuple[dict[str, Choice], list[str]]:
    """Choices for beams that are complete after this step, and the first beams of requests that
    reach their limit.
    """
    ends = {
        seq.arrival: start + count
        for seq, start, count in zip(plan.seqs, plan.starts, plan.counts, strict=True)
    }
    groups: dict[int | None, list[Seq]] = {}
    for seq in scheduler.running(state):
        if seq.request.beams:
            groups.setdefault(seq.group, []).append(seq)
    choices = {}
    ended = []
    for group in groups.values():
        group.sort(key=lambda seq: seq.arrival)
        names = [seq.request_id for seq in group]
        width = len(group) + len(group[0].request.forks)
        incomplete = any(ends.get(seq.arrival, seq.computed) < seq.length for seq in group)
        if incomplete or any(seq.group == group[0].group for seq in state.waiting):
            continue
        if group[0].length + 1 >= group[0].limit:
            ended.append(names[0])
        else:
            choices[names[0]] = Choice(
                tuple(draw.choices(names, k=width)), tuple(draw.choices(range(20), k=width))
            )
    return choices, ended


def filled(
    plan: Plan, size: int, sampled: Sequence[drafts.Sample] = ()
) -> dict[str, tuple[str, ...]]:
    """Made-up hashes of the blocks of generated tokens that a step fills. A block gets its hash when
    it is full, or never: later, other beams may have it too, and one block has one hash.

    Args:
        sampled: of a plan with drafts, what `commit` gets.
    """
    counts = drafts.accepted_columns(plan, sampled).counts if plan.drafts else plan.counts
    hashes: dict[str, tuple[str, ...]] = {}
    for seq, start, count in zip(plan.seqs, plan.starts, counts, strict=True):
        num_hashed = len(seq.hashes)
        new = range(num_hashed, (start + count) // size)
        if new and num_hashed >= start // size:
            hashes[seq.request_id] = tuple(f"{seq.arrival}-{i}" for i in new)
    return hashes


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    record(path, SMALL, seed=45, length=60)
    return path


def edit(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("\n".join([*change(path.read_text().splitlines()), ""]))


def replace_line(number: int, text: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [*lines[: number - 1], text, *lines[number:]]


def header(**changes: object) -> str:
    return event_log.header_line(SMALL._replace(**changes), "fcfs", __version__)


sizes = (
    st.integers(1, 8),
    st.integers(12, 20),
    st.integers(1, 16),
    st.integers(1, 6),
    st.integers(7, 14),
    st.sampled_from([0, 2, 20]),
)
usual = [
    *map(st.just, (True, True, "none")),
    drawn_views.at_most_one_group,
    st.booleans(),
    st.none(),
    st.just(False),
    st.sampled_from([0, 3]),
]
ways = [st.booleans(), st.booleans(), st.sampled_from(get_args(Reservation)), st.just(())]
modes = st.one_of(
    drawn_views.with_checkpoints(st.builds(SchedulerConfig, *sizes, *usual)),
    st.builds(
        SchedulerConfig,
        *sizes,
        *ways,
        prefix_checkpoints=st.none(),
        late_stops=st.just(False),
        empty_blocks=st.just(0),
    ),
)


@drawn.examples(25, 160)
def test_random_recordings_replay_byte_for_byte(tmp_path: Path, number: int):
    path = tmp_path / "run.jsonl"

    def holds(config: SchedulerConfig, seed: int, names: str) -> None:
        transitions = record(path, config, seed, length=80, names=names)
        assert list(replay.replay(path)) == transitions
        report = verify(path)
        assert report.identical
        assert not report.truncated
        kinds = [transition.kind for transition in transitions]
        ends = [
            event.reason
            for transition in transitions
            for event in transition.events
            if isinstance(event, Finished)
        ]
        assert report.lines == len(transitions)
        assert (report.steps, report.requests) == (kinds.count("commit"), kinds.count("submit"))
        assert report.finished == {reason: ends.count(reason) for reason in sorted(set(ends))}

    drawn.check(
        number, holds, config=modes, seed=st.integers(0, 2**32 - 1), names=st.text(max_size=3)
    )


def test_the_example_log_contains_preemptions_and_cancels_in_flight(log: Path):
    """The tests below need them."""
    report = verify(log)
    lines = log.read_text().splitlines()
    assert report.preemptions >= 3
    assert set(report.finished) == {"abort", "length", "stop"}
    assert any(
        b.startswith('{"cancel"')
        for a, b in itertools.pairwise(lines)
        if a.startswith('{"schedule"')
    )


def test_the_format_is_fixed_byte_for_byte(tmp_path: Path):
    """Byte for byte: a change here needs a new format number."""
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path, SMALL)
    state = scheduler.init(SMALL)
    for request in (
        Request("a", 3, 2, 1, frozenset({9, 2}), 5, "u", hashes=("x",)),
        Request("é\n", 4, 2),
    ):
        state = scheduler.submit(state, request)
        recorder.write(Submit(request))
    state, plan = scheduler.schedule(state, FCFS)
    recorder.write(Schedule(plan))
    state, events = scheduler.cancel(state, "nobody")
    recorder.write(Cancel("nobody", "abort", events))
    state, events = scheduler.commit(state, plan, [7, 8])
    recorder.write(Commit(plan, [7, 8], {}, {}, events))
    recorder.write(Forget())
    recorder.write(Restart())
    recorder.write(Update(3, "keep"))
    state = scheduler.update(scheduler.restart(scheduler.forget(state)), "keep")
    state, plan = scheduler.schedule(state, FCFS)
    recorder.write(Schedule(plan))
    recorder.close()
    assert path.read_text() == (
        f'{{"pagedjax_replay":2,"pagedjax":"{__version__}","policy":"fcfs","config":{{"block_size":2,"num_blocks":6,'
        '"max_num_batched_tokens":5,"max_num_seqs":4,"max_model_len":12,"host_blocks":0}}\n'
        '{"submit":{"request_id":"a","prompt_len":3,"max_tokens":2,"min_tokens":1,"stop_token_ids":[2,9],"priority":5,'
        '"user":"u","forks":[],"hashes":["x"],"beams":false}}\n'
        '{"submit":{"request_id":"\\u00e9\\n","prompt_len":4,"max_tokens":2,"min_tokens":0,"stop_token_ids":[],'
        '"priority":0,"user":"","forks":[],"hashes":[],"beams":false}}\n'
        '{"schedule":{"step":0,"ids":["a","\\u00e9\\n"],"starts":[0,0],"counts":[3,2],'
        '"blocks":{"a":[1,2],"\\u00e9\\n":[3,4]},"copies":[],"tables":{},"swap_out":[],"swap_in":[],'
        '"admitted":["a","\\u00e9\\n"],"cached":[0,0],"preempted":[],"swapped":[],"waiting":0,'
        '"blocks_used":4}}\n'
        '{"cancel":{"request_id":"nobody","reason":"abort","events":[]}}\n'
        '{"commit":{"sampled":[7,null],"hashes":{},"choices":{},"events":[{"event":"Admitted","step":0,"request_id":"a",'
        '"num_tokens":3,"num_cached":0},{"event":"Admitted","step":0,"request_id":"\\u00e9\\n","num_tokens":4,"num_cached":0},'
        '{"event":"Sampled","step":0,"request_ids":["a"],"token_ids":[7]}]}}\n'
        '{"forget":{}}\n'
        '{"restart":{}}\n'
        '{"update":{"version":3,"pending":"keep"}}\n'
        '{"schedule":{"step":1,"ids":["a","\\u00e9\\n"],"starts":[0,0],"counts":[4,1],'
        '"blocks":{"a":[5,6],"\\u00e9\\n":[2,1]},"copies":[],"tables":{},"swap_out":[],"swap_in":[],'
        '"admitted":["a","\\u00e9\\n"],"cached":[0,0],"preempted":[],"swapped":[],"waiting":0,"blocks_used":4}}\n'
    )
    assert verify(path).identical


@pytest.mark.parametrize(
    "way", [{}, {"chunked_prefill": False}, {"mixed_steps": False, "reservation": "max"}], ids=str
)
def test_a_header_contains_baseline_options_only_if_they_are_not_default(way: dict):
    """So logs of the default mode do not change when a mode is added."""
    sizes = SMALL._asdict()
    expected = {name: sizes[name] for name in SMALL._fields[:6]} | way
    assert json.loads(header(**way))["config"] == expected


def test_block_tables_can_be_rebuilt_from_the_log_alone(log: Path):
    tables: dict[str, list[int]] = {}
    plans = (transition.plan for transition in replay.replay(log) if transition.plan)
    for line in log.read_text().splitlines()[1:]:
        ((kind, body),) = json.loads(line).items()
        finished = [
            event["request_id"] for event in body.get("events", ()) if event["event"] == "Finished"
        ]
        for name in (*finished, *body.get("preempted", ())):
            tables.pop(name, None)
        if kind == "restart" or body.get("pending") == "restart":
            tables.clear()
        if kind == "schedule":
            tables |= body["tables"]
            for name, new in body["blocks"].items():
                tables[name] = tables.get(name, []) + new
            plan = next(plans)
            assert {seq.request_id: list(seq.blocks) for seq in plan.seqs} == tables
    assert next(plans, None) is None


@pytest.mark.parametrize("apart", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_every_changed_number_of_an_outcome_is_reported_with_its_line(log: Path, apart: int):
    """Plans, sampled tokens and events: each number in turn is raised by one, by default each
    fourth one.
    """
    text = log.read_text()
    tried = 0
    for match in list(re.finditer(r"(?<=[\[,:])\d+(?=[\],}])", text))[::apart]:
        number = text.count("\n", 0, match.start()) + 1
        if text.splitlines()[number - 1].startswith(('{"pagedjax', '{"submit', '{"update')):
            continue
        log.write_text(text[: match.start()] + str(int(match[0]) + 1) + text[match.end() :])
        difference = verify(log).difference
        assert difference is not None, f"line {number}: {match[0]} could be changed"
        assert difference.line == number
        tried += 1
    assert tried > 200 // apart


def test_a_difference_shows_the_recorded_and_the_recomputed_line(log: Path, capsys):
    lines = log.read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if '"counts":[1,' in line)
    tampered = lines[number - 1].replace('"counts":[1,', '"counts":[2,')
    edit(log, replace_line(number, tampered))
    report = verify(log)
    assert report.difference == (number, tampered, lines[number - 1])
    assert replay.main([str(log)]) == 1
    out = capsys.readouterr().out
    assert f"DIFFERENT from line {number} on" in out
    assert '"counts":[2,' in out
    assert '"counts":[1,' in out


@pytest.mark.parametrize("change", ["drop", "repeat", "swap", "spaces"])
def test_dropped_repeated_swapped_and_respelled_lines_are_detected(log: Path, change: str):
    lines = log.read_text().splitlines()
    # later submits show nowhere
    last = max(at for at, line in enumerate(lines) if line.startswith('{"schedule"'))
    for at in range(1, last):
        copies = {
            "drop": lines[:at] + lines[at + 1 :],
            "repeat": [*lines[: at + 1], lines[at], *lines[at + 1 :]],
            "swap": [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]],
            "spaces": [*lines[:at], lines[at].replace(":", ": ", 1), *lines[at + 1 :]],
        }
        kinds = {line[:9] for line in lines[at : at + 2]}
        if change == "swap" and kinds != {'{"schedul', '{"commit"'}:
            continue  # a submit may come a line later and change nothing
        bare = ('{"forget":{}}', '{"restart":{}}', '{"update":{')
        if lines[at].startswith(bare) or (change == "swap" and lines[at + 1].startswith(bare)):
            continue  # forgotten content may never be needed again, and no sequence may run
        if (
            change == "repeat"
            and '"blocks":{},"copies":[],"tables":{},"swap_out":[],"swap_in":[],"admitted":[],"cached":[]'
            in lines[at]
        ):
            continue  # planning the same step again is no transition
        log.write_text("\n".join([*copies[change], ""]))
        assert not verify(log).identical, f"{change} line {at + 1}"


def test_a_truncated_recording_is_replayed_up_to_its_last_whole_line(log: Path, capsys):
    recording = log.read_bytes()
    header = recording.index(b"\n") + 1
    ends = [match.end() for match in re.finditer(b"\n", recording)]
    for cut in sorted(
        {*range(header, len(recording), 397), *ends[::3], *(end - 1 for end in ends[1::3])}
    ):
        log.write_bytes(recording[:cut])
        report = verify(log)
        assert report.identical
        assert report.truncated == (recording[cut - 1 : cut] != b"\n")
        assert report.lines == recording[:cut].count(b"\n")
    log.write_bytes(recording[:-3])
    assert replay.main([str(log)]) == 0
    assert "the last line is cut off, so the run was killed" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", '{"pagedjax_rep'])
def test_a_file_without_a_whole_line_is_an_error(tmp_path: Path, content: str):
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(ReplayError, match="has no whole line: nothing was recorded"):
        verify(path)


@pytest.mark.parametrize(
    ("number", "text", "message"),
    [
        (1, '{"pagedjax_replay":1}', "has 1; this version reads format 2"),
        (1, '{"a":1}', "has no format number; this version reads format 2; name one that was "),
        (1, "# Hello", "is not JSON in ASCII: .*run.jsonl is no recording; name one that was "),
        (
            1,
            '{"pagedjax_replay":2,"policy":"lifo"}',
            "names the policy 'lifo'; known are deadline, .*, fcfs",
        ),
        (1, '{"pagedjax_replay":2,"policy":"fcfs","config":{}}', "is a malformed header"),
        (1, header(reservation="pow3"), "is a malformed header: .*reservation is 'pow3'; it must"),
        (1, header(mixed_steps=0), "is a malformed header: .*mixed_steps is 0; it must be True or"),
        (5, '{"schedule":"é"}', "is not JSON in ASCII"),
        (5, "[]", "is not a JSON object"),
        (
            5,
            "{}",
            "is no transition; one has a single key: submit, schedule, commit, cancel, forget, ",
        ),
        (5, '{"step":{}}', "is no transition"),
        (5, '{"submit":{"request_id":"x"}}', "is a malformed submit: KeyError"),
        (
            5,
            '{"submit":{"stop_token_ids":[],"forks":[],"hashes":[],"colour":1}}',
            "is a malformed submit: TypeError",
        ),
        (5, '{"cancel":{}}', "is a malformed cancel: KeyError"),
        (5, '{"update":{"version":1}}', "is a malformed update: KeyError"),
    ],
)
def test_a_malformed_line_is_an_error_with_its_number(
    log: Path, capsys, number: int, text: str, message: str
):
    edit(log, replace_line(number, text))
    message = f"line {number} {message}"
    with pytest.raises(ReplayError, match=message):
        verify(log)
    with pytest.raises(ReplayError, match=message):
        list(replay.replay(log))
    assert replay.main([str(log)]) == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"commit":{"sampled":[],"events":[]}}', "refused: a commit without a schedule before it"),
        (
            '{"update":{"version":1,"pending":"drop"}}',
            "refused: pending is 'drop'; it must be one of 'restart', 'keep'",
        ),
        (
            '{"update":{"version":"a","pending":"keep"}}',
            "refused: version is 'a'; it must be an integer",
        ),
        (
            '{"submit":{"request_id":"x","prompt_len":99,"max_tokens":1,"stop_token_ids":[],"forks":[],"hashes":[]}}',
            "refused: request 'x' has a prompt of 99 tokens",
        ),
    ],
)
def test_a_transition_refused_by_the_scheduler_is_a_difference(log: Path, text: str, why: str):
    edit(log, replace_line(2, text))
    number, recorded, recomputed = verify(log).difference  # type: ignore[misc]
    assert (number, recorded) == (2, text)
    assert recomputed.startswith(why)
    with pytest.raises(ReplayError, match=f"line 2 is {re.escape(why)}"):
        list(replay.replay(log))


def test_a_recording_that_cannot_be_written_names_the_remedy(tmp_path: Path):
    missing = tmp_path / "none"
    with refused(f"^the recording {missing}/a.jsonl has no folder; make {missing}, or name a file"):
        Recorder(missing / "a.jsonl", SMALL)
    with refused(f"^the recording {tmp_path} is a folder; name a file, such as {tmp_path}/run"):
        Recorder(tmp_path, SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_recording_and_a_folder_in_its_place_are_not_verified(tmp_path: Path):
    with pytest.raises(
        FileNotFoundError,
        match=f"^there is no file {tmp_path}/none.jsonl; name one that was recorded",
    ):
        verify(tmp_path / "none.jsonl")
    with pytest.raises(
        ReplayError, match=f"^{tmp_path} is a directory; name the file that was recorded"
    ):
        verify(tmp_path)


def test_array_scalars_are_recorded_as_integers(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    state = scheduler.submit(scheduler.init(SMALL), Request("a", 2, 2))
    with closing(Recorder(path, SMALL)) as recorder:
        recorder.write(Submit(Request("a", 2, 2)))
        state, plan = scheduler.schedule(state, FCFS)
        recorder.write(Schedule(plan))
        sampled = np.array([7], np.int32)
        recorder.write(Commit(plan, sampled, {}, {}, scheduler.commit(state, plan, sampled)[1]))  # type: ignore[arg-type]
        assert verify(path).identical  # read while it is still open: each line is written at once
        assert path.read_text().count("\n") == 4


@pytest.mark.parametrize("module", ["replay", "event_log"])
def test_the_command_prints_a_summary(log: Path, module: str):
    command = [sys.executable, "-m", f"pagedjax.host.{module}", str(log)]
    process = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True
    )
    report = verify(log)
    assert (
        f"{report.steps} steps, {report.requests} requests, {report.preemptions} preemptions"
        in process.stdout
    )
    assert f"identical: all {report.lines} lines" in process.stdout
    assert replay.main([str(log.with_name("missing"))]) == 1
