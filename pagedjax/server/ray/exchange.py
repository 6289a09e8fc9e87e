"""One HTTP exchange as values: an ASGI scope that can be pickled, and the messages that an
application answers with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Scope

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
ENDING = 5.0  # seconds that an application has to end after its client has left


def plain(scope: Scope) -> dict[str, Any]:
    """The parts of a scope that say what was asked for."""
    return {key: scope[key] for key in KEYS if key in scope}


def get(path: str) -> dict[str, Any]:
    """The scope of a GET without a body."""
    return {
        **{
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
        },
        **{
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [],
        },
    }


async def answered(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
    """Call an application -> its messages, those that are ready together. Closing the generator is
    the client's leave.

    Raises:
        Exception: that of the application, after its messages.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    left, asked = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    call = asyncio.ensure_future(app(dict(scope), receive, messages.put))  # type: ignore[arg-type]
    call.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        ended = False
        while not ended:
            ready = [await messages.get()]
            while not messages.empty():
                ready.append(messages.get_nowait())
            ended = None in ready
            if found := [message for message in ready if message is not None]:
                yield found
        await call
    finally:
        left.set()
        with suppress(asyncio.CancelledError, Exception):
            await asyncio.wait_for(call, ENDING)
