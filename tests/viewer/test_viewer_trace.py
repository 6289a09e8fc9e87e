"""The trace as Perfetto reads it: valid JSON, nested slices, time that never decreases."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest

from pagedjax import viewer
from pagedjax.commands import cli
from pagedjax.host.types import Request
from tests.host.test_event_log import SMALL
from tests.viewer.runs import GOLDENS, Writer, drafting_run, random_run


def tracks(trace: dict) -> dict[tuple[int, int], list[dict]]:
    """Slices by track, in the order of the file."""
    by_track = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            by_track[event["pid"], event["tid"]].append(event)
    return by_track


def check(trace: dict) -> None:
    assert json.loads(json.dumps(trace)) == trace
    phases = {"M", "X", "C", "i"}
    assert {event["ph"] for event in trace["traceEvents"]} <= phases
    stamps = [event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"]
    assert stamps == sorted(stamps)
    assert all(stamp >= 0 for stamp in stamps)
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for track, slices in tracks(trace).items():
        assert track in named
        ends: list[float] = []
        for event in slices:
            assert event["dur"] >= 0
            while ends and ends[-1] <= event["ts"] + 1e-6:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + 2e-3, (
                f"{event} reaches out of the slice that it began in"
            )
            ends.append(end)


@pytest.mark.parametrize("seed", range(12))
def test_slices_nest_and_time_never_decreases(tmp_path, seed):
    random_run(tmp_path / "run.jsonl", seed, num_blocks=9, host_blocks=4 * (seed % 2))
    run = viewer.read(tmp_path / "run.jsonl")
    trace = viewer.trace(run)
    check(trace)
    assert "one step is one millisecond" in trace["otherData"]["time"]
    steps = tracks(trace)[1, 0]
    assert len(steps) == sum("rest" not in frame for frame in run.frames)
    counted = [event["args"] for event in trace["traceEvents"] if event["name"] == "blocks"]
    assert all(sum(values.values()) == 9 and min(values.values()) >= 0 for values in counted)


@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_arguments_of_steps_and_decodes(tmp_path, seed):
    drafting_run(tmp_path / "run.jsonl", seed)
    run = viewer.read(tmp_path / "run.jsonl")
    trace = viewer.trace(run)
    check(trace)
    by_track = tracks(trace)
    steps = [event["args"] for event in by_track[1, 0]]
    step_frames = [frame for frame in run.frames if "rest" not in frame]
    for args, frame in zip(steps, step_frames, strict=True):
        accepted = frame.get("accepted")
        assert args.get("accepted") == (accepted and sum(count or 0 for count in accepted))
    slices = [event for (pid, _), track in by_track.items() if pid == 2 for event in track]
    rows = [e["args"] for e in slices if "of" in e["args"] and "drafts" in e["args"]]
    phases = [e["args"] for e in slices if "of" not in e["args"]]
    assert sum(args.get("drafts", 0) for args in steps) == sum(args["drafts"] for args in rows)
    for name in ("drafts", "accepted"):
        assert sum(args.get(name, 0) for args in rows) == sum(args.get(name, 0) for args in phases)
    verified = [frame["verified"] for frame in step_frames if "verified" in frame]
    shares = [e["args"] for e in trace["traceEvents"] if e["name"] == "accepted share so far"]
    assert [args["share"] for args in shares] == [
        round(accepted / drafts, 4) for drafts, accepted in verified
    ]
    undrafted = [event for event in slices if event["name"] in ("recompute", "prefill")]
    assert not any("drafts" in event["args"] for event in undrafted)


def test_a_trace_without_drafts_is_the_same_as_before():
    assert viewer.trace(viewer.read(GOLDENS / "run.jsonl")) == json.loads(
        (GOLDENS / "trace.json").read_text()
    )


def record_timed_run(path: Path) -> None:
    """Two requests in three blocks of 2, a second a step, half a second between steps."""
    config = SMALL._replace(block_size=2, num_blocks=3, max_num_batched_tokens=8)
    clock = itertools.count(100.0, 0.5)
    writer = Writer(path, config, clock=lambda: next(clock), prompts=True)
    for name in "ab":
        writer.submit(Request(name, 2, 3), [1, 2])
    while writer.state.waiting or writer.state.running.seqs:
        plan = writer.schedule()
        next(clock)
        writer.commit(plan, [7] * len(plan.seqs))
    writer.recorder.close()


def test_phases_of_a_request_have_the_recorded_times(tmp_path):
    record_timed_run(tmp_path / "run.jsonl")
    trace = viewer.trace(viewer.read(tmp_path / "run.jsonl"))
    check(trace)
    assert trace["otherData"]["time"] == "seconds as recorded"
    phases = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in tracks(trace)[2, 2]]
    assert phases == [
        ("queued", 1.0, 0.5),
        ("prefill", 1.5, 1.5),
        ("tokens 0-1", 1.5, 1.0),
        ("preempted", 3.0, 3.0),
        ("recompute", 6.0, 1.5),
        ("tokens 0-2", 6.0, 1.0),
        ("decode", 7.5, 1.0),
    ]
    steps = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in tracks(trace)[1, 0]]
    assert steps == [(f"step {k}", 1.5 + 1.5 * k, 1.0) for k in range(5)]


def test_the_command_writes_a_trace(tmp_path, capsys):
    record_timed_run(tmp_path / "run.jsonl")
    assert cli.main(["trace", str(tmp_path / "run.jsonl")]) == 0
    target = tmp_path / "run.trace.json"
    assert capsys.readouterr().out == f"{target}\n"
    assert json.loads(target.read_text()) == viewer.trace(viewer.read(tmp_path / "run.jsonl"))
