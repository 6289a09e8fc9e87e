"""`pagedjax serve`: load a model, listen, and on SIGTERM or Ctrl-C finish what is under way before leaving."""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn

from pagedjax.llm import LLM
from pagedjax.server.app import Options, create_app


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

    SIGTERM and SIGINT close the port; requests under way have `drain_seconds` to end, then they are cancelled. A second
    SIGINT does not wait.
    """
    config = uvicorn.Config(
        create_app(llm, options),
        log_level=log_level,
        access_log=log_level == "debug",
        timeout_graceful_shutdown=drain_seconds,
        timeout_keep_alive=75,  # seconds; longer than clients keep an idle connection, so that they close it, not we
        server_header=False,
    )
    name, number = at.getsockname()[:2]
    where = f"[{name}]" if ":" in name else name
    _Server(config, f"serving {options.name} at http://{where}:{number}/v1").run(sockets=[at])


class _Server(uvicorn.Server):
    """Says a line once it listens."""

    def __init__(self, config: uvicorn.Config, line: str) -> None:
        super().__init__(config)
        self._line = line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._line, flush=True)


def main(args: argparse.Namespace, engine: dict[str, Any]) -> int:
    """The command. `engine`: fields of EngineConfig."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("pagedjax").setLevel(args.log_level.upper())
    key = Path(args.api_key_file).read_text(encoding="utf-8").strip() if args.api_key_file else None
    options = Options(
        name=args.served_model_name or Path(args.model).name,
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
