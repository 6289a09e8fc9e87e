"""A record of routing replays to the same assignments, and a changed one is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax import routing
from pagedjax.commands import cli
from pagedjax.options.own_errors import OwnError
from pagedjax.routing import PREFIX, ROUTERS, RouterRequest, recording
from pagedjax.routing.recording import Recorder

DONE = st.lists(
    st.tuples(st.sampled_from(("route", "finish", "join", "leave")), st.integers(0, 5)), max_size=30
)


def record(router: routing.Router, events: list[tuple[str, int]], path: Path) -> Recorder:
    """Do those of the events that are possible, and compare with a state that has no record."""
    recorder = Recorder(router, 4, path)
    plain = routing.init(4)
    for step, (action, number) in enumerate(events):
        name = f"r{number}"
        if action == "route" and plain.replicas and f"q{step}" not in plain.unfinished:
            avoids = tuple(f"r{i}" for i in range(number - 3))
            request = RouterRequest(f"q{step}", number, tuple("abcde"[:number]), avoids=avoids)
            plain, expected = routing.route(plain, router, request)
            assert recorder.route(request) == expected
        elif action == "finish":
            plain = routing.finished(plain, f"q{number}")
            recorder.finished(f"q{number}")
        elif action == "join" and name not in plain.replicas:
            plain = routing.joined(plain, name)
            recorder.joined(name)
        elif action == "leave" and name in plain.replicas:
            plain = routing.left(plain, name)
            recorder.left(name)
        assert recorder.state == plain
    recorder.close()
    return recorder


@given(DONE, st.sampled_from(sorted(ROUTERS)))
def test_a_record_replays_to_the_same_state_and_assignments(tmp_path_factory, events, name):
    path = tmp_path_factory.mktemp("routing") / "routing.jsonl"
    recorder = record(ROUTERS[name], events, path)
    lines = path.read_text("utf-8").splitlines()
    state, count = recording.replay(lines)
    assert state == recorder.state
    assert count == sum("routed" in json.loads(line) for line in lines)


@pytest.fixture
def lines(tmp_path) -> list[str]:
    events = [("join", 0), ("join", 1), ("route", 3), ("route", 2), ("finish", 2), ("route", 1)]
    record(PREFIX, events, tmp_path / "a.jsonl")
    return (tmp_path / "a.jsonl").read_text("utf-8").splitlines()


def test_another_assignment_is_found_with_its_line(lines):
    assert json.loads(lines[3])["to"] == "r0"
    lines[3] = lines[3].replace('"to":"r0"', '"to":"r1"')
    with pytest.raises(
        ValueError, match="line 4: router 'prefix' sends 'q2' to 'r0', and the record to 'r1'"
    ):
        recording.replay(lines)


def test_another_router_is_found(lines):
    assert recording.replay(lines)[1] == 3
    last = routing.Router("last", lambda state, request: state.replicas[-1])
    with pytest.raises(
        ValueError, match="line 4: router 'last' sends 'q2' to 'r1', and the record to 'r0'"
    ):
        recording.replay(lines, last)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [], "the record is empty; its first line names the router"),
        (
            lambda lines: ['{"routing":9,"router":"prefix","known_blocks":1}'],
            "line 1: format 9 is not 1",
        ),
        (lambda lines: lines[1:], "line 1 is no transition of a router: .*joined"),
        (lambda lines: [*lines, '{"moved":1}'], "line 8 is no transition of a router"),
        (lambda lines: [*lines, "nonsense"], "line 8: Expecting value"),
        (lambda lines: [*lines, '{"left":"r9"}'], "line 8: replica 'r9' is not present"),
    ],
)
def test_what_is_no_record_is_named(lines, change, message):
    with pytest.raises(ValueError, match=message):
        recording.replay(change(lines))


def test_the_command_replays_a_record(lines, tmp_path, capsys):
    assert cli.main(["replay", str(tmp_path / "a.jsonl")]) == 0
    assert "3 assignments, all as recorded" in capsys.readouterr().out
    assert cli.main(["replay", str(tmp_path / "a.jsonl"), "--policy", "round_robin"]) == 2
    assert "round_robin" in capsys.readouterr().err


OWN = """
from pagedjax.routing import Router

def nth(n: int):
    return Router("nth", lambda state, request: state.replicas[n])
"""


def test_a_record_names_a_router_of_ones_own_with_its_parameters(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(OWN)
    name = f"{tmp_path}/mine.py:nth(n=1)"
    path = tmp_path / "routing.jsonl"
    recorder = Recorder(routing.find(name), 4, path, own_router=name)
    for replica in ("a", "b"):
        recorder.joined(replica)
    assert recorder.route(RouterRequest("q", 1)) == "b"
    recorder.close()
    assert json.loads(path.read_text().splitlines()[0])["own_router"] == name
    assert cli.main(["replay", str(path)]) == 2
    remedy = "the router is 'nth', and a recording runs no file; add --policy"
    assert f"{remedy} '{name}'" in capsys.readouterr().err
    typed = f"name={tmp_path}/mine.py:nth,n=1"
    assert cli.main(["replay", str(path), "--policy", typed]) == 0


def test_an_error_in_a_router_names_its_file_and_line(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    router = routing.find({"name": f"{tmp_path}/mine.py:nth", "n": 7})
    state = routing.joined(routing.init(4), "a")
    with pytest.raises(
        OwnError, match=r"choose of the router 'nth' raised IndexError: .*mine\.py, line 5\)"
    ):
        routing.route(state, router, RouterRequest("q", 1))
