"""Signs of life, and the end of all processes if one of them fails. Here they are threads,
connected by sockets.
"""

from __future__ import annotations

import signal
import socket
import time
from contextlib import suppress

import pytest

from pagedjax.engine.processes import group
from pagedjax.engine.processes.connection import Connection, encode
from pagedjax.engine.processes.group import EXIT_STATUS, ProcessFailed, accept, connect
from tests.processes.pairs import Connected, connected, tcp_pair


def until(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def expect_exits(pair: Connected, *processes: int) -> None:
    until(lambda: {i for i, _ in pair.exits} == set(processes))
    assert {status for _, status in pair.exits} == {EXIT_STATUS}


def test_inputs_arrive_in_order_and_everybody_ends():
    with connected(2) as pair:
        for i in range(50):
            pair.leader.order("add", number=i)
            if i % 7 == 0:
                pair.leader.flush()
        pair.leader.flush()
        for follower in pair.followers:
            assert [follower.receive()["number"] for _ in range(50)] == list(range(50))
            pair.start(lambda follower=follower: (follower.receive(), follower.close()))
        pair.leader.close()
        assert pair.exits == []
        assert pair.leader.failure is None


def test_a_process_that_ends_ends_all(capsys):
    with connected(3) as pair:
        pair.leader.steps = 7
        pair.close(2)
        expect_exits(pair, 0, 1, 2, 3)
        reason = "process 2 ended while process 0 was at step 7: its connection is closed"
        assert {
            member.failure for member in (pair.leader, pair.followers[0], pair.followers[2])
        } == {reason}
        for raises in (pair.leader.flush, pair.followers[0].receive):
            with pytest.raises(ProcessFailed, match=reason) as failed:
                raises()
            assert failed.value.code == EXIT_STATUS
    assert f"pagedjax: {reason}; process 3 ends\n" in capsys.readouterr().err


def test_the_end_of_process_0_ends_all():
    with connected(2) as pair:
        for connection in pair.sockets[::2]:  # the leader's ends
            connection.shutdown(socket.SHUT_RDWR)
        until(lambda: {1, 2} <= {i for i, _ in pair.exits})
        assert pair.followers[0].failure == "process 0 ended: its connection is closed"


def test_silence_is_noticed_on_both_sides(monkeypatch):
    with connected(2, timeout=0.5) as pair:
        monkeypatch.setattr(pair.followers[0], "_check", lambda: None)
        expect_exits(pair, 0, 1, 2)
        assert str(pair.leader.failure).startswith("process 1 has not been heard of for")
    with connected(2, timeout=0.5) as pair:
        monkeypatch.setattr(pair.leader, "_check", lambda: None)
        expect_exits(pair, 1, 2)
        assert str(pair.followers[1].failure).startswith("process 0 has not been heard of for")


def test_a_late_process_is_named_while_all_are_alive():
    with connected(2, timeout=0.6) as pair:
        for member in (pair.leader, *pair.followers):
            member.steps = 3
            member.enter("waiting")
        for member in (pair.leader, pair.followers[1]):
            member.begin_step()
            member.enter("running")
        expect_exits(pair, 0, 1, 2)
        assert str(pair.leader.failure).startswith("process 1 did not begin step 4 for")


def test_nobody_ends_who_waits():
    with connected(1, timeout=0.3) as pair:
        for member in (pair.leader, *pair.followers):
            member.enter("waiting")
        time.sleep(1)
        assert pair.exits == []


def test_an_error_is_not_blamed_if_another_process_caused_it():
    """A device's error comes first, and then the news that a process has ended."""
    with connected(2, cause_seconds=1.0) as pair:
        pair.start(
            _swallow,
            pair.followers[0].report,
            "failed",
            "process 1 failed in step 3: connection reset",
        )
        time.sleep(0.05)
        pair.close(2)
        expect_exits(pair, 0, 1, 2)
        assert str(pair.leader.failure).startswith("process 2 ended")
    with connected(2) as pair:
        pair.start(
            _swallow, pair.followers[0].report, "failed", "process 1 failed in step 3: no memory"
        )
        expect_exits(pair, 0, 1, 2)
        assert pair.followers[1].failure == "process 1 failed in step 3: no memory"


def _swallow(function, *args) -> None:
    with suppress(ProcessFailed):
        function(*args)


def test_clients_are_answered_before_the_end(monkeypatch):
    monkeypatch.setattr(group, "ANSWER_SECONDS", 0.2)
    reports = []
    with connected(1) as pair:
        pair.leader.on_failure.append(lambda reason: reports.append((reason, list(pair.exits))))
        # it fails, and the others are called all the same
        pair.leader.on_failure.insert(0, lambda reason: reports[0])
        pair.close(1)
        until(lambda: 0 in {i for i, _ in pair.exits})
        assert reports[0][0] == pair.leader.failure
        assert (0, EXIT_STATUS) not in reports[0][1]


def test_a_process_that_is_asked_to_stop_asks_process_0(monkeypatch):
    sent = []
    monkeypatch.setattr(group.os, "kill", lambda pid, number: sent.append((pid, number)))
    with connected(1) as pair:
        pair.followers[0].ask_to_stop()
        until(lambda: sent)
    assert sent == [(group.os.getpid(), signal.SIGTERM)]


def test_a_process_that_does_not_end_is_named():
    with connected(1, timeout=0.4) as pair:
        pair.leader.close()
        assert pair.leader.failure == "process 1 did not end for 0.4 s"


def test_a_follower_waits_for_process_0_at_its_end_and_does_not_after_an_exception(monkeypatch):
    with connected() as pair:
        pair.start(pair.followers[0].close)
        pair.leader.order("release")
        pair.leader.flush()
        time.sleep(0.1)
        assert pair.threads[0].is_alive()
        pair.leader.close()
        assert pair.exits == []
    with connected() as pair:
        pair.start(_swallow, pair.followers[0].close)
        pair.leader.order("step")
        pair.leader.flush()
        expect_exits(pair, 0, 1)
        assert (
            pair.leader.failure
            == "process 1 does not follow: its program has ended, and its output says why"
        )
    monkeypatch.setattr(group.sys, "last_value", ValueError("wrong"), raising=False)
    with connected() as pair:
        pair.followers[0]._ended = True
        pair.followers[0].close()
        assert pair.exits == [(1, 1)]


def test_an_exception_that_ends_process_0_is_told_to_all(monkeypatch):
    monkeypatch.setattr(group.sys, "last_value", ValueError("wrong"), raising=False)
    with connected() as pair:
        pair.leader.close()
        expect_exits(pair, 0, 1)
        assert pair.followers[0].failure == "process 0 ended: ValueError: wrong"


def test_an_engine_is_built_when_all_processes_are_ready():
    with connected(2) as pair:
        pair.start(pair.leader.open, {"block_size": 4})
        pair.followers[0].open(lambda facts: None if facts == {"block_size": 4} else "wrong")
        time.sleep(0.05)
        assert pair.threads[0].is_alive()
        pair.followers[1].open(lambda facts: None)
        pair.threads[0].join(10)
        assert not pair.threads[0].is_alive()
        assert {member.engines for member in (pair.leader, *pair.followers)} == {2}
        assert pair.exits == []


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (
            lambda follower: follower.open(lambda facts: "block_size is 8 here"),
            "process 1 differs from process 0: block_size is 8 here",
        ),
        (
            lambda follower: follower.close(),
            "process 1 does not follow: its program has ended, and its output says why",
        ),
    ],
    ids=["other options", "an error while loading"],
)
def test_an_engine_that_one_process_cannot_begin_ends_all(act, reason):
    """Nobody waits: process 0 is not yet in a program that waits for the others' devices."""
    with connected(2) as pair:
        pair.start(_swallow, pair.leader.open, {})
        pair.start(_swallow, pair.followers[1].open, lambda facts: None)
        pair.start(_swallow, act, pair.followers[0])
        expect_exits(pair, 0, 1, 2)
        assert pair.leader.failure == reason


