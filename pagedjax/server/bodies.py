"""Bodies of requests: JSON whose texts UTF-8 can express.

JSON may spell half of a surrogate pair, as `"\\ud800"`, which is no character. Such a text could be
taken, and fail wherever it goes out again: in an echo, in a stream, in the viewer's list of users.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from pagedjax.server.errors import ApiError

SURROGATE = re.compile("[\ud800-\udfff]")
SPELLED = re.compile(rb"\\u[dD][89a-fA-F]")  # also whole pairs, and behind an escaped backslash


class CheckedRoute(APIRoute):
    """A route whose body is checked before it is read.

    Raises:
        ApiError: 400, a text of the body has half of a surrogate pair; `param` is its place.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_checked(request: Request) -> Response:
            with suppress(ClientDisconnect):  # in the middle of a body; the route sees it too
                body = await request.body()  # the request keeps it
                if SPELLED.search(body):
                    _check(body)
            return await handle(request)

        return handle_checked


def _check(body: bytes) -> None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return  # the route says that it is no JSON
    for place in halves(value):
        what = f"{place or 'the body'} has half of a surrogate pair"
        raise ApiError(400, f"{what}; remove it, or send the whole character", place or None)


def halves(value: Any) -> Iterator[str]:
    """The places of texts with half of a surrogate pair, as `messages.0.content`; keys are texts too."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:  # no recursion: a body may be deep
        place, inner = waiting.pop()
        if isinstance(inner, str) and SURROGATE.search(inner):
            yield place
        elif isinstance(inner, list):
            waiting += [(_below(place, i), each) for i, each in enumerate(inner)]
        elif isinstance(inner, dict):
            if any(SURROGATE.search(key) for key in inner):
                yield place
            waiting += [(_below(place, key), each) for key, each in inner.items()]


def _below(place: str, name: str | int) -> str:
    safe = SURROGATE.sub("\ufffd", str(name))
    return f"{place}.{safe}" if place else safe
