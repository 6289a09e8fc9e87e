"""Who is let in, and with how much: the API key and the size of a body, before anything is read."""

from __future__ import annotations

import hmac

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedjax.server.refusals import Refusal

OPEN = ("/health", "/metrics", "/version", "/viewer")  # what needs no key; the viewer's page holds nothing yet


class Gate:
    """Lets in who has the key, with bodies that are not too large."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int) -> None:
        self.app, self.api_key, self.max_body_bytes = app, api_key, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refusal = self._locked(scope["path"], headers) or self._large(headers)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        await self.app(scope, self._counted(receive), send)

    def _locked(self, path: str, headers: dict[bytes, bytes]) -> Refusal | None:
        key = self.api_key
        if key is None or path in OPEN:
            return None
        said = headers.get(b"authorization", b"")
        scheme, _, token = said.partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), key.encode()):
            return None
        return Refusal(401, "send the key of this server as Authorization: Bearer KEY", code="invalid_api_key")

    def _large(self, headers: dict[bytes, bytes]) -> Refusal | None:
        length = headers.get(b"content-length", b"0")
        return self._too_large() if length.isdigit() and int(length) > self.max_body_bytes else None

    def _too_large(self) -> Refusal:
        limit = self.max_body_bytes
        return Refusal(413, f"the body has more than {limit} bytes, the limit of this server", code="too_large")

    def _counted(self, receive: Receive) -> Receive:
        """For a body that comes without its length."""
        count = 0

        async def counted() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self.max_body_bytes:
                raise HTTPException(413, str(self._too_large()))
            return message

        return counted
