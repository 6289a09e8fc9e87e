"""The ingress: the one address of a cluster.

It checks the key, tells the router what it must know of a request, and passes the answer of the
chosen replica on, message by message.

    /health             200 while at least one replica is healthy
    /metrics            those of all replicas, with the label `replica`
    /replicas           the replicas that are present
    /replicas/NAME/...  one replica's own endpoint, such as /replicas/NAME/viewer
    /viewer             links to these
    everything else     what `pagedjax serve` has, from the replica that the router chooses
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedjax.routing import RouterRequest, find
from pagedjax.server import responses
from pagedjax.server.errors import ApiError, add_error_handlers
from pagedjax.server.metrics import Metrics
from pagedjax.server.middleware import Gate
from pagedjax.server import exchange
from pagedjax.server.ray import pages, prompts
from pagedjax.server.ray.link import LINK, NotRouted
from pagedjax.server.ray.options import ClusterOptions
from pagedjax.server.ray.prompts import Reader
from pagedjax.server.ray.replica import HEADER, TAKEN, Answer
from pagedjax.weights.tokenizer_files import open_tokenizer

PAGE_SECONDS = 10.0  # that a replica has to answer for a page of all replicas
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
GONE = (RayActorError, DeploymentUnavailableError, BackPressureError)
ENDED = "the replica that computed this answer has ended; send the request again"
log = logging.getLogger("pagedjax.server")


def create_ingress(options: ClusterOptions, replicas: DeploymentHandle) -> ASGIApp:
    """The ASGI application.

    Args:
        replicas: the handle of their deployment, whose request router is PureRouter.
    """
    app = FastAPI(title="PagedJAX", openapi_url=None)
    ingress = Ingress(options, replicas)
    add_error_handlers(app)

    @app.get("/health")
    async def health() -> Response:
        """200 while a replica is healthy."""
        if not await ingress.healthy():
            return JSONResponse({"status": "no replica is healthy"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Those of all replicas."""
        answers = await ingress.ask_all("/metrics")
        by_replica = {answer.replica: answer.body.decode() for answer in answers}
        page = await run_in_threadpool(pages.merged_page, by_replica)
        return PlainTextResponse(page, media_type=Metrics.CONTENT_TYPE)

    @app.get("/replicas")
    async def present() -> Response:
        """The names of the replicas that are present, and whether they are healthy."""
        healthy = await ingress.healthy()
        names = await ingress.present()
        data = [{"name": name, "healthy": name in healthy} for name in names]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/viewer")
    async def viewers(request: Request) -> Response:
        """A link to the viewer of each replica."""
        root = request.scope.get("root_path", "")
        links = [
            f'<li><a href="{root}/replicas/{name}/viewer">{name}</a></li>'
            for name in await ingress.present()
        ]
        return HTMLResponse(f"<!doctype html><title>Replicas</title><ul>{''.join(links)}</ul>")

    app.mount("/replicas/{name}", ingress.forward_to_replica)
    app.mount("/", ingress.forward)
    server = options.of_server()
    app.add_middleware(Gate, api_key=options.api_key(), max_body_bytes=server.max_body_bytes)
    if server.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER],
        )
    return app


