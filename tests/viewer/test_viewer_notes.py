"""Notes of a recording beside its transitions (times and prompts), which a replay ignores and
keeps.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest

from pagedjax import SamplingParams, viewer
from pagedjax.commands import cli
from pagedjax.host import replay, scheduler
from pagedjax.host.event_log import Cancel, Commit, Forget, Recorder, Schedule, Submit
from pagedjax.host.policies import FCFS
from pagedjax.host.replay import ReplayError
from pagedjax.host.types import Request
from tests.engine.runs import steps
from tests.host.test_event_log import SMALL
from tests.viewer.test_viewer_page import parts

CLOCK = (10.0, 10.25, 10.5, 10.75, 11.0)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A header and one line of each kind, at 0.25 s, 0.125 s (when the step began), 0.5 s and so
    on.
    """
    clock = itertools.chain(CLOCK, itertools.repeat(12.0))
    recorder = Recorder(tmp_path / "run.jsonl", SMALL, clock=lambda: next(clock), prompts=True)
    state = scheduler.init(SMALL)
    state = scheduler.submit(state, Request("a", 2, 2))
    recorder.write(Submit(Request("a", 2, 2), [15496, 11]))
    state, plan = scheduler.schedule(state, FCFS)
    recorder.write(Schedule(plan, started=10.3))
    state, events = scheduler.commit(state, plan, [7])
    recorder.write(Commit(plan, [7], {}, {}, events))
    recorder.write(Forget())
    recorder.write(Cancel("a", "abort", scheduler.cancel(state, "a")[1]))
    recorder.close()
    return tmp_path / "run.jsonl"


def test_times_and_prompts_are_notes_beside_a_transition(log):
    lines = log.read_text().splitlines()
    assert '"at"' not in lines[0]
    ends = [
        '},"at":0.25,"prompt":[15496,11]}',
        '},"at":0.3}',
        '},"at":0.5}',
        '{"forget":{},"at":0.75}',
        '},"at":1.0}',
    ]
    assert all(line.endswith(end) for line, end in zip(lines[1:], ends, strict=True))
    assert replay.verify(log).identical
    assert [transition.at for transition in replay.replay(log)] == [None, 0.25, 0.3, 0.5, 0.75, 1.0]
    assert [transition.prompt for transition in replay.replay(log) if transition.prompt] == [
        (15496, 11)
    ]
    run = viewer.read(log)
    assert run.timed
    assert run.prompts == {0: (15496, 11)}
    assert [frame["at"] for frame in run.frames] == [[0.3, 0.5], [1.0, 1.0]]
    assert run.frames[0]["before"][0] == ["submitted", 0, 0.25]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"at":0.25',
            '"at":-1',
            "line 2 is at -1; that must be seconds since the recording began, 0 or more",
        ),
        ('"at":0.25', '"at":"now"', "line 2 is at 'now'"),
        ('"at":0.25', '"at":true', "line 2 is at True"),
        ('"at":0.25', '"at":null', "line 2 is at None"),
        ('"at":0.25', '"at":NaN', "line 2 is at nan"),
        (
            "[15496,11]",
            "[15496]",
            r"line 2 notes the prompt \[15496\]; its request has 2 prompt tokens",
        ),
        ("[15496,11]", '["a","b"]', "line 2 notes the prompt"),
        ("[15496,11]", "7", "line 2 notes the prompt 7"),
        (
            '"at":0.5}',
            '"at":0.5,"prompt":[1]}',
            r"line 4 notes the prompt \[1\]; a commit has none",
        ),
    ],
)
def test_malformed_notes_are_errors_with_the_line(log, old, new, message):
    log.write_text(log.read_text().replace(old, new, 1))
    with pytest.raises(ReplayError, match=message):
        replay.verify(log)


def test_an_engine_records_notes_only_on_request(tiny_llm, tiny_folder, tmp_path):
    engine = tiny_llm.engine
    tokenizer = tiny_llm.tokenizer
    prompts = {text: tokenizer.encode(text) for text in ("ab", "cde")}
    recordings = {}
    noting = {"times": True, "prompts": True}
    for name, options in (("bare", {}), ("repeated", {}), ("noted", noting)):
        engine.record(tmp_path / name, **options)
        for text, ids in prompts.items():
            engine.add(text, ids, SamplingParams(temperature=0, max_tokens=4))
        list(steps(engine))
        engine.record(None)
        recordings[name] = (tmp_path / name).read_bytes()
        assert replay.verify(tmp_path / name).identical
    assert recordings["bare"] == recordings["repeated"] != recordings["noted"]
    bare = viewer.read(tmp_path / "bare")
    noted = viewer.read(tmp_path / "noted")
    assert (bare.timed, bare.prompts) == (False, {})
    assert [list(noted.prompts[n]) for n in (0, 1)] == list(prompts.values())
    spans = [frame["at"] for frame in noted.frames]
    assert all(begin <= end for begin, end in spans)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert 0 < spans[0][0] < spans[-1][1] < 60
    target = tmp_path / "x.html"
    words = ["view", str(tmp_path / "noted"), "-o", str(target), "--model", str(tiny_folder)]
    assert cli.main(words) == 0
    html = target.read_text("utf-8")
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    assert html == viewer.page(noted, decode=decode)
    assert parts(html)[1]["labels"] == {"0": "ab", "1": "cde"}  # type: ignore[index]
    assert "words" not in parts(viewer.page(noted))[1]  # type: ignore[operator]
