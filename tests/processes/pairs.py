"""A leader and followers in one process, connected by sockets, for tests. Nobody exits: exit
statuses are collected.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from pagedjax.engine.processes import group as group_module
from pagedjax.engine.processes.connection import Connection
from pagedjax.engine.processes.group import Follower, Leader


def tcp_pair() -> list[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return [client, listener.accept()[0]]


class Connected:
    """leader, followers: of one group. exits: (process, exit status), in the order in which they
    ended.
    """

    def __init__(self, followers: int, timeout: float) -> None:
        self.exits: list[tuple[int, int]] = []
        self.sockets: list[socket.socket] = []
        self.threads: list[threading.Thread] = []
        ends = {i: [self._pair() for _ in range(2)] for i in range(1, followers + 1)}
        peers = {i: (pair[0][0], pair[1][0]) for i, pair in ends.items()}
        self.leader = Leader(peers, timeout, exit=self._exit_of(0))
        self.leader.engines = 1  # as if one had been built
        self.followers = [
            Follower(inputs, control, i, followers + 1, timeout, exit=self._exit_of(i))
            for i, ((_, inputs), (_, control)) in ends.items()
        ]
        for follower in self.followers:
            follower.engines = 1

    def _pair(self) -> list[Connection]:
        ends = tcp_pair()
        self.sockets += ends
        return [Connection(end) for end in ends]

    def _exit_of(self, process: int) -> Any:
        return lambda status: self.exits.append((process, status))

    def start(self, function: Any, *args: Any, **options: Any) -> None:
        thread = threading.Thread(target=function, args=args, kwargs=options, daemon=True)
        self.threads.append(thread)
        thread.start()

    def close(self, process: int) -> None:
        """As if a follower ended."""
        for end in self.sockets[4 * (process - 1) : 4 * process]:
            end.close() if end.fileno() < 0 else end.shutdown(socket.SHUT_RDWR)


@contextmanager
def connected(
    followers: int = 1, timeout: float = 30.0, cause_seconds: float = 0.1
) -> Iterator[Connected]:
    """cause_seconds: how long an error waits for the news of a process that caused it."""
    connected_group = Connected(followers, timeout)
    try:
        with patch.object(group_module, "CAUSE_SECONDS", cause_seconds):
            yield connected_group
    finally:
        for group in (connected_group.leader, *connected_group.followers):
            group._closing = True
            group._over.set()
        for end in connected_group.sockets:
            end.close()
        for thread in connected_group.threads:
            thread.join(10)
