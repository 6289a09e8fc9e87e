"""An answer that survives the engine that computes it (docs/design/survival.md).

    keeper = Keeper(...)             # of one front
    await keeper.relay(ask, send)    # of one request

`ask(origin, avoided)` asks an engine for the whole answer and yields its messages. If the engine is
lost, another one is asked, with the tokens so far. It makes the same bytes from the beginning, and
the client gets those that it does not have yet.

A request that ends engines must not end all of them. If it was alone on two engines that ended
without a new token of it in between, it is stopped. If other requests were lost with it, nobody
knows which of them did it. Then those that have lost two engines go on one at a time, and one that
has lost four is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import prometheus_client as prometheus
from starlette.types import Message, Send

from pagedjax.server import continuation, responses
from pagedjax.server.continuation import FAILED, LOST, TAKEN, TOKENS, Delta, Origin
from pagedjax.server.errors import ApiError
from pagedjax.server.metrics import PREFIX, SECONDS

ENDED = "the replica that computed this answer has ended; send the request again"
STOPPED = (
    "{engines} engines ended while they computed this request, without a new token of it in "
    "between; it is not tried again"
)
MAX_ENDED_ALONE = 2  # a request is stopped when so many engines ended that had it alone
MAX_ENDED = 4  # or so many that had it, alone or with other requests
MAX_LOSSES = 60  # in a row, without a new token; with the pauses between them about a minute
DIFFERS = "another engine gave another answer than the client has begun to read"
log = logging.getLogger("pagedjax.server")


class Lost(Exception):
    """The engine that was asked does not give the rest of the answer.

    reason: "ended", "silent" (it did not answer in time), "left" (it is to stop), "drained" (it is
        to stop, and no other one is left), or "refused" (its weights are others).
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def suspicious(self) -> bool:
        """Whether a request may have been the cause."""
        return self.reason in ("ended", "silent")


