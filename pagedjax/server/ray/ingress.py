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
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedjax.routing import RouterRequest, find
from pagedjax.server import exchange
from pagedjax.server.continuation import Origin
from pagedjax.server.errors import ApiError, add_error_handlers
from pagedjax.server.metrics import Metrics
from pagedjax.server.middleware import guard
from pagedjax.server.ray import pages, prompts
from pagedjax.server.ray.link import LINK, NotRouted
from pagedjax.server.ray.options import ClusterOptions
from pagedjax.server.ray.prompts import Reader
from pagedjax.server.ray.replica import HEADER, Answer
from pagedjax.server.relay import ENDED, Avoided, Keeper, Lost, Unanswered
from pagedjax.server.streaming import while_client_stays
from pagedjax.weights.tokenizer_files import open_tokenizer

PAGE_SECONDS = 10.0  # that a replica has to answer for a page of all replicas
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
GONE = (RayActorError, DeploymentUnavailableError, BackPressureError)
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
        return PlainTextResponse(page + ingress.keeper.page(), media_type=Metrics.CONTENT_TYPE)

    @app.get("/replicas")
    async def present() -> Response:
        """The names of the replicas that are present, and whether they are healthy."""
        healthy = await ingress.healthy()
        names = sorted({*await ingress.present(), *LINK.avoided})
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
    guard(app, options.api_key(), server.max_body_bytes, server.allow_origins, [HEADER])
    return app


class Ingress:
    """Passes requests on, and keeps what another replica needs to go on with them (relay.py)."""

    def __init__(self, options: ClusterOptions, replicas: DeploymentHandle) -> None:
        self._options = options
        self._replicas = replicas
        self._tokenizer = open_tokenizer(options.model)
        self._reader: Reader | None = None
        self._moves: set[asyncio.Task[None]] = set()  # of replicas that have left
        self._watch: asyncio.Task[None] | None = None  # of the replicas' pulses
        self._identities: dict[str, str] = {}  # of the replicas that have answered
        self._calls: set[_ReplicaCall] = set()  # that are under way
        self.keeper = Keeper(options.of_server().name, int(options.kept_mib * 2**20))

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
        # Serve treats all calls in the context of one HTTP request as one call; so each call has a
        # context of its own
        calls = [
            asyncio.create_task(self._ask(name, path), context=contextvars.Context())
            for name in names
        ]
        answers = await asyncio.gather(*calls)
        return [answer for answer in answers if answer is not None]

    async def _ask(self, name: str, path: str) -> Answer | None:
        """Send GET to one replica -> its answer; None if it does not answer in time."""
        return await self._answer_in_time(self._replicas.whole.remote(path, target=name))

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
            none_ready = _none_ready(seconds)
            raise ApiError(
                503, str(none_ready), code=none_ready.code, retry_after=none_ready.retry_after
            ) from error
        hashes = find(self._options.router).prefixes and facts["enable_prefix_caching"]
        self._reader = Reader(
            tokenizer=self._tokenizer,
            server=self._options.of_server(),
            max_model_len=facts["max_model_len"],
            block_size=facts["block_size"],
            hashes=hashes,
        )
        loop = asyncio.get_running_loop()

        def left(name: str) -> None:
            loop.call_soon_threadsafe(self._begin_move, name)

        def drained(name: str) -> None:
            loop.call_soon_threadsafe(self._end_drain, name)

        LINK.left = left
        LINK.drained = drained
        self._watch = self._watch or asyncio.create_task(self._watch_pulses())
        return self._reader

    # replicas that leave or are silent ------------------------------------------------------------

    def _give_up(self, name: str, reason: str) -> None:
        """Wait for no more messages of a replica."""
        for call in self._calls:
            if call.replica == name:
                call.give_up(reason)

    def _end_drain(self, name: str) -> None:
        """The time of a replica that has left is over."""
        self._give_up(name, "left" if LINK.present() else "drained")

    def _begin_move(self, name: str) -> None:
        """A replica has left Serve: let another one go on with its requests, if there is one that
        gives the same tokens. Else they have the time to drain.
        """
        if any(call.replica == name for call in self._calls):
            move = asyncio.create_task(self._move(name), context=contextvars.Context())
            self._moves.add(move)
            move.add_done_callback(self._moves.discard)
            move.add_done_callback(_log_error)

    async def _move(self, name: str) -> None:
        for replica in LINK.present():
            if replica not in self._identities:
                facts = await self._answer_in_time(self._replicas.facts.remote(target=replica))
                if facts is not None:
                    self._identities[replica] = facts["identity"]
            if self._identities.get(replica) == self._identities.get(name):
                self._give_up(name, "left")
                return

    async def _watch_pulses(self) -> None:
        """Avoid replicas that answer nothing while others do, and give their requests to these."""
        seconds = self._options.silent_seconds
        last_answers: dict[str, float] = {}  # of the replicas that are present
        avoided: frozenset[str] = frozenset()
        while True:
            await asyncio.sleep(min(1.0, seconds / 4))
            names = {*LINK.present(), *avoided}
            answers = dict(zip(names, await self._pulses(names, seconds / 4), strict=True))
            now = time.monotonic()
            last_answers = {
                name: now if answers[name] else last_answers.get(name, now)
                for name in names
                if answers[name] is not None
            }
            silent = {name for name, at in last_answers.items() if now - at > seconds}
            # if all are silent, this machine is too busy, or its network has failed
            new_avoided = frozenset() if len(silent) == len(last_answers) else frozenset(silent)
            for name in new_avoided - avoided:
                log.warning("replica %s has answered nothing for %g s", name, seconds)
                self._give_up(name, "silent")
            if new_avoided != avoided:
                avoided = new_avoided
                LINK.avoid(avoided)

    async def _pulses(self, names: Iterable[str], seconds: float) -> list[bool | None]:
        """Whether each replica answers in time; None if it is not present any more."""
        calls = [
            asyncio.create_task(self._pulse(name, seconds), context=contextvars.Context())
            for name in names
        ]
        return await asyncio.gather(*calls)

    async def _pulse(self, name: str, seconds: float) -> bool | None:
        try:
            async with asyncio.timeout(seconds):
                await self._replicas.pulse.remote(target=name)
                return True
        except TimeoutError:
            return False
        except (NotRouted, *GONE):
            return None
        except Exception:
            log.exception("replica %s was not asked", name)
            return None

    async def _answer_in_time(self, call: Any) -> Any:
        """The answer of a replica; None if it does not come in PAGE_SECONDS."""
        try:
            async with asyncio.timeout(PAGE_SECONDS):
                return await call
        except (TimeoutError, NotRouted, *GONE):
            call.cancel()
            return None

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
            routed = RouterRequest("", 0)  # each call has an id of its own
            if path in GENERATING:
                routed = await run_in_threadpool(prompts.router_request, reader, "", path, body)

        async def ask(origin: Origin, avoided: Avoided) -> AsyncGenerator[list[Message], None]:
            call = self._call(exchange.plain(scope), body, origin, routed, target, avoided)
            self._calls.add(call)
            try:
                async for messages in call.messages(self._options.route_seconds):
                    if call.replica is not None:
                        self._identities.setdefault(call.replica, call.identity)
                    yield messages
            finally:  # however this ends, the call is over in the replica too
                self._calls.discard(call)
                call.cancel()

        await while_client_stays(receive, self.keeper.relay(ask, send))

    def _call(
        self,
        scope: dict[str, Any],
        body: bytes,
        origin: Origin,
        routed: RouterRequest | None,
        target: str | None,
        avoided: Avoided,
    ) -> _ReplicaCall:
        """Call a replica: `target`, or one that the router chooses, which is none of `avoided` if
        there is another one.

        Raises:
            Unanswered: no other replica is present.
        """
        avoided_names = {*avoided.refusing, *avoided.failed}
        other_names = [name for name in LINK.present() if name not in avoided_names]
        if avoided.refusing and (target is not None or not other_names):
            raise Unanswered(ENDED)
        request = None
        if routed is not None:
            request = routed._replace(
                request_id=uuid.uuid4().hex, avoids=tuple(sorted(avoided_names))
            )
        handle = self._replicas.options(stream=True).answer
        # Serve treats all calls in the context of one HTTP request as one call
        answer = contextvars.Context().run(
            partial(handle.remote, scope, body, origin=origin, routed=request, target=target)
        )
        return _ReplicaCall(answer, request, target)


