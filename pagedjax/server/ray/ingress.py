"""The ingress: the one address of a cluster. It checks the key, tells the router what it must know of a request, and
passes the answer of the chosen replica on, message by message.

    /health             200 while at least one replica is healthy
    /metrics            those of all replicas, with the label `replica`
    /replicas           the replicas that are present
    /replicas/NAME/...  one replica's own endpoint, such as /replicas/NAME/viewer
    everything else     what `pagedjax serve` has, from the replica that the router chooses
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedjax.routing import RouterRequest, find
from pagedjax.server import responses
from pagedjax.server.errors import ApiError, add_errors
from pagedjax.server.metrics import Metrics
from pagedjax.server.middleware import Gate
from pagedjax.server.ray import exchange, pages, prompts
from pagedjax.server.ray.options import ClusterOptions
from pagedjax.server.ray.prompts import Reader
from pagedjax.server.ray.replica import Answer
from pagedjax.weights.locate import open_checkpoint
from pagedjax.weights.tokenizer_files import load_tokenizer

PAGE_SECONDS = 10.0  # that a replica has to answer for a page of all replicas
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
GONE = (RayActorError, DeploymentUnavailableError, BackPressureError)
log = logging.getLogger("pagedjax.server")


def create_ingress(options: ClusterOptions, replicas: DeploymentHandle) -> ASGIApp:
    """The ASGI application. `replicas`: the handle of their deployment, whose request router is PureRouter."""
    app, ingress = FastAPI(title="PagedJAX", openapi_url=None), Ingress(options, replicas)
    add_errors(app)

    @app.get("/health")
    async def health() -> Response:
        """200 while a replica is healthy."""
        good = [one.replica for one in await ingress.of_all("/health") if one.status == 200]
        return JSONResponse({"status": "ok" if good else "no replica is healthy"}, 200 if good else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Those of all replicas."""
        found = {one.replica: one.body.decode() for one in await ingress.of_all("/metrics")}
        return PlainTextResponse(await run_in_threadpool(pages.merged, found), media_type=Metrics.CONTENT_TYPE)

    @app.get("/replicas")
    async def present() -> Response:
        """The names of the replicas that are present, and whether they are healthy."""
        found = await ingress.of_all("/health")
        listed = [{"name": one.replica, "healthy": one.status == 200} for one in sorted(found)]
        return JSONResponse({"object": "list", "data": listed})

    app.mount("/replicas/{name}", ingress.named)
    app.mount("/", ingress.routed)
    server = options.of_server()
    app.add_middleware(Gate, api_key=options.api_key(), max_body_bytes=server.max_body_bytes)
    if server.allow_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(server.allow_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


class Ingress:
    """Passes requests on. It keeps nothing of them but the calls that are under way."""

    def __init__(self, options: ClusterOptions, replicas: DeploymentHandle) -> None:
        self._options, self._replicas = options, replicas
        self._tokenizer = load_tokenizer(open_checkpoint(options.model))
        self._reader: Reader | None = None

    async def routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of everything that the router decides."""
        await self._forward(scope, receive, send, None)

    async def named(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of the paths below /replicas/NAME."""
        name = scope["path_params"]["name"]
        present = [one.replica for one in await self.of_all("/health")]
        if name not in present:
            what = f"there is no replica {name!r:.80}; present are {', '.join(sorted(present)) or 'none'}"
            raise ApiError(404, what, code="replica_not_found")
        await self._forward(scope, receive, send, name)

    async def of_all(self, path: str) -> list[Answer]:
        """What each replica answers to GET. One that does not answer in time, or not any more, is left out."""
        try:
            calls = self._replicas.broadcast("whole", path)
            found = await calls.results_async(timeout_s=PAGE_SECONDS, return_exceptions=True)
        except (TimeoutError, *GONE):
            return []
        return [one for one in found if isinstance(one, Answer)]

    async def _forward(self, scope: Scope, receive: Receive, send: Send, target: str | None) -> None:
        if scope["type"] != "http":
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        routed = None
        if target is None:
            routed = await self._router_request(scope["path"].removeprefix(scope.get("root_path", "")), body)
        call: Any = self._replicas.options(stream=True).answer.remote(
            exchange.plain(scope), body, routed=routed, target=target
        )
        await _unless_client_leaves(call, receive, self._pass_on(call, send))

    async def _router_request(self, path: str, body: bytes) -> RouterRequest:
        request_id = uuid.uuid4().hex
        if path not in GENERATING:
            return RouterRequest(request_id, 0)
        reader = self._reader or await self._read_facts()
        return await run_in_threadpool(prompts.router_request, reader, request_id, path, body)

    async def _read_facts(self) -> Reader:
        """Raises ApiError if no replica is present in time."""
        try:
            async with asyncio.timeout(self._options.route_seconds):
                facts = await self._replicas.facts.remote()
        except (TimeoutError, *GONE) as error:
            raise _no_replica(self._options.route_seconds) from error
        hashes = find(self._options.router).prefixes and facts["enable_prefix_caching"]
        self._reader = Reader(
            self._tokenizer, self._options.of_server(), facts["max_model_len"], facts["block_size"], hashes
        )
        return self._reader

    async def _pass_on(self, call: DeploymentResponseGenerator[list[Message]], send: Send) -> None:
        """Send a replica's messages. One that ends before its answer begins is an ApiError, and after that the last
        event of a stream."""
        start: Message | None = None
        try:
            try:
                async with asyncio.timeout(self._options.route_seconds):
                    await anext(call)  # the empty list: a replica has taken the request
            except TimeoutError:
                raise _no_replica(self._options.route_seconds) from None
            async for messages in call:
                for message in messages:
                    start = message if message["type"] == "http.response.start" else start
                    await send(message)
        except GONE as error:
            log.warning("a replica ended with a request under way: %s", type(error).__name__)
            what = "the replica that computed this answer has ended; send the request again"
            if start is None:
                raise ApiError(503, what, code="replica_ended", seconds=1) from error
            if not _is_stream(start):
                raise  # a part of the answer is sent already, so the connection ends
            last = responses.event(responses.error(what, "server_error", code="replica_ended"))
            await send({"type": "http.response.body", "body": (last + responses.event("[DONE]")).encode()})


def _is_stream(start: Message) -> bool:
    return dict(start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")


def _no_replica(seconds: float) -> ApiError:
    what = f"no replica was ready within {seconds:g} s; try again later"
    return ApiError(503, what, code="no_replica", seconds=10)


async def _unless_client_leaves(call: DeploymentResponseGenerator[Any], receive: Receive, work: Any) -> None:
    """Run `work` to its end, or until the client leaves. However this ends, the call is over in the replica too."""
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
    finally:
        left.cancel()
        if not task.done() or task.cancelled() or task.exception() is not None:
            task.cancel()
            call.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
