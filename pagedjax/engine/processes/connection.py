"""Messages between processes: JSON with its length before it, over two TCP connections for each
follower.

One connection has the leader's inputs, in order. The other has all the rest, in both directions:
signs of life, failures. So a process that reads no inputs can still be told to end. JSON, because a
peer's bytes must not run code.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
MAX_BYTES = 2**28  # the most bytes of a message; a prompt of a million tokens has 7 MB


class Connection:
    """One connection. Any thread may send; one thread receives."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = stream
        self._file = stream.makefile("rb")
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send what `encode` returned. A closed connection is not an error: the thread that
        receives from it notices the end.
        """
        with self._lock, suppress(OSError):
            self._socket.sendall(data)

    def receive(self) -> Message | None:
        """The next message; None at the end of the connection."""
        with suppress(OSError, ValueError):
            head = self._file.read(4)
            size = int.from_bytes(head, "big")
            if len(head) == 4 and size <= MAX_BYTES:
                body = self._file.read(size)
                return json.loads(body) if len(body) == size else None
        return None

    def messages(self) -> Iterator[Message]:
        """The messages until the end of the connection."""
        while (message := self.receive()) is not None:
            yield message

    def close(self) -> None:
        """Close both directions. A thread that waits in `receive` gets None."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def text_of(message: Message) -> str:
    """A message as JSON: the same text on both sides."""
    return json.dumps(message, separators=(",", ":"))


def message_bytes(text: str) -> bytes:
    """The bytes of a message's text. They are the same for every connection."""
    body = text.encode()
    return len(body).to_bytes(4, "big") + body


def encode(message: Message) -> bytes:
    return message_bytes(text_of(message))
