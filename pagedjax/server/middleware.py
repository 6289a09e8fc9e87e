"""Checks before a request is read: the API key and the size of the body."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from fastapi import FastAPI, HTTPException
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedjax.server.errors import ApiError

# These paths need no key; the first page and the viewer's page alone show no data
OPEN_PATHS = ("/", "/health", "/metrics", "/version", "/viewer")


def guard(
    app: FastAPI,
    api_key: str | None,
    max_body_bytes: int,
    allow_origins: Sequence[str],
    expose_headers: Sequence[str] = (),
) -> None:
    """Add checks before the routes of a server: the key, and the size of a body. Web pages of
    `allow_origins` may send requests, and read `expose_headers`.
    """
    app.add_middleware(Gate, api_key=api_key, max_body_bytes=max_body_bytes)
    if allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=list(expose_headers),
        )


class Gate:
    """Refuses requests without the key (401) and bodies that are too large (413)."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int) -> None:
        self.app = app
        self.api_key = api_key
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        error = self._wrong_key(path, headers) or self._large_body(headers)
        if error is not None:
            await error.response()(scope, receive, send)
            return
        await self.app(scope, self._counting(receive), send)

    def _wrong_key(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        key = self.api_key
        if key is None or path in OPEN_PATHS:
            return None
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), key.encode()):
            return None
        return ApiError(
            401, "send the key of this server as Authorization: Bearer KEY", code="invalid_api_key"
        )

    def _large_body(self, headers: dict[bytes, bytes]) -> ApiError | None:
        length = headers.get(b"content-length", b"0")
        return self._too_large() if length.isdigit() and int(length) > self.max_body_bytes else None

    def _too_large(self) -> ApiError:
        limit = self.max_body_bytes
        return ApiError(
            413, f"the body has more than {limit} bytes, the limit of this server", code="too_large"
        )

    def _counting(self, receive: Receive) -> Receive:
        """A `receive` that counts the bytes of a body, for one without a Content-Length."""
        count = 0

        async def receive_and_count() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self.max_body_bytes:
                raise HTTPException(413, str(self._too_large()))
            return message

        return receive_and_count
