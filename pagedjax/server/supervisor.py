"""One engine in a process of its own, which is started again if it ends: `serve --restarts N`.

    client ── this process: key, relay.py ── HTTP over a Unix socket ── process of the engine

This process has no device and no model. It keeps what another engine needs to go on with each
unfinished request, and asks the process of the engine for answers. If that process ends, or answers
nothing, a new one is started, and goes on with the requests. A client sees a pause.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedjax.engine.processes.join import joined
from pagedjax.server import exchange
from pagedjax.server import serve as serving
from pagedjax.server.app import Options, create_app, identity
from pagedjax.server.continuation import FAILED, TAKEN, Origin
from pagedjax.server.errors import add_error_handlers
from pagedjax.server.metrics import Metrics
from pagedjax.server.middleware import guard
from pagedjax.server.relay import Avoided, Keeper, Lost, Unanswered
from pagedjax.server.serve import Plan
from pagedjax.server.streaming import while_client_stays

PULSE_SECONDS = 1.0  # between two questions whether the engine's process answers
SILENT_SECONDS = 30.0  # without an answer, after which the process is killed
STEP_SECONDS = 600.0  # that a step may take; it may compile a program
START_SECONDS = 600.0  # that requests wait for a new process
# After so long a run, the process may be started again as often as in the beginning.
STABLE_SECONDS = 1800.0
STOPPING = "the server is stopping"
NO_ENGINE = "the engine ended {restarts} times in a row and is not started again"
log = logging.getLogger("pagedjax.server")


# the process of the engine --------------------------------------------------------------------------


def run_engine(plan: Plan, path: str, number: int) -> None:
    """The engine's process: loads, and answers on the Unix socket `path` until it is killed.

    Args:
        number: of the process, from 0. A later one writes a recording with a number before the
            ending of its name.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serving.log_to_stderr(plan.log_level)
    if plan.record is not None and number:
        record = Path(plan.record)
        plan = plan._replace(record=str(record.with_suffix(f".{number + 1}{record.suffix}")))
    llm = plan.load()
    app = create_app(llm, plan.options)
    outer = engine_app(app, identity(llm, plan.options), f"process {number}")
    # the server ends by SIGTERM, and raises it again at its end; the recording is closed after that
    signal.signal(signal.SIGTERM, lambda *_: None)
    uvicorn.run(outer, uds=path, log_level="warning", timeout_graceful_shutdown=1)
    llm.engine.record(None)