def test_an_error_in_process_0_before_its_first_engine_ends_all():
    with connected(1) as pair:
        pair.leader.engines = 0
        pair.start(_swallow, pair.followers[0].open, lambda facts: None)
        pair.leader.close()
        expect_exits(pair, 0, 1)
        assert pair.followers[0].failure == "process 0 ended before it had an engine"


@pytest.mark.slow
def test_an_engine_that_nobody_can_build_ends_nobody_and_one_that_some_cannot_ends_all():
    with connected(2, timeout=0.6) as pair:
        for follower in pair.followers:
            follower.not_built("ValueError: num_blocks is 0")
        pair.leader.not_built("ValueError: num_blocks is 0")
        time.sleep(0.8)
        assert pair.exits == []
    with connected(2, timeout=0.6) as pair:
        pair.followers[1].not_built("RESOURCE_EXHAUSTED")
        expect_exits(pair, 0, 1, 2)
        assert pair.leader.failure == "process 2 cannot build the engine: RESOURCE_EXHAUSTED"
    with connected(2, timeout=0.6) as pair:
        pair.followers[1].not_built("no memory")
        pair.leader.not_built("no memory here")
        expect_exits(pair, 0, 1, 2)
        assert pair.leader.failure == "process 0 cannot build the engine: no memory here"


def test_strangers_are_not_let_in():
    """Other bytes, another token, a process that does not exist: each is closed, and nobody waits
    for it.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        clients = []
        for hello in (
            b"GET / HTTP/1.1\r\n\r\n",
            encode({"token": "x", "process": 1, "kind": "inputs"}),
            b"\0\0\0\3[1]",
        ):
            clients.append(socket.create_connection(address))
            clients[-1].sendall(hello)
        clients.append(socket.create_connection(address))
        clients[-1].sendall(encode({"token": "secret", "process": 5, "kind": "inputs"}))
        follower = connect(address, 1, 2, "secret", 30.0, exit=lambda status: None)
        leader = accept(listener, 2, "secret", 10.0, 30.0, exit=lambda status: None)
        leader.order("add", text="\u00e9\n")
        leader.flush()
        assert follower.receive() == {"input": "add", "text": "\u00e9\n"}
        assert [client.recv(1) for client in clients[:3]] == [b"", b"", b""]
        follower._closing = leader._closing = True
        with pytest.raises(
            TimeoutError, match=r"process 1 has not connected to process 0 for 0.1 s"
        ):
            accept(listener, 2, "secret", 0.1, 30.0)
        for client in clients:
            client.close()


def test_a_connection_refuses_what_is_no_message():
    for wrong in (b"\xff\xff\xff\xff" + b"x" * 9, encode({"a": 1})[:-1], b"\0\0\0\1x"):
        near, far = tcp_pair()
        connection = Connection(near)
        far.sendall(wrong)
        far.close()
        assert connection.receive() is None
        connection.close()
