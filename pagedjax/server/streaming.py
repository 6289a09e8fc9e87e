"""Answers that take time: server-sent events, and waiting that ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pagedjax.server import responses, schema, tool_answers
from pagedjax.server.responses import JSON, Style
from pagedjax.server.schema import GenerationBody
from pagedjax.server.worker import EngineStopped, Submission
from pagedjax.tools.reader import CallReader

CLIENT_LEFT = 499  # the status of a response that no client reads, as in nginx
Result = TypeVar("Result")


async def unless_client_leaves(request: Request, awaitable: Awaitable[Result]) -> Result | None:
    """The awaitable's result, or None if the client leaves first. The awaitable is cancelled
    then."""
    work, left = asyncio.ensure_future(awaitable), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, left):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await left


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events. `ended` is called after the last event, when the client leaves, and if it
    has left before."""

    def __init__(
        self,
        events: AsyncIterator[str],
        ended: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # nginx and others behind its example would keep events until their buffer is full
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


async def events(submission: Submission, body: GenerationBody, style: Style) -> AsyncIterator[str]:
    """The server-sent events of a submission."""
    options = body.stream_options or schema.StreamOptions()
    always = bool(options.continuous_usage_stats)
    requests = submission.requests
    width = max(request.params.n or 1 for request in requests)
    counts = style.logprobs is not None and not style.chat
    each = [request for request in requests for _ in range(width)] if counts else []
    offsets = [responses.OutputOffsets(style, request) for request in each]
    sent: Counter[int] = Counter()  # characters of each branch
    generated: Counter[int] = Counter()  # tokens of each branch
    readers = [CallReader(style.calls) for _ in range(len(requests) * width)] if style.calls else []

    def with_usage(chunk: JSON, index: int) -> str:
        """With vLLM's usage so far, which counts one branch."""
        if always:
            chunk["usage"] = responses.used(
                len(requests[index // width].prompt_token_ids), generated[index]
            )
        return responses.event(chunk)

    try:
        for index in range(len(requests) * width):
            first = responses.opening(style, index, requests[index // width])
            if first is not None:
                yield with_usage(first, index)
        async for delta in submission:
            index = delta.request * width + delta.index
            generated[index] += not style.only_echo
            said: JSON = {"content": "" if style.only_echo else delta.text}
            reason: str | None = delta.finish_reason
            if style.calls is not None:
                said, reason = tool_answers.delta(readers[index], delta.text, reason)
            offset = 0
            if counts:
                offset = offsets[index].next(delta.token_id)
                sent[index] += len(delta.text)
                if reason is not None:  # tokens of a stop string may come behind the text
                    offset = min(offset, offsets[index].start + sent[index])
            shown = style.logprobs is not None or style.token_ids or reason is not None or always
            if shown or any(said.values()):
                choice = responses.delta_choice(style, delta, index, offset, said, reason)
                yield with_usage(responses.chunk(style, choice), index)
        if options.include_usage:
            usage = responses.usage(submission.outputs, style.only_echo)
            yield responses.event(responses.chunk(style, None, usage))
    except EngineStopped as error:
        yield responses.event(responses.error(str(error), "server_error"))
    yield responses.event("[DONE]")
