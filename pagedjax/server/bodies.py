"""Bodies of requests: JSON whose texts UTF-8 can express.

JSON may spell half of a surrogate pair, as `"\\ud800"`, which is no character. Such a text could be
taken, and fail wherever it goes out again: in an echo, in a stream, in the viewer's list of users.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from pagedjax.server.errors import ApiError
from pagedjax.text.surrogates import places_of_halves

# Half of a pair, spelled or as bytes; also whole pairs, and behind an escaped backslash.
SPELLED = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


class CheckedRoute(APIRoute):
    """A route whose body is checked before it is read. Every body is JSON, whatever type its client
    names: `curl -d` names a form.

    Raises:
        ApiError: 400, a text of the body has half of a surrogate pair; `param` is its place.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_checked(request: Request) -> Response:
            with suppress(ClientDisconnect):  # in the middle of a body; the route sees it too
                body = await request.body()  # the request keeps it
                if body:
                    request.scope["headers"] = _with_json_type(request.scope["headers"])
                if SPELLED.search(body) or json.detect_encoding(body) != "utf-8":
                    _check(body)
            return await handle(request)

        return handle_checked


def _with_json_type(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of a request with the type of JSON."""
    other_headers = [(name, value) for name, value in headers if name != b"content-type"]
    return [*other_headers, (b"content-type", b"application/json")]


def _check(body: bytes) -> None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return  # the route says that it is no JSON
    place = next(places_of_halves(value), None)
    if place is None:
        return
    message = (
        f"{place or 'the body'} has half of a surrogate pair; "
        "remove it, or send the whole character"
    )
    raise ApiError(400, message, place or None)
