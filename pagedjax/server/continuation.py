"""What decides how an answer goes on, so that another engine can continue it.

A front (the ingress of replicas) keeps an `Origin` for each unfinished request. The application
that answers it reads the origin here, wherever an answer would depend on chance or time:

- ids and times of an answer come from the origin, so a second application makes the same bytes;
- a request without a seed gets that of the origin, so its tokens depend on their positions alone;
- each token goes to the front, before the client gets bytes of it (`Call.note`, `Call.flush`).

Without a front there is no `Call`, and ids, times and seeds are those of this process.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

from pagedjax.engine.session import GenerationRequest, Progress
from pagedjax.host.types import FinishReason
from pagedjax.options.params import SamplingParams
from pagedjax.text.outputs import PositionLogprobs

# Types of messages to a front, beside those of ASGI.
TAKEN = "pagedjax.taken"  # the first one; `engine`: the name of the one that answers; `identity`
TOKENS = "pagedjax.tokens"  # fields of new `tokens`, before the bytes that show them
FAILED = "pagedjax.failed"  # the application failed, and another engine would fail in the same way
LOST = "pagedjax.lost"  # the engine has ended, and nothing that follows counts
# Tokens travel with the bytes that show them, because each message costs more than its content. If
# no bytes come, as those of a whole answer, so many travel together, or those of so many seconds.
TOKENS_TOGETHER = 256
SECONDS_TOGETHER = 0.5


class Delta(NamedTuple):
    """One new token of a branch.

    request: index in the submission.
    index: of the branch.
    text: final text, which may be behind the tokens; "" in an `Origin`.
    logprobs: of the token, if the request asks for them.
    cached: tokens of the prompt that were found in the cache.
    """

    request: int
    index: int
    text: str
    token_id: int
    logprobs: PositionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    cached: int


class Origin(NamedTuple):
    """A request at a front.

    key: 32 hexadecimal digits; the answer's ids are drawn from it.
    created: seconds since 1970.
    seed: of the requests that have none.
    tokens: what engines have generated so far, in the order in which they did.
    taken: whether an engine has had this request; then no queue is too full for it.
    identity: `app.identity` of the server that the client has tokens of; "" if any may answer.
    """

    key: str
    created: int
    seed: int
    tokens: tuple[Delta, ...] = ()
    taken: bool = False
    identity: str = ""


def new_origin() -> Origin:
    """The origin of a request that has just arrived."""
    key = secrets.token_hex(16)
    return Origin(key, int(time.time()), int(key[:8], 16))


class Call:
    """A request from a front, in the application that answers it."""

    def __init__(self, origin: Origin, send: Callable[[dict[str, Any]], None]) -> None:
        """send: gives a message to the front."""
        self.origin = origin
        self.ids = random.Random(origin.key)
        self._send = send
        self._unsent: list[Delta] = []
        self._last_sent = time.monotonic()

    def note(self, delta: Delta) -> None:
        """Give a new token to the front, soon or with the next bytes of the answer."""
        self._unsent.append(delta._replace(text=""))
        is_late = time.monotonic() - self._last_sent > SECONDS_TOGETHER
        if is_late or len(self._unsent) >= TOKENS_TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Give the tokens to the front that it does not have yet."""
        if self._unsent:
            # plain tuples, because Ray pickles a class slowly
            self._send({"type": TOKENS, "tokens": tuple(map(tuple, self._unsent))})
            self._unsent = []
            self._last_sent = time.monotonic()

    def lost(self) -> None:
        """Say that the engine has ended."""
        self.flush()
        self._send({"type": LOST})

    def prepared(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """The requests with seeds, and with what engines have generated of them."""
        return [
            _with_progress(_with_seed(request, self.origin.seed, i), i, self.origin.tokens)
            for i, request in enumerate(requests)
        ]


_CALL: ContextVar[Call | None] = ContextVar("call", default=None)
_SYSTEM = secrets.SystemRandom()


@contextmanager
def answering(call: Call | None) -> Iterator[None]:
    """In the block, and in tasks that begin in it, `call` is the request that is answered."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)


def current() -> Call | None:
    """The request from a front that is answered; None without a front."""
    return _CALL.get()


def ids() -> random.Random:
    """Where the ids of an answer come from."""
    call = _CALL.get()
    return _SYSTEM if call is None else call.ids


def new_id() -> str:
    """32 hexadecimal digits."""
    return f"{ids().getrandbits(128):032x}"


def created() -> int:
    """When the request arrived, in seconds since 1970."""
    call = _CALL.get()
    return int(time.time()) if call is None else call.origin.created


def can_go_on(request: GenerationRequest) -> bool:
    """Whether another engine can go on with a request in the middle. Other requests begin anew:
    those of which nothing is known before their end, and those that want log-probabilities of their
    prompt, which have to be computed again.
    """
    params = request.params
    return isinstance(params, SamplingParams) and params.prompt_logprobs is None


def _with_seed(request: GenerationRequest, seed: int, number: int) -> GenerationRequest:
    """The request with a seed of its own, if it samples and has none."""
    params = request.params
    if not isinstance(params, SamplingParams) or params.seed is not None:
        return request
    own_seed = (seed + 0x9E3779B9 * number) % 2**32
    return replace(request, params=replace(params, seed=own_seed))


def _with_progress(
    request: GenerationRequest, number: int, tokens: Sequence[Delta]
) -> GenerationRequest:
    """The request with its part of the tokens, if it has any.

    Without tokens it begins anew: `can_go_on`.
    """
    tokens = [token for token in tokens if token.request == number]
    params = request.params
    if not tokens or not isinstance(params, SamplingParams):
        return request
    width = params.drawn().n
    branches: list[list[int]] = [[] for _ in range(width)]
    ended = [False] * width
    for token in tokens:
        branches[token.index].append(token.token_id)
        ended[token.index] = token.finish_reason is not None
    progress = Progress(tuple(map(tuple, branches)), tuple(ended), tokens[0].cached)
    return replace(request, progress=progress)
