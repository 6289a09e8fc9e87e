"""A link between two transfer servers that is cut in the middle of the pages.

The servers first tell each other, over the connection that `connect` opens, where they take bytes
of pages. This link is a proxy of that connection. It replaces these addresses by those of proxies
of its own, so that all bytes go through it.
"""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress

ADDRESS = re.compile(rb"127\.0\.0\.1:\d{5}")


class Link:
    """Passes bytes between this process and `target` until `limit` bytes of pages have passed; then
    it is dead.

    address: to connect to in place of the target's.
    passed: bytes of pages that have passed.
    """

    def __init__(self, target: str, limit: int) -> None:
        self.passed = 0
        self._limit = limit
        self._dead = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.address = self._listen(target, pages=False)

    def close(self) -> None:
        """Cut all connections; no new one is taken."""
        self._dead.set()
        for connection in self._sockets:
            with suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _listen(self, target: str, *, pages: bool) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        self._sockets.append(listener)
        threading.Thread(target=self._accept, args=(listener, target, pages), daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def _accept(self, listener: socket.socket, target: str, pages: bool) -> None:
        host, _, port = target.rpartition(":")
        while not self._dead.is_set():
            try:
                near_end = listener.accept()[0]
                far_end = socket.create_connection((host, int(port)))
            except OSError:  # cut
                return
            self._sockets += [near_end, far_end]
            for source, sink in ((near_end, far_end), (far_end, near_end)):
                threading.Thread(target=self._pass, args=(source, sink, pages), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, pages: bool) -> None:
        try:
            while data := source.recv(4096):
                if not pages:
                    data = ADDRESS.sub(self._replaced, data)
                else:
                    with self._lock:
                        self.passed += len(data)
                        if self.passed > self._limit:
                            self.close()
                            return
                sink.sendall(data)
        except OSError:  # cut
            pass

    def _replaced(self, address: re.Match[bytes]) -> bytes:
        """Another address of the same length: messages begin with their lengths, and ports here
        have five digits.
        """
        relayed = self._listen(address[0].decode(), pages=True).encode()
        assert len(relayed) == len(address[0]), "a port with fewer than five digits"
        return relayed