class _ReplicaCall:
    """A call of a replica.

    replica: its name, as soon as the router has chosen it; from the beginning if the client has.
    identity: of its engine, as soon as it has answered.
    """

    def __init__(self, answer: Any, request: RouterRequest | None, target: str | None) -> None:
        """
        Args:
            answer: the messages, as a DeploymentResponseGenerator.
            request: what the router decides by; None if the client names a replica, `target`.
        """
        self._answer = answer
        self._request = request
        self._taken_by = target
        self._given_up = ""  # why, if the call was given up
        self._wait = asyncio.timeout(None)  # for the next messages; a call that is given up ends it
        self.identity = ""

    @property
    def replica(self) -> str | None:
        if self._taken_by is None and self._request is not None:
            return LINK.replica_of(self._request.request_id)
        return self._taken_by

    def give_up(self, reason: str) -> None:
        """Wait for no more messages. `reason`: of the `Lost` that says so."""
        self._given_up = self._given_up or reason
        with suppress(RuntimeError):  # it does not wait now
            self._wait.reschedule(asyncio.get_running_loop().time())

    def cancel(self) -> None:
        """End the call in the replica too, and let the router know."""
        self._answer.cancel()
        if self._request is not None:
            LINK.end(self._request.request_id)

    async def messages(self, seconds: float) -> AsyncIterator[list[Message]]:
        """Yield the messages of the replica.

        Args:
            seconds: how long to wait for a replica that takes the request.

        Raises:
            Lost: it gives no more messages.
            Unanswered: none takes the request in time, or the router failed.
        """
        try:
            async with asyncio.timeout(seconds):
                first_messages = await self._next()
        except TimeoutError:
            raise _none_ready(seconds) from None
        except NotRouted as error:
            raise Unanswered(str(error), "not_routed") from error
        assert first_messages is not None
        self._taken_by = first_messages[0]["engine"]
        self.identity = first_messages[0]["identity"]
        messages: list[Message] | None = first_messages
        while messages is not None:
            yield messages
            messages = await self._next()

    async def _next(self) -> list[Message] | None:
        """The next messages; None at the end."""
        if self._given_up:
            raise Lost(self._given_up)
        try:
            async with asyncio.timeout(None) as self._wait:
                return await anext(self._answer, None)
        except TimeoutError:
            if self._given_up:
                raise Lost(self._given_up) from None
            raise
        except GONE as error:
            raise Lost("ended") from error


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("requests of a replica that left were not moved", exc_info=task.exception())


def _none_ready(seconds: float) -> Unanswered:
    message = f"no replica was ready within {seconds:g} s; try again later"
    return Unanswered(message, "no_replica", 10)
