"""The command `pagedjax serve`: loads a model and serves it until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import uvicorn
from starlette.types import ASGIApp

from pagedjax.engine.garbage import collect_rarely
from pagedjax.engine.processes.join import joined, leave
from pagedjax.host import event_log, policies, purity
from pagedjax.llm import LLM
from pagedjax.server import adapters
from pagedjax.server.app import Options, create_app

ANSWER_SECONDS = 3  # to send the answers of 503
log = logging.getLogger("pagedjax.server")


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address.

    It is bound before a model is loaded, so that a port in use is an early error.

    Raises:
        ValueError: the address cannot be used.
    """
    if not 0 <= port < 2**16:  # getaddrinfo takes a port modulo 2**16
        raise ValueError(f"port is {port}; it must be from 0 (a free one) to {2**16 - 1}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(
            f"cannot listen at {host!r}, port {port}: {error}; choose others (--host, --port)"
        ) from error
    return listener


def serve(
    llm: LLM,
    options: Options,
    listener: socket.socket,
    *,
    drain_seconds: int = 60,
    log_level: str = "info",
) -> None:
    """Serve until a signal. Prints the address when the server listens.

    SIGTERM and SIGINT close the port. Unfinished requests have `drain_seconds` to end, then they
    are answered 503, and connections that do not read the answer are closed. A second SIGINT does
    not wait for them. After SIGTERM this returns; after SIGINT it raises KeyboardInterrupt.
    """
    app = create_app(llm, options)
    worker = app.state.worker
    group = joined()
    if group:
        group.on_failure.append(worker.fail)
    config = uvicorn_config(app, drain_seconds, log_level)
    line = addresses(options.name, listener)
    Server(config, worker.halt, drain_seconds, line).run(sockets=[listener])


def uvicorn_config(app: ASGIApp, drain_seconds: int, log_level: str) -> uvicorn.Config:
    """How uvicorn runs an application of ours."""
    return uvicorn.Config(
        app,
        log_level=log_level,
        access_log=log_level == "debug",
        # Then uvicorn cancels, without an answer
        timeout_graceful_shutdown=drain_seconds + 2 * ANSWER_SECONDS,
        # Seconds; longer than clients keep an idle connection, so that clients close it
        timeout_keep_alive=75,
        server_header=False,
    )


def addresses(name: str, listener: socket.socket) -> str:
    """The lines that say where a model is served."""
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    address = f"http://{host}:{port}"
    return f"serving {name} at {address}/v1\nits steps are shown at {address}/viewer"


class Server(uvicorn.Server):
    """Prints its addresses when it listens, and ends unfinished requests before uvicorn cancels them."""

    def __init__(
        self, config: uvicorn.Config, halt: Callable[[], None], drain_seconds: int, line: str
    ) -> None:
        """halt: ends unfinished requests."""
        super().__init__(config)
        self._halt = halt
        self._drain_seconds = drain_seconds
        self._line = line
        self._second_signal = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._line, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_after_drain())
        await super().shutdown(sockets)
        ending.cancel()
        await asyncio.to_thread(leave)  # now, because uvicorn raises SIGINT again

    async def _end_after_drain(self) -> None:
        """Answer unfinished requests when the time is over.

        Then close the connections that do not read.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                await self._second_signal.wait()
        self._halt()
        await asyncio.sleep(ANSWER_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT and not self._second_signal.is_set():
            self._second_signal.set()  # the loop reads it when it next wakes, ten times a second
        elif sig == signal.SIGTERM:
            # uvicorn would raise it again in the end, and the exit status would not be 0
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)


def follow(llm: LLM, group: Any, record: str | None) -> int:
    """Serve as a process that takes no requests -> the exit status.

    SIGTERM here stops process 0, which drains and then ends all.

    Args:
        record: the recording of process 0; this process writes one in the same folder.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        group.ask_to_stop()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends this process, and so all

    signal.signal(signal.SIGTERM, stop)
    print(group, flush=True)
    path = Path(record).with_suffix(f".process-{group.process}.jsonl") if record else None
    llm.follow(record=path)
    return 0


def name_of(model: str) -> str:
    """The name of a model's folder or file, also for ".". Symbolic links are not resolved."""
    return Path(os.path.abspath(model)).name


