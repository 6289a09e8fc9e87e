"""`pagedjax serve`: load a model, listen, and on SIGTERM or Ctrl-C finish what is under way before leaving."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import uvicorn

from pagedjax.llm import LLM
from pagedjax.server.app import Options, create_app


def serve(llm: LLM, options: Options, *, host: str, port: int, drain_seconds: int, log_level: str = "info") -> None:
    """Serve until a signal. Prints the address once the port is open; port 0 takes any that is free.

    SIGTERM and SIGINT close the port; requests under way have `drain_seconds` to end, then they are cancelled. A second
    SIGINT does not wait.
    """
    config = uvicorn.Config(
        create_app(llm, options),
        host=host,
        port=port,
        log_level=log_level,
        access_log=log_level in ("debug", "trace"),
        timeout_graceful_shutdown=drain_seconds,
        timeout_keep_alive=75,  # seconds; longer than clients keep an idle connection, so that they close it, not we
        server_header=False,
    )
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    name, number = socket.getsockname()[:2]
    where = f"[{name}]" if ":" in name else name
    print(f"serving {options.name} at http://{where}:{number}/v1", flush=True)
    server.run(sockets=[socket])


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
    llm = LLM(args.model, progress=sys.stderr.isatty(), **engine)
    if args.record:
        llm.engine.record(args.record, times=True)
    try:
        serve(llm, options, host=args.host, port=args.port, drain_seconds=args.drain_seconds, log_level=args.log_level)
    finally:
        llm.engine.record(None)
    return 0
