"""One HTTP exchange as values.

They are an ASGI scope that can be pickled, and the messages that an application answers with.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from pagedjax.server.continuation import Call, Origin, answering

KEYS = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
)
ENDING_SECONDS = 5.0  # that an application has to end after its client has left


def plain(scope: Scope) -> dict[str, Any]:
    """The parts of a scope that describe the request, and can be pickled."""
    return {key: scope[key] for key in KEYS if key in scope}


def get(path: str) -> dict[str, Any]:
    """The scope of a GET without a body."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
    }


async def answer_messages(
    app: ASGIApp, scope: Scope, body: bytes, origin: Origin | None = None
) -> AsyncGenerator[list[Message], None]:
    """Call an application; yield its messages, those that are ready together.

    To close the generator is to leave, as a client.

    Args:
        origin: of the request at a front, which also gets the messages of `continuation`.

    Raises:
        Exception: that of the application, after its messages.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    client_left = asyncio.Event()
    body_received = False

    async def receive() -> Message:
        nonlocal body_received
        if not body_received:
            body_received = True
            return {"type": "http.request", "body": body, "more_body": False}
        await client_left.wait()
        return {"type": "http.disconnect"}

    front_call = None if origin is None else Call(origin, messages.put_nowait)

    async def send(message: Message) -> None:
        if front_call is not None:
            front_call.flush()
        messages.put_nowait(message)

    with answering(front_call):
        call = asyncio.ensure_future(app(dict(scope), receive, send))
    call.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        ended = False
        while not ended:
            ready = [await messages.get()]
            while not messages.empty():
                ready.append(messages.get_nowait())
            ended = None in ready
            batch = [message for message in ready if message is not None]
            if batch:
                yield batch
        await call
    finally:
        client_left.set()
        with suppress(asyncio.CancelledError, Exception):
            await asyncio.wait_for(call, ENDING_SECONDS)
