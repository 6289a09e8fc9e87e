"""`pagedjax serve`: load a model, listen, and on SIGTERM or Ctrl-C finish what is under way before leaving."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from pagedjax.llm import LLM
from pagedjax.server.app import Options, create_app
from pagedjax.server.worker import Worker

GRACE = 3  # seconds for answers of 503 to leave


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, so that a port in use is told before a model is loaded. It listens once uvicorn does.

    Raises:
        ValueError: the address cannot be had.
    """
    if not 0 <= port < 2**16:  # getaddrinfo would take it modulo that
        raise ValueError(f"port is {port}; it must be from 0 (any that is free) to {2**16 - 1}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen at {host!r}, port {port}: {error}; choose others (--host, --port)") from error
    return made


def serve(llm: LLM, options: Options, at: socket.socket, *, drain_seconds: int = 60, log_level: str = "info") -> None:
    """Serve until a signal. Prints the address once somebody can connect.

    SIGTERM and SIGINT close the port; requests under way have `drain_seconds` to end, then they are answered 503, and
    who does not take the answer is cut off. A second SIGINT does not wait for them.
    """
    app = create_app(llm, options)
    config = uvicorn.Config(
        app,
        log_level=log_level,
        access_log=log_level == "debug",
        timeout_graceful_shutdown=drain_seconds + 2 * GRACE,  # what it cancels gets no answer but a page in the log
        timeout_keep_alive=75,  # seconds; longer than clients keep an idle connection, so that they close it, not we
        server_header=False,
    )
    name, number = at.getsockname()[:2]
    where = f"[{name}]" if ":" in name else name
    line = f"serving {options.name} at http://{where}:{number}/v1"
    _Server(config, app.state.worker, drain_seconds, line).run(sockets=[at])


class _Server(uvicorn.Server):
    """Says a line once it listens, and ends in time what uvicorn would cancel."""

    def __init__(self, config: uvicorn.Config, worker: Worker, drain_seconds: int, line: str) -> None:
        super().__init__(config)
        self._worker, self._drain_seconds, self._line = worker, drain_seconds, line
        self._hurry = asyncio.Event()  # a second SIGINT

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._line, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end(self) -> None:
        """Answer what is left when the time is over, and then leave those who do not read their answers."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                await self._hurry.wait()
        self._worker.halt()
        await asyncio.sleep(GRACE)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT and not self._hurry.is_set():
            self._hurry.set()  # the loop looks at it when it next wakes, ten times a second
        else:
            super().handle_exit(sig, frame)


def name_of(model: str) -> str:
    """A model's own name, also of "."; what a link points at may have any."""
    return Path(os.path.abspath(model)).name


def main(args: argparse.Namespace, engine: dict[str, Any]) -> int:
    """The command. `engine`: fields of EngineConfig."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("pagedjax").setLevel(args.log_level.upper())
    key = Path(args.api_key_file).read_text(encoding="utf-8").strip() if args.api_key_file else None
    options = Options(
        name=args.served_model_name or name_of(args.model),
        api_key=key,
        max_queue=args.max_queue,
        max_body_bytes=int(args.max_body_mib * 2**20),
        allow_origins=tuple(args.allow_origin),
    )
    with bound(args.host, args.port) as at:
        llm = LLM(args.model, progress=sys.stderr.isatty(), **engine)
        if args.record:
            llm.engine.record(args.record, times=True)
        try:
            serve(llm, options, at, drain_seconds=args.drain_seconds, log_level=args.log_level)
        finally:
            llm.engine.record(None)
    return 0