class Ingress:
    """Passes requests on. It keeps nothing of them but the calls that are under way."""

    def __init__(self, options: ClusterOptions, replicas: DeploymentHandle) -> None:
        self._options = options
        self._replicas = replicas
        self._tokenizer = open_tokenizer(options.model)
        self._reader: Reader | None = None
        # of each replica that has a request: it has left, and its time to drain is over
        self._drained: dict[str, asyncio.Event] = {}

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of everything that the router decides."""
        await self._forward(scope, receive, send, None)

    async def forward_to_replica(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of the paths below /replicas/NAME."""
        name = scope["path_params"]["name"]
        names = await self.present()
        if name not in names:
            message = f"there is no replica {name!r:.80}; present are {', '.join(names) or 'none'}"
            raise ApiError(404, message, code="replica_not_found")
        await self._forward(scope, receive, send, name)

    async def present(self) -> list[str]:
        """The names of the replicas that are present, sorted."""
        if self._reader is None:  # Serve says which replicas there are after the first call
            with suppress(ApiError):
                await self._read_facts(PAGE_SECONDS)
        return sorted(LINK.present())

    async def healthy(self) -> set[str]:
        """The names of the replicas that are healthy."""
        answers = await self.ask_all("/health")
        return {answer.replica for answer in answers if answer.status == 200}

    async def ask_all(self, path: str) -> list[Answer]:
        """Send GET to all replicas -> the answers of those that answer in time."""
        names = await self.present()
        # Serve takes two calls of one HTTP request for one, which its context says; so each has a
        # context of its own
        calls = [
            asyncio.create_task(self._ask(name, path), context=contextvars.Context())
            for name in names
        ]
        answers = await asyncio.gather(*calls)
        return [answer for answer in answers if answer is not None]

    async def _ask(self, name: str, path: str) -> Answer | None:
        """Send GET to one replica -> its answer; None if it does not answer in time."""
        call = self._replicas.whole.remote(path, target=name)
        try:
            async with asyncio.timeout(PAGE_SECONDS):
                return await call
        except (TimeoutError, NotRouted, *GONE):
            call.cancel()
            return None

    async def _read_facts(self, seconds: float) -> Reader:
        """Ask a replica what the router must know -> `_reader`, from now on.

        Raises:
            ApiError: no replica is present in time.
        """
        call = self._replicas.facts.remote()
        try:
            async with asyncio.timeout(seconds):
                facts = await call
        except (TimeoutError, *GONE) as error:
            call.cancel()
            raise _no_replica(seconds) from error
        hashes = find(self._options.router).prefixes and facts["enable_prefix_caching"]
        self._reader = Reader(
            tokenizer=self._tokenizer,
            server=self._options.of_server(),
            max_model_len=facts["max_model_len"],
            block_size=facts["block_size"],
            hashes=hashes,
        )
        loop = asyncio.get_running_loop()

        def drained(name: str) -> None:
            loop.call_soon_threadsafe(self._drain_is_over, name)

        LINK.drained = drained
        return self._reader

    def _drain_is_over(self, name: str) -> None:
        event = self._drained.pop(name, None)
        if event is not None:
            event.set()

    # one request ----------------------------------------------------------------------------------

    async def _forward(
        self, scope: Scope, receive: Receive, send: Send, target: str | None
    ) -> None:
        if scope["type"] != "http":
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        reader = self._reader or await self._read_facts(self._options.route_seconds)
        routed = None
        if target is None:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            routed = RouterRequest(uuid.uuid4().hex, 0)
            if path in GENERATING:
                routed = await run_in_threadpool(
                    prompts.router_request, reader, routed.request_id, path, body
                )
        call: Any = self._replicas.options(stream=True).answer.remote(
            exchange.plain(scope), body, routed=routed, target=target
        )
        try:
            await _unless_client_leaves(receive, self._pass_on(call, send))
        finally:  # however this ends, the call is over in the replica too, and the router knows it
            call.cancel()
            if routed is not None:
                LINK.end(routed.request_id)

    async def _pass_on(self, call: DeploymentResponseGenerator[list[Message]], send: Send) -> None:
        """Send a replica's messages to the client.

        If the replica ends before its answer begins, that is an ApiError. If it ends later, a
        stream gets a last event that says so.
        """
        start: Message | None = None
        try:
            replica = await self._wait_for_replica(call)
            drained = self._drained.setdefault(replica, asyncio.Event())
            while (messages := await _next(call, drained)) is not None:
                for message in messages:
                    if message["type"] == "http.response.start":
                        start = message
                    await send(message)
        except (*GONE, _Drained) as error:
            log.warning("a replica ended with a request under way: %s", type(error).__name__)
            if start is None:
                raise ApiError(503, ENDED, code="replica_ended", retry_after=1) from error
            if not _is_stream(start):
                raise  # a part of the answer is sent already, so the connection ends
            error_event = responses.event(
                responses.error(ENDED, "server_error", code="replica_ended")
            )
            end = (error_event + responses.event("[DONE]")).encode()
            await send({"type": "http.response.body", "body": end})

    async def _wait_for_replica(self, call: DeploymentResponseGenerator[list[Message]]) -> str:
        """Wait for a replica that takes the request -> its name.

        Raises:
            ApiError: none does in time, or the router failed.
        """
        try:
            async with asyncio.timeout(self._options.route_seconds):
                (message,) = await anext(call)
        except TimeoutError:
            raise _no_replica(self._options.route_seconds) from None
        except NotRouted as error:
            raise ApiError(503, str(error), code="not_routed", retry_after=1) from error
        assert message["type"] == TAKEN
        return message["replica"]


class _Drained(Exception):
    """The replica has left, and its time to end what it had is over."""


async def _next(
    call: DeploymentResponseGenerator[list[Message]], drained: asyncio.Event
) -> list[Message] | None:
    """The next messages; None at the end. Raises _Drained if the replica's time is over before."""
    messages = asyncio.ensure_future(anext(call, None))
    over = asyncio.ensure_future(drained.wait())
    try:
        await asyncio.wait((messages, over), return_when=asyncio.FIRST_COMPLETED)
        if messages.done():
            return messages.result()
        raise _Drained
    finally:
        messages.cancel()
        over.cancel()


def _is_stream(start: Message) -> bool:
    return dict(start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")


def _no_replica(seconds: float) -> ApiError:
    message = f"no replica was ready within {seconds:g} s; try again later"
    return ApiError(503, message, code="no_replica", retry_after=10)


async def _unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or until the client leaves."""
    task = asyncio.ensure_future(work)
    client_leaves = asyncio.ensure_future(_wait_until_disconnected(receive))
    try:
        await asyncio.wait((task, client_leaves), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
    finally:
        client_leaves.cancel()
        task.cancel()
        await asyncio.gather(task, client_leaves, return_exceptions=True)


async def _wait_until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
