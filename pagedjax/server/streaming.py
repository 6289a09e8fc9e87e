"""Answers that take time: server-sent events, and waiting that ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pagedjax.engine.session import GenerationRequest
from pagedjax.server import continuation, responses, schema, tool_answers
from pagedjax.server.continuation import Delta
from pagedjax.server.responses import JSON, Style
from pagedjax.server.schema import GenerationBody
from pagedjax.server.worker import EngineStopped, Submission, TurnedAway
from pagedjax.text.tools.reader import CallReader

CLIENT_LEFT = 499  # the status of a response that no client reads, as in nginx
Result = TypeVar("Result")


async def unless_client_leaves(request: Request, awaitable: Awaitable[Result]) -> Result | None:
    """Wait for the awaitable -> its result.

    If the client leaves first, the awaitable is cancelled, and the result is None.
    """
    work = asyncio.ensure_future(awaitable)
    client_leaves = asyncio.ensure_future(_until_disconnected(request.receive))
    try:
        await asyncio.wait((work, client_leaves), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        client_leaves.cancel()
        with suppress(asyncio.CancelledError):
            await client_leaves


async def while_client_stays(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run the work of an ASGI application to its end, or until the client leaves."""
    task = asyncio.ensure_future(work)
    client_leaves = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((task, client_leaves), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
    finally:
        client_leaves.cancel()
        task.cancel()
        await asyncio.gather(task, client_leaves, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events.

    `on_end` is called after the last event, when the client leaves, and if it has left before.
    """

    def __init__(
        self,
        events: AsyncIterator[str],
        on_end: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # nginx, and proxies that follow its example, would hold events until their buffer is full
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


class _Branch:
    """What a stream remembers of one branch."""

    def __init__(self, style: Style, request: GenerationRequest) -> None:
        self.request = request
        self.tokens = 0
        self.offset = 0  # where the last token begins in the text, if log-probabilities show it
        self._only_echo = style.only_echo
        self._characters = 0
        self._calls = None
        if style.calls is not None:
            self._calls = CallReader(style.calls, continuation.ids())
        self._offsets = None
        if style.logprobs is not None and not style.chat:
            self._offsets = responses.OutputOffsets(style, request)

    def push(self, delta: Delta) -> tuple[JSON, str | None]:
        """Take a new token -> (its fields in the delta of a chat, why the branch ended)."""
        if not self._only_echo:
            self.tokens += 1
        fields: JSON = {"content": "" if self._only_echo else delta.text}
        reason: str | None = delta.finish_reason
        if self._calls is not None:
            fields, reason = tool_answers.delta(self._calls, delta.text, reason)
        if self._offsets is not None:
            self.offset = self._offsets.next(delta.token_id)
            self._characters += len(delta.text)
            if reason is not None:  # tokens of a stop string may come behind the text
                self.offset = min(self.offset, self._offsets.start + self._characters)
        return fields, reason


async def events(submission: Submission, body: GenerationBody, style: Style) -> AsyncIterator[str]:
    """The server-sent events of a submission."""
    options = body.stream_options or schema.StreamOptions()
    usage_in_chunks = bool(options.continuous_usage_stats)
    requests = submission.requests
    width = max(request.params.n or 1 for request in requests)
    branches = [_Branch(style, request) for request in requests for _ in range(width)]

    def with_usage(chunk: JSON, branch: _Branch) -> str:
        """The event of a chunk, with vLLM's usage so far, which counts one branch."""
        if usage_in_chunks:
            prompt_tokens = len(branch.request.prompt_token_ids)
            chunk["usage"] = responses.usage_counts(prompt_tokens, branch.tokens)
        return responses.event(chunk)

    try:
        for index, branch in enumerate(branches):
            opening = responses.opening(style, index, branch.request)
            if opening is not None:
                yield with_usage(opening, branch)
        async for delta in submission:
            index = delta.request * width + delta.index
            branch = branches[index]
            fields, reason = branch.push(delta)
            has_logprobs = style.logprobs is not None
            if (
                any(fields.values())
                or has_logprobs
                or style.token_ids
                or reason is not None
                or usage_in_chunks
            ):
                choice = responses.delta_choice(style, delta, index, branch.offset, fields, reason)
                yield with_usage(responses.chunk(style, choice), branch)
        if options.include_usage:
            usage = responses.usage(submission.outputs, style.only_echo)
            yield responses.event(responses.chunk(style, None, usage))
    except EngineStopped as error:
        yield responses.event(responses.error(str(error), "server_error"))
    except TurnedAway as error:
        yield responses.event(responses.error(str(error), "rate_limit_error", None, "rejected"))
    yield responses.event("[DONE]")