def _end_with_parent() -> None:
    """End this process when the one that started it has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def engine_app(app: FastAPI, identity_of_app: str, name: str) -> FastAPI:
    """The application of the engine's process, around the one of `pagedjax serve`.

    POST /answer   the messages of an answer; body: pickled arguments of `exchange.answer_messages`
    GET /pulse     {"healthy": ..., "step_seconds": ...}
    """
    worker = app.state.worker

    @asynccontextmanager
    async def lifespan(outer: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)

    outer = FastAPI(openapi_url=None, lifespan=lifespan)

    @outer.post("/answer")
    async def answer(request: Request) -> Response:
        scope, body, origin = pickle.loads(await request.body())

        async def frames() -> AsyncIterator[bytes]:
            yield _frame([{"type": TAKEN, "engine": name, "identity": identity_of_app}])
            try:
                async for messages in exchange.answer_messages(app, scope, body, origin):
                    yield _frame(messages)
            except Exception:
                log.exception("an answer failed")
                yield _frame([{"type": FAILED}])

        return StreamingResponse(frames())

    @outer.get("/pulse")
    async def pulse() -> dict[str, Any]:
        return {"healthy": worker.healthy, "step_seconds": worker.step_seconds}

    return outer


_LENGTH = struct.Struct(">I")


def _frame(messages: Sequence[Message]) -> bytes:
    body = pickle.dumps(messages)
    return _LENGTH.pack(len(body)) + body


async def _frames(chunks: AsyncIterator[bytes]) -> AsyncIterator[list[Message]]:
    """The messages of frames that come in pieces of any size."""
    buffer = b""
    async for chunk in chunks:
        buffer += chunk
        while len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            end = _LENGTH.size + length
            if len(buffer) < end:
                break
            yield pickle.loads(buffer[_LENGTH.size : end])
            buffer = buffer[end:]


# this process ---------------------------------------------------------------------------------------


class Supervisor:
    """Runs the process of the engine.

    ended: set when the process has ended and is not started again.
    """

    def __init__(self, plan: Plan, restarts: int) -> None:
        """restarts: how often in a row the process is started again."""
        self.keeper = Keeper(plan.options.name)
        self.ended = asyncio.Event()
        self.exit_status = 0
        self._plan = plan
        self._restarts = restarts
        self._folder = tempfile.TemporaryDirectory(prefix="pagedjax-")
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._client: httpx.AsyncClient | None = None
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._number = -1  # of the process

    @property
    def healthy(self) -> bool:
        return self._ready.is_set()

    async def start(self) -> bool:
        """Start the first process -> whether it answers. If it does not, it has said why."""
        self._begin()
        is_ready = await self._wait_until_ready()
        if not is_ready and not self._stopping.is_set():
            self.exit_status = self._process.exitcode or 1
        return is_ready

    async def watch(self) -> None:
        """Start the process again whenever it ends or hangs, as often as it is allowed."""
        failures = 0
        while not self._stopping.is_set():
            start = time.monotonic()
            reason = await self._wait_for_end()
            if self._stopping.is_set():
                return
            self._ready.clear()
            assert self._client is not None, "it was started"
            await self._client.aclose()
            failures = 0 if time.monotonic() - start > STABLE_SECONDS else failures
            failures += 1
            if failures > self._restarts:
                log.error(
                    "the engine's process %s; %s", reason, NO_ENGINE.format(restarts=failures)
                )
                self.exit_status = 1
                self.ended.set()
                return
            log.error(
                "the engine's process %s; it is started again (%d of %d in a row)",
                reason,
                failures,
                self._restarts,
            )
            self._begin()
            await self._wait_until_ready()

    def _begin(self) -> None:
        self._number += 1
        path = f"{self._folder.name}/{self._number}"
        arguments = (self._plan, path, self._number)
        self._process = self._context.Process(target=run_engine, args=arguments, daemon=True)
        self._process.start()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        transport = httpx.AsyncHTTPTransport(uds=path, limits=limits)
        self._client = httpx.AsyncClient(
            transport=transport, base_url="http://engine", timeout=None
        )

    async def _wait_until_ready(self) -> bool:
        """Whether the process answers, and has not ended before."""
        start = time.monotonic()
        while self._process.is_alive() and not self._stopping.is_set():
            if time.monotonic() - start > START_SECONDS:
                log.error("the engine's process did not load within %g s", START_SECONDS)
                self._process.kill()
            if await self._pulse() is not None:
                self._ready.set()
                return True
            await asyncio.sleep(0.05)
        return False

    async def _pulse(self) -> dict[str, Any] | None:
        """What the process says of itself; None if it does not answer."""
        assert self._client is not None, "call start first"
        try:
            return (await self._client.get("/pulse", timeout=PULSE_SECONDS)).json()
        except (httpx.HTTPError, ValueError):
            return None

    async def _wait_for_end(self) -> str:
        """Wait until the process has ended, or was killed because it hangs -> why."""
        last_answer = time.monotonic()
        while self._process.is_alive():
            pulse = await self._pulse()
            now = time.monotonic()
            if pulse is not None:
                last_answer = now
                self._ready.set()
            reason = ""
            if now - last_answer > SILENT_SECONDS:
                reason = f"answered nothing for {SILENT_SECONDS:g} s"
            elif pulse and pulse["step_seconds"] > STEP_SECONDS:
                reason = f"has a step of more than {STEP_SECONDS:g} s"
            elif pulse and not pulse["healthy"]:
                reason = "has an engine that failed"
            if reason:
                self._process.kill()
                await asyncio.to_thread(self._process.join)
                return reason
            await asyncio.sleep(PULSE_SECONDS / 4)
        return f"ended with status {self._process.exitcode}"

    async def ask(
        self, scope: Mapping[str, Any], body: bytes, origin: Origin
    ) -> AsyncGenerator[list[Message], None]:
        """Yield the messages of the answer to an HTTP request.

        Raises:
            Lost: the process has ended.
            Unanswered: there is no process, and none is started in time.
        """
        client = await self._ready_client()
        content = pickle.dumps((dict(scope), body, origin))
        try:
            async with client.stream("POST", "/answer", content=content) as response:
                response.raise_for_status()
                async for messages in _frames(response.aiter_bytes()):
                    yield messages
        except httpx.HTTPError as error:
            if self._stopping.is_set():
                raise Unanswered(STOPPING, "engine_stopped", None) from error
            if client is self._client:
                self._ready.clear()  # until `watch` has an answer again
            raise Lost("ended") from error

    async def _ready_client(self) -> httpx.AsyncClient:
        """The client of the process that is ready, now or soon. Raises Unanswered."""
        deadline = time.monotonic() + START_SECONDS
        while not self._ready.is_set():
            if self._stopping.is_set():
                raise Unanswered(STOPPING, "engine_stopped", None)
            seconds = deadline - time.monotonic()
            if self.ended.is_set() or seconds <= 0:
                raise Unanswered(
                    "the engine has ended and is not started again", "engine_stopped", 60
                )
            events = (self._ready, self.ended, self._stopping)
            waits = [asyncio.ensure_future(event.wait()) for event in events]
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        assert self._client is not None, "a process is ready"
        return self._client

    def stop(self) -> None:
        """End the process. Its unfinished requests are answered 503."""
        self._stopping.set()
        if self._process is not None and self._process.is_alive():
            self._process.terminate()

    def close(self) -> None:
        """Wait for the end of the process."""
        self.stop()
        if self._process is not None:
            self._process.join(5)
            self._process.kill()
            self._process.join()
        self._folder.cleanup()


def create_front(supervisor: Supervisor, options: Options) -> ASGIApp:
    """The application of this process."""
    app = FastAPI(title="PagedJAX", openapi_url=None)
    add_error_handlers(app)

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine's process answers."""
        if supervisor.healthy:
            return JSONResponse({"status": "ok"})
        if supervisor.ended.is_set():
            return JSONResponse({"status": "the engine failed"}, 503)
        return JSONResponse({"status": "the engine is being started again"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Those of the engine, and of this process."""
        answer: list[Message] = []
        with suppress(Lost, Unanswered, TimeoutError):
            if not supervisor.healthy:
                raise Lost("ended")
            origin = Origin("", 0, 0)
            async for messages in supervisor.ask(exchange.get("/metrics"), b"", origin):
                answer += messages
        page = b"".join(message.get("body", b"") for message in answer)
        return PlainTextResponse(
            page.decode() + supervisor.keeper.page(), media_type=Metrics.CONTENT_TYPE
        )

    async def forward(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        plain = exchange.plain(scope)

        def ask(origin: Origin, avoided: Avoided) -> AsyncGenerator[list[Message], None]:
            if avoided.refusing:
                raise Unanswered("the weights on disk have changed; send the request again")
            return supervisor.ask(plain, body, origin)

        await while_client_stays(receive, supervisor.keeper.relay(ask, send))

    app.mount("/", forward)
    guard(app, options.api_key, options.max_body_bytes, options.allow_origins)
    return app


class _Server(serving.Server):
    """Starts the engine's process before it listens, and ends when that is not started again."""

    def __init__(self, config: uvicorn.Config, supervisor: Supervisor, *arguments: Any) -> None:
        super().__init__(config, supervisor.stop, *arguments)
        self._supervisor = supervisor
        self._watching: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if not await self._supervisor.start():
            self.should_exit = True
            return
        self._watching = asyncio.create_task(self._watch())
        await super().startup(sockets)

    async def _watch(self) -> None:
        try:
            await self._supervisor.watch()
        except Exception:  # else nobody would start the process again, and requests would wait
            log.exception("the engine's process is not watched any more; the server ends")
            self._supervisor.exit_status = 1
            self._supervisor.ended.set()
        if self._supervisor.ended.is_set():
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if not self.started:  # it loads, and waits for nothing else
            self._supervisor.stop()


def main(args: argparse.Namespace, engine: dict[str, Any]) -> int:
    """Run the command `pagedjax serve --restarts N` -> the exit status.

    Args:
        engine: fields of EngineConfig.

    Raises:
        ValueError: an option that a process which is started again cannot have.
    """
    plan = serving.plan_of(args, engine)
    options = plan.options
    if joined() is not None:
        raise ValueError(
            f"restarts is {args.restarts}, and this engine has several processes; leave --restarts "
            "out, or start one process"
        )
    if options.allow_runtime_lora_updating:
        raise ValueError(
            f"restarts is {args.restarts}, and adapters that clients load would be gone after a "
            "restart; name them with --lora-modules, or leave --restarts out"
        )
    engine_options = replace(options, api_key=None, allow_origins=(), lecture_endpoints=False)
    supervisor = Supervisor(plan._replace(options=engine_options), args.restarts)
    front = create_front(supervisor, options)
    config = serving.uvicorn_config(front, args.drain_seconds, args.log_level)
    try:
        with serving.bound_socket(args.host, args.port) as listener:
            line = serving.addresses(options.name, listener)
            _Server(config, supervisor, args.drain_seconds, line).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn raises SIGINT again, once it has ended
        return 130
    finally:
        supervisor.close()
    return supervisor.exit_status