def read_key(file: str) -> str:
    """The API key in a file. Raises ValueError if the file cannot be read or is empty."""
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(
            f"the API key file {file!r} cannot be read: {reason}; name a text file that has the "
            "key alone, or leave it out to need no key"
        ) from None
    if not key:
        raise ValueError(
            f"the API key in {file} is empty; write the key into it, or leave it out to need no key"
        )
    return key


class Plan(NamedTuple):
    """What a process of a server loads, and how it serves.

    llm: options of LLM.
    adapters: their folders, by name.
    record: a file for a recording.
    """

    model: str
    llm: Mapping[str, Any]
    adapters: Mapping[str, str]
    options: Options
    record: str | None
    log_level: str

    def load(self) -> LLM:
        """The model with its adapters. Its run is recorded from now on."""
        llm = LLM(self.model, **self.llm)
        for name, folder in self.adapters.items():
            llm.load_adapter(name, folder)
        if self.record is not None:
            llm.engine.record(self.record, times=True)
        return llm


def plan_of(args: argparse.Namespace, engine: Mapping[str, Any]) -> Plan:
    """The plan that the options of the command make. Switches the log on.

    Args:
        engine: fields of EngineConfig.

    Raises:
        ValueError: a wrong option.
    """
    log_to_stderr(args.log_level)
    key = None if args.api_key_file is None else read_key(args.api_key_file)
    if args.record:
        event_log.check_target(args.record)
    options = Options(
        name=args.served_model_name or name_of(args.model),
        api_key=key,
        max_queue=args.max_queue,
        max_body_bytes=int(args.max_body_mib * 2**20),
        allow_origins=tuple(args.allow_origin),
        min_priority=args.min_priority,
        max_priority=args.max_priority,
        allow_user=args.allow_user,
        allow_service_fields=args.allow_service_fields,
        lecture_endpoints=args.lecture_endpoints,
        result_seconds=args.result_seconds,
        tool_call_parser=args.tool_call_parser,
        allow_runtime_lora_updating=args.allow_runtime_lora_updating,
    )
    folders = adapters.modules(
        args.lora_modules, options.name, engine, options.allow_runtime_lora_updating
    )
    policy = engine.get("policy")
    if policy in ("fair", "vtc") and not options.allow_user:
        log.warning(
            f"the policy is {policy}, but the field user of requests is ignored; add --allow-user to "
            "share by it"
        )
    if policy is not None and purity.needs_predictions(policies.find(policy)):
        raise ValueError(
            f"policy is {policy!r}, which reads seq.predicted, and requests to a server need not "
            "have a predicted length; take another policy (srtf with its parameter default), or "
            "let it read seq.request.predicted, which may be None there"
        )
    llm_options = {
        "progress": sys.stderr.isatty(),
        "compilation_cache": args.compilation_cache,
        **engine,
    }
    return Plan(args.model, llm_options, folders, options, args.record, args.log_level)


def log_to_stderr(level: str) -> None:
    """Show what pagedjax logs at this level or above."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("pagedjax").setLevel(level.upper())


def main(args: argparse.Namespace, engine: dict[str, Any]) -> int:
    """Run the command -> the exit status. `engine`: fields of EngineConfig."""
    plan = plan_of(args, engine)
    group = joined()
    if group is not None and group.process:
        llm = LLM(plan.model, **plan.llm)
        collect_rarely()
        return follow(llm, group, plan.record)
    with bound_socket(args.host, args.port) as listener:
        llm = plan.load()
        collect_rarely()
        try:
            serve(
                llm,
                plan.options,
                listener,
                drain_seconds=args.drain_seconds,
                log_level=args.log_level,
            )
        except KeyboardInterrupt:  # uvicorn raises SIGINT again, once it has ended
            return finish(llm, 130)
        finally:
            llm.engine.record(None)
    return finish(llm, 0)


def finish(llm: LLM, status: int) -> int:
    """Stop the compilation of programs -> the exit status.

    If a program is being compiled, the process ends here, because Python would wait for it.
    """
    programs = llm.engine.background
    if programs is not None:
        programs.stop()
        if programs.compiling:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return status