class Unanswered(Exception):
    """No engine can go on. The client gets an error with this code; it may try again after
    `retry_after` seconds.
    """

    def __init__(
        self, message: str, code: str = "replica_ended", retry_after: int | None = 1
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class Avoided(NamedTuple):
    """Names of engines that are not asked.

    refusing: they have other weights, so the answer cannot go on there.
    failed: they said that they have ended. If there is no other one, they are asked again.
    """

    refusing: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


Ask = Callable[[Origin, Avoided], AsyncGenerator[Sequence[Message], None]]


class Keeper:
    """The unfinished requests of a front.

    relays: of these requests.
    max_bytes: of tokens that are kept for all requests together. The tokens of a request beyond it
        are forgotten, and it cannot go on in the middle.
    """

    def __init__(self, model: str, max_bytes: int = 256 * 2**20) -> None:
        self.relays: set[_Relay] = set()
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.one_at_a_time = asyncio.Lock()
        self.registry = prometheus.CollectorRegistry()
        self._continued = prometheus.Counter(
            f"{PREFIX}:requests_continued",
            "Requests with which another engine went on, by the reason",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._stopped = prometheus.Counter(
            f"{PREFIX}:requests_not_continued",
            "Requests that were lost with an engine and that no other one ended, by the error's code",
            ("model_name", "code"),
            registry=self.registry,
        )
        self._pauses = prometheus.Histogram(
            f"{PREFIX}:continuation_pause_seconds",
            "From the last message of an engine that was lost to the next one of another",
            ("model_name",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._model = model

    async def relay(self, ask: Ask, send: Send, origin: Origin | None = None) -> None:
        """Answer one request.

        Args:
            origin: of the request; None: a new one.

        Raises:
            ApiError: before the answer has begun: no engine can compute it.
            Unanswered: the answer has begun, and is no stream that could say so.
        """
        relay = _Relay(self, ask, send, origin or continuation.new_origin())
        self.relays.add(relay)
        try:
            await relay.run()
        except Unanswered as error:
            if relay.engine is not None:
                self._stopped.labels(self._model, error.code).inc()
            await relay.end(error)
        finally:
            self.relays.discard(relay)
            relay.forget()

    def page(self) -> str:
        """The metrics in Prometheus's text format."""
        return prometheus.generate_latest(self.registry).decode()

    def is_alone(self, relay: _Relay) -> bool:
        """Whether no other request has the engine that this one has."""
        return all(
            other_relay is relay or other_relay.engine != relay.engine
            for other_relay in self.relays
        )

    def count(self, reason: str) -> None:
        self._continued.labels(self._model, reason).inc()

    def observe_pause(self, seconds: float) -> None:
        self._pauses.labels(self._model).observe(seconds)


class _Relay:
    """One unfinished request.

    engine: the name of the one that has it now, or had it last.
    ended_engines: the engines that were lost to it since its last new token.
    ended_alone: how many of these had no other request.
    """

    def __init__(self, keeper: Keeper, ask: Ask, send: Send, origin: Origin) -> None:
        self._keeper = keeper
        self._ask = ask
        self._send = send
        self._origin = origin
        self._tokens: list[Delta] = []
        self._num_bytes = 0  # of `_tokens`, about
        self._num_tokens = 0  # of the answer, as far as the present engine knows it
        self._most_tokens = 0  # that any engine has made
        self._too_large = False  # its tokens are not kept
        self._start: Message | None = None  # that the client got
        self._sent = 0  # bytes of the body that the client got
        self._digest = blake2b()  # of these
        self._complete = False  # the client has the whole answer
        self._refusing: list[str] = []  # engines with other weights
        self._identity = ""  # of the engines that made the tokens
        self._last_message = 0.0  # time.perf_counter
        self._has_turn = False  # it holds `one_at_a_time`
        self._is_taken = False  # by the engine that was asked last
        self._lost_because = ""  # why the engine before was lost; "" as soon as another one goes on
        self._num_losses = 0  # in a row, without a new token
        self._failed: list[str] = []  # engines that said themselves that they have ended
        self.engine: str | None = None
        self.ended_engines: list[str] = []
        self.ended_alone = 0

    @property
    def key(self) -> str:
        return self._origin.key

    async def run(self) -> None:
        """Ask engines until one has given the whole answer. Raises Unanswered."""
        while True:
            self._is_taken = False
            with self._released():
                try:
                    await self._pass_on()
                    if self._complete:
                        return
                    raise Lost("ended")  # the answer stopped in the middle
                except Lost as loss:
                    if self._complete:
                        return
                    self._check(loss)
            self._num_losses += 1
            await asyncio.sleep(min(1.0, 0.05 * self._num_losses))
            if len(self.ended_engines) >= 2:
                await self._keeper.one_at_a_time.acquire()
                self._has_turn = True

    async def _pass_on(self) -> None:
        """Send the messages of one engine that the client does not have yet."""
        bytes_to_compare = self._sent
        digest = blake2b()
        has_answer = bool(self._tokens) or self._start is not None
        origin = self._origin._replace(
            tokens=tuple(self._tokens),
            taken=self.engine is not None,
            identity=self._identity if has_answer else "",
        )
        self._num_tokens = len(self._tokens)
        is_new = self.engine is None
        waits_since = self._last_message
        async with aclosing(
            self._ask(origin, Avoided(tuple(self._refusing), tuple(self._failed)))
        ) as answer:
            async for messages in answer:
                self._last_message = time.perf_counter()
                for message in messages:
                    kind = message["type"]
                    if kind == TAKEN:
                        self.engine = message["engine"]
                        self._is_taken = True
                        if origin.identity not in ("", message["identity"]):
                            raise Lost("refused")
                        self._identity = message["identity"]
                        self._note_continuation()
                    elif kind == LOST:
                        self._failed.append(self.engine or "")
                        raise Lost("ended")
                    elif kind == FAILED:
                        raise Unanswered("internal error", "internal_error", None)
                    elif kind == TOKENS:
                        self._keep([Delta(*fields) for fields in message["tokens"]])
                    elif kind == "http.response.start":
                        await self._begin(message)
                    else:
                        body = message.get("body", b"")
                        compared = body[:bytes_to_compare]
                        digest.update(compared)
                        bytes_to_compare -= len(compared)
                        is_last = not message.get("more_body", False)
                        if compared and not bytes_to_compare:
                            is_same = digest.digest() == self._digest.digest()
                            self._check_same(is_same)
                        self._check_same(not (bytes_to_compare and is_last))
                        await self._continue(message, body[len(compared) :])
                        if self._complete:
                            return
                    if not is_new and kind not in (TAKEN, LOST):
                        is_new = True
                        self._keeper.observe_pause(self._last_message - waits_since)

    async def _begin(self, message: Message) -> None:
        """Send the start of an answer, or compare it with the one that was sent."""
        if self._start is None:
            await self._send(message)
            self._start = message
        else:
            self._check_same(message["status"] == self._start["status"])

    async def _continue(self, message: Message, body: bytes) -> None:
        """Send bytes that the client does not have, and the end of the answer."""
        if body or not message.get("more_body", False):
            await self._send({**message, "body": body})
            self._sent += len(body)
            self._digest.update(body)
        self._complete = not message.get("more_body", False)

    def _check_same(self, is_same: bool) -> None:
        """Raises Unanswered if the answer is not the one that the client has begun to read."""
        if not is_same:
            log.error("request %s: engine %s gave another answer", self.key[:8], self.engine)
            raise Unanswered(DIFFERS)

    def _keep(self, tokens: Sequence[Delta]) -> None:
        self._num_tokens += len(tokens)
        # an engine that begins anew repeats tokens: only a token beyond all earlier ones is new
        if self._num_tokens > self._most_tokens:
            self._most_tokens = self._num_tokens
            self.ended_engines = []
            self.ended_alone = 0
            self._num_losses = 0
            self._free_turn()
        if self._too_large:
            return
        size = sum(200 + 350 * len(token.logprobs or ()) for token in tokens)
        if self._keeper.num_bytes + size > self._keeper.max_bytes:
            self._too_large = True
            self.forget()
            return
        self._tokens += tokens
        self._num_bytes += size
        self._keeper.num_bytes += size

    def forget(self) -> None:
        """Let the tokens go."""
        self._keeper.num_bytes -= self._num_bytes
        self._num_bytes = 0
        self._tokens = []

    def _check(self, loss: Lost) -> None:
        """Raises Unanswered unless another engine may go on."""
        engine = self.engine or "no engine"
        if loss.reason == "refused":
            self._refusing.append(engine)
            return
        place = f"request {self.key[:8]}, {len(self._tokens)} tokens, engine {engine}"
        if loss.reason == "drained":
            log.warning("%s: no other engine is left", place)
            raise Unanswered(ENDED)
        if self._too_large and self._start is not None:
            log.warning("%s: %s; its tokens were not kept", place, loss.reason)
            raise Unanswered(ENDED)
        if self._num_losses >= MAX_LOSSES:
            log.warning("%s: lost %d times without a new token", place, MAX_LOSSES)
            raise Unanswered(ENDED)
        if loss.suspicious and self._is_taken and engine not in self.ended_engines:
            self.ended_engines.append(engine)
            self.ended_alone += self._keeper.is_alone(self)
            if self.ended_alone >= MAX_ENDED_ALONE or len(self.ended_engines) >= MAX_ENDED:
                self._stop(place)
        self._lost_because = loss.reason
        log.warning("%s: %s; another engine is asked", place, loss.reason)

    def _note_continuation(self) -> None:
        """Count that another engine has taken the request, and say so."""
        if self._lost_because:
            self._keeper.count(self._lost_because)
            log.warning("request %s: engine %s goes on", self.key[:8], self.engine)
            self._lost_because = ""

    def _stop(self, place: str) -> None:
        engines = ", ".join(self.ended_engines)
        log.error("%s: it ended the engines %s without a new token; it is stopped", place, engines)
        raise Unanswered(STOPPED.format(engines=len(self.ended_engines)), "request_stopped")

    @contextmanager
    def _released(self) -> Iterator[None]:
        """Give the turn back at the end of the block."""
        try:
            yield
        finally:
            self._free_turn()

    def _free_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._keeper.one_at_a_time.release()

    async def end(self, error: Unanswered) -> None:
        """Tell the client that nothing follows."""
        if self._start is None:
            raise ApiError(
                503, str(error), code=error.code, retry_after=error.retry_after
            ) from error
        if not is_stream(self._start):
            raise error  # a part of the answer is sent already, so the connection ends
        body = responses.error(str(error), "server_error", code=error.code)
        end = responses.event(body) + responses.event("[DONE]")
        await self._send({"type": "http.response.body", "body": end.encode()})


def is_stream(start: Message) -> bool:
    """Whether an answer that begins so is a stream of events."""
    headers: dict[bytes, Any] = dict(start["headers"])
    return headers.get(b"content-type", b"").startswith(b"text/event-stream")
